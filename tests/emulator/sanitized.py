"""python -m emulator.sanitized LIBRARY: some of the checks, for a library whose sanitizers must be loaded first."""

import sys

import kernel_checks as c
import torch

from grpo_kernels.names import KernelParams, PlanRules

from .kernels import DEVICES, Kernels

kernels = Kernels(sys.argv[1])
for order, device in enumerate(("cluster 1", "cluster 4", "streamed")):
    kernels.use(DEVICES[device], order)
    for pair in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
        for vocab, shift in ((1, 0), (70, 3), (2049, 1)):
            c.check_rows(kernels, vocab, pair, KernelParams(softcap=5.0 * (shift % 2)), shift, vocab != 70)
            c.check_in_place(kernels, vocab, pair, shift)
    kernels.use(order=order)
    c.check_plan(kernels, *c.make_plan_inputs([7, 0, 300, 1]), PlanRules(whole_sequences=True))
    c.check_sequences(kernels, KernelParams(level="sequence", vespo=True))
    c.check_reduce(kernels, "clip", True)
    c.check_groups(kernels, "batch", "leave_one_out", 1)
    for dtype, shift in zip(c.DTYPES, (3, 7, 0), strict=True):
        c.check_scale(kernels, dtype, 8193, shift)
print("all checks passed")
