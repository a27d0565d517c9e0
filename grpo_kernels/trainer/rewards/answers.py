"""Rewards from the text of a completion, 1.0 or 0.0: one right answer, or the form. A completion has to commit itself:
one that names several answers gets 0, but for `last_number`. And the penalty of long completions.

All patterns are linear, but for a user's own (`pattern`), for which a worker reads this file without the package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

NUMBER = re.compile(r"(?<![\w.])([+-]?)\$?(\d{1,30}(?:,\d{3}){0,10})(\.\d{1,30})?(?:/(\d{1,30}))?(?!\w)")
# By rank: where a completion has an answer in the first form, later forms do not count.
MARKED = [re.compile(r"####[ \t]*([^\n]{0,200})"), re.compile(r"\\boxed\{([^{}\n]{0,200})\}")]
SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")
TAGGED = re.compile(r"<answer>([^<]*)</answer>")
TAGS = "<think>", "</think>", "<answer>", "</answer>"
WITHOUT_TAGS = r"(?:(?!</?think>|</?answer>).)*"
# Each tag once, in order, with only blanks around the blocks.
FORM = re.compile(rf"\s*<think>{WITHOUT_TAGS}</think>\s*<answer>{WITHOUT_TAGS}</answer>\s*", re.DOTALL)


def text_of(completion: Any) -> str:
    """A completion's text, of a string or of a conversation's messages: the contents of the last one."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def reply(prompt: Any, text: str) -> Any:
    """A completion as reward functions get it: text, or where the prompt is messages, a message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def number_in(text: str) -> Fraction | None:
    """The number in `text` if there is exactly one. $ and thousands separators are taken off: "$1,234.50" is 1234.5."""
    found = NUMBER.findall(text)
    if len(found) != 1:
        return None
    sign, digits, decimals, denominator = found[0]
    if denominator and not int(denominator):
        return None
    return Fraction(sign + digits.replace(",", "") + decimals) / int(denominator or 1)


def final_number(text: str) -> Fraction | None:
    """The number after "####", or in \\boxed{}, or in the sentence of the last "answer is": the first of these forms
    that the text has. None without one, if one of the form holds no number or several, or if they contradict."""
    for pattern in MARKED:
        found = {number_in(answer) for answer in pattern.findall(text)}
        if found:
            return found.pop() if len(found) == 1 else None
    _, marker, rest = text.lower().rpartition("answer is")
    return number_in(SENTENCE_END.split(rest[:200], maxsplit=1)[0]) if marker else None


def gold_number(answer: Any) -> Fraction:
    """The right number of a row: GSM8K's solution that ends in "#### 42", or a number alone. Raises ValueError where
    there is not exactly one."""
    text = str(answer)
    if (gold := number_in(text.rsplit("####", 1)[-1])) is None:
        raise ValueError(f'answer {text[-60:]!r} has no single number, alone or after "####"')
    return gold


def gold_text(answer: Any) -> str:
    if answer is None or answer != answer or isinstance(answer, (list, dict)):
        raise ValueError(f"answer is {answer!r:.60}; expected a text or a number")
    if not str(answer).strip():
        raise ValueError("answer is empty")
    return str(answer).strip()


def exact_answer(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 if the completion is the column `answer`, blanks around it apart. With <answer>...</answer>: if its contents
    are; several such blocks are no answer."""
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        text = text_of(completion)
        tagged = TAGGED.findall(text)
        found = text if not tagged else tagged[0] if len(tagged) == 1 else ""
        scores.append(float(found.strip() == gold_text(right)))
    return scores


def gsm8k(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 if the completion's final number equals that of the column `answer`, see `final_number` and `gold_number`."""
    pairs = zip(completions, answer, strict=True)
    return [float(final_number(text_of(completion)) == gold_number(right)) for completion, right in pairs]


def last_number(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 if the last number of the completion, whatever stands before it, equals that of the column `answer`."""
    found = [[*NUMBER.finditer(text_of(completion))][-1:] for completion in completions]
    pairs = zip(found, answer, strict=True)
    return [float(any(number_in(x.group()) == gold_number(right) for x in last)) for last, right in pairs]


def format(completions: Sequence[Any], prompts: Sequence[Any], opens: bool = False, **_: Any) -> list[float]:
    """1 if the whole completion has the form, behind a first tag that its prompt may end with. opens: whether the chat
    template ends prompts with that tag; a prompt that a completion continues ends as it is."""
    scores = []
    for completion, prompt in zip(completions, prompts, strict=True):
        continued = isinstance(prompt, str) or prompt[-1]["role"] == "assistant"
        begun = text_of(prompt).rstrip().endswith(TAGS[0]) if continued else opens
        scores.append(float(bool(FORM.fullmatch(TAGS[0] * begun + text_of(completion)))))
    return scores


def pattern(completions: Sequence[Any], value: re.Pattern[str], **_: Any) -> list[float]:
    """1 if the whole completion, blanks around it apart, matches the regular expression."""
    return [float(bool(value.fullmatch(text_of(completion).strip()))) for completion in completions]


def soft_overlong(completion_ids: Sequence[Sequence[int]], value: int, max_length: int, **_: Any) -> list[float]:
    """DAPO's penalty of long completions (arXiv:2503.14476, equation 13): from 0 to -1 over the last `value` tokens
    before max_length."""
    return [-min(max(0.0, (len(ids) - max_length + value) / value), 1.0) for ids in completion_ids]


def compiled(text: str, max_length: int) -> re.Pattern[str]:
    """Of `pattern`: "." is any character."""
    try:
        return re.compile(text, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no regular expression: {error}") from None


def tokens(text: str, max_length: int) -> int:
    """Of `soft_overlong`."""
    if not (text.isdecimal() and 1 <= int(text) <= max_length):
        raise ValueError(f"expected a number of tokens, 1 to max_completion_length={max_length}")
    return int(text)
