"""`grpo-kernels bench`: this library against eager PyTorch, its peers and the bare matrix products, on your machine.

cases               heads of real models, what one measurement is, the named sets of them, the targets
inputs, reference   the batch, the same for all implementations; the exact result, in float64
implementations/    what is compared, one plug-in each
measure, process    one case: time, interleaved in one process; peak memory, in a process per implementation
limits              operations, bytes and seconds that the hardware would allow
machine             where it was measured, and the JSON that holds it all
command             many cases, most valuable first, within a number of minutes
show, figures       the tables, the pictures
"""
