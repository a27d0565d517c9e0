"""The demo from end to end: build, warm up, evaluate, GRPO, evaluate, log, plot."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ..config import GRPOConfig
from .losses import LOSSES
from .memory import memory_line
from .model import build_model, lm_head_weight
from .plot import plot
from .settings import DemoSettings
from .task import MAX_COMPLETION_LENGTH, split_problems
from .train import Record, accuracy, train_grpo, warm_up


@dataclass(frozen=True)
class DemoResult:
    """Held-out greedy accuracy in [0, 1] before and after GRPO; one record per step."""

    accuracy_before: float
    accuracy_after: float
    records: list[Record]


def run_demo(settings: DemoSettings) -> DemoResult:
    """Run it; writes `log.jsonl` and `curves.png` into settings.output (made if absent) and prints what happened."""
    start = time.perf_counter()
    device = torch.device(_default_device() if settings.device == "auto" else settings.device)
    config = loss_config(settings)
    training, held_out = split_problems(settings.num_held_out, settings.seed)
    model = build_model(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        num_layers=settings.num_layers,
        seed=settings.seed,
        device=device,
    )
    settings.output.mkdir(parents=True, exist_ok=True)
    log, curves = settings.output / "log.jsonl", settings.output / "curves.png"

    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"model: Llama, {num_parameters / 1e6:.1f} M parameters, {settings.vocab_size} ids, on {device}", flush=True)
    warmup_steps = warm_up(model, training, settings)
    before = accuracy(model, held_out)
    print(f"held-out accuracy after {warmup_steps} steps of supervised warm-up: {before:.3f}", flush=True)
    records = train_grpo(model, training, LOSSES[settings.loss], config, settings, log)
    after = accuracy(model, held_out)
    title = f"GRPO on two-digit addition ({settings.preset}, {settings.loss}): held-out accuracy"
    plot(records, curves, f"{title} {before:.2f} -> {after:.2f}")
    print(f"held-out accuracy after {settings.steps} steps of GRPO: {after:.3f} ({len(held_out)} problems)")
    print(f"{log} and {curves} written; {time.perf_counter() - start:.0f} s in all")
    # The largest batch that a step can hold: every completion as long as it may be.
    num_tokens = settings.num_prompts * settings.num_generations * MAX_COMPLETION_LENGTH
    print(memory_line(num_tokens, lm_head_weight(model), config))
    return DemoResult(before, after, records)


def loss_config(settings: DemoSettings) -> GRPOConfig:
    """The preset with the demo's beta, and the completion length where its aggregation divides by it."""
    fixed_length = {"max_completion_length": MAX_COMPLETION_LENGTH} if settings.preset == "dr_grpo" else {}
    return GRPOConfig.preset(settings.preset, beta=settings.beta, **fixed_length)


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
