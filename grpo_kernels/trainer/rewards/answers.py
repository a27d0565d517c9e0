"""Rewards from the text of a completion, 1.0 or 0.0: one right answer, or the form. A completion has to commit itself:
one that names several answers gets 0, but for `last_number`. And the penalty of long completions.

All patterns are linear, but for a user's own (`pattern`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, TypeAlias

from . import reading
from .reading import ANSWER, END_OF_ANSWER, END_OF_THOUGHT, THINK

Prompts: TypeAlias = "Sequence[Any] | None"

TAGS = THINK, END_OF_THOUGHT, ANSWER, END_OF_ANSWER
WITHOUT_TAGS = r"(?:(?!</?think>|</?answer>).)*"
# Each tag once, in order, with only blanks around the blocks.
FORM = re.compile(rf"\s*<think>{WITHOUT_TAGS}</think>\s*<answer>{WITHOUT_TAGS}</answer>\s*", re.DOTALL)
WORD = re.compile(r"[-+]?(?:[eE][-+]|[\w.,/])+")  # that may be a number


def text_of(completion: Any) -> str:
    """Returns a completion's text, of a string or of a conversation's messages: the contents of the last one."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def reply(prompt: Any, text: str) -> Any:
    """Returns a completion as reward functions get it: text, or where the prompt is messages, a message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def whole_text(completion: Any, prompt: Any, opens: bool) -> str:
    """Returns a completion's text behind the <think> that its prompt may end with. opens: whether the chat template
    ends prompts with it; a prompt that a completion continues ends as it is."""
    continued = isinstance(prompt, str) or prompt[-1]["role"] == "assistant"
    begun = text_of(prompt).rstrip().endswith(THINK) if continued else opens
    return THINK * begun + text_of(completion)


def said(completion: Any, prompt: Any, opens: bool) -> str:
    """Returns a completion's text without its thoughts, as `reading` takes it."""
    return reading.normalize(reading.after_thought(whole_text(completion, prompt, opens)))


def _said(completions: Sequence[Any], prompts: Prompts, opens: bool) -> list[str]:
    prompts = [""] * len(completions) if prompts is None else prompts
    return [said(completion, prompt, opens) for completion, prompt in zip(completions, prompts, strict=True)]


def text_of_gold(answer: Any) -> str:
    """Returns a row's answer, of a text or a number. Raises ValueError for anything else."""
    if isinstance(answer, dict):
        parts = " or ".join(f"COLUMN.{name}" for name in answer) or "none"
        raise ValueError(f"answer is an object; expected a text or a number: answer_column={parts} names a part of it")
    if type(answer) is bool or not (isinstance(answer, str) or (isinstance(answer, Real) and math.isfinite(answer))):
        raise ValueError(f"answer is {answer!r:.60}; expected a text or a number")
    if not str(answer).strip():
        raise ValueError("answer is empty")
    if isinstance(answer, (str, Integral)):
        return str(answer).strip()
    return f"{Decimal(repr(float(answer))):f}"  # never 1e-05


def gold_answer(answer: Any) -> str:
    """Returns the right answer of a row: alone, or at the end of a solution, as `reading.final_answer` finds it. Raises
    ValueError where there is not exactly one."""
    text = text_of_gold(answer)
    if (gold := reading.gold_answer(text)) is None:
        raise _unread(text, "answer")
    return gold


def gold_number(answer: Any) -> str:
    """Returns the same of a row whose answer is a number."""
    gold = gold_answer(answer)
    if not reading.is_number(gold):
        raise _unread(text_of_gold(answer), "number")
    return gold


def _unread(text: str, kind: str) -> ValueError:
    sentence = f'answer {text[-60:]!r} has no single {kind}, alone, after "####" or in \\boxed{{}}'
    if reading.time_limit() is None:
        sentence += "; in another thread than the main one, and under an alarm, only numbers and fractions are read"
    return ValueError(sentence)


def exact_answer(
    completions: Sequence[Any], answer: Sequence[Any], prompts: Prompts = None, opens: bool = False, **_: Any
) -> list[float]:
    """Returns 1 if the completion is the column `answer`, blanks around it apart. With <answer>...</answer>: if its
    contents are; several such blocks are no answer."""
    scores = []
    for text, right in zip(_said(completions, prompts, opens), answer, strict=True):
        tagged = reading.tagged(text)
        stated = text if not tagged else tagged[0] if len(tagged) == 1 else ""
        scores.append(float(stated.strip() == reading.normalize(text_of_gold(right))))
    return scores


def math_answer(
    completions: Sequence[Any], answer: Sequence[Any], prompts: Prompts = None, opens: bool = False, **_: Any
) -> list[float]:
    """Returns 1 if the completion's final answer is that of the column `answer`, see `reading.final_answer`."""
    answers = map(reading.final_answer, _said(completions, prompts, opens))
    pairs = zip(answers, map(gold_answer, answer), strict=True)
    return [float(one is not None and reading.is_same(gold, one)) for one, gold in pairs]


def last_number(
    completions: Sequence[Any], answer: Sequence[Any], prompts: Prompts = None, opens: bool = False, **_: Any
) -> list[float]:
    """Returns 1 if the last number of the completion, whatever stands before it, equals that of the column `answer`."""
    scores = []
    for text, right in zip(_said(completions, prompts, opens), answer, strict=True):
        words = [word for word in WORD.findall(text) if any(map(str.isdigit, word))]
        last = next(filter(reading.is_number, map(reading.clean, reversed(words))), None)
        scores.append(float(last is not None and reading.is_same(gold_number(right), last)))
    return scores


def format(completions: Sequence[Any], prompts: Sequence[Any], opens: bool = False, **_: Any) -> list[float]:
    """Returns 1 if the whole completion has the form, behind a first tag that its prompt may end with."""
    pairs = zip(completions, prompts, strict=True)
    return [float(bool(FORM.fullmatch(whole_text(completion, prompt, opens)))) for completion, prompt in pairs]


def pattern(completions: Sequence[Any], value: re.Pattern[str], **_: Any) -> list[float]:
    """Returns 1 if the whole completion, blanks around it apart, matches the regular expression."""
    return [float(bool(value.fullmatch(text_of(completion).strip()))) for completion in completions]


def soft_overlong(completion_ids: Sequence[Sequence[int]], value: int, max_length: int, **_: Any) -> list[float]:
    """Returns DAPO's penalty of long completions (arXiv:2503.14476, equation 13): from 0 to -1 over the last `value`
    tokens before max_length."""
    return [-min(max(0.0, (len(ids) - max_length + value) / value), 1.0) for ids in completion_ids]


def compiled(text: str, max_length: int) -> re.Pattern[str]:
    """Compiles the expression of `pattern`: "." is any character."""
    try:
        return re.compile(text, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no regular expression: {error}") from None


def tokens(text: str, max_length: int) -> int:
    """Reads the number of `soft_overlong`."""
    if not (text.isdecimal() and 1 <= int(text) <= max_length):
        raise ValueError(f"expected a number of tokens, 1 to max_completion_length={max_length}")
    return int(text)
