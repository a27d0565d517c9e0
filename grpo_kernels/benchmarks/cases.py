"""What one measurement is: a head, a batch, a type and a kind of work."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

LENGTH = 1024  # tokens per completion, where the batch is large enough
GENERATIONS = 4  # completions per prompt, unless a case says otherwise

MODES = {
    "step": "loss, forward and backward, lm_head trained",
    "frozen": "loss, forward and backward, lm_head frozen",
    "forward": "log-probabilities of the sampled ids under no_grad",
}
DTYPES = ("float32", "bfloat16", "float16")


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("shapes.json").read_text()
    table: dict[str, Any] = json.loads(text)
    return table


def heads() -> dict[str, dict[str, Any]]:
    """Of shapes.json: name -> {"hidden_size", "vocab_size", "model"}."""
    found: dict[str, dict[str, Any]] = _table()["heads"]
    return found


def token_counts(most: int) -> list[int]:
    """Of shapes.json: N from 128 up to `most`."""
    return [count for count in _table()["tokens"] if count <= most]


@dataclass(frozen=True)
class Case:
    """One measurement: N = `tokens` in N / T completions of T = `length`, `generations` adjacent ones to a prompt.

    `idle_share` of the prompts have equal rewards, hence advantages of 0; `beta` weighs the k3 term. `masked_share` of
    the completions have a sampling mask of `kept_ids` ids for each token; with 0 there is none.
    """

    head: str
    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: str
    length: int
    mode: str = "step"
    generations: int = GENERATIONS
    idle_share: float = 0.0
    beta: float = 0.04
    kept_ids: int = 0
    masked_share: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}; expected one of {', '.join(MODES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}; expected one of {', '.join(DTYPES)}")
        for name in ("idle_share", "masked_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)}; expected a number from 0 to 1")
        if not 0 <= self.kept_ids <= self.vocab_size:
            raise ValueError(f"kept_ids={self.kept_ids}; expected 0 to vocab_size = {self.vocab_size}")
        if min(self.tokens, self.hidden_size, self.vocab_size, self.length, self.generations) < 1:
            raise ValueError(f"{self}: sizes have to be positive")
        if self.tokens % (self.generations * self.length):
            raise ValueError(
                f"tokens={self.tokens}; expected a multiple of generations * length = {self.generations * self.length}"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def logits_bytes(self) -> int:
        """What one copy of all logits takes in the inputs' type."""
        return self.tokens * self.vocab_size * self.torch_dtype.itemsize

    def __str__(self) -> str:
        parts = [f"{self.head} ({self.tokens}, {self.hidden_size}, {self.vocab_size})", self.dtype, self.mode]
        if self.generations != GENERATIONS:
            parts.append(f"{self.generations} completions per prompt")
        if self.idle_share or not self.beta:
            parts.append(f"{self.idle_share:.0%} of the prompts without gradient, beta {self.beta:g}")
        if self.kept_ids:
            share = "" if self.masked_share == 1.0 else f" of {self.masked_share:.0%} of the tokens"
            parts.append(f"{self.kept_ids} ids kept{share}")
        return ", ".join(parts)


def make_case(shape: str, dtype: str, *, length: int | None = None, **options: Any) -> Case:
    """A case from a shape as `parse_shape` reads it; completions of `length` tokens, or of up to `LENGTH`."""
    head, tokens, hidden_size, vocab_size = parse_shape(shape)
    generations = options.get("generations", GENERATIONS)
    length = length or max(1, min(LENGTH, tokens // generations))
    return Case(head, tokens, hidden_size, vocab_size, dtype, length, **options)


def parse_shape(text: str) -> tuple[str, int, int, int]:
    """(head, N, H, V) of "qwen2.5-7b:16384", a head of shapes.json, or of "16384x3584x152064"."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found:
        tokens, hidden_size, vocab_size = map(int, found.groups())
        names = {(h["hidden_size"], h["vocab_size"]): name for name, h in heads().items()}
        return names.get((hidden_size, vocab_size), "custom"), tokens, hidden_size, vocab_size
    head, _, tokens_text = text.partition(":")
    if head not in heads() or not tokens_text.isdigit():
        raise ValueError(f"{text!r}; expected HEAD:TOKENS with a head of {', '.join(heads())}, or TOKENSxHIDDENxVOCAB")
    return head, int(tokens_text), heads()[head]["hidden_size"], heads()[head]["vocab_size"]
