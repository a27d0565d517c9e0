"""The compiled backends (csrc): tensors are checked here, addresses are handed over to the module of the binding."""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch import Tensor

from ...contract import (
    AGGREGATIONS,
    LEVELS,
    TABLE_FIELDS,
    VALUE_FIELDS,
    KernelParams,
    PlannedTokens,
    PlanRules,
    Rows,
    Sums,
    TokenInputs,
    TokenValues,
    is_per_sequence,
)
from ..checks import check_matrices, check_rewards, check_tokens

INTERFACE = 5  # of csrc/layout.h

_MASK_BYTES = {torch.bool: 1, torch.uint8: 1, torch.int8: 1, torch.int32: 4, torch.int64: 8}
_SCALAR, _PER_SEQUENCE, _PER_TOKEN = 0, 1, 2


class CompiledBackend:
    """Row kernels for logits (C, V) in fp32, bf16 or fp16, any row stride; everything per token is fp32."""

    name: str
    device_type: str

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.dtypes = {getattr(torch, name): code for code, name in enumerate(module.DTYPES)}
        self._packed: dict[KernelParams | PlanRules, bytes] = {}

    def where(self, device: torch.device) -> AbstractContextManager[int]:
        """Gives the last argument of each compiled function, which must be called inside: threads, or a stream."""
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

        def floats(x: Tensor | None) -> Tensor | None:
            if x is None or (x.dtype is torch.float32 and x.is_contiguous()):
                return x
            return x.to(torch.float32).contiguous()

        def mode(x: Tensor | None) -> int:
            if x is None or x.dim() == 0:
                return _SCALAR
            return _PER_SEQUENCE if is_per_sequence(x, shape, sequences) else _PER_TOKEN

        weights, temperature = inputs.rollout_weights, inputs.temperature
        if temperature is not None and temperature.numel() == 1 and tokens != 1:
            temperature = temperature.reshape(())
        advantages, old, ref, rollout = map(
            floats, (inputs.advantages, inputs.old_logps, inputs.ref_logps, inputs.rollout_logps)
        )
        given_weights, given_temperature = floats(weights), floats(temperature)
        threshold, normalizer = floats(inputs.entropy_threshold), floats(inputs.normalizer)
        flat = ids.reshape(-1) if ids.dtype is torch.int64 else ids.to(torch.int64).reshape(-1)
        table = output((len(TABLE_FIELDS), tokens), device)
        values = TokenValues(output((len(VALUE_FIELDS), tokens), device), output((tokens,), device, torch.float64))
        lengths = output((sequences,), device)
        scored, active = output((2, tokens), device, torch.bool).unbind()
        sizes = [sequences + 1, 0 if mask is None else tokens, 0, 0]
        if ordered:
            sizes[2:] = tokens, 2 + sequences * rules.whole_sequences
        integers = output((sum(sizes),), device, torch.int64).split(sizes)
        limits, clean = integers[0], flat if mask is None else integers[1]
        order, counts = integers[2:] if ordered else (None, None)
        workspace = self.plan_workspace(tokens, sequences, device)
        with self.where(device) as where:
            self.module.plan(
                tokens, sequences, row_length, address(offsets), flat.data_ptr(), address(mask), mask_bytes,
                address(advantages), mode(inputs.advantages), address(old), address(ref), address(rollout),
                address(given_weights), mode(weights), address(given_temperature), mode(temperature),
                address(threshold), address(normalizer), self.rules(rules), table.data_ptr(),
                values.columns.data_ptr(), values.lse.data_ptr(), limits.data_ptr(), lengths.data_ptr(),
                scored.data_ptr(), active.data_ptr(), 0 if clean is flat else clean.data_ptr(), address(order),
                address(counts), address(workspace), where,
            )  # fmt: skip
        return PlannedTokens(table, values, limits, lengths, scored, active, clean, order, counts)

    # --- rows of logits -------------------------------------------------------------------------------------------

    def single_pass(
        self,
        logits: Tensor,
        rows: Rows,
        ids: Tensor,
        table: Tensor,
        values: TokenValues,
        params: KernelParams,
        bias: Tensor | None = None,
        grad: Tensor | None = None,
        rounding_error: Tensor | None = None,
    ) -> None:
        """Statistics and objective of every row; with `grad` (C, V) d loss / d logits, it may start where logits do."""
        check_matrices(logits, grad, rows, bias, rounding_error)
        check_tokens(ids, values, table=table)
        with self.where(self._served(logits)) as where:
            self.module.single_pass(
                *self._rows(logits, rows, ids, bias), table.data_ptr(), *_values(values), *self._matrix(grad),
                address(rounding_error), self.params(params), where,
            )  # fmt: skip

    def statistics(
        self,
        logits: Tensor,
        rows: Rows,
        ids: Tensor,
        temperature: Tensor,
        values: TokenValues,
        params: KernelParams,
        bias: Tensor | None = None,
    ) -> None:
        """logp, entropy and lse of every row."""
        check_matrices(logits, None, rows, bias)
        check_tokens(ids, values, temperature=temperature)
        with self.where(self._served(logits)) as where:
            self.module.stats(
                *self._rows(logits, rows, ids, bias), temperature.data_ptr(), *_values(values), self.params(params),
                where,
            )  # fmt: skip

    def logits_gradient(
        self,
        logits: Tensor,
        grad: Tensor,
        rows: Rows,
        ids: Tensor,
        temperature: Tensor,
        values: TokenValues,
        g_logp: Tensor,
        g_entropy: Tensor,
        params: KernelParams,
        bias: Tensor | None = None,
        rounding_error: Tensor | None = None,
    ) -> None:
        """Writes d loss / d logits to `grad` from d loss / d logp and d loss / d entropy (N,) and the statistics."""
        check_matrices(logits, grad, rows, bias, rounding_error)
        check_tokens(ids, values, temperature=temperature, g_logp=g_logp, g_entropy=g_entropy)
        with self.where(self._served(logits)) as where:
            self.module.gradient(
                *self._rows(logits, rows, ids, bias), temperature.data_ptr(), *_values(values), g_logp.data_ptr(),
                g_entropy.data_ptr(), *self._matrix(grad), address(rounding_error), self.params(params), where,
            )  # fmt: skip

    # --- tokens and rewards ---------------------------------------------------------------------------------------

    def token_objective(self, rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
        """log_ratio, value, kl and g_logp of these tokens from their logp and entropy."""
        check_tokens(None, values, table=table)
        with self.where(self._served(table)) as where:
            tokens, columns, _ = _values(values)
            self.module.token_objective(
                rows.count, rows.start, address(rows.index), table.data_ptr(), tokens, columns, self.params(params),
                where,
            )  # fmt: skip

    def sequence_objective(
        self,
        sequences: slice,
        row_length: int | None,
        table: Tensor,
        scored: Tensor,
        offsets: Tensor,
        lengths: Tensor,
        values: TokenValues,
        params: KernelParams,
    ) -> None:
        """`token_objective` of the scored tokens of whole sequences, which depend on each other."""
        check_tokens(None, values, table=table, scored=scored)
        with self.where(self._served(table)) as where:
            tokens, columns, _ = _values(values)
            self.module.sequence_objective(
                sequences.start, sequences.stop, offsets.data_ptr(), lengths.data_ptr(), scored.data_ptr(),
                table.data_ptr(), tokens, columns, self.params(params), where,
            )  # fmt: skip

    def sums(
        self,
        scored: Tensor,
        table: Tensor,
        values: TokenValues,
        params: KernelParams,
        offsets: Tensor,
        group_index: Tensor | None,
        num_groups: int,
    ) -> Sums:
        """Sums of params.COLUMNS over the scored tokens."""
        check_tokens(None, values, table=table, scored=scored)
        device = self._served(table)
        sequences, columns = offsets.numel() - 1, len(self.module.COLUMNS)
        groups = 0 if group_index is None else num_groups
        found = Sums(output((Sums.size(sequences, groups),), device), sequences, groups)
        start, row = found.numbers.data_ptr(), columns * 4
        addresses = start, start + sequences * row, start + (sequences + groups) * row
        tokens, column_address, _ = _values(values)
        workspace = self.sums_workspace(sequences, device)
        with self.where(device) as where:
            self.module.reduce(
                tokens, sequences, offsets.data_ptr(), scored.data_ptr(), table.data_ptr(), column_address,
                address(group_index), groups, *addresses, addresses[2] + row, self.params(params), address(workspace),
                where,
            )  # fmt: skip
        return found

    def group_statistics(
        self, rewards: Tensor, group_index: Tensor, num_groups: int, scale: str, baseline: str, ddof: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(advantages (B,), mean (num_groups,), std (num_groups,)); NaN rewards are left out and get 0."""
        check_rewards(rewards, group_index)
        groups = (num_groups,)
        outputs = output(rewards.shape, rewards.device), output(groups, rewards.device), output(groups, rewards.device)
        with self.where(self._served(rewards)) as where:
            self.module.group_statistics(
                rewards.data_ptr(), group_index.data_ptr(), rewards.numel(), num_groups,
                self.module.SCALES.index(scale), self.module.BASELINES.index(baseline), ddof, eps,
                *map(address, outputs), where,
            )  # fmt: skip
        return outputs

    # --- arguments of the compiled functions ----------------------------------------------------------------------

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

    def _rows(self, logits: Tensor, rows: Rows, ids: Tensor, bias: Tensor | None) -> tuple[int, ...]:
        count, vocab = logits.shape
        matrix = self._matrix(logits)
        return *matrix, count, vocab, address(bias), ids.data_ptr(), rows.start, address(rows.index)

    def _matrix(self, matrix: Tensor | None) -> tuple[int, int, int]:
        """(address, code of the type, row stride)."""
        return (0, 0, 0) if matrix is None else (matrix.data_ptr(), self.dtypes[matrix.dtype], matrix.stride(0))

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


def kernel_mask(mask: Tensor | None) -> tuple[Tensor | None, int]:
    """(mask in memory that a kernel reads, bytes of an element)."""
    if mask is None:
        return None, 0
    if mask.dtype not in _MASK_BYTES:
        mask = mask != 0
    return mask.contiguous(), _MASK_BYTES[mask.dtype]


def _values(values: TokenValues) -> tuple[int, int, int]:
    """(tokens, address of the columns, address of lse)."""
    return values.lse.shape[0], values.columns.data_ptr(), values.lse.data_ptr()


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def output(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that a kernel fills, in the type that it writes: what torch.set_default_dtype says is nothing to it."""
    return torch.empty(shape, dtype=dtype, device=device)
