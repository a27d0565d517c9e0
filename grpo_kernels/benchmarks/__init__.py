"""`grpo-kernels bench`: this library against eager PyTorch, its peers and the bare matrix products, on your machine.

shapes.json         the lm_heads of real models, and numbers of tokens
cases, sets         what one measurement is; the named sets of measurements
inputs, reference   the batch, the same for all implementations; the exact result, in float64
implementations/    what is compared, one plug-in each
measure, memory     one case: time, interleaved in one process; peak memory, in a process per implementation
limits, gemm        operations, bytes and tiles: what the hardware would allow
run                 many cases, most valuable first, within a number of minutes
machine, document   where it was measured; the JSON that holds it all
show, figures       the table in the terminal, the pictures
"""
