"""Memory that the chunks of a call share: logits, their gradients, and what rounding took from these."""

from __future__ import annotations

import torch
from torch import Tensor

from .memory import ChunkSizes, allocate_rows


class Scratch:
    """Grows to the largest chunk so far; what it returns is valid until the next call of the same method.

    `sizes`: of the chunks, which decide how many rows are made at first.
    """

    def __init__(
        self,
        num_tokens: int,
        vocab_size: int,
        sizes: ChunkSizes,
        logits_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_tokens, self.vocab_size, self.sizes = num_tokens, vocab_size, sizes
        self.logits_dtype, self.grad_dtype, self.device = logits_dtype, grad_dtype, device
        self._logits: Tensor | None = None
        self._gradients: Tensor | None = None
        self._errors: Tensor | None = None

    @property
    def _usual_chunk(self) -> int:
        """Rows of a product chunk where no token is left out. Where some are, fewer chunks may be a little longer."""
        return -(-self.num_tokens // -(-self.num_tokens // self.sizes.products))

    def logits(self, count: int) -> Tensor:
        """(count, V) of a row chunk."""
        if self._logits is None or self._logits.shape[0] < count:
            self._logits = None  # freed before the next one is made
            rows = count
            if count != self.num_tokens:
                usual = min(self.sizes.logits, self._usual_chunk)
                rows = usual if count <= usual else max(count, min(self.sizes.sequences, self.num_tokens))
            self._logits = allocate_rows(rows, self.vocab_size, self.logits_dtype, self.device)
        return self._logits if self._logits.shape[0] == count else self._logits[:count]

    def gradients(self, count: int) -> Tensor:
        """(count, V) of a product chunk, where they do not lie over the logits."""
        if self._gradients is None or self._gradients.shape[0] < count:
            self._gradients = None
            rows = max(count, self._usual_chunk)
            self._gradients = allocate_rows(rows, self.vocab_size, self.grad_dtype, self.device)
        return self._gradients[:count]

    def over(self, logits: Tensor) -> Tensor:
        """(count, V) gradients over these logits: of a narrower type, over the front half of each row."""
        return logits if self.grad_dtype == self.logits_dtype else logits.view(self.grad_dtype)[:, : self.vocab_size]

    def errors(self, count: int) -> Tensor:
        """(count,) float32 of a product chunk."""
        if self._errors is None:
            size = max(self.sizes.products, self.sizes.sequences)
            self._errors = torch.empty(size, dtype=torch.float32, device=self.device)
        return self._errors[:count]

    def release(self) -> None:
        """Let go of everything."""
        self._logits = self._gradients = self._errors = None
