"""Options of the demo, with tuned defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoSettings:
    """Options of one run; the defaults are the command's.

    loss: "fused" or "reference". preset, beta: of `GRPOConfig`. device: "auto", "cpu", "cuda", ...
    warmup_loss: nats per token at which the warm-up ends; 0.15 is what remains of the teacher's whims.
    careful_share: share of right answers among the demonstrations of the warm-up.
    """

    output: Path = Path("grpo-demo")
    steps: int = 300
    seed: int = 0
    loss: str = "fused"
    preset: str = "grpo"
    beta: float = 0.005
    device: str = "auto"
    quiet: bool = False

    vocab_size: int = 2048
    hidden_size: int = 128
    num_layers: int = 2

    num_held_out: int = 400
    max_warmup_steps: int = 800
    warmup_loss: float = 0.22
    warmup_batch: int = 192
    warmup_lr: float = 1e-3
    careful_share: float = 0.3

    lr: float = 2e-4
    lr_warmup_steps: int = 20
    num_prompts: int = 32
    num_generations: int = 8
    num_iterations: int = 2
