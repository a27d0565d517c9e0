"""Finds reward functions, and calls them as TRL does."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLOSE_SECONDS = 10.0  # that coroutines get to end when they are cancelled


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
        description = f"{name!r} of module {module_name!r} is {function!r:.60}"
        raise ValueError(f"reward {spec!r}: {description}, expected a function")
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


class EventLoop:
    """An event loop in a thread of its own, since the caller may be in a running one, as every notebook is. It starts
    with the first coroutine and goes on until `close`: connections that a function keeps open belong to it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Any) -> Future[Any]:
        """Starts a coroutine and returns its future."""
        if self._thread is None:
            ready = threading.Event()
            self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
            self._thread.start()
            ready.wait()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await self._closed.wait()

    def close(self) -> None:
        """Cancels what still runs and ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._loop.call_soon_threadsafe(self._closed.set)
            thread.join(CLOSE_SECONDS)


class Call:
    """A call of a reward function as TRL makes it, with `log_metric(name, value)` and `log_extra(column, values)`. A
    function without **keywords gets those of `arguments` that it takes.

    What an async function returns is awaited in `loop` from now on, beside others; `finish` waits for it, after which
    `value` holds what the function gave, or `error` message and traceback of what it raised.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any], loop: EventLoop) -> None:
        self.value: Any = None
        self.metrics: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}
        self.error: tuple[str, str] | None = None
        self.seconds = 0.0
        self._future: Future[Any] | None = None
        self._interrupt: KeyboardInterrupt | None = None
        arguments = dict(arguments, log_metric=self._log_metric, log_extra=self._log_extra)
        with self._recorded():
            parameters = inspect.signature(function).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                arguments = {name: value for name, value in arguments.items() if name in parameters}
            self.value = function(**arguments)
        if inspect.isawaitable(self.value):
            self._future = loop.submit(self._await(self.value))

    def finish(self) -> None:
        if self._future is not None:
            self.value = self._future.result()
        if self._interrupt is not None:
            raise self._interrupt
        with self._recorded():
            self.value = _as_list(self.value)

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()

    async def _await(self, value: Awaitable[Any]) -> Any:
        with self._recorded():
            try:
                return await value
            except KeyboardInterrupt as error:  # it would end the loop; it is for the thread that called
                self._interrupt = error

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            self.error = f"{type(error).__name__}: {error}", traceback.format_exc()
        finally:
            self.seconds += time.perf_counter() - begin

    def _log_metric(self, name: str, value: Any) -> None:
        self.metrics.setdefault(name, []).append(float(value))

    def _log_extra(self, column: str, values: Any) -> None:
        self.extra[column] = list(values)


def _as_list(value: Any) -> Any:
    """Returns numbers of any sequence or array as a list; other types as they are."""
    # An array of one number has __iter__, which raises.
    if not hasattr(value, "__iter__") or isinstance(value, (str, bytes, dict)) or getattr(value, "ndim", 1) == 0:
        return value
    items = list(value)
    # Arrays of numpy or torch. Those of (B, 1), as reward models give them, are a number each, not a step each.
    one_each = all(math.prod(x.shape) == 1 for x in items if hasattr(x, "shape"))
    return [(x.item() if one_each else x.tolist()) if hasattr(x, "shape") else x for x in items]
