"""Memory that the chunks of a call share: logits, their gradients, and what rounding took from these."""

from __future__ import annotations

import torch
from torch import Tensor

from .memory import allocate_rows


class Scratch:
    """Grows to the largest chunk so far; what it returns is valid until the next call of the same method.

    `logits_rows`, `product_rows`: of the row chunk and the product chunk that are expected; of them are made at least
    so many at once. `most_logits_rows`: so many at least where those of a row chunk are too few, lest the memory of one
    call be too short for the next.
    """

    def __init__(
        self,
        vocab_size: int,
        logits_rows: int,
        product_rows: int,
        logits_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        most_logits_rows: int = 0,
    ) -> None:
        self.vocab_size, self.logits_rows, self.product_rows = vocab_size, logits_rows, product_rows
        self.most_logits_rows = most_logits_rows
        self.logits_dtype, self.grad_dtype, self.device = logits_dtype, grad_dtype, device
        self._logits: Tensor | None = None
        self._gradients: Tensor | None = None
        self._errors: Tensor | None = None

    def logits(self, count: int) -> Tensor:
        """(count, V) of a row chunk."""
        if self._logits is None or self._logits.shape[0] < count:
            self._logits = None  # freed before the next one is made
            rows = self.logits_rows if count <= self.logits_rows else max(count, self.most_logits_rows)
            self._logits = allocate_rows(rows, self.vocab_size, self.logits_dtype, self.device)
        return self._logits if self._logits.shape[0] == count else self._logits[:count]

    def gradients(self, count: int) -> Tensor:
        """(count, V) of a product chunk, where they do not lie over the logits."""
        if self._gradients is None or self._gradients.shape[0] < count:
            self._gradients = None
            rows = max(count, self.product_rows)
            self._gradients = allocate_rows(rows, self.vocab_size, self.grad_dtype, self.device)
        return self._gradients[:count]

    def over(self, logits: Tensor) -> Tensor:
        """(count, V) gradients over these logits: of a narrower type, over the front half of each row."""
        return logits if self.grad_dtype == self.logits_dtype else logits.view(self.grad_dtype)[:, : self.vocab_size]

    def errors(self, count: int) -> Tensor:
        """(count,) float32 of a product chunk."""
        if self._errors is None or len(self._errors) < count:
            self._errors = torch.empty(max(count, self.product_rows), dtype=torch.float32, device=self.device)
        return self._errors[:count]

    def release(self) -> None:
        """Let go of everything."""
        self._logits = self._gradients = self._errors = None
