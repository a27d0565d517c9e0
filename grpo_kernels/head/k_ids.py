"""K ids of each token: the search for the likeliest, their log-probabilities, their entries of d loss / d logits.

A gradient through K log-probabilities is, at any other id j, p_j times one number of the token. The row kernel
therefore computes it together with d loss / d logp. The entries of the K ids and of the sampled id are then overwritten
with exact ones, computed from their logits: O(NK) in plain torch, on every backend, and no further product.

With a slice of the vocabulary every rank has all K ids of a token. Logits that another rank has are summed over the
ranks, 8 K bytes per token, and a rank overwrites the entries of its own columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import round_float
from ..kernels.operations import Backend, LogitChunk, PolicyTransform, Statistics, TeacherTransform
from ..kernels.torch.transform import transformed
from .vocab_parallel import VocabSlice

# The search for the likeliest ids. BLOCKS: columns of a block whose maximum is taken, 32 where torch has vector
# instructions for it and there are many more blocks than K, else 8. With fewer than DIRECT * K logits blocks gain
# nothing. At most COPIED_ELEMENTS logits are copied at a time: on a CPU its cache has them, a GPU takes few launches.
BLOCKS, DIRECT, COPIED_ELEMENTS = (8, 32), 16, {"cpu": 2**22, "cuda": 2**24}


class TopKGradient(NamedTuple):
    """The gradient of a sum over K ids by the logits z.

    d_top_k: by z of the K ids. By z_j of any other id j it is p_j d_other + (p_j / the mass of the other ids) d_tail.
    """

    d_top_k: Tensor  # (C, K)
    d_other: Tensor  # (C,)
    d_tail: Tensor  # (C,)


class GradientPatch(NamedTuple):
    """The exact entries of d loss / d logits for the K ids and the sampled id of each row of a chunk."""

    positions: tuple[Tensor, Tensor]  # (row, column) indices of the entries in the chunk
    is_local: Tensor | None  # (C, K + 1) bool: ids whose columns this rank has; None: all
    gradient: Tensor  # (C, K + 1), the sampled id last

    def write(self, dlogits: Tensor) -> None:
        """Overwrites the entries in dlogits (C, V), which the row kernel has written."""
        rounded = self.gradient.to(dlogits.dtype)
        dlogits[self.positions] = rounded if self.is_local is None else rounded[self.is_local]


class TopKIds:
    """K ids of each token of a call, and a sum over them that the loss has a gradient through.

    ids: (N, K) int64 of the whole vocabulary, or how many of the likeliest to find.
    used: (N, K) bool; entries that a token does not use repeat its first id.
    tail: statistics over all ids but the K; None where the gradient does not depend on the mass of these ids.
    weight: (N,) d loss / d sum.
    """

    weight: Tensor
    tail: Statistics | None = None

    def __init__(
        self, ids: Tensor | int, stats: Statistics, vocab_size: int, vocab_slice: VocabSlice | None = None
    ) -> None:
        self.finds, self.vocab_size, self.vocab_slice = isinstance(ids, int), vocab_size, vocab_slice
        self.ids = stats.lse.new_full((len(stats.lse), ids), -1, dtype=torch.int64) if isinstance(ids, int) else ids
        self.used = torch.ones_like(self.ids[:1, :1], dtype=torch.bool).expand(self.ids.shape)

    def _sum_gradient(self, chunk: LogitChunk, log_p: Tensor) -> TopKGradient:
        """Returns the gradient of the sum over K ids by the logits; log_p (C, K): log-probabilities of the ids."""
        raise NotImplementedError

    def patch(
        self, chunk: LogitChunk, sampled: Tensor, coefficients: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[LogitChunk, Tensor, Tensor, GradientPatch]:
        """Returns what the row kernel needs for the other ids, and the entries that overwrite its result afterwards.

        Call it before the gradient overwrites the logits.
        sampled: (N,) int64, ids of the whole vocabulary.
        coefficients: d loss / d logp, d loss / d entropy and `weight`, (N,) each.
        Returns (chunk, d loss / d logp, d loss / d entropy, entries of the K ids and the sampled id).
        """
        rows, top_ids, sampled_id = chunk.rows, chunk.rows.take(self.ids), chunk.rows.take(sampled)[:, None]
        sampled_id = torch.where(sampled_id < 0, top_ids[:, :1], sampled_id)  # without a sampled one the first again
        ids = torch.cat([top_ids, sampled_id], 1)
        log_p, dz_du = self._log_p(chunk, ids)
        sum_grad = self._sum_gradient(chunk, log_p[:, :-1])
        log_tail = torch.zeros_like(log_p[:, 0])  # 0 where it is not needed, or there is no other id
        if self.tail is not None:
            log_tail = rows.take(self.tail.lse) - rows.take(chunk.stats.lse)
            log_tail = torch.where(log_tail > -torch.inf, log_tail, 0.0)
        dlogp, dentropy, weight = (rows.take(x).double() for x in coefficients)
        gradient = self._gradient(chunk, ids, log_p, sum_grad, log_tail, dlogp, dentropy, weight)
        adjusted = self._tail_coefficients(chunk, sum_grad, log_tail, dlogp, dentropy, weight)
        stats = Statistics(*(x.clone() for x in chunk.stats))
        dlogp, dentropy = (x.clone() for x in coefficients[:2])
        for destination, x in zip((stats.lse, stats.entropy, dlogp, dentropy), adjusted, strict=True):
            rows.put(destination, x)
        positions, is_local = self._positions(ids)
        return chunk._replace(stats=stats), dlogp, dentropy, GradientPatch(positions, is_local, gradient * dz_du)

    def _gradient(
        self, chunk: LogitChunk, ids: Tensor, log_p: Tensor, sum_grad: TopKGradient, log_tail: Tensor, dlogp: Tensor,
        dentropy: Tensor, weight: Tensor,
    ) -> Tensor:  # fmt: skip
        """Returns d loss / d z (C, K + 1) of the K ids and the sampled one, which comes last in `ids`.

        It is weight * sum_grad + dlogp ([id is sampled] - p) - dentropy p (log p + H). log_tail, dlogp, dentropy,
        weight (C,).
        """
        rows, sampled, p = chunk.rows, ids[:, -1:], log_p.exp()
        is_sampled = (ids[:, :-1] == sampled) & rows.take(self.used)
        # The entry of the sampled id, where that is one of the K; any other one where it is not.
        d_top_k = sum_grad.d_top_k.gather(1, is_sampled.int().argmax(1, keepdim=True))
        share_of_tail = (log_p[:, -1:] - log_tail[:, None]).exp()
        d_other = p[:, -1:] * sum_grad.d_other[:, None] + share_of_tail * sum_grad.d_tail[:, None]
        d_sampled = torch.where(is_sampled.any(1, keepdim=True), d_top_k, d_other)
        dlogp, dentropy, weight = dlogp[:, None], dentropy[:, None], weight[:, None]
        dz = torch.where(weight != 0, weight * torch.cat([sum_grad.d_top_k, d_sampled], 1), 0.0)
        entropy = torch.where(dentropy != 0, rows.take(chunk.stats.entropy).double()[:, None], 0.0)
        weighted_logp = torch.where(p == 0, 0.0, p * (log_p + entropy))
        return dz - dlogp * p - dentropy * weighted_logp + dlogp * (ids == sampled)

    def _tail_coefficients(
        self,
        chunk: LogitChunk,
        sum_grad: TopKGradient,
        log_tail: Tensor,
        dlogp: Tensor,
        dentropy: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (log-sum-exp, entropy, d loss / d logp, d loss / d entropy) (C,) from which a row kernel computes the
        gradient of the other ids.

        The kernel computes e^(z_j - lse) (-dlogp - dentropy (z_j - lse + H)). With the log-sum-exp of the other ids
        alone, its coefficients are multiplied by the mass of these ids, and H is shifted as the log-sum-exp is.
        """
        rows, mass = chunk.rows, log_tail.exp()
        dlogp_of_sum = torch.where(weight != 0, weight * (mass * sum_grad.d_other + sum_grad.d_tail), 0.0)
        lse, entropy = (rows.take(x).double() + log_tail for x in (chunk.stats.lse, chunk.stats.entropy))
        return lse, entropy, mass * dlogp - dlogp_of_sum, mass * dentropy

    # --- logits of K ids ------------------------------------------------------------------------------------------

    def _local_ids(self, ids: Tensor) -> Tensor:
        """Returns the columns of ids in this rank's logits, -1 where another rank has them."""
        return ids if self.vocab_slice is None else self.vocab_slice.local_ids(ids)

    def _positions(self, ids: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Returns the (row, column) indices of ids (C, K) in a chunk's logits, and which ids this rank has; None:
        all."""
        row, local_ids = torch.arange(len(ids), device=ids.device)[:, None], self._local_ids(ids)
        if self.vocab_slice is None:
            return (row, local_ids.clamp(0, self.vocab_size - 1)), None
        is_local = local_ids >= 0
        return (row.expand_as(ids)[is_local], local_ids[is_local]), is_local

    def _log_p(self, chunk: LogitChunk, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (log-probabilities, dz / d logit where this rank has the id) of ids (C, K), in float64; NaN for an id
        outside the vocabulary."""
        local_ids = self._local_ids(ids).clamp(0, chunk.logits.shape[1] - 1)
        temperature = chunk.rows.take(chunk.temperature)
        u = _of_columns(chunk.logits, local_ids).to(torch.promote_types(chunk.logits.dtype, torch.float32))
        u = u if chunk.bias is None else u + chunk.bias[local_ids]
        z, softcap_slope = exact_z(u, temperature, chunk.transform)
        dz_du = chunk.transform.logit_scale / temperature.double()[:, None]
        dz_du = dz_du if softcap_slope is None else dz_du * softcap_slope
        return self._on_all_ranks(z, ids) - chunk.rows.take(chunk.stats.lse)[:, None], dz_du

    def _on_all_ranks(self, z: Tensor, ids: Tensor) -> Tensor:
        """Returns z (C, K) of ids on every rank, where each rank computed those of its own columns."""
        if self.vocab_slice is not None:
            z = torch.where(self._local_ids(ids) >= 0, z, 0.0)
            self.vocab_slice.add_up(z)
        return torch.where((ids >= 0) & (ids < self.vocab_size), z, torch.nan)

    def _likeliest(self, chunk: LogitChunk) -> Tensor:
        """Returns the ids with the largest logits (C, K), the largest first, ties by id."""
        k, group = self.ids.shape[1], self.vocab_slice
        local_ids = top_k(chunk.logits, chunk.bias, min(k, chunk.logits.shape[1]))
        if group is None:
            return local_ids
        u = _of_columns(chunk.logits, local_ids).to(chunk.stats.logp.dtype)
        u = (u if chunk.bias is None else u + chunk.bias[local_ids]).clamp(min=torch.finfo(u.dtype).min)
        missing = 0, k - local_ids.shape[1]  # places that a narrow slice does not fill come last, behind logits of -inf
        u = group.gather(pad(u, missing, value=-torch.inf)).transpose(0, 1).flatten(1)
        ids = group.gather(pad(local_ids + group.first, missing)).transpose(0, 1).flatten(1)
        return ids.gather(1, u.sort(dim=1, descending=True, stable=True).indices[:, :k])


class TopKLogps(TopKIds):
    """The log-probabilities of K ids, `logp` (N, K). Their sum weighted by g has the gradient d / dz_i = sum_j g_j ([i
    = j] - p_i)."""

    def __init__(self, ids: Tensor | int, stats: Statistics, *vocab: Any) -> None:
        super().__init__(ids, stats, *vocab)
        self.logp = stats.logp.new_zeros(self.ids.shape)

    def after_statistics(self, chunk: LogitChunk, backend: Backend, number: int = 0) -> None:
        """Computes the log-probabilities of a chunk, whose statistics are known."""
        if self.finds:
            chunk.rows.put(self.ids, self._likeliest(chunk))
        log_p, _ = self._log_p(chunk, chunk.rows.take(self.ids))
        chunk.rows.put(self.logp, log_p)

    def clear(self, masked: Tensor) -> None:
        """Sets the results of padding, masked (N,) bool, to 0, and ids that were searched for to -1."""
        self.logp.masked_fill_(masked[:, None], 0.0)
        if self.finds:
            self.ids.masked_fill_(masked[:, None], -1)

    def take_gradient(self, g: Tensor) -> None:
        """Receives g (N, K) = d loss / d logp for the backward."""
        self.weight = g.double().abs().sum(1).to(self.logp.dtype)  # no entry of the gradient is larger
        g = g / torch.where(self.weight == 0, 1.0, self.weight.double())[:, None]
        self.total, self.shares = g.sum(1), add_equal(self.ids, g)

    def _sum_gradient(self, chunk: LogitChunk, log_p: Tensor) -> TopKGradient:
        total = chunk.rows.take(self.total)
        d_top_k = chunk.rows.take(self.shares) - log_p.exp() * total[:, None]
        return TopKGradient(d_top_k, -total, torch.zeros_like(total))


def exact_z(u: Tensor, temperature: Tensor, params: PolicyTransform | TeacherTransform) -> tuple[Tensor, Tensor | None]:
    """Returns `transformed` in float64, of logits (C, K) that include their bias.

    Kernels add the bias, and round the scale, in the type of the logits u, and their log-sum-exp contains that
    rounding. With another rounding here the probability of an id that is nearly certain would be wrong by that
    much: 1e-3 at logits of 1e4.
    """
    params = params._replace(logit_scale=round_float(params.logit_scale, u.dtype))
    return transformed(u.double(), None, temperature, params)


def _of_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Returns x[i, columns[i]] of x (C, n, ...), columns (C, k)."""
    return x[torch.arange(len(x), device=x.device)[:, None], columns]


def add_equal(ids: Tensor, x: Tensor) -> Tensor:
    """Returns for each x (N, K) the sum over the entries of its row that have the same id, in a fixed order."""
    ids, order = ids.sort(dim=1, stable=True)
    x, step = x.gather(1, order), 1
    while step < ids.shape[1]:  # x_i: the sum of up to 2 step places from i on
        same = torch.where(ids[:, step:] == ids[:, :-step], x[:, step:], 0.0)
        x, step = x + pad(same, (0, step)), 2 * step
    return torch.empty_like(x).scatter_(1, order, x.gather(1, torch.searchsorted(ids, ids)))


# --- the likeliest ids ------------------------------------------------------------------------------------------------


def top_k(logits: Tensor, bias: Tensor | None, k: int) -> Tensor:
    """Returns the columns of the k largest logits (C, V) + bias (V,), the largest first, ties by column: (C, k)."""
    vocab_size = logits.shape[1]
    slow = logits.device.type == "cpu" and logits.dtype.itemsize == 2  # torch's maximum of 16 bits on a CPU
    copied = vocab_size if slow or vocab_size < DIRECT * k else BLOCKS[1] * k
    size = _rows_at_once(logits, copied)
    if len(logits) > size:
        return torch.cat([top_k(x, bias, k) for x in logits.split(size)])
    return _largest(logits.float() if slow else logits, k, bias)


def _rows_at_once(logits: Tensor, copied: int) -> int:
    """Returns how many rows are searched together, of which `copied` numbers each are copied."""
    return max(1, COPIED_ELEMENTS.get(logits.device.type, COPIED_ELEMENTS["cuda"]) // copied)


def _largest(u: Tensor, k: int, bias: Tensor | None = None, in_order: bool = True) -> Tensor:
    """Returns the columns of the k largest u (C, n) + bias (n,), ties by column: (C, k), the largest first, or in order
    of the columns.

    All of them lie in the k blocks of columns with the largest maxima, ties by block: if one did not, each of these
        blocks would have an element before it. The maxima, and then the elements of these blocks, are searched in the
        same way.
    """
    n = u.shape[1]
    if n < DIRECT * k:
        return _largest_of_few(u if bias is None else u + bias, k, in_order)
    block = BLOCKS[n > 8 * DIRECT * k]
    end = n // block * block
    blocks, rest = u[:, :end].unflatten(1, (-1, block)), u[:, end:]
    if bias is None:
        maxima = blocks.amax(2)
    else:  # logits with their bias are a copy
        bias_blocks, rest = bias[:end].view(-1, block), rest + bias[end:]
        maxima = torch.cat([(x + bias_blocks).amax(2) for x in blocks.split(_rows_at_once(u, n))])
    block_ids = _largest(maxima, k, in_order=False)
    candidates = _of_columns(blocks, block_ids)
    candidates = (candidates if bias is None else candidates + bias_blocks[block_ids]).flatten(1)
    candidate_ids = _largest(torch.cat([candidates, rest], 1) if end < n else candidates, k, in_order=in_order)
    block_of = candidate_ids // block
    columns = block_ids.gather(1, block_of.clamp(max=k - 1)) * block + candidate_ids % block
    return torch.where(block_of < k, columns, candidate_ids + (end - k * block)) if end < n else columns


def _largest_of_few(u: Tensor, k: int, in_order: bool) -> Tensor:
    """Returns what `_largest` does, by one sort of each row; n < 2^31."""
    if u.dtype == torch.float64:  # which does not fit in 64 bits with its place
        columns = u.sort(dim=1, descending=True, stable=True).indices[:, :k]
    else:
        bits = (u.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
        key = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits).long()  # in the order of u
        key.bitwise_left_shift_(32).sub_(torch.arange(u.shape[1], device=u.device))
        columns = key.topk(k, dim=1, sorted=in_order).values.neg_().bitwise_and_(0xFFFFFFFF)
    return columns if in_order else columns.sort(dim=1).values
