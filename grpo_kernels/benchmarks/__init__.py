"""`grpo-kernels bench`: this library against eager PyTorch, its peers and the bare matrix products, on your machine.

shapes.json         the lm_heads of real models, and numbers of tokens
cases               what one measurement is; the sets of them that have a name
inputs, reference   the batch that everybody gets; what is right, in float64
implementations/    who is compared, one plug-in each
measure, memory     one case: time, interleaved in one process; peak memory, in a process per implementation
limits, gemm        operations, bytes and tiles: what the hardware would allow
run                 many cases, most valuable first, within a number of minutes
machine, document   where it was measured; the JSON that holds it all
show, figures       the table in the terminal, the pictures
"""
