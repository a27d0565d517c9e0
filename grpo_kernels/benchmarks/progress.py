"""Where a run is: a bar in a terminal, nothing elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from .sets import Job


class Progress:
    """One step per implementation's first call, per round and per weighing; `next` when a job has ended."""

    def __init__(self, jobs: Sequence[Job], rounds: int) -> None:
        self._jobs = [
            (str(job.case), len(job.names()) * job.timed * (1 + rounds) + len(job.weighed_names())) for job in jobs
        ]
        self._at = self._before = 0
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if importlib.util.find_spec("tqdm") is None:
            print("no progress bar without tqdm: pip install tqdm", file=sys.stderr)
        else:
            from tqdm import tqdm

            # No estimate of the time that is left: cases differ too much for one.
            form = "{percentage:3.0f} % |{bar:24}| {elapsed} {desc}"
            total = sum(steps for _, steps in self._jobs)
            self._bar = tqdm(total=total, bar_format=form, disable=None, leave=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def tell(self, text: str) -> None:
        """The job that is running has turned to this."""
        if self._bar is not None:
            case, steps = self._jobs[self._at]
            self._bar.set_description_str(f"{case}: {text}", refresh=False)
            self._bar.n = min(self._bar.n + 1, self._before + steps)
            self._bar.refresh()

    def next(self) -> None:
        """The job has ended; the line is free for what is printed about it."""
        self._before += self._jobs[self._at][1]
        self._at += 1
        if self._bar is not None:
            self._bar.n = self._before
            self._bar.clear()
