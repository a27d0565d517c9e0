"""Finds and calls reward functions, here or in a process of their own that can be killed.

The process imports the function, gets batches as pickles over a socket and answers in JSON: what it sends is data here,
whatever it is. It imports nothing of this package: `Worker` starts this file's text with `python -c`, which takes 50 ms
and not the seconds that torch takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from ctypes import CDLL
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

if __name__ != "__main__":
    from .process import Ended, Process

START_SECONDS = 300.0  # for the import of the function's module, which may load a model
WALL_PER_CPU = 5  # of a call: the limit of wall-clock time over the limit of CPU time


class Result(NamedTuple):
    """What a call returned and logged. error: None, or (message, traceback)."""

    value: Any
    metrics: dict[str, list[float]]
    extra: dict[str, list[Any]]
    error: tuple[str, str] | None
    late: bool = False  # it was stopped at a limit of time


def find(spec: str) -> Callable[..., Any]:
    """The function of "module:function", of "package.module.function" or of "path/file.py:function".

    Raises:
        ValueError: there is no such file, module or function, or it is no function.
    """
    module_name, _, name = spec.partition(":") if ":" in spec else spec.rpartition(".")
    if not module_name or not name:
        raise ValueError(f"reward {spec!r} is neither a built-in one nor module:function")
    if spec.endswith(".py"):
        raise ValueError(f"reward {spec!r} names no function; expected {spec}:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script has its own folder there, not the user's
    try:
        module = from_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"reward {spec!r}: module {module_name!r} cannot be imported: {reason}") from error
    function = getattr(module, name, None)
    if not callable(function) or isinstance(function, type):
        kind = "class" if isinstance(function, type) else type(function).__name__
        problem = "no such name" if function is None else f"a {kind}, expected a function"
        raise ValueError(f"reward {spec!r}: module {module_name!r} has {problem}: {name!r}")
    return function


def from_file(path: Path) -> Any:
    """The module of a file, which finds those beside it, and is imported once. Its name is the path: one like random.py
    hides no module."""
    name = str(path.resolve())
    if name in sys.modules:
        return sys.modules[name]
    if os.path.dirname(name) not in sys.path:
        sys.path.append(os.path.dirname(name))
    spec = importlib.util.spec_from_file_location(name, name)
    assert spec is not None and spec.loader is not None  # of a name that ends with .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> Result:
    """Calls it as TRL does, with `log_metric(name, value)` and `log_extra(column, values)`; awaits it if it is async. A
    function without **keywords gets those of `arguments` that it takes."""
    metrics: dict[str, list[float]] = {}
    extra: dict[str, list[Any]] = {}
    arguments = dict(arguments, log_metric=lambda name, value: metrics.setdefault(name, []).append(float(value)))
    arguments["log_extra"] = lambda column, values: extra.update({column: list(values)})
    try:
        parameters = inspect.signature(function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(awaited(value))
        # A tensor of one number has __iter__, which raises.
        if not isinstance(value, (str, bytes, dict)) and hasattr(value, "__iter__") and getattr(value, "ndim", 1) != 0:
            items = list(value)
            # Arrays of numpy or torch. Those of (B, 1), as reward models give them, are a number each, not a step each.
            one_each = all(math.prod(getattr(x, "shape", (0,))) == 1 for x in items if hasattr(x, "tolist"))
            value = [(x.item() if one_each else x.tolist()) if hasattr(x, "tolist") else x for x in items]
    except (Exception, SystemExit) as error:
        return Result(None, {}, {}, (f"{type(error).__name__}: {error}", traceback.format_exc()))
    return Result(value, metrics, extra, None)


async def awaited(value: Any) -> Any:
    return await value


# ---- the process -----------------------------------------------------------------------------------------------------


def serve() -> None:
    """In the process: answers each (arguments, CPU seconds). It ends with its input, and with the trainer."""
    if sys.platform == "linux":
        CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # in the middle of a call as well
    trainer = Connection(int(sys.argv[1]))

    def send(result: Result) -> None:
        try:
            answer = json.dumps(result._asdict(), default=plain)
        except Exception as error:  # what it returned or logged contains itself, say
            why = f"its answer cannot be JSON: {type(error).__name__}: {error}"
            answer = json.dumps(Result(None, {}, {}, (why, traceback.format_exc()))._asdict())
        trainer.send_bytes(answer.encode())

    spec, sys.path[:] = trainer.recv()
    try:
        function = find(spec)
    except Exception as error:
        return send(Result(None, {}, {}, (str(error), traceback.format_exc())))
    send(Result(None, {}, {}, None))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, inside of a regular expression as well
    with contextlib.suppress(EOFError):
        while True:
            arguments, seconds = trainer.recv()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            result = call(function, arguments)
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(result)
    return None


def plain(item: Any) -> Any:
    """What JSON lacks: arrays as lists, other numbers as float, the rest, such as dates, as text."""
    if hasattr(item, "tolist"):
        return item.tolist()
    return float(item) if hasattr(item, "__float__") else str(item)


def read_answer(answer: bytes) -> Result:
    """What `serve` sent, whose `value` may be any JSON. Raises ValueError where it is anything else."""
    try:
        found = json.loads(answer)
        value, metrics, extra, error = (found[name] for name in ("value", "metrics", "extra", "error"))
        metrics = {name: [float(number) for number in numbers] for name, numbers in metrics.items()}
        if not all(metrics.values()) or not all(isinstance(column, list) for column in extra.values()):
            raise ValueError("numbers of log_metric or values of log_extra are missing")
        if error is not None:
            message, trace = map(str, error)
            error = message, trace
    except Exception as problem:  # of many types: it may be anything
        raise ValueError(f"{type(problem).__name__}: {problem}") from None
    return Result(value, metrics, extra, error)


class Worker:
    """A function of `spec` in a process that is killed when a call takes too long, and started again by the next call.

    seconds: of CPU time for a call. A call that sleeps or waits is stopped after WALL_PER_CPU times as much."""

    def __init__(self, spec: str, seconds: float) -> None:
        self.spec, self.seconds = spec, seconds
        self._process: Process | None = None

    def call(self, arguments: dict[str, Any]) -> Result:
        """A call that takes too long, or that ends its process, gives a Result with an error.

        Raises:
            ValueError: the function cannot be found in the process.
        """
        if self._process is None:
            self._process = Process(Path(__file__))
            error = self._ask((self.spec, sys.path), START_SECONDS).error
            if error:
                self.close()
                raise ValueError(f"reward {self.spec!r} cannot be started: {error[0]}\n{error[1]}")
        return self._ask((arguments, self.seconds), self.seconds * WALL_PER_CPU)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _ask(self, message: Any, seconds: float) -> Result:
        assert self._process is not None
        data, late = pickle.dumps(message), False
        try:
            return read_answer(self._process.answer(seconds, data))
        except Ended as end:
            self._process, late = None, end.late or end.status == -signal.SIGPROF
            text = f"its process {end}"
            if end.status == -signal.SIGPROF:
                text = f"timed out: more than {self.seconds:g} s of CPU time"
            elif end.late:
                text = f"timed out: more than {seconds:g} s of wall-clock time"
        except ValueError as error:
            self.close()  # who knows what it sends next
            text = f"what its process sent is no answer: {error}"
        text = f"reward {self.spec!r}: {text}"
        return Result(None, {}, {}, (text, text), late)


if __name__ == "__main__":
    serve()
