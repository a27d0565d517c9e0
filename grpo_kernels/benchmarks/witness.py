"""Which backend really ran: the methods that were called, not the name that was requested."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..backends import available_backends, get_backend

# Those that do a loss's work on rows of logits, or instead of them.
METHODS = ("single_pass", "statistics", "logits_gradient", "linear_logp", "anchored", "kept_logits")


@contextmanager
def witness() -> Iterator[Counter[str]]:
    """Calls inside, as {"cuda.single_pass": 4}, of every backend that is available here."""
    calls: Counter[str] = Counter()
    patched: list[tuple[Any, str]] = []

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return method(*arguments, **options)

        return call

    try:
        for name in available_backends():
            backend = get_backend(name)
            for method in METHODS:
                if hasattr(backend, method):
                    setattr(backend, method, counted(f"{name}.{method}", getattr(backend, method)))
                    patched.append((backend, method))
        yield calls
    finally:
        for backend, method in patched:
            delattr(backend, method)  # the class has the original


def backends_of(calls: Counter[str]) -> list[str]:
    """From {"cuda.single_pass": 4, "cuda.statistics": 1} to ["cuda"]."""
    return sorted({name.partition(".")[0] for name in calls})
