"""Calls the reward functions of a batch, finds the completions that they fail for, and adds up the rewards."""

from __future__ import annotations

import inspect
import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .. import RunError, reason_of
from ..data import MOST_LEVELS, is_flat
from . import answers
from .answers import TAGS
from .worker import Result, Worker, call, find, importable_name

NAN = math.nan
LARGEST = torch.finfo(torch.float32).max  # rewards become float32
GOLDEN_RATIO = 0.618034
MOST_LATE = 8
# What functions get beside the columns.
GIVEN = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}


class BuiltIn(NamedTuple):
    """check: raises ValueError for a row's answer that the function cannot read. read: from the text behind "name=" and
    max_completion_length to the value that the function gets; raises ValueError."""

    function: Callable[..., list[float]]
    check: Callable[[Any], object] | None = None
    read: Callable[[str, int], Any] | None = None


BUILT_IN = {
    "exact_answer": BuiltIn(answers.exact_answer, answers.gold_text),
    "arithmetic": BuiltIn(answers.exact_answer, answers.gold_text),  # by the name of the generated task
    "gsm8k": BuiltIn(answers.gsm8k, answers.gold_number),
    "last_number": BuiltIn(answers.last_number, answers.gold_number),
    "format": BuiltIn(answers.format),
    "pattern": BuiltIn(answers.pattern, read=answers.compiled),
    "soft_overlong": BuiltIn(answers.soft_overlong, read=answers.tokens),
}


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
    """A reward function by its name: in this process, or in a worker if it is the user's and there is a time limit."""

    def __init__(self, spec: str | Callable[..., Any], timeout: float | None, max_length: int) -> None:
        self.constants: dict[str, Any] = {}
        self.check_answer: Callable[[Any], object] | None = None
        in_worker = ""
        name, _, value = str(spec).partition("=")
        if callable(spec):
            self.name, self.function = getattr(spec, "__name__", type(spec).__name__), spec
            in_worker = "" if timeout is None else importable_name(spec)
        elif name in BUILT_IN:
            self.name, (self.function, self.check_answer, read) = name, BUILT_IN[name]
            try:
                if bool(value) != bool(read):
                    raise ValueError(f"expected {name}{'=VALUE' if read else ''}")
                self.constants = {"value": read(value, max_length), "max_length": max_length} if read else {}
            except ValueError as error:
                raise ValueError(f"reward {spec!r}: {error}") from None
            in_worker = f"{answers.__file__}:pattern" if name == "pattern" else ""  # some text may take it forever
        elif ":" in spec or "." in spec:
            self.name, self.function, in_worker = spec.replace(":", ".").rpartition(".")[2], find(spec), spec
        else:
            expected = f"one of {', '.join(BUILT_IN)}, module:function or path/file.py:function"
            raise ValueError(f"reward {spec!r} is none of the built-in ones; expected {expected}")
        self.worker = Worker(in_worker, timeout) if in_worker and timeout is not None else None

    def call(self, given: dict[str, Any]) -> Result:
        """Calls it with copies: what it changes in its arguments is not changed for others, who train on them."""
        try:
            arguments = pickle.dumps(given | self.constants)
            return self.worker.call(arguments) if self.worker else call(self.function, pickle.loads(arguments))
        except Exception as error:  # of what a column holds, or of a process that cannot start again
            raise RunError(f"reward {self.name!r} cannot be called: {reason_of(error)}") from error

    def call_each(self, given: dict[str, list[Any]], state: dict[str, Any]) -> list[Result]:
        """Calls it for each completion alone, in an order that is spread over the batch: where the first MOST_LATE time
        out, the others would as well (a server that is down), and are not waited for."""
        count = len(given["completions"])
        found: dict[int, Result] = {}
        for i in sorted(range(count), key=lambda i: i * GOLDEN_RATIO % 1):
            if len(found) == MOST_LATE and all(result.late for result in found.values()):
                return [found.get(i, found[0]) for i in range(count)]
            found[i] = self.call({**{name: [values[i]] for name, values in given.items()}, **state})
        return [found[i] for i in range(count)]

    def values(self, result: Result, size: int) -> list[Value]:
        """Returns those of `size` completions; raises RunError for a result of the wrong length or type."""
        if result.error:
            return [Value(NAN, error=result.error)] * size
        if not isinstance(result.value, list):
            raise self.returned(type(result.value).__name__, f"a list of {size} numbers")
        if len(result.value) != size:
            raise self.returned(f"{len(result.value)} values", f"{size}, one for each completion")
        return [Value(NAN) if item is None else self.value(item) for item in result.value]

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

    def returned(self, found: str, expected: str) -> RunError:
        return RunError(f"reward {self.name!r} returned {found}, expected {expected}")


