"""Host time of a small step, where products take next to nothing: loss and backward against plain PyTorch's own.

    python bench/host_time.py [--rounds 9] [--steps 100] [--output build/host-time.json]

(B, T, H, V) = (8, 8, 16, 64), float32, a mask and old_logps, one thread, on the CPU. Both sides take turns in one
process, after their gradients were compared. A number is the tenth percentile of a round's steps in time of this
thread, which other processes hardly change, and of these the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.benchmarks.document import write
from grpo_kernels.benchmarks.machine import environment

ROWS, LENGTH, HIDDEN, VOCAB = 8, 8, 16, 64
PRESETS = ("dapo", "grpo", "gspo", "vespo", "rloo")
Call = Callable[[], Any]


class Batch(NamedTuple):
    hidden: Tensor
    weight: Tensor
    ids: Tensor
    advantages: Tensor
    mask: Tensor
    old: Tensor
    ref: Tensor


def make_batch() -> Batch:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    mask[:, -2:] = False
    old, ref = (-3 * torch.rand(ROWS, LENGTH) for _ in range(2))
    return Batch(hidden, weight, torch.randint(VOCAB, (ROWS, LENGTH)), torch.randn(ROWS), mask, old, ref)


def eager_logps(b: Batch) -> Tensor:
    logits = b.hidden @ b.weight.T
    return torch.log_softmax(logits.float(), -1).gather(-1, b.ids[..., None]).squeeze(-1)


def eager_loss(b: Batch, preset: str, config: gk.GRPOConfig) -> Tensor:
    """As a trainer writes it by hand for this preset alone."""
    logps, mask, advantages = eager_logps(b), b.mask.float(), b.advantages[:, None]
    tokens = mask.sum(1).clamp(min=1)
    if preset == "vespo":
        log_weight = ((logps.detach() - b.old) * mask).sum(1, keepdim=True).clamp(-18.4, 20.0)
        positive = advantages >= 0
        k = torch.where(positive, config.vespo_k_pos, config.vespo_k_neg)
        rate = torch.where(positive, config.vespo_lambda_pos, config.vespo_lambda_neg)
        weight = (rate + k * log_weight - rate * log_weight.exp()).exp()
        return -(weight * advantages * logps * mask).sum() / mask.sum().clamp(min=1)
    log_ratio = logps - b.old
    if preset in ("gspo", "rloo"):
        log_ratio = (log_ratio * mask).sum(1, keepdim=True)
        if preset == "gspo":
            log_ratio = log_ratio / tokens[:, None]
    ratio = log_ratio.exp()
    low, high = 1 - config.epsilon_low, 1 + config.epsilon_high
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if config.beta:
        apart = b.ref - logps
        per_token = per_token + config.beta * (apart.exp() - apart - 1)
    if preset == "dapo":
        return (per_token * mask).sum() / mask.sum().clamp(min=1)
    return ((per_token * mask).sum(1) / tokens).mean()


def steps(preset: str) -> tuple[Call, Call]:
    """(ours, eager)"""
    b, config = make_batch(), gk.GRPOConfig.preset(preset)
    reference = {"ref_logps": b.ref} if config.beta else {}

    def clear() -> None:
        b.hidden.grad = b.weight.grad = None

    def ours() -> None:
        clear()
        out = gk.fused_grpo_loss(
            b.hidden, b.weight, b.ids, b.advantages, completion_mask=b.mask, old_logps=b.old, config=config, **reference
        )
        out.loss.backward()

    def eager() -> None:
        clear()
        eager_loss(b, preset, config).backward()

    ours()
    expected = b.weight.grad
    eager()
    torch.testing.assert_close(b.weight.grad, expected, rtol=1e-3, atol=1e-5)
    return ours, eager


def scoring() -> tuple[Call, Call]:
    """`steps` of log-probabilities alone, without gradients."""
    b = make_batch()
    hidden, weight = b.hidden.detach(), b.weight.detach()
    alone = b._replace(hidden=hidden, weight=weight)
    return lambda: gk.fused_logps(hidden, weight, b.ids), lambda: eager_logps(alone)


def microseconds(call: Call, count: int) -> float:
    times = []
    for _ in range(count):
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
    return sorted(times)[count // 10] / 1e3


def compare(pair: tuple[Call, Call], rounds: int, count: int) -> dict[str, float]:
    for call in pair:
        microseconds(call, count)
    found = [[microseconds(call, count) for call in pair] for _ in range(rounds)]
    ours, eager = (statistics.median(times) for times in zip(*found, strict=True))
    return {"ours_us": ours, "eager_us": eager, "ratio": statistics.median(a / b for a, b in found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {"environment": environment(torch.device("cpu")), "calls": {}}
    print("| call | ours, us | eager, us | ratio |\n|---|---|---|---|")
    for name in (*PRESETS, "fused_logps"):
        with torch.set_grad_enabled(name in PRESETS):
            pair = steps(name) if name in PRESETS else scoring()
            found = document["calls"][name] = compare(pair, chosen.rounds, chosen.steps)
        print(f"| {name} | {found['ours_us']:.0f} | {found['eager_us']:.0f} | {found['ratio']:.2f} |", flush=True)
    if chosen.output:
        write(chosen.output, json.loads(json.dumps(document, default=str)))


if __name__ == "__main__":
    main()
