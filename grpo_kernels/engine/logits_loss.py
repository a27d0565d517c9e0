"""The loss from logits that the caller holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import GRPOConfig
from ..contract import Backend, RowGradients, Rows, TokenInputs
from .backward import FinishedGradients, power_of_two_scale
from .chunks import run
from .kept import make_token_mask
from .memory import Chunk
from .plan import make_plan
from .shared import is_capturing, table_dtype
from .vocab_parallel import VocabSlice


def loss_over_logits(
    logits: Tensor,
    completion_ids: Tensor,
    tokens: TokenInputs,
    num_groups: int,
    config: GRPOConfig,
    kernels: Backend,
    *,
    gradients: bool,
) -> tuple[tuple[Tensor, ...], FinishedGradients | None]:
    """((loss, logps, entropy, numbers of Sums), gradient); with `gradients` it replaces `logits` (N, V).

    Every row is computed where it lies: rows that cannot have a gradient get zeros, and nothing is copied.
    """
    with torch.no_grad():
        dtype = table_dtype(logits.dtype)
        plan = make_plan(tokens, completion_ids, config, num_groups, kernels, static_shapes=True, dtype=dtype)
        if gradients and tokens.completion_mask is not None:
            _clear_rows(logits, ~plan.tokens.scored)  # padding may hold NaN, which no coefficient of 0 would hide
        head = GivenLogits(logits)
        mask = make_token_mask(
            tokens.kept_ids, tokens.kept_counts, logits.shape[1], is_static=is_capturing(logits.device)
        )
        values, sums = run(head, plan, kernels, gradients=gradients, static_shapes=True, sampling_mask=mask)
        columns = values.columns.view(len(values.columns), *completion_ids.shape)
    results = sums.loss.clone(), columns[0], columns[1], sums.numbers
    if not gradients:
        return results, None
    return results, FinishedGradients([logits], [logits.dtype], kernels, [head.gradient_scale])


def _clear_rows(x: Tensor, chosen: Tensor) -> None:
    """Zero these rows (N,) bool of x (N, V). Only they are written, except under capture, where all are."""
    if is_capturing(x.device):
        x.masked_fill_(chosen[:, None], 0.0)
    else:
        x.index_fill_(0, chosen.nonzero().squeeze(1), 0.0)


class GivenLogits:
    """Logits behind the interface of `LMHead`: all rows are at hand, and are overwritten with their gradient."""

    computes_logits = False

    def __init__(self, logits: Tensor) -> None:
        """`logits` (N, V); their gradient may hold the factor `gradient_scale`."""
        self.buffer = logits
        self.gradient_scale: Tensor | None = None
        self.num_tokens = self.sequence_rows = logits.shape[0]
        self.grad_dtype = logits.dtype
        self.strategy = "rows"
        self.folded_bias: Tensor | None = None
        self.vocab_slice: VocabSlice | None = None
        self.vocab_size = logits.shape[1]

    def columns(self, ids: Tensor) -> Tensor:
        """Where the logits of the sampled ids (N,) are in their rows."""
        return ids

    def chunks(self, index: Tensor | None) -> list[Chunk]:
        """All rows: none is left out, `index` is None."""
        assert index is None
        return self.chunks_of([Rows(0, self.num_tokens)]) if self.num_tokens else []

    def chunks_of(self, parts: Sequence[Rows]) -> list[Chunk]:
        return [Chunk(rows, max(rows.count, 1), in_place=True) for rows in parts]

    def packed_rows(self, longest: int) -> int:
        """All sequences are one chunk."""
        return self.sequence_rows

    def logits(self, rows: Rows) -> Tensor:
        return rows.take(self.buffer)

    def row_gradients(self, chunk: Chunk, rows: Rows, logits: Tensor) -> RowGradients:
        return RowGradients(logits)

    def scale_gradients(self, largest: Tensor) -> Tensor:
        """() the scale of the gradients of all logits, which are one chunk."""
        self.gradient_scale = power_of_two_scale(largest)
        return self.gradient_scale

    def accumulate(self, chunk: Chunk, ids: Tensor) -> None:
        """The gradient is where it belongs already."""
