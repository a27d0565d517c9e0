"""The contract between the engine and a backend: its methods, and what kernels get and give per token.

N tokens of a batch, S sequences, C rows of a chunk of logits, V vocabulary. Kernels find what belongs to a token by the
token's place in the batch, so nothing per token is gathered or scattered. names.py has the fields and parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .names import COLUMN, COLUMNS, MASK_SUMS, SPARSE_SUMS, VALUE_FIELDS, KernelParams, PlanRules, TeacherParams


def chunk_row_stride(vocab_size: int, device: torch.device) -> int:
    """Elements from one row of the scratch to the next.

    On a GPU each row starts on 16 bytes, whatever the vocabulary: 8 elements would do, but Triton's compiler only keeps
    track of whether 16 divides an integer. On a CPU rows that lie a multiple of 4 KiB apart would share few sets of a
    cache: a product of (1024, 49152) and (49152, 576) in bfloat16 took 62 ms with them, and 53 with 128 bytes between.
    """
    if device.type != "cpu":
        return -(-vocab_size // 16) * 16
    return vocab_size if vocab_size % 2048 else vocab_size + 64


def contiguous_rows(x: Tensor) -> Tensor:
    """The matrix, or a copy if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


class TokenValues(NamedTuple):
    """What the kernels write: columns (len(VALUE_FIELDS), N) float32, or float64 for float64 inputs; lse (N,) nats.

    The log-sum-exp is float64: logits near 1e4 leave a float32 one an error of 1e-3, and the probabilities of the
    gradient with it.
    """

    columns: Tensor
    lse: Tensor

    @property
    def logp(self) -> Tensor:
        return self.columns[0]

    @property
    def entropy(self) -> Tensor:
        return self.columns[1]

    @property
    def value(self) -> Tensor:
        return self.columns[3]

    @property
    def g_logp(self) -> Tensor:
        return self.columns[5]

    @property
    def divergence(self) -> Tensor:
        return self.columns[6]

    def only(self, kept: Tensor) -> TokenValues:
        """With 0 at the tokens that kept (N,) bool leaves out."""
        return TokenValues(torch.where(kept, self.columns, 0.0), torch.where(kept, self.lse, 0.0))


def no_values(
    num_tokens: int, dtype: torch.dtype, device: torch.device, columns: int = len(VALUE_FIELDS)
) -> TokenValues:
    """0 everywhere. columns: the first two are enough for statistics."""
    found = torch.zeros((columns, num_tokens), dtype=dtype, device=device)
    return TokenValues(found, found.new_zeros(num_tokens, dtype=torch.float64))


@dataclass(init=False)  # not frozen, which takes twice as long to make: a call makes several
class Rows:
    """A chunk of tokens: `index` (C,) int64 into the batch, or None for the range [start, stop)."""

    start: int
    stop: int
    index: Tensor | None
    count: int

    def __init__(self, start: int, stop: int, index: Tensor | None = None) -> None:
        self.start, self.stop, self.index, self.count = start, stop, index, stop - start

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """The chunk's part of a per-token tensor; a view where the chunk is a range."""
        if self.index is None:
            if self.count == x.shape[dim]:
                return x
            return x.narrow(dim, self.start, self.count)
        return x.index_select(dim, self.index)

    def put(self, destination: Tensor, values: Tensor, dim: int = 0) -> None:
        """Write the chunk's values into a per-token tensor."""
        if self.index is None:
            destination.narrow(dim, self.start, self.stop - self.start).copy_(values)
        else:
            destination.index_copy_(dim, self.index, values)

    def tokens(self, device: torch.device) -> Tensor:
        """(C,) int64: places in the batch."""
        return torch.arange(self.start, self.stop, device=device) if self.index is None else self.index

    def split(self, size: int) -> list[Rows]:
        """In parts of `size` rows, the last may be shorter."""
        if self.count <= size:
            return [self] if self.count else []
        return [
            Rows(self.start + first, self.start + last, None if self.index is None else self.index[first:last])
            for first in range(0, self.count, size)
            for last in (min(first + size, self.count),)
        ]


class TeacherLogits(NamedTuple):
    """The teacher's logits of a chunk's rows, and what row kernels read and write of its tokens beside TokenValues.

    A row kernel that has them computes the divergence too, and adds its gradient to d loss / d logits.
    """

    logits: Tensor  # (C, V), contiguous rows at any stride
    bias: Tensor | None  # (V,) in float32 or better
    params: TeacherParams
    weight: Tensor  # (N,) d loss / d divergence, in the type of TokenValues.columns like the next one
    offset: Tensor  # (N,) nats: the divergence, "jsd": KL of the policy to the mixture; "forward_kl": not read
    lse: Tensor  # (N,) float64 nats, of the teacher


