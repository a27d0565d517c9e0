"""Runs a function in a new interpreter that reports its progress; a crash there does not end the parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .machine import OUT_OF_MEMORY, describe

OnProgress = Callable[[str], None]


class Died(Exception):
    """The process ended without a result: killed, crashed, or silent for too long."""

    def __init__(self, why: str, last_message: str) -> None:
        super().__init__(why)
        self.last_message = last_message


def run_in_subprocess(
    function: Callable[..., Any],
    *arguments: object,
    on_progress: OnProgress = lambda text: None,
    silence_s: float = 600.0,
) -> Any:
    """What `function(*arguments, on_progress)` returns in a process of its own; its messages come to `on_progress`.

    Raises `Died` if it raises, dies, or says nothing for `silence_s` seconds.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    last_message = ""
    try:
        while True:
            if not ours.poll(silence_s):
                raise Died(f"no answer for {silence_s:.0f} s", last_message)
            kind, value = ours.recv()
            if kind == "returned":
                return value
            if kind == "raised":
                raise Died(value, last_message)
            last_message = value
            on_progress(value)
    except EOFError:
        process.join(10)
        raise Died(_describe_exit(process.exitcode), last_message) from None
    finally:
        _end(process)
        ours.close()


def _serve(pipe: Connection, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    try:
        pipe.send(("returned", function(*arguments, lambda text: pipe.send(("progress", text)))))
    except Exception as error:  # the parent decides what an error means
        pipe.send(("raised", describe(error)))
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own end takes time and prints what Triton's bindings did not free


def _end(process: Any) -> None:
    """It has answered and is leaving, or it hangs."""
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
        time.sleep(0.1)  # a device's memory comes back a moment after its process


def _describe_exit(exitcode: int | None) -> str:
    if exitcode == -signal.SIGKILL:
        return f"{OUT_OF_MEMORY}: the process was killed"
    if exitcode is not None and exitcode < 0:
        return f"the process died with {signal.Signals(-exitcode).name}"
    return f"the process ended with {exitcode}"
