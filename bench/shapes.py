"""The sizes that are measured: lm_heads of real models, with as many completion tokens as a small machine holds."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """One lm_head and batch: `tokens` N, `hidden_size` H, `vocab_size` V. N is cut into sequences of up to `LENGTH`."""

    name: str
    tokens: int
    hidden_size: int
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.name} ({self.tokens}, {self.hidden_size}, {self.vocab_size})"

    def logits_bytes(self, itemsize: int) -> int:
        """What one copy of all logits takes."""
        return self.tokens * self.vocab_size * itemsize


LENGTH = 256  # tokens per sequence

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen2.5-0.5b", 1024, 896, 151936),
        Shape("smollm2-135m", 2048, 576, 49152),
        Shape("llama-3.2-1b", 512, 2048, 128256),
        Shape("qwen2.5-0.5b-4k", 4096, 896, 151936),
        Shape("tiny", 512, 64, 2048),
    )
}

TIMED = ("qwen2.5-0.5b", "smollm2-135m", "llama-3.2-1b")
WEIGHED = ("smollm2-135m", "qwen2.5-0.5b", "qwen2.5-0.5b-4k")

DTYPES = ("float32", "bfloat16")
