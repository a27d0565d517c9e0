"""What the processes of a run tell each other. With one process all of it is the identity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object


class Ranks:
    """The processes of a run, each of which holds a contiguous share of every list of rows."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.index, self.count = accelerator.process_index, accelerator.num_processes

    def share(self, rows: Sequence[Any]) -> list[Any]:
        """This rank's part of rows, whose number the ranks divide."""
        size = len(rows) // self.count
        return list(rows[self.index * size : (self.index + 1) * size])

    def gather(self, rows: list[Any]) -> list[Any]:
        """The rows of all ranks, in the order of the ranks."""
        return list(gather_object(rows))

    def sum(self, numbers: dict[str, float]) -> dict[str, float]:
        """Sums over the ranks, in float64; every rank passes the same names."""
        if self.count == 1:
            return numbers
        values = torch.tensor(list(numbers.values()), dtype=torch.float64, device=self.accelerator.device)
        return dict(zip(numbers, self.accelerator.reduce(values).tolist(), strict=True))

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error of one rank within it becomes an error of all: the others would wait for that rank without end.

        Holds no collective operation.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        messages = self.gather([None if error is None else f"{type(error).__name__}: {error}"])
        if error is not None:
            raise error
        failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
        if failed:
            raise RuntimeError(f"rank {failed[0][0]} failed: {failed[0][1]}")
