"""Finds and calls reward functions, here or in a process of their own that can be killed.

The process imports the function, gets batches as pickles and answers in JSON: what it sends is data here, whatever it
is. It runs this file as a script and imports nothing else of this package, nor torch, which takes seconds.
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
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from ctypes import CDLL
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

START_SECONDS = 300.0  # for the import of the function's module, which may load a model
WALL_PER_CPU = 5  # of a call: the limit of wall-clock time over the limit of CPU time
MOST_BYTES = 1 << 28  # of an answer


class Result(NamedTuple):
    """What a call returned and logged. error: None, or (message, traceback). late: stopped at a limit of time."""

    value: Any
    metrics: dict[str, list[float]]
    extra: dict[str, list[Any]]
    error: tuple[str, str] | None = None
    late: bool = False


def failed(message: str, *, late: bool = False) -> Result:
    """Returns the result of a failure, with the traceback of the exception that is being handled, if one is."""
    trace = traceback.format_exc() if sys.exc_info()[0] else message
    return Result(None, {}, {}, (message, trace), late)


def find(spec: str) -> Callable[..., Any]:
    """Returns the function of "module:function", "package.module.function" or "path/file.py:function". Raises
    ValueError where there is no such file, module or function, or it is no function."""
    module_name, _, name = spec.partition(":") if ":" in spec else spec.rpartition(".")
    if not module_name or not name or spec.endswith(".py"):
        raise ValueError(f"reward {spec!r} names no function; expected module:function or path/file.py:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script has its own folder there, not the user's
    try:
        module = from_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"reward {spec!r}: module {module_name!r} cannot be imported: {reason}") from error
    function = getattr(module, name, None)
    if not callable(function) or isinstance(function, type):
        found = f"{name!r} of module {module_name!r} is {function!r:.60}"
        raise ValueError(f"reward {spec!r}: {found}, expected a function")
    return function


def from_file(path: Path) -> Any:
    """Returns the module of a file, which finds those beside it, and is imported once. Its name is the path: one like
    random.py hides no module."""
    name = str(path.resolve())
    if name not in sys.modules:
        sys.path.append(os.path.dirname(name))
        spec = importlib.util.spec_from_file_location(name, name)
        assert spec is not None and spec.loader is not None  # of a name that ends with .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where a dataclass of the file looks for it
        try:
            spec.loader.exec_module(module)
        except BaseException:  # a notebook calls again with a file that was mended
            del sys.modules[name]
            raise
    return sys.modules[name]


def name_of(function: Callable[..., Any]) -> str:
    """Returns "module:function"."""
    kind: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


def importable_name(function: Callable[..., Any]) -> str:
    """Returns the name by which another process can `find` a function; raises ValueError where there is none."""
    name = name_of(function)
    try:
        importable = not name.startswith("__main__:") and find(name) is function
    except ValueError:
        importable = False
    if not importable:
        raise ValueError(f"reward_timeout with {name}, which no process can import; expected a function of a module")
    return name


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
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        # An array of one number has __iter__, which raises.
        if hasattr(value, "__iter__") and not isinstance(value, (str, bytes, dict)) and getattr(value, "ndim", 1) > 0:
            items = list(value)
            # Arrays of numpy or torch. Those of (B, 1), as reward models give them, are a number each, not a step each.
            one_each = all(math.prod(x.shape) == 1 for x in items if hasattr(x, "shape"))
            value = [(x.item() if one_each else x.tolist()) if hasattr(x, "shape") else x for x in items]
    except (Exception, SystemExit) as error:
        return failed(f"{type(error).__name__}: {error}")
    return Result(value, metrics, extra)


def serve(trainer: Connection) -> None:
    """Answers each call, in the process, until the trainer closes the connection or ends."""
    if sys.platform == "linux":
        CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: in the middle of a call as well

    def send(result: Result) -> None:
        try:
            answer = json.dumps(result._asdict(), default=plain)
        except Exception as error:  # what it returned or logged contains itself, say
            answer = json.dumps(failed(f"its answer cannot be JSON: {type(error).__name__}: {error}")._asdict())
        trainer.send_bytes(answer.encode())

    spec, seconds, sys.path[:] = trainer.recv()
    try:
        function = find(spec)
    except Exception as error:
        return send(failed(str(error)))
    send(Result(None, {}, {}))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, inside of a regular expression as well
    with contextlib.suppress(EOFError):
        while True:
            arguments = trainer.recv()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            result = call(function, arguments)
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(result)


def plain(item: Any) -> Any:
    """What JSON lacks: arrays as lists, other numbers as float, the rest, such as dates, as text."""
    if hasattr(item, "tolist"):
        return item.tolist()
    return float(item) if hasattr(item, "__float__") else str(item)


def read_answer(answer: bytes) -> Result:
    """Returns what `serve` sent, whose `value` may be any JSON; raises ValueError where it is anything else."""
    try:
        found = json.loads(answer)
        metrics = {name: [float(number) for number in numbers] for name, numbers in found["metrics"].items()}
        if not all(metrics.values()) or not all(isinstance(column, list) for column in found["extra"].values()):
            raise ValueError("numbers of log_metric or values of log_extra are missing")
        message, trace = map(str, found["error"] or ("", ""))
        return Result(found["value"], metrics, found["extra"], (message, trace) if found["error"] else None)
    except Exception as problem:  # of many types: it may be anything
        raise ValueError(f"{type(problem).__name__}: {problem}") from None


class Worker:
    """A function of `spec` in a process that is killed when a call takes too long, and started again by the next call.

    seconds: of CPU time for a call. A call that sleeps or waits is stopped after WALL_PER_CPU times as much. The
    process has a session of its own: Ctrl-C is the trainer's, which finishes its step, and a kill reaches what the
    process has started.
    """

    def __init__(self, spec: str, seconds: float) -> None:
        self.spec, self.seconds = spec, seconds
        self.process: subprocess.Popen[bytes] | None = None

    def call(self, arguments: bytes) -> Result:
        """Calls it with pickled arguments; a call that takes too long, or that ends its process, gives a Result with an
        error. Raises ValueError where the function cannot be found in the process."""
        if self.process is None:
            self._connection, other = Pipe()
            fd = other.fileno()
            command = [sys.executable, "-P", "-s", __file__, str(fd)]  # -P: this file's folder is not on the path
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True)
            other.close()
            if error := self._ask(pickle.dumps((self.spec, self.seconds, sys.path)), START_SECONDS).error:
                self.close()
                raise ValueError(f"reward {self.spec!r} cannot be started: {error[0]}\n{error[1]}")
        return self._ask(arguments, self.seconds * WALL_PER_CPU)

    def _ask(self, message: bytes, seconds: float) -> Result:
        late = False

        def stop() -> None:  # also where the process does not read, or has written half of its answer
            nonlocal late
            late = True
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
                pipe.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            self._connection.send_bytes(message)
            return read_answer(self._connection.recv_bytes(MOST_BYTES))
        except (EOFError, ConnectionError):
            problem, patience = "its process ended", 5
        except (OSError, ValueError) as error:
            problem, patience = f"what it sent is no answer: {error}", 0
        finally:
            timer.cancel()
        status = self.close(0 if late else patience)
        if late:
            problem = f"timed out: more than {seconds:g} s of wall-clock time"
        elif status == -signal.SIGPROF:
            problem, late = f"timed out: more than {self.seconds:g} s of CPU time", True
        elif patience:
            problem += f" with status {status}"
        return failed(f"reward {self.spec!r}: {problem}", late=late)

    def close(self, patience: float = 0) -> int:
        """Ends the process and returns its status. patience: seconds that it gets to end by itself."""
        process, self.process = self.process, None
        if process is None:
            return 0
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
