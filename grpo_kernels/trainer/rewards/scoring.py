"""Calls the reward functions of a batch, and adds up the rewards."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .. import RunError, reason_of
from ..data import MOST_LEVELS, is_flat
from . import answers
from .answers import TAGS
from .functions import Call, EventLoop, find
from .reading import END_OF_THOUGHT, THINK

NAN = math.nan
LARGEST = torch.finfo(torch.float32).max  # rewards become float32
# What functions get beside the columns.
GIVEN = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}


class BuiltIn(NamedTuple):
    """check: raises ValueError for a row's answer that the function cannot read. read: from the text behind "name=" and
    max_completion_length to the value that the function gets; raises ValueError."""

    function: Callable[..., list[float]]
    check: Callable[[Any], object] | None = None
    read: Callable[[str, int], Any] | None = None


BUILT_IN = {
    "exact_answer": BuiltIn(answers.exact_answer, answers.text_of_gold),
    "arithmetic": BuiltIn(answers.exact_answer, answers.text_of_gold),  # by the name of the generated task
    "gsm8k": BuiltIn(answers.math_answer, answers.gold_number),
    "math": BuiltIn(answers.math_answer, answers.gold_answer),
    "last_number": BuiltIn(answers.last_number, answers.gold_number),
    "format": BuiltIn(answers.format),
    "pattern": BuiltIn(answers.pattern, read=answers.compiled),
    "soft_overlong": BuiltIn(answers.soft_overlong, read=answers.tokens),
}
THINKING = answers.exact_answer, answers.math_answer, answers.last_number, answers.format  # which skip thoughts


class Failure(NamedTuple):
    """A reward function that failed. row: the completion within the batch."""

    name: str
    row: int
    message: str
    traceback: str


@dataclass
class RewardBatch:
    """The rewards of B completions.

    total: (B,) float32, the weighted sum of what the functions gave; NaN: unscored, because a function failed for this
        completion or none applies to it.
    by_name: name -> (B,) float32, without weights; NaN where the function gave nothing.
    steps: for each completion the weighted rewards of its steps, [] where unscored, if functions gave some (else
        None). Their sum is `total`: what functions gave for the whole completion belongs to its last step.
    failures: what failed, completion by completion. fatal: what the run should stop with, where a function failed for
        all of them, or no completion was scored.
    seconds: name -> wall-clock time. metrics: of `log_metric`, means. extra: of `log_extra`, B values for each column.
    """

    total: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    by_name: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[list[float]] | None = None
    failures: list[Failure] = field(default_factory=list)
    fatal: Failure | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)


class Value(NamedTuple):
    """What a function gave for one completion; NaN: nothing. steps: None, or what `number` is the sum of. error: where
    it failed, message and traceback."""

    number: float
    steps: list[float] | None = None
    error: tuple[str, str] | None = None


class Function:
    """A reward function by its name."""

    def __init__(self, spec: str | Callable[..., Any], max_length: int) -> None:
        self.constants: dict[str, Any] = {}
        self.check_answer: Callable[[Any], object] | None = None
        name, _, value = str(spec).partition("=")
        if callable(spec):
            self.name, self.function = getattr(spec, "__name__", type(spec).__name__), spec
        elif name in BUILT_IN:
            self.name, (self.function, self.check_answer, read) = name, BUILT_IN[name]
            try:
                if bool(value) != bool(read):
                    raise ValueError(f"expected {name}{'=VALUE' if read else ''}")
                self.constants = {"value": read(value, max_length), "max_length": max_length} if read else {}
            except ValueError as error:
                raise ValueError(f"reward {spec!r}: {error}") from None
        elif ":" in spec or "." in spec:
            self.name, self.function = spec.replace(":", ".").rpartition(".")[2], find(spec)
        else:
            expected = f"one of {', '.join(BUILT_IN)}, module:function or path/file.py:function"
            raise ValueError(f"reward {spec!r} is none of the built-in ones; expected {expected}")

    def call(self, columns: dict[str, Any], loop: EventLoop) -> Call:
        """Calls it with copies: what it changes in its arguments is not changed for others, who train on them."""
        try:
            arguments = pickle.loads(pickle.dumps(columns | self.constants))
        except Exception as error:  # of what a column holds
            raise RunError(f"reward {self.name!r} cannot be called: {reason_of(error)}") from error
        return Call(self.function, arguments, loop)

    def values(self, call: Call, size: int) -> list[Value]:
        """Returns those of `size` completions; raises RunError for a result of the wrong length or type."""
        if call.error:
            return [Value(NAN, error=call.error)] * size
        if not isinstance(call.value, list):
            raise self.returned(type(call.value).__name__, f"a list of {size} numbers")
        if len(call.value) != size:
            raise self.returned(f"{len(call.value)} values", f"{size}, one for each completion")
        return [Value(NAN) if item is None else self.value(item) for item in call.value]

    def value(self, item: Any) -> Value:
        has_steps = isinstance(item, (list, tuple))
        numbers = list(item) if has_steps else [item]
        try:
            if not numbers or any(isinstance(number, (str, bytes)) for number in numbers):
                raise TypeError
            numbers = [float(number) for number in numbers]
        except (TypeError, ValueError, OverflowError):
            expected = "a number, None, or a number for each of its steps"
            raise self.returned(f"{_shown(item)} for a completion", expected) from None
        if not all(abs(number) <= LARGEST for number in numbers):  # nor NaN
            return Value(NAN, error=(f"reward {self.name!r} returned {item!r:.80}",) * 2)
        return Value(sum(numbers), numbers if has_steps else None)

    def returned(self, description: str, expected: str) -> RunError:
        return RunError(f"reward {self.name!r} returned {description}, expected {expected}")


class Rewards:
    """Reward functions and their weights.

    specs: each a built-in name, "module:function", "path/file.py:function", "package.module.function", or a callable.
    Signature as in TRL: function(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns)
    -> list of float, None, or list of float (rewards of steps). Async functions run side by side, in a thread of their
    own. A function that raises has failed for the whole batch, and is not called again. max_length:
    max_completion_length. Raises ValueError for an unknown function, two of the same name, weights that do not fit.
    """

    def __init__(self, specs: Sequence[Any], weights: Sequence[float] | None = None, *, max_length: int = 0) -> None:
        self.weights = [1.0] * len(specs) if weights is None else list(weights)
        if len(self.weights) != len(specs) or not all(map(math.isfinite, self.weights)):
            expected = f"one finite number for each of {len(specs)} functions"
            raise ValueError(f"reward_weights is {weights!r}, expected {expected}")
        self.functions = [Function(spec, max_length) for spec in specs]
        self.names = [function.name for function in self.functions]
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"two reward functions have the same name: {', '.join(self.names)}")
        self.opens = False
        self.loop = EventLoop()

    def check(self, columns: dict[str, list[Any]]) -> None:
        """Raises ValueError for a missing column, one that the trainer passes itself, or a row, by its number from 0,
        whose answer a built-in function cannot read."""
        if taken := sorted(columns.keys() & GIVEN):
            raise ValueError(f"the data has the column {taken[0]!r}, which rewards get from the trainer; rename it")
        for function in self.functions:
            for p in inspect.signature(function.function).parameters.values():
                needed = p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
                if needed and p.name not in columns.keys() | GIVEN | function.constants.keys():
                    there = ", ".join(columns) or "none"
                    raise ValueError(f"reward {function.name!r} reads the column {p.name!r}; there are: {there}")
            for row, answer in enumerate(columns.get("answer", ()) if function.check_answer else ()):
                try:
                    function.check_answer(answer)  # type: ignore[misc]
                except ValueError as error:
                    raise ValueError(f"row {row}, reward {function.name!r}: {error}") from None

    def check_form(self, tokenizer: Any, prompts: Sequence[Any]) -> None:
        """Tells the built-in functions whether the chat template ends `prompts` (of data.py) with <think>. Raises
        ValueError where the tokenizer has no ordinary tokens for tags that they need: texts would lack them."""
        chats = (p for p in prompts if not isinstance(p.prompt, str) and p.prompt[-1]["role"] != "assistant")
        self.opens = next((tokenizer.decode(p.ids) for p in chats), "").rstrip().endswith(THINK)
        for function in self.functions:
            if function.function not in THINKING:
                continue
            function.constants["opens"] = self.opens
            needed = TAGS if function.name == "format" else (END_OF_THOUGHT,) if self.opens else ()
            ids = {tag: tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in needed}
            if lost := [tag for tag in needed if tag not in tokenizer.decode(ids[tag], skip_special_tokens=True)]:
                why = f"no text of theirs has {', '.join(lost)}, for which the tokenizer has special tokens, or none"
                raise ValueError(f"reward {function.name!r} would be 0 for every completion: {why}")

    def score(
        self, *, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]],
        columns: dict[str, list[Any]], step: int,
    ) -> RewardBatch:  # fmt: skip
        """Scores B completions; raises RunError for a result of the wrong length or type."""
        arguments = dict(
            columns, prompts=prompts, completions=completions, completion_ids=completion_ids,
            trainer_state=SimpleNamespace(global_step=step),
        )  # fmt: skip
        batch, table, count = RewardBatch(), [], len(completions)
        calls: list[Call] = []
        try:
            calls.extend(function.call(arguments, self.loop) for function in self.functions)
            for call in calls:
                call.finish()
        except BaseException:  # Ctrl-C, say: nobody waits for the others
            for call in calls:
                call.cancel()
            raise
        for function, call in zip(self.functions, calls, strict=True):
            batch.seconds[function.name] = call.seconds
            values = function.values(call, count)
            table.append(values)
            failures = [Failure(function.name, row, *value.error) for row, value in enumerate(values) if value.error]
            batch.failures += failures
            if failures and len(failures) == count:
                batch.fatal = batch.fatal or failures[0]
            if not call.error:
                _log(call, count, batch)
        numbers = torch.tensor([[value.number for value in values] for values in table], dtype=torch.float64)
        batch.by_name = dict(zip(self.names, numbers.float(), strict=True))
        weighted = numbers * torch.tensor(self.weights, dtype=torch.float64)[:, None]
        weighted[:, [failure.row for failure in batch.failures]] = NAN
        batch.total = weighted.nansum(0).masked_fill(weighted.isnan().all(0), NAN).float()
        if any(value.steps for values in table for value in values):
            batch.steps = [self._steps(row, i) for i, row in enumerate(zip(*table, strict=True))]
        if batch.fatal is None and count and not batch.total.isfinite().any():
            names = ", ".join(self.names)
            text = f"no completion of step {step} was scored: {names} gave None or failed for each"
            batch.fatal = Failure(names, 0, text, batch.failures[0].traceback if batch.failures else text)
        return batch

    def close(self) -> None:
        self.loop.close()

    def _steps(self, values: Sequence[Value], index: int) -> list[float]:
        """Returns the weighted rewards of a completion's steps; the last has what functions gave for the whole
        completion."""
        counts = {len(value.steps) for value in values if value.steps}
        if not counts or any(value.error for value in values):
            return []
        if len(counts) > 1:
            raise RunError(f"completion {index}: reward functions gave rewards of {sorted(counts)} steps")
        totals = [0.0] * counts.pop()
        for weight, value in zip(self.weights, values, strict=True):
            if not math.isnan(value.number):
                steps = value.steps or [0.0] * (len(totals) - 1) + [value.number]
                totals = [total + weight * reward for total, reward in zip(totals, steps, strict=True)]
        return totals


def _shown(item: Any) -> str:
    try:
        return f"{item!r:.80}"
    except Exception:  # of an int of 5,000 digits, say
        return f"a {type(item).__name__} that cannot be shown"


def _log(call: Call, count: int, batch: RewardBatch) -> None:
    """Adds what a function gave to log_metric and log_extra."""
    for name, numbers in call.metrics.items():
        batch.metrics[name] = sum(numbers) / len(numbers)  # fmean raises for infinities of both signs
    for column, values in call.extra.items():
        if len(values) != count or not is_flat(values):
            expected = f"{count}, of at most {MOST_LEVELS} levels of lists and objects"
            raise RunError(f"log_extra({column!r}) got {len(values)} values; expected {expected}")
        batch.extra[column] = values