class LogitChunk(NamedTuple):
    """Logits of some rows, and what row kernels read and write of their tokens."""

    logits: Tensor  # (C, V), contiguous rows at any stride
    rows: Rows  # whose logits these are
    ids: Tensor  # (N,) int64, the sampled ids of the batch
    temperature: Tensor  # (N,)
    values: TokenValues  # statistics are written here, and read for the gradient
    params: KernelParams
    bias: Tensor | None = None  # (V,) in float32 or better, added to the logits as they are read
    teacher: TeacherLogits | None = None


class HeadChunk(NamedTuple):
    """Hidden states of some rows, for a product with the softmax in its epilogue, and what belongs to their tokens."""

    hidden: Tensor  # (C, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    ids: Tensor  # (C,) int64
    temperature: Tensor  # (C,)
    params: KernelParams


class RowGradients(NamedTuple):
    """Where a row kernel writes d loss / d logits."""

    dlogits: Tensor  # (C, V), may start where the logits do
    rounding_error: Tensor | None = None  # (C,) receives what rounding took from the sampled ids' entries


class RowStats(NamedTuple):
    """(C,) each, nats: log-probability of the token, log-sum-exp (float64, see TokenValues), entropy."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor

    @classmethod
    def empty(cls, count: int, device: torch.device) -> RowStats:
        """For a kernel to fill, in the types that it writes, whatever torch.set_default_dtype says."""
        dtypes = torch.float32, torch.float64, torch.float32
        return cls(*(torch.empty(count, dtype=dtype, device=device) for dtype in dtypes))


class TokenMask(NamedTuple):
    """A SamplingMask, flat; or the part of it that lies in a slice of the vocabulary."""

    ids: Tensor  # (M,) int32 or int64, contiguous
    counts: Tensor  # (N,) how many each token has
    ends: Tensor  # (N,) int64: where those of each token end

    @property
    def firsts(self) -> Tensor:
        """(N,) int64: where those of each token begin."""
        return self.ends - self.counts


class KeptIds(NamedTuple):
    """Ids that truncated sampling kept for some tokens, the sampled ones among them."""

    rows: Rows  # the tokens, by an index
    ids: Tensor  # (C, K) int32, -1 in the places that a token does not use, which come last; gradients there may be
    # anything. 4 divides K


class KeptRows(NamedTuple):
    """What `kept_ids` writes of some tokens."""

    kept: KeptIds
    token_of: Tensor  # (C, K) int32: the token of each place
    columns: Tensor  # (N,) int64: the place of the token's sampled id in its row; -1 where the row does not have it, or
    # an id is not in the vocabulary, which gives NaN
    added: Tensor  # (C,) bool: the sampled id was not among the kept ones


class KeptPairs(NamedTuple):
    """All pairs of a token and an id that was kept for it."""

    ids: Tensor  # (M,) int32, -1 where a place is not used
    token_of: Tensor  # (M,) int32

    def by_id(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """(starts (V + 1,), pairs (M,)) int64: pairs[starts[v] : starts[v + 1]] are those of id v, in their order."""
        ids, order = self.ids.sort(stable=True)
        bounds = torch.arange(vocab_size + 1, dtype=ids.dtype, device=ids.device)
        return torch.searchsorted(ids, bounds), order


class SparseRule(NamedTuple):
    """How a row of d loss / d logits becomes pairs of an id and a number: systematic sampling.

    s = logit_scale / temperature (|d loss / d logp| + |d loss / d entropy|) is the scale of the row. Kept as they are:
    the sampled id's entry, those of at least theta s, and NaN. The shares |v| / (theta s) of the others are added up in
    the order of the ids, and an entry becomes sign(v) theta s where the sum passes an integer minus u; else it is 0.
    u in [0, 1) is a hash of the token's place in the batch, of its log-sum-exp and of `first_id`. Shares are rounded to
    whole units of 1 / SPARSE_ONE: any order of adding gives the same bits.
    """

    theta: float
    first_id: int = 0  # of a slice of the vocabulary


class SparseRows(NamedTuple):
    """Where a row kernel writes the pairs. Places beyond a row's count may hold anything."""

    ids: Tensor  # (C, K) int32, ascending
    values: Tensor  # (C, K) float32, or float64 for float64 inputs
    counts: Tensor  # (C,) int32; K + 1 where there are more than K, of which none can be used

    def part(self, first: int, last: int) -> SparseRows:
        return SparseRows(*(x[first:last] for x in self))


