"""A backend is a table of operations over the vocabulary; this file says what each receives and writes.

N tokens of a batch, C rows of a chunk of logits, V vocabulary. Tensors (N,) and (C,) are contiguous. Row operations
find what belongs to a token by the token's place in the batch, so nothing per token is gathered or scattered. No
operation but `objective` knows a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

SPARSE_ONE = 2**31  # one in the fixed-point running sum of sparse gradients, which a kernel keeps modulo this


def chunk_row_stride(vocab_size: int, device: torch.device) -> int:
    """Returns the number of elements from one row of the scratch to the next.

    On a GPU each row starts on 16 bytes, whatever the vocabulary: 8 elements would do, but Triton's compiler only keeps
    track of whether 16 divides an integer. On a CPU rows that lie a multiple of 4 KiB apart would share few sets of a
    cache: a product of (1024, 49152) and (49152, 576) in bfloat16 took 62 ms with them, and 53 with 128 bytes between.
    """
    if device.type != "cpu":
        return -(-vocab_size // 16) * 16
    return vocab_size if vocab_size % 2048 else vocab_size + 64


def contiguous_rows(x: Tensor) -> Tensor:
    """Returns the matrix, or a copy if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def fits_tma(x: Tensor) -> bool:
    """Returns whether Hopper's tensor memory accelerator can fetch tiles of a matrix of 16-bit numbers as it lies."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
    return x.dtype.itemsize == 2 and x.stride(1) == 1 and aligned and x.stride(0) >= x.shape[1]


def rows_for_tma(x: Tensor) -> Tensor:
    """Returns the matrix, whose width 8 divides, or a copy that fits_tma."""
    return x if fits_tma(x) else x.clone(memory_format=torch.contiguous_format)


def multiplies_by_tma(hidden: Tensor, weight: Tensor) -> bool:
    """Returns whether products of hidden (..., H) and weight (V, H) can take their tiles so."""
    return hidden.dtype == weight.dtype and fits_tma(weight) and weight.shape[1] % 8 == 0


@dataclass(init=False)  # not frozen, which takes twice as long to make: a call makes several
class Rows:
    """A chunk of tokens: `index` (C,) int64 into the batch, or None for the range [start, stop)."""

    start: int
    stop: int
    index: Tensor | None
    count: int

    def __init__(self, start: int, stop: int, index: Tensor | None = None) -> None:
        self.start, self.stop, self.index, self.count = start, stop, index, stop - start

    def take(self, x: Tensor) -> Tensor:
        """Returns the chunk's part of a per-token tensor; a view where the chunk is a range."""
        if self.index is None:
            return x if self.count == x.shape[0] else x.narrow(0, self.start, self.count)
        return x.index_select(0, self.index)

    def put(self, destination: Tensor, values: Tensor) -> None:
        """Writes the chunk's values into a per-token tensor, in its type."""
        if self.index is None:
            destination.narrow(0, self.start, self.count).copy_(values)
        else:
            destination.index_copy_(0, self.index, values.to(destination.dtype))

    def tokens(self, device: torch.device) -> Tensor:
        """Returns the places in the batch, (C,) int64."""
        return torch.arange(self.start, self.stop, device=device) if self.index is None else self.index

    def split(self, size: int) -> list[Rows]:
        """Returns parts of `size` rows, of which the last may be shorter."""
        if self.count <= size:
            return [self] if self.count else []
        return [
            Rows(self.start + first, self.start + last, None if self.index is None else self.index[first:last])
            for first in range(0, self.count, size)
            for last in (min(first + size, self.count),)
        ]


