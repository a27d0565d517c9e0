"""Runs a function in a new interpreter that reports its progress; a crash there does not end the parent."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .machine import OUT_OF_MEMORY, describe

OnProgress = Callable[..., None]  # (message, results so far or nothing)
NOT_RUN = "not run: out of time"  # reasons that are a lack of time begin with this


class Died(Exception):
    """The process ended without a result: killed, crashed, silent for too long, or out of time (`NOT_RUN`).

    last_message, last_result: the last ones that it sent.
    """

    def __init__(self, reason: str, last_message: str, last_result: Any = None) -> None:
        super().__init__(reason)
        self.last_message, self.last_result = last_message, last_result


def run_in_subprocess(
    function: Callable[..., Any],
    *arguments: object,
    on_progress: OnProgress = lambda text, result=None: None,
    silence_s: float = 600.0,
    deadline: float = math.inf,
) -> Any:
    """Runs `function(*arguments, on_progress)` in a process of its own. Returns its result; messages go to
    `on_progress`.

    Raises `Died` if it raises, dies, sends nothing for `silence_s` seconds, or is not ready at `deadline`, a time of
    time.time().
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, function, arguments), daemon=True)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child inherits this: only the parent answers Ctrl-C
    process.start()
    signal.signal(signal.SIGINT, handler)
    sender.close()
    last_message, last_result, answered = "", None, False
    try:
        while True:
            if not receiver.poll(min(silence_s, max(0.0, deadline - time.time()))):
                reason = NOT_RUN if time.time() >= deadline else f"no answer for {silence_s:.0f} s"
                raise Died(reason, last_message, last_result)
            kind, value, *results = receiver.recv()
            answered = kind != "progress"
            if kind == "returned":
                return value
            if kind == "raised":
                raise Died(value, last_message, last_result)
            last_message, last_result = value, results[0] or last_result
            on_progress(value, results[0])
    except EOFError:
        process.join(10)
        raise Died(_describe_exit(process.exitcode), last_message, last_result) from None
    finally:
        process.join(5.0 if answered else 0.0)  # only a process that has answered ends by itself
        if process.is_alive():
            process.kill()
            process.join()
            time.sleep(0.1)  # a device frees memory a moment after the process ended
        receiver.close()


def _serve(pipe: Connection, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    """Sends the result of a function, or its error, to the parent process, and ends this one."""
    try:
        pipe.send(("returned", function(*arguments, lambda text, result=None: pipe.send(("progress", text, result)))))
    except Exception as error:  # the parent decides what an error means
        pipe.send(("raised", describe(error)))
    sys.stdout.flush()
    os._exit(0)  # a normal exit takes time and prints what Triton's bindings did not free


def _describe_exit(exitcode: int | None) -> str:
    """Returns why a process ended, from its exit code."""
    if exitcode == -signal.SIGALRM:
        return f"{NOT_RUN}, its first call took half of what was left"
    if exitcode == -signal.SIGKILL:
        return f"{OUT_OF_MEMORY}: the process was killed"
    if exitcode is not None and exitcode < 0:
        return f"the process died with {signal.Signals(-exitcode).name}"
    return f"the process ended with {exitcode}"
