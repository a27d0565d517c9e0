"""SIGTERM and Ctrl-C: the run stops at the next moment at which its state is whole, saves it, and leaves."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupted(Exception):
    """Sampling was cut short."""


class Signals:
    """Within it the first SIGTERM or SIGINT is noted in `received`; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        except ValueError:  # not the main thread, which alone gets signals
            pass
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    @property
    def exit_status(self) -> int:
        """As shells have it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.received or 0)
