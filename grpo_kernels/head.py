"""The three matrix products of the lm_head, chunk by chunk, in the vendor's GEMM.

    logits  = h W^T (+ b)        (C, V) into one scratch that every chunk reuses
    dhidden = dlogits W          (C, H) per chunk
    dweight += dlogits^T h       (V, H)

The gradient of the logits takes their place in the scratch. 16-bit inputs with float32 logits put a 16-bit gradient
over the front half of each float32 row (row pitch 2V), so that there is no second buffer.

Rounding to 16 bits hurts one entry of a row of dlogits most, that of the sampled id: it carries most of the row's norm,
and without its rounding the error of the other products falls 20-fold. So on a CPU the row kernel reports what the
rounding took, e_t, and the products start from e_t W[id] and e_t h_t, a sum over N rows of length H.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .backends import Backend
from .delivery import FinishedGradients, power_of_two_scale, waiting_dtype
from .memory import ROUNDED_CHUNKS, allocate_chunk
from .params import Rows
from .products import PIECE_ROWS, SPLIT_SUM_ELEMENTS, add_product, product, returns_float32
from .strategy import choose_strategy

# Rows of W in one float32 product of the forward pass on a CPU: 512 hidden rows against 1,024 take 4 to 9 % less time
# than against all of W at once (H from 576 to 2048, V from 49,152 to 151,936).
FORWARD_ROWS = 1024


def chunk(index: Tensor | None, num_tokens: int, size: int) -> Iterator[Rows]:
    """Cut token indices, or all tokens, into chunks of nearly equal length, at most `size` rows each."""
    count = num_tokens if index is None else index.numel()
    if count == 0:
        return
    pieces = -(-count // size)
    for i in range(pieces):
        start, stop = count * i // pieces, count * (i + 1) // pieces
        yield Rows(start, stop) if index is None or count == num_tokens else Rows(start, stop, index[start:stop])


class LMHead:
    """Products with one lm_head; gradients accumulate here.

    `compute_dtype`: the type of the products where that is not the inputs' own (autocast); gradients come back in the
    types of the inputs. `wants` = (hidden, weight, bias) need gradients. `keep` (N,) bool: padding is computed along
    with the rest, and its hidden states, which may hold anything, count as 0. `strategy`: see strategy.py.
    `gradient_scale`: where gradients of logits are float16, the power of two that dlogits, dweight and dbias hold as a
    factor; dhidden does not.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        logits_dtype: torch.dtype,
        chunk_rows: int,
        backend: Backend,
        wants: tuple[bool, ...] = (False, False, False),
        keep: Tensor | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.given_dtypes = [hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
        self.waiting_dtypes = [waiting_dtype(dtype) for dtype in self.given_dtypes]
        if compute_dtype is not None:
            hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
            bias = None if bias is None else bias.to(compute_dtype)
        self.hidden, self.weight, self.bias, self.keep = hidden, weight, bias, keep
        # (V,) in float32 or better, for the row kernels to add.
        self.folded_bias: Tensor | None = None
        if bias is not None and backend.folds_bias:
            self.folded_bias = bias.detach().to(torch.promote_types(bias.dtype, torch.float32)).contiguous()
        self.strategy = choose_strategy(backend, hidden, weight)
        self.num_tokens = hidden.numel() // hidden.shape[-1]
        self.flat_hidden = _flat_view(hidden)
        self.logits_dtype, self.chunk_rows, self.backend = logits_dtype, chunk_rows, backend
        self.wants = wants
        on_cpu = hidden.device.type == "cpu"
        # A CPU has no usable float16 product, and none that returns float32 from 16-bit inputs: convert W in pieces.
        self.converts = logits_dtype != hidden.dtype and not returns_float32(hidden.device, hidden.dtype)
        self.grad_dtype = torch.float32 if hidden.dtype == torch.float16 and self.converts else hidden.dtype
        self.rounds = on_cpu and self.grad_dtype == torch.bfloat16
        # Few chunks may add to a 16-bit dweight, on a GPU one alone: its GEMM rounds once. More are summed in float32,
        # as is a gradient that is wanted in float32.
        few = ROUNDED_CHUNKS if on_cpu else 1
        long = self.num_tokens > few * chunk_rows or self.waiting_dtypes[1] == torch.float32
        self.sums_in_float32 = self.grad_dtype.itemsize == 2 and long
        self.gradient_scale: Tensor | None = None
        self.scratch: Tensor | None = None
        self._gathered: tuple[Rows, Tensor] | None = None  # a chunk's hidden states serve two products
        self.dhidden: Tensor | None = None
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None

    def logits(self, rows: Rows) -> Tensor:
        """(C, V) logits of a chunk, valid until the next call."""
        h = self.hidden_rows(rows)
        out = self._scratch(rows, self.logits_dtype)
        if self.converts:
            h = h.to(self.logits_dtype)
            for piece in self._pieces(PIECE_ROWS):
                torch.mm(h, self.weight[piece].to(self.logits_dtype).T, out=out[:, piece])
        elif self.logits_dtype != h.dtype:
            torch.mm(h, self.weight.T, out_dtype=self.logits_dtype, out=out)
        elif h.device.type == "cpu" and h.dtype == torch.float32:
            for piece in self._pieces(FORWARD_ROWS):
                torch.mm(h, self.weight[piece].T, out=out[:, piece])
        else:
            torch.mm(h, self.weight.T, out=out)
        if self.bias is not None and not self.backend.folds_bias:
            out += self.bias.to(out.dtype)
        return out

    def exponentials(self, rows: Rows) -> Tensor:
        """(C, V) uninitialised, in the type of the gradients, for the anchored strategy; valid until the next call."""
        return self._scratch(rows, self.grad_dtype)

    def _scratch(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        if self.scratch is None or self.scratch.dtype != dtype:
            self.scratch = None  # freed before the next one is made
            self.scratch = allocate_chunk(self.chunk_rows, self.weight.shape[0], dtype, self.hidden.device)
        return self.scratch[: rows.stop - rows.start]

    def gradient_buffer(self, logits: Tensor) -> Tensor:
        """Where the row kernel writes d loss / d logits: over the logits."""
        if self.grad_dtype == logits.dtype:
            return logits
        return logits.view(self.grad_dtype)[:, : logits.shape[1]]

    def scale_gradients(self, largest: Tensor) -> Tensor:
        """() the scale of the next chunk of dlogits, whose largest entry would be `largest`, and of all sums from then
        on. It only ever falls, so that a chunk with small gradients costs no pass over dweight."""
        scale = power_of_two_scale(largest)
        if self.gradient_scale is not None:
            scale = torch.minimum(scale, self.gradient_scale)
            for total in (self.dweight, self.dbias):
                if total is not None:
                    self.backend.scale(total, scale / self.gradient_scale)
        self.gradient_scale = scale
        return scale

    def residual(self, rows: Rows) -> Tensor | None:
        """(C,) to receive what rounding takes from the sampled ids' entries of dlogits; None where it is not used."""
        if not self.rounds:
            return None
        return torch.empty(rows.stop - rows.start, dtype=torch.float32, device=self.hidden.device)

    def accumulate_scaled(self, rows: Rows, exponentials: Tensor, scale: Tensor) -> None:
        """`accumulate` of dlogits = scale[:, None] * exponentials, scale (C,) float32, which is never formed."""
        h = self.hidden_rows(rows)
        if self.wants[0]:
            self._put_dhidden(rows, scale[:, None] * self._times_weight(exponentials))
        if self.wants[1]:
            self._add_dweight(exponentials, (scale[:, None] * h).to(h.dtype))
        if self.wants[2]:
            total = torch.mv(exponentials.T, scale.to(exponentials.dtype)).float()
            self.dbias = total if self.dbias is None else self.dbias.add_(total)

    def accumulate(self, rows: Rows, dlogits: Tensor, ids: Tensor, residual: Tensor | None) -> None:
        """Add a chunk's share of dhidden, dweight and dbias; ids (N,) of all tokens."""
        h = self.hidden_rows(rows)
        if residual is not None:
            ids = rows.take(ids)
        if self.wants[0]:
            self._add_dhidden(rows, dlogits, ids, residual)
        if self.wants[1]:
            self._add_dweight(dlogits, h, None if residual is None else (ids, residual))
        if self.wants[2]:
            total = dlogits.sum(0, dtype=torch.promote_types(dlogits.dtype, torch.float32))
            if residual is not None:
                total.index_add_(0, ids, residual)
            self.dbias = total if self.dbias is None else self.dbias.add_(total)

    def gradients(self) -> FinishedGradients:
        """Of (hidden, weight, bias), in their shapes; zeros where no row contributed."""
        self.scratch = self._gathered = None
        sums = self.dhidden, self.dweight, self.dbias
        self.dhidden = self.dweight = self.dbias = None
        inputs = self.hidden, self.weight, self.bias
        finished: list[Tensor | None] = [None, None, None]
        for i, (total, x, dtype) in enumerate(zip(sums, inputs, self.waiting_dtypes, strict=True)):
            if self.wants[i] and x is not None:
                if total is None:
                    total = torch.zeros(x.shape, dtype=dtype, device=x.device)
                finished[i] = total.view(x.shape).to(dtype)
        scales = [None, self.gradient_scale, self.gradient_scale]
        return FinishedGradients(finished, self.given_dtypes, self.backend, scales)

    def _put_dhidden(self, rows: Rows, values: Tensor) -> None:
        values = values.to(self.waiting_dtypes[0])
        rows.put(self._dhidden(rows), values if self.gradient_scale is None else values / self.gradient_scale)

    def _dhidden(self, rows: Rows) -> Tensor:
        if self.dhidden is None:
            shape = (self.num_tokens, self.hidden.shape[-1])
            # Rows that no chunk visits keep the zero they start with.
            fresh = torch.empty if rows.index is None else torch.zeros
            self.dhidden = fresh(shape, dtype=self.waiting_dtypes[0], device=self.hidden.device)
        return self.dhidden

    def _add_dhidden(self, rows: Rows, dlogits: Tensor, ids: Tensor, residual: Tensor | None) -> None:
        if dlogits.dtype != self.weight.dtype:
            shape = dlogits.shape[0], self.hidden.shape[-1]
            total = torch.zeros(shape, dtype=dlogits.dtype, device=dlogits.device)
            for piece in self._pieces(PIECE_ROWS):
                total.addmm_(dlogits[:, piece], self.weight[piece].to(dlogits.dtype))
            self._put_dhidden(rows, total)
        elif residual is not None:
            start = (residual[:, None] * self.weight[ids]).to(dlogits.dtype)
            self._put_dhidden(rows, start.addmm_(dlogits, self.weight))
        elif self._writes_dhidden(rows):
            self._times_weight(dlogits, out=self._dhidden(rows)[rows.start : rows.stop])
        else:
            self._put_dhidden(rows, self._times_weight(dlogits))

    def _writes_dhidden(self, rows: Rows) -> bool:
        """Whether a product may have its rows of dhidden as its output."""
        same_type = self.waiting_dtypes[0] == self._times_weight_dtype(rows.stop - rows.start)
        return rows.index is None and self.gradient_scale is None and same_type

    def _times_weight_dtype(self, count: int) -> torch.dtype:
        """The type in which dlogits W of `count` rows is computed: float32 where it is wanted or where rounding parts
        of the sum to 16 bits would show."""
        dtype = self.weight.dtype
        if dtype.itemsize > 2 or not returns_float32(self.weight.device, dtype):
            return dtype
        split = count * self.weight.shape[1] < SPLIT_SUM_ELEMENTS
        return torch.float32 if split or self.waiting_dtypes[0] == torch.float32 else dtype

    def _times_weight(self, dlogits: Tensor, out: Tensor | None = None) -> Tensor:
        """dlogits W (C, H)."""
        if self._times_weight_dtype(dlogits.shape[0]) == self.weight.dtype:
            return torch.mm(dlogits, self.weight, out=out)
        return product(dlogits, self.weight, out)

    def _add_dweight(self, dlogits: Tensor, h: Tensor, rounded: tuple[Tensor, Tensor] | None = None) -> None:
        """`rounded`: sampled ids and what rounding took from their entries of dlogits."""
        if dlogits.dtype.itemsize == 2 and rounded is None:
            if self.dweight is not None:
                self.dweight = self.dweight.float()
                add_product(self.dweight, dlogits.T, h)
            elif self.sums_in_float32:
                self.dweight = product(dlogits.T, h)
            else:
                self.dweight = torch.mm(dlogits.T, h)
            return
        h = h.to(dlogits.dtype)
        if rounded is None:
            if self.dweight is None:
                self.dweight = torch.empty(self.weight.shape, dtype=h.dtype, device=h.device)
                torch.mm(dlogits.T, h, out=self.dweight)
            else:
                self.dweight.addmm_(dlogits.T, h)
            return
        if self.dweight is None:
            dtype = torch.float32 if self.sums_in_float32 else h.dtype
            self.dweight = torch.zeros(self.weight.shape, dtype=dtype, device=h.device)
        self.backend.add_rows(self.dweight, *rounded, h)
        if not self.sums_in_float32:
            self.dweight.addmm_(dlogits.T, h)
            return
        for piece in self._pieces(PIECE_ROWS):
            self.dweight[piece] += torch.mm(dlogits[:, piece].T, h)

    def hidden_rows(self, rows: Rows) -> Tensor:
        """(C, H) of a chunk."""
        if self._gathered is None or self._gathered[0] is not rows:
            h = self._stored_rows(rows)
            self._gathered = rows, h if self.keep is None else torch.where(rows.take(self.keep)[:, None], h, 0.0)
        return self._gathered[1]

    def _stored_rows(self, rows: Rows) -> Tensor:
        if self.flat_hidden is not None:
            return rows.take(self.flat_hidden)
        # A strided view (a shifted completion, say) is read chunk by chunk, never copied whole.
        index = rows.index
        if index is None:
            index = torch.arange(rows.start, rows.stop, device=self.hidden.device)
        length = self.hidden.shape[1]
        return self.hidden[index // length, index % length]

    def _pieces(self, rows: int) -> Iterator[slice]:
        for start in range(0, self.weight.shape[0], rows):
            yield slice(start, min(start + rows, self.weight.shape[0]))


class GivenLogits:
    """Logits that the caller already holds, behind the interface of `LMHead`: all rows are at hand, in place."""

    def __init__(self, logits: Tensor) -> None:
        """`logits` (N, V) are overwritten with their gradient, which may hold the factor `gradient_scale`."""
        self.buffer = logits
        self.gradient_scale: Tensor | None = None
        self.num_tokens = self.chunk_rows = logits.shape[0]
        self.grad_dtype = logits.dtype
        self.strategy = "rows"
        self.folded_bias: Tensor | None = None

    def logits(self, rows: Rows) -> Tensor:
        return rows.take(self.buffer)

    def gradient_buffer(self, logits: Tensor) -> Tensor:
        return logits

    def scale_gradients(self, largest: Tensor) -> Tensor:
        """() the scale of the gradients of all logits, which are one chunk."""
        self.gradient_scale = power_of_two_scale(largest)
        return self.gradient_scale

    def residual(self, rows: Rows) -> Tensor | None:
        return None

    def accumulate(self, rows: Rows, dlogits: Tensor, ids: Tensor, residual: Tensor | None) -> None:
        if rows.index is not None:  # a range is a view: its gradient is in place already
            rows.put(self.buffer, dlogits)


def _flat_view(hidden: Tensor) -> Tensor | None:
    """(N, H) view of (B, T, H) or (N, H) hidden states, None where only a copy could be that."""
    if hidden.dim() == 2:
        return hidden
    batch, length, width = hidden.shape
    if batch == 1 or hidden.stride(0) == length * hidden.stride(1):
        return hidden.as_strided((batch * length, width), (hidden.stride(1), hidden.stride(2)), hidden.storage_offset())
    return None
