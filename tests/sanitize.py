"""The CUDA kernels under compute-sanitizer: memcheck, racecheck, initcheck, synccheck.  `make sanitize`, on a GPU.

A small workload reaches every kernel: each type with fused products and without, vocabularies of any alignment, losses
over tokens and over sequences, groups. Results are compared with the torch backend, so that a kernel which a tool keeps
from running does not pass. Exit status 1 for a finding, 2 where there is nothing to run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

import grpo_kernels as gk
from grpo_kernels import kernels

_OURS = ("--error-exitcode", "1", "--kernel-name", "kernel_substring=gk_")
OPTIONS = {
    # The driver looks for a kernel in one module after another: that it is not in the first is no error.
    "memcheck": (*_OURS, "--report-api-errors", "no"),
    "racecheck": _OURS,
    # It sees what the kernels write that it looks into: all, since ours read what others wrote.
    "initcheck": ("--print-limit", "0"),
    "synccheck": _OURS,
}
OF_OURS = re.compile(r"^=+ +at .*\bgk_", re.MULTILINE)  # in a report of initcheck
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# (sequences, length, hidden size, vocabulary): odd; of no multiple of a tile; one row; too long for a cluster.
SHAPES = ((4, 6, 24, 67), (2, 65, 72, 1003), (1, 1, 64, 512), (2, 2, 16, 600_001))
CONFIGS = (
    gk.GRPOConfig(beta=0.04, epsilon_high=0.3),
    gk.GRPOConfig(importance_sampling_level="sequence", entropy_coef=0.01),
    gk.GRPOConfig(surrogate="cispo", logit_softcap=10.0, temperature=0.8),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--workload", action="store_true", help="run the workload alone, without a tool")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("sanitize: needs a GPU, and torch sees none", file=sys.stderr)
        return 2
    if arguments.workload:
        return workload()
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(Path(home, "bin")))
    if program is None:
        print("sanitize: compute-sanitizer is in neither PATH nor CUDA_HOME; it comes with CUDA", file=sys.stderr)
        return 2
    return max([run(program, tool) for tool in arguments.tools])


def run(program: str, tool: str) -> int:
    command = [program, "--tool", tool, *OPTIONS[tool], sys.executable, __file__, "--workload"]
    # Without torch's cache an access past a tensor is one past an allocation.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    reports = [match.start() for match in OF_OURS.finditer(done.stdout)] if tool == "initcheck" else []
    found = done.returncode != 0 or bool(reports)
    print(f"{tool:10} {'FOUND SOMETHING' if found else 'ok'}  {time.perf_counter() - start:.0f} s")
    if found:
        print(done.stdout[reports[0] :][:8000] if reports else done.stdout[-8000:])
    return int(found)


def workload() -> int:
    worst = worst_error()
    table = dataclasses.replace(kernels.get_backend("cuda"), fused_products=None)
    kernels._REGISTRY["cuda"] = kernels._REGISTRY["cuda"]._replace(load=lambda: (table, ""))
    kernels._load.cache_clear()
    worst = max(worst, worst_error())
    print(f"largest error: {worst:.2f} of what is allowed")
    return int(not worst <= 1.0)


def worst_error() -> float:
    """Of every step, as a share of what is allowed."""
    worst = 0.0
    for shape in SHAPES:
        for dtype, tolerance in TOLERANCE.items():
            for config in CONFIGS:
                expected, found = (step(shape, dtype, config, backend) for backend in ("torch", "cuda"))
                for a, b in zip(found, expected, strict=True):
                    error = float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
                    worst = max(worst, error / tolerance)
    return worst


def step(
    shape: tuple[int, int, int, int], dtype: torch.dtype, config: gk.GRPOConfig, backend: str
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of both ways and both gradients of one batch whose rewards come in groups."""
    sequences, length, width, vocab = shape
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(sequences, length, width, generator=g).to("cuda", dtype).requires_grad_()
    weight = (0.1 * torch.randn(vocab, width, generator=g)).to("cuda", dtype).requires_grad_()
    ids = torch.randint(vocab, (sequences, length), generator=g).cuda()
    rewards = torch.rand(sequences, generator=g).cuda()
    with torch.no_grad():
        old, _ = gk.fused_logps(hidden, weight, ids, backend="torch")
        scored, _ = gk.fused_logps(hidden, weight, ids, entropy=True, backend=backend)
    given = dict(old_logps=old - 0.05, ref_logps=old + 0.1, group_ids=torch.zeros_like(rewards).long())
    config = dataclasses.replace(config, advantage_scale="none") if sequences == 1 else config
    out = gk.fused_grpo_loss(hidden, weight, ids, rewards=rewards, config=config, backend=backend, **given)
    dhidden, dweight = torch.autograd.grad(0.5 * out.loss, (hidden, weight))  # a factor that is to be multiplied
    return out.logps, scored, dhidden, dweight  # the loss itself cancels: advantages of a group add up to 0


if __name__ == "__main__":
    sys.exit(main())
