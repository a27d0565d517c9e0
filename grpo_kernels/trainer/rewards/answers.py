"""Rewards from the text of a completion, 1.0 or 0.0: one right answer, or the form. A completion has to commit itself:
one that names several answers gets 0, but for `last_number`.

All patterns are linear.
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
# Each tag once, in order, with only blanks around the blocks. The first may be missing: chat templates of thinking
# models write it at the end of the prompt.
FORM = re.compile(rf"\s*(?:<think>)?{WITHOUT_TAGS}</think>\s*<answer>{WITHOUT_TAGS}</answer>\s*", re.DOTALL)


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
    """The right number of a row: GSM8K's solution that ends in "#### 42", or a number alone.

    Raises:
        ValueError: there is not exactly one.
    """
    text = str(answer)
    gold = number_in(text.rsplit("####", 1)[-1])
    if gold is None:
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


def format(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 if the whole completion has the form."""
    return [float(bool(FORM.fullmatch(text_of(completion)))) for completion in completions]
