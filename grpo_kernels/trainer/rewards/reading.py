"""Finds where a text states its answer; math-verify reads it, and says whether two answers are the same.

All patterns are linear.
"""

from __future__ import annotations

import re
import signal
import threading
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

THINK, END_OF_THOUGHT = "<think>", "</think>"
ANSWER, END_OF_ANSWER = "<answer>", "</answer>"

MOST_CHARACTERS = 200  # of an answer
SECONDS = 3  # to read an answer, and to compare two

DASHES = dict.fromkeys(map(ord, "‐‑‒–—−"), "-") | {ord("⁄"): "/"}
# NFKC would make 102 of 10² and 21/2 of 2½.
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+|[¼-¾⅐-⅞]")
# At the start of a line and before a number, a sign, a currency or LaTeX, in bold or not. Other text is a heading of
# Markdown, and so is "#### 1. Step".
HASHES = re.compile(
    r"^[ \t]*####[ \t]*(?=(?:\*\*)?[-+.\d\\${(€£¥₹])(?!(?:\*\*)?\d+[.):]\**[ \t]+\**[^\W\d])(.+)$", re.MULTILINE
)
BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
STATED = re.compile(r"\banswer\**[ \t]*(?:is\b|:|=)[\s:*]*", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")

BOLD = re.compile(r"\*\*([^*]+)\*\*")
DELIMITER = re.compile(r"\\[$()\[\]]")  # of LaTeX; \$ is a currency
PROSE = re.compile(r"^(?!.*\\).*(?:^|\s)[^\W\d_]{2}", re.DOTALL)  # not the products of letters in "3xy" and "2 \pi rh"
E_NOTATION = re.compile(r"(?<=\d)[eE]([-+]?\d+)(?!\w)")
# What is read and compared in a moment, for want of a limit of time: no powers, factorials, sums or subscripts.
SIMPLE = re.compile(
    r"(?:[^\W_]|[\s.,:;+\-*/=<>%'()\[\]{}]|\\(?:[dt]?frac|sqrt|pi|cdot|times|text|mathrm|left|right)(?![a-z])|\\[%,;!]){1,60}"
)
MOST_NESTED = 3  # brackets of it


def normalize(text: str) -> str:
    """Returns a text in Unicode's form NFKC, with one kind of minus sign; powers and fractions of one character become
    LaTeX."""
    text = unicodedata.normalize("NFKC", RAISED.sub(_as_latex, text))
    return text.translate(DASHES)


def _as_latex(match: re.Match[str]) -> str:
    top, slash, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return f"\\frac{{{top}}}{{{bottom}}}" if slash else f"^{{{top}}}"


def after_thought(text: str) -> str:
    """Returns what stands after the last </think>; nothing where a thought does not end."""
    said = text.rpartition(END_OF_THOUGHT)[2]
    return "" if THINK in said else said


def tagged(text: str) -> list[str]:
    """Returns the contents of the <answer> blocks."""
    blocks = (part.partition(END_OF_ANSWER) for part in text.split(ANSWER)[1:])
    return [content for content, end, _ in blocks if end]


def boxed(text: str) -> list[str]:
    """Returns the contents of each \\boxed{}, which may have braces inside."""
    contents: list[str] = []
    open_braces: list[int] = []  # where the contents begin, of a box; -1 of other braces
    for match in BRACES.finditer(text):
        if match[0].endswith("{") and match[0] != r"\{":
            open_braces.append(match.end() if len(match[0]) > 1 else -1)
        elif match[0] == "}" and open_braces and (start := open_braces.pop()) >= 0:
            contents.append(text[start : match.start()])
    return contents


def stated(text: str) -> list[str]:
    """Returns the sentence after the last "answer is" or "Answer:"."""
    ends = [match.end() for match in STATED.finditer(text)]
    return [SENTENCE_END.split(text[end : end + MOST_CHARACTERS + 1], maxsplit=1)[0] for end in ends[-1:]]


def marked(text: str) -> list[str]:
    """Returns what stands after "####", or in \\boxed{}, or after "answer is": in the first of these forms that the
    text has."""
    return HASHES.findall(text) or boxed(text) or stated(text)


def final_answer(text: str) -> str | None:
    """Returns the answer that a text commits itself to: in <answer>, or else `marked`. None without one, and where one
    cannot be read or two are not the same. The text is normalized and has no thoughts."""
    places = [place for content in tagged(text) for place in marked(content) or [content]] or marked(text)
    return _only(map(clean, places))


def gold_answer(text: str) -> str | None:
    """Returns the answer of a solution, as `final_answer` does, or of a text that is the answer alone."""
    text = normalize(text)
    return _only([clean(text)]) if not marked(text) and not tagged(text) else final_answer(text)


def _only(answers: Iterator[str] | list[str]) -> str | None:
    first = None
    for answer in answers:
        if first is None and is_read(answer):
            first = answer
        elif first is None or not is_same(first, answer):
            return None
    return first


def clean(text: str) -> str:
    """Returns an answer without what is no part of it: Markdown, delimiters of LaTeX, currencies, a full stop."""
    text = DELIMITER.sub("", BOLD.sub(r"\1", text))
    text = "".join(c for c in text if unicodedata.category(c) != "Sc")
    text = E_NOTATION.sub(r" \\times 10^{\1}", text)
    return text.strip(" \t\r\n*_`\"'").rstrip(".,;: \t\r\n").lstrip(": ")


# --- math-verify ------------------------------------------------------------------------------------------------------


def time_limit() -> int | None:
    """Returns the seconds after which math-verify gives up, which it does by the signal SIGALRM: None where that cannot
    be used, in another thread than the main one, or where somebody else's alarm is set."""
    main = threading.current_thread() is threading.main_thread()
    return SECONDS if main and hasattr(signal, "SIGALRM") and not any(signal.getitimer(signal.ITIMER_REAL)) else None


def is_read(answer: str) -> bool:
    """Says whether math-verify reads an answer."""
    return bool(_read(answer, time_limit()))


def is_number(answer: str) -> bool:
    """Says whether an answer is a finite number."""
    values = _read(answer, time_limit())
    return bool(values and getattr(values[0], "is_number", False) and getattr(values[0], "is_finite", False))


def is_same(gold: str, answer: str) -> bool:
    """Says whether an answer is the right one."""
    return _is_same(gold, answer, time_limit())


@lru_cache(maxsize=1 << 14)  # the completions of a group have few answers
def _is_same(gold: str, answer: str, seconds: int | None) -> bool:
    import math_verify

    return math_verify.verify([*_read(gold, seconds)[:1]], [*_read(answer, seconds)], timeout_seconds=seconds)


@lru_cache(maxsize=1 << 14)
def _read(text: str, seconds: int | None) -> tuple[Any, ...]:
    """Returns the value of a text, of sympy's types, or a text where it is no mathematics: () where it is nothing or
    several numbers. The value of words is their one number (18 of "18 dollars"); after that of "5 m", which may be a
    product, stands its number."""
    import sympy
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if not 0 < len(text) <= MOST_CHARACTERS or (seconds is None and not _is_simple(text)):
        return ()

    def value_of(text: str, config: Any) -> Any:
        return next(iter(parse(text, [config], parsing_timeout=seconds)), None)

    def number_of(word: str) -> Any:
        value = value_of(f"\\boxed{{{word}}}", LatexExtractionConfig())
        if getattr(value, "is_number", False):
            return value
        return None if "\\" in word else value_of(word, ExprExtractionConfig())  # "18km", "18)"

    whole, is_prose = value_of(f"\\boxed{{{text}}}", LatexExtractionConfig()), PROSE.search(text) is not None
    is_product = isinstance(whole, sympy.Mul) and bool(whole.free_symbols)
    if is_prose and isinstance(whole, sympy.Eq):  # 9 * 2 = 18 dollars
        return _read(text.rpartition("=")[2].strip(), seconds)
    if not (whole is None or isinstance(whole, (str, sympy.Number)) or is_product):
        return (whole,)
    words = [word for word in text.split() if any(map(str.isdigit, word))]
    if isinstance(whole, sympy.Number) and len(words) < 2:
        return (whole,)
    first, *others = [number for word in words if (number := number_of(word)) is not None] or [None]
    if any(not verify(first, number, timeout_seconds=seconds) for number in others):
        return (whole,) if is_product and not is_prose else ()
    values = (first,) if is_prose else (whole, first)
    return tuple(value for value in values if value is not None) or ((whole,) if whole is not None else ())


def _is_simple(text: str) -> bool:
    depth = most = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        most = max(most, depth)
    return most <= MOST_NESTED and SIMPLE.fullmatch(text) is not None
