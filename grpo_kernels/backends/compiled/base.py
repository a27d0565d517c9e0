"""The compiled backends (csrc): addresses of checked tensors are handed over to the module of the binding."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from ...contract import (
    AGGREGATIONS,
    COLUMNS,
    LEVELS,
    TABLE_FIELDS,
    VALUE_FIELDS,
    KeptIds,
    KeptPairs,
    KernelParams,
    LogitChunk,
    PlannedTokens,
    PlanRules,
    RowGradients,
    Rows,
    Sums,
    TokenInputs,
    TokenValues,
    is_per_sequence,
)
from ..checked import CheckedBackend

Result = TypeVar("Result")
INTERFACE = 7  # of csrc/layout.h

_MASK_BYTES = {torch.bool: 1, torch.uint8: 1, torch.int8: 1, torch.int32: 4, torch.int64: 8}
_SCALAR, _PER_SEQUENCE, _PER_TOKEN = 0, 1, 2


class CompiledBackend(CheckedBackend):
    """What CheckedBackend says, by the functions of a compiled module."""

    name: str
    device_type: str

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.dtypes = {getattr(torch, name): code for code, name in enumerate(module.DTYPES)}
        self._packed: dict[KernelParams | PlanRules, bytes] = {}

    def call(self, function: Callable[..., Result], device: torch.device, *arguments: object) -> Result:
        """A compiled function, on the device of its tensors; its last argument, which is added here, says where."""
        raise NotImplementedError

    def plan_workspace(self, tokens: int, sequences: int, device: torch.device) -> Tensor | None:
        """Scratch memory of `plan`, if it needs any."""
        return None

    def sums_workspace(self, sequences: int, device: torch.device) -> Tensor | None:
        """Scratch memory of `sums`, if it needs any."""
        return None

    # --- the plan -------------------------------------------------------------------------------------------------

    def plan(
        self, inputs: TokenInputs, ids: Tensor, rules: PlanRules, dtype: torch.dtype, *, ordered: bool
    ) -> PlannedTokens:
        """What pytorch/plan.py computes."""
        device, shape, tokens = self._served(ids), ids.shape, ids.numel()
        offsets = inputs.cu_seqlens
        if offsets is None and tokens == 0:
            offsets = torch.zeros(shape[0] + 1, dtype=torch.int64, device=device)
        elif offsets is not None:
            offsets = offsets.to(torch.int64).contiguous()
        sequences = shape[0] if offsets is None else offsets.numel() - 1
        row_length = shape[1] if offsets is None else 0
        mask, mask_bytes = kernel_mask(inputs.completion_mask)
        weights, temperature = inputs.rollout_weights, inputs.temperature
        if temperature is not None and temperature.numel() == 1 and tokens != 1:
            temperature = temperature.reshape(())
        advantages = float_values(inputs.advantages)
        optional = (
            *(inputs.old_logps, inputs.ref_logps, inputs.rollout_logps, weights, temperature),
            *(inputs.entropy_threshold, inputs.normalizer),
        )
        floats = [None if x is None else float_values(x) for x in optional]  # held until the kernel has read them
        old, ref, rollout, given_weights, given_temperature, threshold, normalizer = map(address, floats)
        flat = ids.reshape(-1) if ids.dtype is torch.int64 else ids.to(torch.int64).reshape(-1)
        # One by one, and by new_empty, which takes half the time of torch.empty or of a view of one block.
        new = advantages.new_empty
        table, lengths = new((len(TABLE_FIELDS), tokens)), new(sequences)
        values = TokenValues(new((len(VALUE_FIELDS), tokens)), new(tokens, dtype=torch.float64))
        scored, active = new(tokens, dtype=torch.bool), new(tokens, dtype=torch.bool)
        limits = flat.new_empty(sequences + 1)
        clean = flat if mask is None else flat.new_empty(tokens)
        order = flat.new_empty(tokens) if ordered else None
        counts = flat.new_empty(2 + sequences * rules.whole_sequences) if ordered else None
        workspace = self.plan_workspace(tokens, sequences, device)
        self.call(
            self.module.plan, device, tokens, sequences, row_length, address(offsets), flat.data_ptr(), address(mask),
            mask_bytes, advantages.data_ptr(), _mode(advantages, shape, sequences), old, ref, rollout,
            given_weights, _mode(weights, shape, sequences), given_temperature, _mode(temperature, shape, sequences),
            threshold, normalizer, self.rules(rules), table.data_ptr(),
            values.columns.data_ptr(), values.lse.data_ptr(), limits.data_ptr(), lengths.data_ptr(),
            scored.data_ptr(), active.data_ptr(), 0 if clean is flat else clean.data_ptr(), address(order),
            address(counts), address(workspace),
        )  # fmt: skip
        return PlannedTokens(table, values, limits, lengths, scored, active, clean, order, counts)

    # --- rows of logits -------------------------------------------------------------------------------------------

    def _single_pass(
        self,
        chunk: LogitChunk,
        table: Tensor,
        values: TokenValues,
        params: KernelParams,
        gradients: RowGradients | None,
    ) -> None:
        self.call(
            self.module.single_pass, self._served(table), *self._rows(chunk), table.data_ptr(), *_values(values),
            *self._gradients(gradients), self.params(params),
        )  # fmt: skip

    def _statistics(self, chunk: LogitChunk, temperature: Tensor, values: TokenValues, params: KernelParams) -> None:
        self.call(
            self.module.stats, self._served(temperature), *self._rows(chunk), temperature.data_ptr(), *_values(values),
            self.params(params),
        )  # fmt: skip

    def _logits_gradient(
        self,
        chunk: LogitChunk,
        temperature: Tensor,
        values: TokenValues,
        g_logp: Tensor,
        g_entropy: Tensor,
        params: KernelParams,
        gradients: RowGradients,
    ) -> None:
        self.call(
            self.module.gradient, self._served(temperature), *self._rows(chunk), temperature.data_ptr(),
            *_values(values), g_logp.data_ptr(), g_entropy.data_ptr(), *self._gradients(gradients),
            self.params(params),
        )  # fmt: skip

    # --- tokens and rewards ---------------------------------------------------------------------------------------

    def _token_objective(self, rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
        tokens, columns, _ = _values(values)
        self.call(
            self.module.token_objective, self._served(table), rows.count, rows.start, address(rows.index),
            table.data_ptr(), tokens, columns, self.params(params),
        )  # fmt: skip

    def _sequence_objective(self, sequences: slice, planned: PlannedTokens, params: KernelParams) -> None:
        table = planned.table
        tokens, columns, _ = _values(planned.values)
        self.call(
            self.module.sequence_objective, self._served(table), sequences.start, sequences.stop,
            planned.offsets.data_ptr(), planned.lengths.data_ptr(), planned.scored.data_ptr(), table.data_ptr(),
            tokens, columns, self.params(params),
        )  # fmt: skip

    def _sums(self, planned: PlannedTokens, params: KernelParams, group_index: Tensor | None, groups: int) -> Sums:
        device, sequences = self._served(planned.table), planned.lengths.shape[0]
        numbers = planned.table.new_empty(Sums.size(sequences, groups))
        start, row = numbers.data_ptr(), len(COLUMNS) * numbers.itemsize
        of_groups = start + sequences * row
        of_all = of_groups + groups * row
        tokens, columns, _ = _values(planned.values)
        workspace = self.sums_workspace(sequences, device)
        self.call(
            self.module.reduce, device, tokens, sequences, planned.offsets.data_ptr(), planned.scored.data_ptr(),
            planned.table.data_ptr(), columns, address(group_index), groups, start, of_groups, of_all, of_all + row,
            self.params(params), address(workspace),
        )  # fmt: skip
        return Sums(numbers, sequences, groups)

    def _group_statistics(
        self, rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        device, groups = self._served(rewards), (num_groups,)
        outputs = output(rewards.shape, device), output(groups, device), output(groups, device)
        self.call(
            self.module.group_statistics, device, rewards.data_ptr(), group_index.data_ptr(), rewards.numel(),
            num_groups, self.module.SCALES.index(scale), self.module.BASELINES.index(baseline), ddof, eps,
            *map(address, outputs),
        )  # fmt: skip
        return outputs

    # --- arguments of the compiled functions ----------------------------------------------------------------------

    # --- kept ids -------------------------------------------------------------------------------------------------

    def _kept_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: KeptIds, logits: Tensor) -> None:
        given = self._kept(weight, kept, hidden.shape[0], address(hidden), address(bias), hidden.stride(0))
        self.call(self.module.kept_logits, self._served(weight), given, logits.data_ptr())

    def _kept_dhidden(self, dlogits: Tensor, weight: Tensor, kept: KeptIds, dhidden: Tensor) -> None:
        given, (target, dtype, stride) = self._kept(weight, kept, dhidden.shape[0]), self._matrix(dhidden)
        self.call(self.module.kept_dhidden, self._served(weight), given, dlogits.data_ptr(), target, stride, dtype)

    def _kept(
        self, weight: Tensor, kept: KeptIds, tokens: int, hidden: int = 0, bias: int = 0, hidden_row_stride: int = 0
    ) -> tuple[int, ...]:
        """gk::KeptArgs."""
        return (
            hidden, weight.data_ptr(), bias, kept.ids.data_ptr(), 0, address(kept.rows.index), *kept.ids.shape, tokens,
            *weight.shape, hidden_row_stride, weight.stride(0), self.dtypes[weight.dtype],
        )  # fmt: skip

    def _pairs(self, dlogits: Tensor, hidden: Tensor, pairs: KeptPairs, vocab_size: int) -> tuple[int, ...]:
        """gk::KeptPairs."""
        return (
            hidden.data_ptr(), pairs.ids.data_ptr(), pairs.token_of.data_ptr(), dlogits.data_ptr(), dlogits.numel(),
            hidden.shape[0], vocab_size, hidden.shape[1], hidden.stride(0), self.dtypes[hidden.dtype],
        )  # fmt: skip

    def params(self, params: KernelParams) -> bytes:
        """gk::Params."""
        packed = self._packed.get(params)
        if packed is None:
            if params.logit_scale <= 0 or params.softcap < 0:
                raise ValueError("logit_scale must be positive, softcap positive or 0")
            codes = {
                "surrogate": self.module.SURROGATES.index(params.surrogate),
                "kl": self.module.KL_ESTIMATORS.index(params.kl),
                "level": LEVELS.index(params.level),
            }
            values = params._asdict() | codes
            packed = self._packed[params] = _pack(values, self.module.PARAMS, self.module.PARAM_INTEGERS)
        return packed

    def rules(self, rules: PlanRules) -> bytes:
        """gk::PlanRules."""
        packed = self._packed.get(rules)
        if packed is None:
            codes = {"aggregation": AGGREGATIONS.index(rules.aggregation), "level": LEVELS.index(rules.level)}
            values = rules._asdict() | codes
            packed = self._packed[rules] = _pack(values, self.module.PLAN_RULES, self.module.PLAN_RULE_INTEGERS)
        return packed

    def _rows(self, chunk: LogitChunk) -> tuple[int, ...]:
        """Logits, their shape, bias, ids, and whose rows they are."""
        logits, rows, ids, bias = chunk
        return *self._matrix(logits), *logits.shape, address(bias), ids.data_ptr(), rows.start, address(rows.index)

    def _gradients(self, gradients: RowGradients | None) -> tuple[int, int, int, int]:
        if gradients is None:
            return 0, 0, 0, 0
        return *self._matrix(gradients.dlogits), address(gradients.rounding_error)

    def _matrix(self, x: Tensor) -> tuple[int, int, int]:
        """(address, code of the type, row stride)."""
        return x.data_ptr(), self.dtypes[x.dtype], x.stride(0)

    def _served(self, x: Tensor) -> torch.device:
        """The tensor's device, if its memory is what these kernels can read."""
        device = x.device
        if device.type != self.device_type:
            raise ValueError(f"backend {self.name!r} serves tensors on {self.device_type}, got one on {device}")
        return device


def _pack(values: dict[str, float], names: tuple[str, ...], integers: int) -> bytes:
    """int32, then float32, in the order of the struct. A float64 beyond float32 becomes infinite, as in C."""
    first, rest = names[:integers], names[integers:]
    floats = torch.tensor([values[name] for name in rest], dtype=torch.float64, device="cpu").to(torch.float32).tolist()
    return struct.pack(f"<{len(first)}i{len(rest)}f", *(int(values[name]) for name in first), *floats)


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


def float_values(x: Tensor) -> Tensor:
    """float32, contiguous."""
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()


def _values(values: TokenValues) -> tuple[int, int, int]:
    """(tokens, address of the columns, address of lse)."""
    return values.lse.shape[0], values.columns.data_ptr(), values.lse.data_ptr()


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def output(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that a kernel fills, in the type that it writes: what torch.set_default_dtype says is nothing to it."""
    return torch.empty(shape, dtype=dtype, device=device)
