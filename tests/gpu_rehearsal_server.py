"""The process from which gpu_rehearsal.py forks its probes: it has done once what makes a first call slow."""

import gc

import gpu_profile  # noqa: F401  (a probe imports it)
import gpu_rehearsal  # noqa: F401
import torch

import grpo_kernels

torch.set_num_threads(1)  # a pool of threads would not be there after a fork
hidden, weight = torch.zeros(2, 1, 8, requires_grad=True), torch.zeros(16, 8, requires_grad=True)
ids = torch.zeros(2, 1, dtype=torch.long)
grpo_kernels.fused_logps(hidden, weight, ids, backend="torch")
grpo_kernels.fused_grpo_loss(
    hidden, weight, ids, torch.ones(2), old_logps=torch.zeros(2, 1), backend="torch"
).loss.backward()
gc.freeze()  # the benchmark collects before each call