class Statistics(NamedTuple):
    """Log-probability of the sampled id, log-sum-exp and entropy, nats: of all tokens (N,) or of some rows (C,).

    logp and entropy are float32 (float64 from float64 inputs). lse is float64: logits near 1e4 leave a float32 one an
    error of 1e-3, and the probabilities of the gradient with it.
    """

    logp: Tensor
    lse: Tensor
    entropy: Tensor

    @classmethod
    def empty(cls, count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Statistics:
        """Returns memory to be filled, in these types whatever torch.set_default_dtype says."""
        dtypes = dtype, torch.float64, dtype
        return cls(*(torch.empty(count, dtype=dtype, device=device) for dtype in dtypes))

    @classmethod
    def zeros(cls, count: int, device: torch.device, dtype: torch.dtype) -> Statistics:
        """Returns statistics of 0, each on 16 bytes whatever the count is: Triton compiles a kernel anew for a tensor
        that is not."""
        logp, entropy = torch.zeros((2, count + -count % 4), dtype=dtype, device=device)[:, :count].unbind()
        return cls(logp, torch.zeros(count, dtype=torch.float64, device=device), entropy)


class PolicyTransform(NamedTuple):
    """What makes the policy's logits u, with their bias, the z of its softmax:
    z = softcap tanh(logit_scale u / softcap) / temperature, or logit_scale u / temperature."""

    logit_scale: float = 1.0
    softcap: float = 0.0  # 0: no softcap


class TeacherTransform(NamedTuple):
    """The same of a teacher's logits, and which divergence to its distribution is computed."""

    divergence: str = "reverse_kl"  # one of names.DIVERGENCES
    divergence_beta: float = 0.5  # of "jsd": the teacher's share of the mixture
    logit_scale: float = 1.0
    softcap: float = 0.0


class TeacherLogits(NamedTuple):
    """The teacher's logits of a chunk's rows, and what row operations read and write of its tokens.

    A row operation that has them computes the divergence too, and adds its gradient to d loss / d logits.
    """

    logits: Tensor  # (C, V), contiguous rows at any stride
    bias: Tensor | None  # (V,) in float32 or better
    transform: TeacherTransform
    weight: Tensor  # (N,) d loss / d divergence, in the type of Statistics.logp like the next two
    divergence: Tensor  # (N,) nats
    policy_kl: Tensor  # (N,) nats: KL of the policy to the teacher, "jsd": to the mixture; "forward_kl": not read
    lse: Tensor  # (N,) float64 nats, of the teacher


class LogitChunk(NamedTuple):
    """Logits of some rows, and what row operations read and write of their tokens."""

    logits: Tensor  # (C, V), contiguous rows at any stride
    rows: Rows  # whose logits these are
    ids: Tensor  # (N,) int64, the sampled ids of the batch; outside of [0, V): there is none, and logp is NaN
    temperature: Tensor  # (N,)
    stats: Statistics  # (N,): statistics are written here, and lse and entropy read for the gradient
    transform: PolicyTransform
    bias: Tensor | None = None  # (V,) in float32 or better, added to the logits as they are read
    teacher: TeacherLogits | None = None


class HeadChunk(NamedTuple):
    """Hidden states of some rows, for a product with the softmax in its epilogue, and what belongs to their tokens."""

    hidden: Tensor  # (C, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    rows: Rows  # whose hidden states these are
    ids: Tensor  # (N,) int64
    temperature: Tensor  # (N,)
    stats: Statistics  # (N,), written
    transform: PolicyTransform


class RowScales(NamedTuple):
    """The factors that turn rows of exponentials E, which are 0 at the sampled ids, into d loss / d logits: it is
    -dlogp * row_scale * E, and dlogp * sampled at the sampled id. That entry is as large as all others together, and
    stays in float32."""

    row_scale: Tensor  # (C,) float32
    sampled: Tensor  # (C,) float32; 0 where there is no sampled id

    @classmethod
    def empty(cls, exponentials: Tensor) -> RowScales:
        """Returns memory to be filled for these rows, each tensor on 16 bytes whatever their number is."""
        count, device = len(exponentials), exponentials.device
        return cls(*(torch.empty(count, dtype=torch.float32, device=device) for _ in range(2)))


class TokenMask(NamedTuple):
    """A SamplingMask, flat; or the part of it that lies in a slice of the vocabulary."""

    ids: Tensor  # (M,) int32 or int64, contiguous
    counts: Tensor  # (N,) how many each token has
    ends: Tensor  # (N,) int64: where those of each token end

    @property
    def firsts(self) -> Tensor:
        """Returns where the ids of each token begin, (N,) int64."""
        return self.ends - self.counts


class GatheredIds(NamedTuple):
    """A few ids of each of some tokens, whose rows of the weight are gathered: those of a sampling mask with the
    sampled one among them, a teacher's K ids, the entries of a sparse gradient."""

    rows: Rows  # the tokens, by an index
    ids: Tensor  # (C, K) int32, -1 in the entries that a token does not use, which come last; gradients there may be
    # anything. 4 divides K


class AllowedIdRows(NamedTuple):
    """The ids that a sampling mask allows some tokens: what `allowed_ids` writes."""

    gathered: GatheredIds
    token_of: Tensor  # (C, K) int32: the token of each entry
    # (N,) int64: the column of the token's sampled id in its row; -1 where the row does not have it, or where an id is
    # not in the vocabulary, which gives NaN.
    columns: Tensor
    added: Tensor  # (C,) bool: the sampled id was not among them


class TokenIdPairs(NamedTuple):
    """All pairs of a token and one of its ids."""

    ids: Tensor  # (M,) int32, -1 where an entry is not used
    token_of: Tensor  # (M,) int32

    def by_id(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Returns (starts (V + 1,), pairs (M,)) int64: pairs[starts[v] : starts[v + 1]] are those of id v, in their
        order."""
        ids, order = self.ids.sort(stable=True)
        bounds = torch.arange(vocab_size + 1, dtype=ids.dtype, device=ids.device)
        return torch.searchsorted(ids, bounds), order


class SparseRule(NamedTuple):
    """How a row of d loss / d logits becomes pairs of an id and a number: systematic sampling.

    s = logit_scale / temperature (|dlogp| + |dentropy|) is the scale of the row. Kept as they are: the sampled id's
    entry, those of at least theta s, and NaN. The shares |v| / (theta s) of the others are added up in the order of the
    ids, and an entry becomes sign(v) theta s where the sum passes an integer minus u; else it is 0. u in [0, 1) is a
    hash of the token's place in the batch, of its log-sum-exp and of `first_id`. Shares are rounded to whole units of
    1 / SPARSE_ONE: any order of adding gives the same bits.
    """

    theta: float
    first_id: int = 0  # of a slice of the vocabulary


class SparseRows(NamedTuple):
    """Where a row operation writes the pairs. Places beyond a row's count may hold anything."""

    ids: Tensor  # (C, K) int32, ascending
    values: Tensor  # (C, K) float32, or float64 for float64 inputs
    counts: Tensor  # (C,) int32; K + 1 where there are more than K, of which none can be used

    def rows(self, first: int, last: int) -> SparseRows:
        return SparseRows(*(x[first:last] for x in self))


def _always(device: torch.device) -> str:
    return ""


@dataclass(frozen=True)
class Backend:
    """The operations of one backend. What it lacks it has from another table by `dataclasses.replace`; operations that
    may be None are faster paths, which head/ takes where a backend has them.

    statistics(chunk: LogitChunk): writes logp, lse and entropy; with a teacher its divergence, policy_kl and lse.
    gradient(chunk: LogitChunk, dlogp (N,), dentropy (N,), out (C, V)): writes d loss / d logits, from d loss / d logp,
        d loss / d entropy and the statistics. `out` may start where the logits do.
    divergence(chunk: LogitChunk) -> (2, C): the shares of a slice of the vocabulary in the teacher's divergence and
        policy_kl, from log-sum-exps of both sides over the whole vocabulary.
    exponentials(chunk: LogitChunk, head: HeadChunk, out (C, V) bfloat16) -> RowScales: writes the statistics and the
        exponentials e^(z - z_id), of which d loss / d logits is a multiple where no gradient goes through the entropy.
        The logits are read once, and `out` may lie over the front of them. `head`: what the logits are a product of,
        for rows that have to be computed again.
    fused_exponentials(head: HeadChunk, out (C, V) bfloat16) -> RowScales: the same from the epilogue of the product,
        without logits.
    fused_logp(head: HeadChunk, entropy: bool): writes the statistics, without logits. entropy: whether it is wanted.
    sparse_gradient(chunk, dlogp (N,), dentropy (N,), rule: SparseRule, out: SparseRows): `gradient` by this rule; the
        logits stay as they are. No pairs for a token without a gradient.
    allowed_ids(mask: TokenMask, sampled (N,), local_vocab: range, vocab_size: int, out: AllowedIdRows): writes the ids
        that the mask allows some tokens, less than K each, and that lie in `local_vocab`, a range of the whole
        vocabulary, as rows of the weight; behind them the sampled id, where it is missing. `mask`: of the whole
        vocabulary. No address depends on an id.
    gathered_logits(hidden (N, H), weight (V, H), bias (V,) | None, gathered: GatheredIds, logits (C, K)): logits of
        these ids, float32 or float64, -inf in entries that are not used.
    gathered_dhidden(dlogits (C, K), weight, gathered: GatheredIds, dhidden (N, H)): writes the tokens' rows of dhidden.
    gathered_dweight(dlogits (M,), hidden, pairs: TokenIdPairs, dweight (V, H), add=bool): dweight from all pairs:
        added, or written, 0 for ids without a pair.
    objective(inputs: ObjectiveInputs, logp, entropy, dlogp (N,), rows: Rows | None): writes d loss / d logp of these
        rows' tokens; with rows=None of all tokens, and returns Sums in one row. See fused_objective.py; float32.
    scale_rows(x (C, H), dlogp (N,), scales: RowScales, head: HeadChunk, out, *, is_product: bool): writes x * (-dlogp *
        row_scale), computed in float32 and rounded once. is_product: x is the product of exponentials and the weight in
        float32; the sampled ids' entries times their rows of the weight are added, and `out` (N, H) is dhidden, whose
        rows of these tokens are written. Else x holds hidden states, and `out` is (C, H). A token of dlogp 0 gets 0.
    scale(x, factor): x *= factor, float32 () that the host need not know; x is contiguous, a product rounded once.
    """

    name: str
    statistics: Callable[..., None]
    gradient: Callable[..., None]
    divergence: Callable[[LogitChunk], Tensor]
    sparse_gradient: Callable[..., None]
    allowed_ids: Callable[..., None]
    gathered_logits: Callable[..., None]
    gathered_dhidden: Callable[..., None]
    gathered_dweight: Callable[..., None]
    scale: Callable[[Tensor, Tensor], None]
    scale_rows: Callable[..., None]
    exponentials: Callable[..., RowScales] | None = None
    fused_exponentials: Callable[..., RowScales] | None = None
    fused_logp: Callable[..., None] | None = None
    objective: Callable[..., Any] | None = None
    # Which of the two fused products serve (hidden (..., H), weight (V, H)), and pay on this GPU.
    fused_products: Callable[[Tensor, Tensor], tuple[str, ...]] | None = None
    takes_teachers: bool = True
    # Why these operations cannot run on this device, of a type that the registry has for them; or nothing.
    unavailable_reason: Callable[[torch.device], str] = _always