class TokenInputs(NamedTuple):
    """What a caller gives besides hidden states, weight and ids. Shapes: (B, T) or packed (N,); "per sequence" (S,).

    advantages and both kinds of weights may also be per sequence; temperature a scalar; what is optional may be None.
    """

    advantages: Tensor
    completion_mask: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    rollout_weights: Tensor | None = None
    rollout_logps: Tensor | None = None
    cu_seqlens: Tensor | None = None  # (S + 1,) int32 or int64, packed batches
    normalizer: Tensor | None = None  # scalar, replaces the denominator of the aggregation
    temperature: Tensor | None = None  # one per token, instead of config.temperature
    entropy_threshold: Tensor | None = None  # scalar
    entropy_coef: Tensor | None = None  # scalar, instead of config.entropy_coef
    entropy_normalizer: Tensor | None = None  # scalar, replaces the denominator of the entropy bonus
    group_index: Tensor | None = None  # (S,) int64 in [0, num_groups)
    token_weights: Tensor | None = None  # what scales a token's loss
    kept_ids: Tensor | None = None  # (M,) of a SamplingMask
    kept_counts: Tensor | None = None  # one per token


def is_per_sequence(x: Tensor, shape: torch.Size, num_sequences: int) -> bool:
    """Whether x holds one value per sequence, (S,) or (S, 1), rather than one per token."""
    return x.shape != shape and x.numel() == num_sequences and x.shape[0] == num_sequences


class PlannedTokens(NamedTuple):
    """What a backend's `plan` writes."""

    table: Tensor  # (len(TABLE_FIELDS), N); masked tokens hold neutral values
    values: TokenValues  # 0
    offsets: Tensor  # (S + 1,) int64: sequences among the N tokens
    lengths: Tensor  # (S,) unmasked tokens, in the table's type
    scored: Tensor  # (N,) bool: logps, entropy and metrics are wanted
    active: Tensor  # (N,) bool: may have a gradient. Exact: one that is left out has a gradient of exactly 0
    ids: Tensor  # (N,) int64, 0 at padding
    order: Tensor | None  # (N,) int64: active tokens, then those that are scored alone, each ascending, then anything
    counts: Tensor | None  # int64: active, scored alone, and with whole_sequences active tokens per sequence


@dataclass  # no NamedTuple, whose properties torch.compile of torch 2.8 cannot follow
class Sums:
    """Sums of COLUMNS over scored tokens, in `numbers` one after the other: per sequence, per group, all; extrema."""

    numbers: Tensor
    num_sequences: int
    num_groups: int
    has_bonus: bool = False  # the entropy bonus comes last

    @property
    def loss(self) -> Tensor:
        """() a view."""
        return self.numbers[(self.num_sequences + self.num_groups) * len(COLUMNS)]

    @property
    def sequences(self) -> Tensor:
        """(S, K)."""
        return self._rows(0, self.num_sequences)

    @property
    def groups(self) -> Tensor:
        """(num_groups, K)."""
        return self._rows(self.num_sequences, self.num_groups)

    @property
    def totals(self) -> Tensor:
        """(K,)."""
        return self._rows(self.num_sequences + self.num_groups, 1).view(-1)

    @property
    def extrema(self) -> Tensor:
        """(3,): ratio min, ratio max, mismatch max."""
        size = self.size(self.num_sequences, self.num_groups)
        return self.numbers[size - 3 : size]

    def column(self, name: str) -> Tensor:
        """(S + num_groups + 1,) of COLUMNS; a view."""
        return self._rows(0, self.num_sequences + self.num_groups + 1)[:, COLUMN[name]]

    @property
    def mask(self) -> Tensor | None:
        """(len(MASK_SUMS),) where there is a sampling mask."""
        return self._others[: len(MASK_SUMS)] if len(self._others) >= len(MASK_SUMS) else None

    @property
    def sparse(self) -> Tensor | None:
        """(len(SPARSE_SUMS),) with sparse_backward: they come after those of a mask."""
        has_sparse = len(self._others) % len(MASK_SUMS) == len(SPARSE_SUMS)
        return self._others[-len(SPARSE_SUMS) :] if has_sparse else None

    @property
    def teacher_mass(self) -> Tensor | None:
        """() the probability of the ids of a teacher that is known at K of them, which sparse_backward refuses."""
        return self._others[-1] if len(self._others) % len(MASK_SUMS) == 1 else None

    @property
    def bonus(self) -> Tensor:
        """() the entropy bonus with entropy_kept_only."""
        return self.numbers[-1]

    @property
    def _others(self) -> Tensor:
        return self.numbers[self.size(self.num_sequences, self.num_groups) : self.numbers.numel() - self.has_bonus]

    def _rows(self, first: int, count: int) -> Tensor:
        columns = len(COLUMNS)
        return self.numbers[first * columns : (first + count) * columns].view(count, columns)

    @staticmethod
    def size(num_sequences: int, num_groups: int) -> int:
        """How many numbers there are."""
        return (num_sequences + num_groups + 1) * len(COLUMNS) + 3