class Rewards:
    """Reward functions and their weights.

    specs: each a built-in name, "module:function", "path/file.py:function", "package.module.function", or a callable.
    Signature as in TRL: function(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns)
    -> list of float, None, or list of float (rewards of steps); async functions as well. A call that raises, or takes
    more CPU time than `timeout` seconds, is repeated for each completion alone, to find those that fail. max_length:
    max_completion_length. Raises ValueError for an unknown function, two of the same name, weights that do not fit.
    """

    def __init__(
        self, specs: Sequence[Any], weights: Sequence[float] | None = None, *, timeout: float | None = None,
        max_length: int = 0,
    ) -> None:  # fmt: skip
        if timeout is not None and not 0 < timeout < math.inf:
            raise ValueError(f"reward timeout is {timeout!r}, expected seconds above 0")
        self.weights = [1.0] * len(specs) if weights is None else list(weights)
        if len(self.weights) != len(specs) or not all(map(math.isfinite, self.weights)):
            expected = f"one finite number for each of {len(specs)} functions"
            raise ValueError(f"reward_weights is {weights!r}, expected {expected}")
        self.functions = [Function(spec, timeout, max_length) for spec in specs]
        self.names = [function.name for function in self.functions]
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"two reward functions have the same name: {', '.join(self.names)}")

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
        """Tells "format" whether the chat template ends `prompts` (of data.py) with its first tag. Raises ValueError
        where the tokenizer has no ordinary tokens for its tags: the text that rewards get would lack them."""
        for function in self.functions:
            if function.function is not answers.format:
                continue
            ids = {tag: tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in TAGS}
            if lost := [tag for tag in TAGS if tag not in tokenizer.decode(ids[tag], skip_special_tokens=True)]:
                why = f"no text of theirs has {', '.join(lost)}, for which the tokenizer has special tokens, or none"
                raise ValueError(f"reward 'format' would be 0 for every completion: {why}")
            chats = (p for p in prompts if not isinstance(p.prompt, str) and p.prompt[-1]["role"] != "assistant")
            first = next((tokenizer.decode(p.ids) for p in chats), "")
            function.constants["opens"] = first.rstrip().endswith(TAGS[0])

    def score(
        self, *, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]],
        columns: dict[str, list[Any]], step: int,
    ) -> RewardBatch:  # fmt: skip
        """Scores B completions; raises RunError for a result of the wrong length or type."""
        given = dict(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        state, count = {"trainer_state": SimpleNamespace(global_step=step)}, len(completions)
        batch, table = RewardBatch(), []
        for function in self.functions:
            start = time.perf_counter()
            results = [function.call({**given, **state})]
            if results[0].error and count > 1:  # for which of them?
                results = function.call_each(given, state)
            batch.seconds[function.name] = time.perf_counter() - start
            values = [value for result in results for value in function.values(result, count // len(results))]
            table.append(values)
            failures = [Failure(function.name, row, *value.error) for row, value in enumerate(values) if value.error]
            batch.failures += failures
            if failures and len(failures) == count:
                batch.fatal = batch.fatal or failures[0]
            _log(results, count, batch)
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
        for function in self.functions:
            if function.worker:
                function.worker.close()

    def _steps(self, values: Sequence[Value], index: int) -> list[float]:
        """The weighted rewards of a completion's steps; the last has what functions gave for the whole completion."""
        counts = {len(value.steps) for value in values if value.steps}
        if not counts or any(value.error for value in values):
            return []
        if len(counts) > 1:
            raise RunError(f"completion {index}: reward functions gave rewards of {sorted(counts)} steps")
        found = [0.0] * counts.pop()
        for weight, value in zip(self.weights, values, strict=True):
            if not math.isnan(value.number):
                steps = value.steps or [0.0] * (len(found) - 1) + [value.number]
                found = [total + weight * reward for total, reward in zip(found, steps, strict=True)]
        return found


def _shown(item: Any) -> str:
    try:
        return f"{item!r:.80}"
    except Exception:  # of an int of 5,000 digits, say
        return f"a {type(item).__name__} that cannot be shown"


def _log(results: list[Result], count: int, batch: RewardBatch) -> None:
    """What functions gave to log_metric and log_extra, of one call or of one for each completion."""
    for name in dict.fromkeys(name for result in results for name in result.metrics):
        numbers = [number for result in results for number in result.metrics.get(name, ())]
        batch.metrics[name] = sum(numbers) / len(numbers)  # fmean raises for infinities of both signs
    nothing = [None] * (count // len(results))
    for column in dict.fromkeys(column for result in results for column in result.extra):
        values = [value for result in results for value in result.extra.get(column, nothing)]
        if len(values) != count or not is_flat(values):
            expected = f"{count}, of at most {MOST_LEVELS} levels of lists and objects"
            raise RunError(f"log_extra({column!r}) got {len(values)} values; expected {expected}")
        batch.extra[column] = values
