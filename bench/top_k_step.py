"""What K ids per token cost at SmolLM2's head: a step with a teacher on the policy's likeliest ids over one without, K
log-probabilities over one, and over scoring, finding K ids and those that truncated sampling kept. Rounds are
interleaved in one process; medians of wall time, and of processor time, which other work on the machine stretches less.

    OMP_NUM_THREADS=1 python bench/top_k_step.py bench/results/steps/top-k.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import grpo_kernels as gk
from grpo_kernels.commands.bench.machine import environment, write
from grpo_kernels.commands.bench.measure import interleave

TOKENS, WIDTH, VOCAB, K, ROUNDS = 1024, 576, 49152, 100, 9
CPU = torch.device("cpu")
# Before the first run: of a token's 2 ms in one thread the search takes 0.1, gathers and O(K) arithmetic 0.06; the
# normaliser is a fourth product, and "tail" takes the row's statistics twice.
PREDICTED = {"renormalize": 1.08, "truncate": 1.42, "tail": 1.45, "K log-probabilities": 1.03, "top K": 1.2}
RULES: dict[str, dict[str, Any]] = {
    "min_p 0.05": dict(min_p=0.05), "top_k 50": dict(top_k=50), "top_k 50, top_p 0.9": dict(top_k=50, top_p=0.9),
    "top_p 0.9": dict(top_p=0.9),
}  # fmt: skip
BASES = {"K log-probabilities": "one log-probability", **dict.fromkeys(("top K", *RULES), "scoring")}


def steps() -> dict[str, Callable[[], Any]]:
    g = torch.Generator().manual_seed(0)
    shape = 8, TOKENS // 8
    hidden, of_teacher = torch.randn((2, *shape, WIDTH), generator=g)
    weight, other = torch.randn((2, VOCAB, WIDTH), generator=g) * 2 / WIDTH**0.5
    several, advantages = torch.randint(VOCAB, (*shape, K), generator=g), torch.randn(8, generator=g)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    config = gk.GRPOConfig(distill_coef=0.5)

    def loss(**of_ids: Any) -> None:
        given = {"teacher": gk.Teacher(of_teacher, other, **of_ids), "config": config} if of_ids else {}
        torch.autograd.grad(gk.fused_grpo_loss(*leaves, several[..., 0], advantages, **given).loss, leaves)

    def logps(ids: torch.Tensor) -> None:
        torch.autograd.grad(gk.fused_logps(*leaves, ids)[0].sum(), leaves)

    found: dict[str, Callable[[], Any]] = {"no teacher": loss, "whole vocabulary": lambda: loss(top_k=None)}
    for mode in ("renormalize", "truncate", "tail"):
        found[mode] = lambda mode=mode: loss(top_k=K, mode=mode)  # type: ignore[misc]
    found["one log-probability"] = lambda: logps(several[..., 0])
    found["K log-probabilities"] = lambda: logps(several)
    found["scoring"] = torch.no_grad()(lambda: gk.fused_logps(*leaves, several[..., 0]))
    found["top K"] = lambda: gk.fused_top_k(*leaves, K)
    for name, rule in RULES.items():
        found[name] = partial(gk.sampling_support, *leaves, several[..., 0], **rule)
    return found


def main(output: Path) -> None:
    runs = steps()
    spent: dict[str, list[float]] = {name: [] for name in runs}

    def counted(name: str) -> None:
        begin = time.process_time()
        runs[name]()
        spent[name].append(time.process_time() - begin)

    for name in runs:  # the first call warms up
        runs[name]()
    times = dict(interleave({name: partial(counted, name) for name in runs}, ROUNDS, CPU, bases=runs))
    found = {}
    for name in runs:
        base = BASES.get(name, name if name in BASES.values() else "no teacher")
        wall, processor = (median(x[name]) / median(x[base]) for x in (times, spent))
        found[name] = {
            "base": base, "ratio": wall, "processor_ratio": processor, "predicted": PREDICTED.get(name),
            "seconds": median(times[name]), "times": list(zip(times[name], spent[name], strict=True)),
        }  # fmt: skip
        print(f"{name:20} {median(times[name]):7.3f} s, of {base}: {wall:.3f}, processor {processor:.3f}")
    case = {"tokens": TOKENS, "hidden_size": WIDTH, "vocab_size": VOCAB, "k": K, "dtype": "float32"}
    write(output, {"environment": environment(CPU), "case": case, "steps": found})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
