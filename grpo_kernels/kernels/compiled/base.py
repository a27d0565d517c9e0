"""The compiled backends (csrc): tensors are handed over to the module of the binding, which takes their addresses."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar, cast

import torch
from torch import Tensor

from ...contract import (
    Backend,
    KeptIds,
    KeptPairs,
    KeptRows,
    LogitChunk,
    PlannedTokens,
    RowGradients,
    Rows,
    SparseRows,
    SparseRule,
    Sums,
    TeacherLogits,
    TokenInputs,
    TokenMask,
    TokenValues,
    contiguous_rows,
    is_per_sequence,
)
from ...names import (
    AGGREGATIONS,
    DIVERGENCES,
    DTYPES,
    KL_ESTIMATORS,
    LEVELS,
    OUTSIDE,
    SURROGATES,
    TABLE_FIELDS,
    VALUE_FIELDS,
    KernelParams,
    PlanRules,
    TeacherParams,
    integers_first,
)

Result = TypeVar("Result")
Argument = Tensor | int | None  # None: a null pointer
_MOST_PACKED = 256
_CODES: dict[str, tuple[str, ...]] = {
    "surrogate": SURROGATES,
    "kl": KL_ESTIMATORS,
    "level": LEVELS,
    "outside": OUTSIDE,
    "aggregation": AGGREGATIONS,
    "divergence": DIVERGENCES,
}

_MASK_BYTES = {torch.bool: 1, torch.uint8: 1, torch.int8: 1, torch.int32: 4, torch.int64: 8}
_SCALAR, _PER_SEQUENCE, _PER_TOKEN = 0, 1, 2


class CompiledBackend(Backend):
    """The functions of a compiled module. Logits (C, V) are in fp32, bf16 or fp16; everything per token is fp32."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.dtypes = {getattr(torch, name): code for code, name in enumerate(DTYPES)}
        self._packed: dict[int, tuple[object, bytes]] = {}  # by id: to hash so many fields takes longer than a kernel

    def call(self, function: Callable[..., Result], device: torch.device, *arguments: object) -> Result:
        """A compiled function, on the device of its tensors; its last argument, which is added here, says where."""
        raise NotImplementedError

    def workspace(self, operation: str, device: torch.device, *sizes: Argument) -> Tensor | None:
        """Scratch memory of an operation of these sizes, if it needs any."""
        return None

    # --- the plan -------------------------------------------------------------------------------------------------

    def plan(
        self, inputs: TokenInputs, ids: Tensor, rules: PlanRules, dtype: torch.dtype, *, ordered: bool
    ) -> PlannedTokens:
        device, shape, tokens = ids.device, ids.shape, ids.numel()
        offsets = inputs.cu_seqlens
        if offsets is None and tokens == 0:
            offsets = torch.zeros(shape[0] + 1, dtype=torch.int64, device=device)
        elif offsets is not None:
            offsets = offsets.to(torch.int64).contiguous()
        sequences = shape[0] if offsets is None else offsets.numel() - 1
        row_length = shape[1] if offsets is None else 0
        mask, mask_bytes = kernel_mask(inputs.completion_mask)
        given = (
            *(inputs.advantages, inputs.old_logps, inputs.ref_logps, inputs.rollout_logps, inputs.rollout_weights),
            *(inputs.temperature, inputs.entropy_threshold, inputs.normalizer),
        )
        advantages, old, ref, rollout, weights, temperature, threshold, normalizer = [
            x if x is None or (x.dtype is torch.float32 and x.is_contiguous()) else x.to(torch.float32).contiguous()
            for x in given
        ]
        if temperature is not None and temperature.numel() == 1 and tokens != 1:
            temperature = temperature.reshape(())
        ids = ids if ids.dtype is torch.int64 and ids.is_contiguous() else ids.to(torch.int64).contiguous()
        # One by one, and by new_empty, which takes half the time of torch.empty or of a view of one block.
        new = cast(Tensor, advantages).new_empty
        table, lengths = new(len(TABLE_FIELDS), tokens), new(sequences)
        values = TokenValues(new(len(VALUE_FIELDS), tokens), new(tokens, dtype=torch.float64))
        scored, active = new(tokens, dtype=torch.bool), new(tokens, dtype=torch.bool)
        limits = ids.new_empty(sequences + 1)
        clean = ids.view(-1) if mask is None else ids.new_empty(tokens)
        order = ids.new_empty(tokens) if ordered else None
        counts = ids.new_empty(2 + sequences * rules.whole_sequences) if ordered else None
        workspace = self.workspace("plan", device, tokens, sequences)
        self.call(
            self.module.plan, device, tokens, sequences, row_length, offsets, ids, mask, mask_bytes, advantages,
            _mode(advantages, shape, sequences), old, ref, rollout, weights, _mode(weights, shape, sequences),
            temperature, _mode(temperature, shape, sequences), threshold, normalizer, self.packed(rules), table,
            *values, limits, lengths, scored, active, None if mask is None else clean, order, counts, workspace,
        )  # fmt: skip
        return PlannedTokens(table, values, limits, lengths, scored, active, clean, order, counts)

    # --- rows of logits -------------------------------------------------------------------------------------------

    def single_pass(self, chunk: LogitChunk, table: Tensor, gradients: RowGradients | None = None) -> None:
        self._run_rows("single_pass", chunk, gradients, table)

    def statistics(self, chunk: LogitChunk) -> None:
        self._run_rows("stats", chunk)

    def logits_gradient(self, chunk: LogitChunk, g_logp: Tensor, g_entropy: Tensor, gradients: RowGradients) -> None:
        self._run_rows("gradient", chunk, gradients, None, g_logp, g_entropy)

    def sparse_gradient(
        self, chunk: LogitChunk, g_logp: Tensor, g_entropy: Tensor, rule: SparseRule, pairs: SparseRows
    ) -> None:
        self._run_rows("sparse_gradient", chunk, None, None, g_logp, g_entropy, *pairs, pairs.ids.shape[1], *rule)

    def _run_rows(
        self,
        name: str,
        chunk: LogitChunk,
        gradients: RowGradients | None = None,
        table: Tensor | None = None,
        g_logp: Tensor | None = None,
        g_entropy: Tensor | None = None,
        *others: object,
    ) -> None:
        """Calls a row function of the module with the fields of gk::RowArgs, and `others` behind them."""
        logits, rows, ids, temperature, values, params, bias, teacher = chunk
        if teacher is not None:
            name, others = f"teacher_{name}", (self._teacher(teacher), *others)
        dlogits, rounding_error = gradients or (None, None)
        written = (None, 0, 0) if dlogits is None else self._matrix(dlogits)
        self.call(
            getattr(self.module, name), logits.device, *self._matrix(logits), *logits.shape, bias, ids,
            rows.start, rows.index, temperature, *_tokens(table, values), values.lse, g_logp, g_entropy, *written,
            rounding_error, self.packed(params), *others,
        )  # fmt: skip

    def _teacher(self, teacher: TeacherLogits) -> tuple[object, ...]:
        """gk::TeacherArgs."""
        return (
            *self._matrix(teacher.logits), teacher.bias, teacher.weight, teacher.offset, teacher.lse,
            self.packed(teacher.params),
        )  # fmt: skip

    # --- tokens ---------------------------------------------------------------------------------------------------

    def token_objective(self, rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
        self.call(
            self.module.token_objective, table.device, rows.count, rows.start, rows.index, *_tokens(table, values),
            self.packed(params),
        )  # fmt: skip

    def sequence_objective(
        self, sequences: slice, row_length: int | None, planned: PlannedTokens, params: KernelParams
    ) -> None:
        self.call(
            self.module.sequence_objective, planned.table.device, sequences.start, sequences.stop, planned.offsets,
            planned.lengths, planned.scored, *_tokens(planned.table, planned.values), self.packed(params),
        )  # fmt: skip

    def sums(self, planned: PlannedTokens, params: KernelParams, group_index: Tensor | None, num_groups: int) -> Sums:
        device, sequences = planned.table.device, planned.lengths.shape[0]
        groups = 0 if group_index is None else num_groups
        numbers = planned.table.new_empty(Sums.size(sequences, groups))
        self.call(
            self.module.reduce, device, *_tokens(planned.table, planned.values), sequences, planned.offsets,
            planned.scored, group_index, groups, numbers, self.packed(params),
            self.workspace("reduce", device, sequences),
        )  # fmt: skip
        return Sums(numbers, sequences, groups)

    # --- kept ids -------------------------------------------------------------------------------------------------

    def kept_ids(self, mask: TokenMask, sampled: Tensor, own: range, vocab_size: int, found: KeptRows) -> None:
        (rows, ids), token_of, columns, added = found
        self.call(
            self.module.kept_ids, ids.device, mask.ids, mask.ids.dtype == torch.int64, len(mask.ids), mask.ends,
            sampled, own.start, len(own), vocab_size, 0, rows.index, *ids.shape, ids, token_of, columns, added,
        )  # fmt: skip

    def kept_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: KeptIds, logits: Tensor) -> None:
        hidden, weight = contiguous_rows(hidden), contiguous_rows(weight)
        self.call(self.module.kept_logits, weight.device, self._kept(hidden, weight, bias, kept), logits)

    def kept_dhidden(self, dlogits: Tensor, weight: Tensor, kept: KeptIds, dhidden: Tensor) -> None:
        weight = contiguous_rows(weight)
        given = self._kept(None, weight, None, kept)
        self.call(self.module.kept_dhidden, weight.device, given, dlogits, *self._matrix(dhidden))

    def _kept(self, hidden: Tensor | None, weight: Tensor, bias: Tensor | None, kept: KeptIds) -> tuple[Argument, ...]:
        """gk::KeptArgs."""
        return (
            hidden, weight, bias, kept.ids, 0, kept.rows.index, *kept.ids.shape, weight.shape[1],
            0 if hidden is None else hidden.stride(0), weight.stride(0), self.dtypes[weight.dtype],
        )  # fmt: skip

    def _pairs(self, dlogits: Tensor, hidden: Tensor, pairs: KeptPairs, vocab_size: int) -> tuple[Argument, ...]:
        """gk::KeptPairs."""
        return (
            hidden, pairs.ids, pairs.token_of, dlogits, dlogits.numel(),
            vocab_size, hidden.shape[1], hidden.stride(0), self.dtypes[hidden.dtype],
        )  # fmt: skip

    # --- arguments ------------------------------------------------------------------------------------------------

    def packed(self, struct: KernelParams | PlanRules | TeacherParams) -> bytes:
        """gk::Params, gk::PlanRules or gk::TeacherParams."""
        found = self._packed.get(id(struct))
        if found is None:
            if len(self._packed) >= _MOST_PACKED:
                self._packed.clear()
            # Kept with the struct, so that no other object gets its id. A configuration has one or two at a time.
            found = self._packed[id(struct)] = struct, pack(struct)
        return found[1]

    def _matrix(self, x: Tensor) -> tuple[Tensor, int, int]:
        """(x, code of the type, row stride)."""
        return x, self.dtypes[x.dtype], x.stride(0)


def pack(struct: KernelParams | PlanRules | TeacherParams) -> bytes:
    """int32, then float32, in the order of the struct. A float64 beyond float32 becomes infinite, as in C."""
    integers, floats = integers_first(struct)
    given = struct._asdict()
    codes = [_CODES[name].index(given[name]) if name in _CODES else int(given[name]) for name in integers]
    return array("i", codes).tobytes() + array("f", [given[name] for name in floats]).tobytes()


def _mode(x: Tensor | None, shape: torch.Size, sequences: int) -> int:
    """How a kernel finds the number of a token in x."""
    if x is None or x.dim() == 0:
        return _SCALAR
    return _PER_SEQUENCE if is_per_sequence(x, shape, sequences) else _PER_TOKEN


def kernel_mask(mask: Tensor | None) -> tuple[Tensor | None, int]:
    """(mask in memory that a kernel reads, bytes of an element)."""
    if mask is None:
        return None, 0
    if mask.dtype not in _MASK_BYTES:
        mask = mask != 0
    return mask.contiguous(), _MASK_BYTES[mask.dtype]


def _tokens(table: Tensor | None, values: TokenValues) -> tuple[Argument, ...]:
    """gk::TokenData."""
    return table, values.lse.shape[0], values.columns