class Backend:
    """What the engine asks of a backend; kernels/torch/ has the plainest form.

    Per-token tensors are those of the whole batch, (N,) or (fields, N); a row of logits finds its token through `rows`.
    """

    name: str
    takes_teachers: bool = True
    has_amx: bool = False  # it runs on a processor that multiplies tiles of bfloat16

    def unavailable_reason(self, device: torch.device) -> str:
        """Why these kernels cannot run on this device, of a type that the registry has for them; or nothing."""
        return ""

    def strategies(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        """Those of launch.py that serve these inputs, best first."""
        return ("rows",)

    def plan(
        self, inputs: TokenInputs, ids: Tensor, rules: PlanRules, dtype: torch.dtype, *, ordered: bool
    ) -> PlannedTokens:
        """What pytorch/plan.py computes."""
        raise NotImplementedError

    def single_pass(self, chunk: LogitChunk, table: Tensor, gradients: RowGradients | None = None) -> None:
        """Computes all values of tokens that depend on themselves alone, and with `gradients` d loss / d logits."""
        raise NotImplementedError

    def statistics(self, chunk: LogitChunk) -> None:
        """logp, entropy and lse alone."""
        raise NotImplementedError

    def logits_gradient(self, chunk: LogitChunk, g_logp: Tensor, g_entropy: Tensor, gradients: RowGradients) -> None:
        """d loss / d logits from d loss / d logp and d loss / d entropy (N,) and the statistics."""
        raise NotImplementedError

    def sparse_gradient(
        self, chunk: LogitChunk, g_logp: Tensor, g_entropy: Tensor, rule: SparseRule, pairs: SparseRows
    ) -> None:
        """`logits_gradient` by this rule; the logits stay as they are. No pairs for a token without a gradient."""
        raise NotImplementedError

    def token_objective(self, rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
        """log_ratio, value, kl and g_logp of these tokens from their logp and entropy."""
        raise NotImplementedError

    def sequence_objective(
        self, sequences: slice, row_length: int | None, planned: PlannedTokens, params: KernelParams
    ) -> None:
        """`token_objective` of the scored tokens of whole sequences, which depend on each other."""
        raise NotImplementedError

    def sums(self, planned: PlannedTokens, params: KernelParams, group_index: Tensor | None, num_groups: int) -> Sums:
        """Sums of COLUMNS over the scored tokens. logp and entropy of the others, which may have been computed, become
        0."""
        raise NotImplementedError

    def add_rows(self, target: Tensor, ids: Tensor, scale: Tensor, rows: Tensor) -> None:
        """target[ids] += scale * rows, one sum in float32 per id; target (V, H), ids and scale (C,), rows (C, H). On a
        CPU alone: products of a GPU need no correction."""
        raise NotImplementedError

    def scale(self, x: Tensor, factor: Tensor) -> None:
        """x *= factor, float32 () that the host need not know; x is contiguous, a product rounded once."""
        raise NotImplementedError

    def kept_ids(self, mask: TokenMask, sampled: Tensor, own: range, vocab_size: int, found: KeptRows) -> None:
        """The kept ids of tokens, less than K each, that are rows `own` of the whole vocabulary, as rows of the weight;
        the sampled one (N,), wherever it is missing, behind them. `mask`: whole, and not of a slice. No address depends
        on what an id is."""
        raise NotImplementedError

    def kept_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: KeptIds, logits: Tensor) -> None:
        """Logits (C, K) of kept ids, float32 or float64, -inf in places that are not used. hidden (N, H), bias (V,)."""
        raise NotImplementedError

    def kept_dhidden(self, dlogits: Tensor, weight: Tensor, kept: KeptIds, dhidden: Tensor) -> None:
        """The tokens' rows of dhidden (N, H) from dlogits (C, K); rows of other tokens are not written."""
        raise NotImplementedError

    def kept_dweight(self, dlogits: Tensor, hidden: Tensor, pairs: KeptPairs, dweight: Tensor, *, add: bool) -> None:
        """dweight (V, H) from dlogits (M,) of all pairs: added, or written, 0 for ids without a pair."""
        raise NotImplementedError

    def linear_logp(self, chunk: HeadChunk, *, entropy: bool) -> RowStats:
        """Computes statistics without logits, for the strategy "linear". entropy: whether it is wanted."""
        raise NotImplementedError

    def anchored(self, chunk: HeadChunk, table: Tensor, exponentials: Tensor) -> tuple[RowStats, Tensor]:
        """Writes the exponentials (C, V) and returns (statistics, scale (C,)), for the strategy "anchored": scale times
        exponentials is d loss / d logits. table (fields, C): of these rows alone."""
        raise NotImplementedError

    def add_transposed(self, target: Tensor, source: Tensor, *, add: bool) -> None:
        """target = source^T, or += with `add`; target (R, H) bf16 or fp32, source (H, R) bf16, both contiguous rows.
        Called with `has_amx` alone: there oneDNN takes longer to add a transposed product to a sum."""
        raise NotImplementedError
