"""The task: two-digit addition, the sum written ones first, as one adds by hand: "37+58=" is continued by "59".

Problems are generated, and completions verified. Demonstrations come from a teacher who mostly forgets to carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAD_ID, EOS_ID = 0, 1
_CHARACTERS = "0123456789+="
_ID_OF = {c: i for i, c in enumerate(_CHARACTERS, start=2)}
_CHARACTER_OF = {i: c for c, i in _ID_OF.items()}
NUM_IDS = 2 + len(_CHARACTERS)

PROMPT_LENGTH = 6  # every prompt is as long as every other: no left padding
MAX_COMPLETION_LENGTH = 5  # three digits, the end, and one to spare: a completion can be too long
OPERANDS = range(100)


@dataclass(frozen=True)
class Problem:
    """a + b of two two-digit numbers."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a:02d}+{self.b:02d}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)[::-1]

    @property
    def careless_answer(self) -> str:
        """Digit by digit without carrying: right for 3 problems in 10."""
        tens, ones = (self.a // 10 + self.b // 10) % 10, (self.a + self.b) % 10
        return str(10 * tens + ones)[::-1]


def split_problems(num_held_out: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(training problems, held-out problems): all 10,000 in a random order, cut in two; no problem is in both."""
    problems = [Problem(a, b) for a in OPERANDS for b in OPERANDS]
    if not 0 < num_held_out < len(problems):
        raise ValueError(f"num_held_out={num_held_out}; expected a number in (0, {len(problems)})")
    order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = [problems[i] for i in order]
    return shuffled[num_held_out:], shuffled[:num_held_out]


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character."""
    return [_ID_OF[c] for c in text]


def decode(ids: Sequence[int]) -> str:
    """The text before the first end-of-sequence id; ids that stand for no character become "?"."""
    text = ""
    for i in ids:
        if i == EOS_ID:
            break
        text += _CHARACTER_OF.get(i, "?")
    return text


def encode_prompts(problems: Sequence[Problem]) -> Tensor:
    """(B, PROMPT_LENGTH) int64."""
    return torch.tensor([encode(p.prompt) for p in problems])


def encode_answers(answers: Sequence[str]) -> Tensor:
    """(B, MAX_COMPLETION_LENGTH) int64: each answer, its end, padding."""
    rows = [[*encode(answer), EOS_ID] for answer in answers]
    return torch.tensor([row + [PAD_ID] * (MAX_COMPLETION_LENGTH - len(row)) for row in rows])


def completion_mask(completion_ids: Tensor) -> Tensor:
    """(B, T) bool, True up to and with the first end-of-sequence id."""
    ended = (completion_ids == EOS_ID).long().cumsum(1)
    return (ended == 0) | ((ended == 1) & (completion_ids == EOS_ID))


def reward(completion_ids: Tensor, problems: Sequence[Problem]) -> Tensor:
    """(B,) float32 on the CPU: 1 where the completion is the answer and stops there, 0 elsewhere."""
    right = [decode(ids) == p.answer for ids, p in zip(completion_ids.tolist(), problems, strict=True)]
    return torch.tensor(right, dtype=torch.float32)
