"""The emulated kernels as functions of torch tensors. Shapes and types are the caller's business: these are tests."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from kernel_checks import some_values
from torch import Tensor

from grpo_kernels.backends.compiled.base import pack
from grpo_kernels.contract import (
    KeptIds,
    KeptPairs,
    LogitChunk,
    PlannedTokens,
    RowGradients,
    Rows,
    RowStats,
    Sums,
    TokenInputs,
    TokenValues,
    is_per_sequence,
)
from grpo_kernels.names import ADVANTAGE_BASELINES, ADVANTAGE_SCALES, TABLE_FIELDS, KernelParams, PlanRules

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# Shared memory so small that rows of 5,003 logits take clusters of the named size, or none; an L2 cache that makes the
# streamed kernel's blocks do several rows each. The last two have no clusters.
DEVICES = {
    "cluster 1": (90, 132, 232448, 233472, 62914560),
    "cluster 2": (90, 132, 13 << 10, 40 << 10, 62914560),
    "cluster 4": (90, 132, 7 << 10, 24 << 10, 62914560),
    "cluster 8": (90, 132, 5 << 10, 16 << 10, 62914560),
    "streamed": (90, 8, 2 << 10, 6 << 10, 40000),
    "capability 8.0, resident": (80, 108, 166912, 167936, 41943040),
    "capability 8.0, streamed": (80, 8, 2 << 10, 6 << 10, 40000),
}


class Launch(NamedTuple):
    kernel: str
    grid: int
    block: int
    shared: int
    cluster: int


class Kernels:
    """Those of a library of build_kernels."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.gk_call.restype = ctypes.c_char_p
        self.library.gk_emulator_last_kernel.restype = ctypes.c_char_p

    def use(self, device: tuple[int, ...] | None = None, order: int = 0) -> None:
        """Capability, multiprocessors, shared memory per block and per multiprocessor, L2 bytes; None is an H200."""
        self.library.gk_emulator_device(",".join(map(str, device or ())).encode())
        self.library.gk_emulator_order(order)

    def last_launch(self) -> Launch:
        values = (self.library.gk_emulator_last_launch(i) for i in range(4))
        return Launch(self.library.gk_emulator_last_kernel().decode(), *values)

    def launches(self) -> int:
        """Of kernels, so far."""
        return self.library.gk_emulator_launches()

    def call(self, function: str, values: list[int | Tensor | None], numbers: bytes = b"") -> None:
        addresses = [v.data_ptr() if isinstance(v, Tensor) else v or 0 for v in values]
        array = (ctypes.c_int64 * len(values))(*addresses)
        error = self.library.gk_call(function.encode(), array, len(values), numbers)
        if error:
            raise RuntimeError(error.decode())

    # --- the plan -------------------------------------------------------------------------------------------------

    def plan(
        self, inputs: TokenInputs, ids: Tensor, rules: PlanRules, *, ordered: bool = True, row_length: int | None = None
    ) -> PlannedTokens:
        """Everything that is to be written holds something else before."""
        offsets, mask, tokens = inputs.cu_seqlens, inputs.completion_mask, ids.numel()
        if row_length is None:
            row_length = 0 if offsets is not None else ids.shape[1]
        sequences = ids.shape[0] if offsets is None else len(offsets) - 1

        def flat(x: Tensor | None, dtype: torch.dtype | None = torch.float32) -> Tensor | None:
            return None if x is None else x.reshape(-1).to(dtype or x.dtype).contiguous()

        def with_mode(x: Tensor | None) -> tuple[Tensor | None, int]:
            if x is None or x.dim() == 0:
                return flat(x), 0
            return flat(x), 1 if is_per_sequence(x, ids.shape, sequences) else 2

        table, values = torch.full((len(TABLE_FIELDS), tokens), 7.5), some_values(tokens)
        longs = torch.full((2 * tokens + 3 * sequences + 3,), -1)
        clean_ids, order, out_offsets, counts = longs.split([tokens, tokens, sequences + 1, 2 * sequences + 2])
        scored, active = torch.full((2, tokens), 85, dtype=torch.uint8).view(torch.bool)
        lengths = torch.full((sequences,), torch.nan)
        counts = counts[: 2 + sequences * rules.whole_sequences] if ordered else None
        order = order if ordered else None
        self.call(
            "plan",
            [
                *(tokens, sequences, row_length, flat(offsets, torch.int64), flat(ids, torch.int64)),
                *(flat(mask, None), 0 if mask is None else mask.element_size(), *with_mode(inputs.advantages)),
                *(flat(x) for x in (inputs.old_logps, inputs.ref_logps, inputs.rollout_logps)),
                *(*with_mode(inputs.rollout_weights), *with_mode(inputs.temperature)),
                *(flat(inputs.entropy_threshold), flat(inputs.normalizer)),
                *(table, *values, out_offsets, lengths, scored, active, clean_ids, order, counts),
            ],
            pack(rules),
        )
        return PlannedTokens(table, values, out_offsets, lengths, scored, active, clean_ids, order, counts)

    # --- rows of logits -------------------------------------------------------------------------------------------

    def rows(
        self, function: str, chunk: LogitChunk, values: TokenValues, params: KernelParams,
        gradients: RowGradients | None = None, **given: Tensor,
    ) -> None:  # fmt: skip
        logits, rows, ids, bias = chunk
        assert rows.stop - rows.start == len(logits)
        dlogits, error = (None, None) if gradients is None else gradients
        self.call(
            function,
            [
                *(logits, DTYPES.index(logits.dtype), logits.stride(0), *logits.shape, bias),
                *((dlogits, DTYPES.index(dlogits.dtype), dlogits.stride(0)) if gradients is not None else (None, 0, 0)),
                *(error, ids, rows.start, rows.index, given.get("temperature")),
                *(given.get("table"), len(ids), *values, given.get("g_logp"), given.get("g_entropy")),
            ],
            pack(params),
        )

    def statistics(self, chunk, temperature, values, params) -> None:
        self.rows("stats", chunk, values, params, temperature=temperature)

    def logits_gradient(self, chunk, temperature, values, g_logp, g_entropy, params, gradients) -> None:
        per_token = {"temperature": temperature, "g_logp": g_logp, "g_entropy": g_entropy}
        self.rows("gradient", chunk, values, params, gradients, **per_token)

    def single_pass(self, chunk, table, values, params, gradients=None) -> None:
        self.rows("single_pass", chunk, values, params, gradients, table=table)

    # --- tokens and rewards ---------------------------------------------------------------------------------------

    def token_objective(self, rows: Rows, table: Tensor, values: TokenValues, params: KernelParams) -> None:
        arguments = [rows.stop - rows.start, rows.start, rows.index, table, table.shape[1], values.columns]
        self.call("token_objective", arguments, pack(params))

    def sequence_objective(
        self, sequences: slice, row_length: int | None, planned: PlannedTokens, params: KernelParams
    ) -> None:
        per_sequence = [planned.offsets, planned.lengths, planned.scored]
        per_token = [planned.table, planned.table.shape[1], planned.values.columns]
        self.call("sequence_objective", [sequences.start, sequences.stop, *per_sequence, *per_token], pack(params))

    def sums(self, planned: PlannedTokens, params: KernelParams, group_index: Tensor | None, groups: int) -> Sums:
        scored, offsets = planned.scored, planned.offsets
        sequences = len(offsets) - 1
        found = Sums(torch.full((Sums.size(sequences, groups),), torch.nan), sequences, groups)
        per_token = [offsets, scored, planned.table, planned.values.columns]
        tokens = [len(scored), sequences, *per_token, group_index, groups]
        self.call("reduce", [*tokens, found.sequences, found.groups, found.totals, found.extrema], pack(params))
        return found

    def group_statistics(self, rewards, group_index, groups, scale, baseline, ddof, eps) -> tuple[Tensor, ...]:
        out = [torch.full((n,), torch.nan) for n in (len(rewards), groups, groups)]
        codes = [ADVANTAGE_SCALES.index(scale), ADVANTAGE_BASELINES.index(baseline), ddof]
        self.call(
            "group_statistics", [rewards, group_index, len(rewards), groups, *codes, *out], struct.pack("<d", eps)
        )
        return tuple(out)

    # --- kept ids -------------------------------------------------------------------------------------------------

    def kept_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: KeptIds, logits: Tensor) -> None:
        self.call("kept_logits", [*kept_arguments(hidden, weight, bias, kept, len(hidden)), logits])

    def kept_dhidden(self, dlogits: Tensor, weight: Tensor, kept: KeptIds, dhidden: Tensor) -> None:
        self.call("kept_dhidden", [*kept_arguments(None, weight, None, kept, len(dhidden)), dlogits, *matrix(dhidden)])

    def kept_dweight(self, dlogits: Tensor, hidden: Tensor, pairs: KeptPairs, dweight: Tensor, *, add: bool) -> None:
        sizes = [dlogits.numel(), len(hidden), *dweight.shape, hidden.stride(0), DTYPES.index(hidden.dtype)]
        given = [hidden, pairs.ids, pairs.token_of, dlogits, *sizes, *pairs.by_id(len(dweight))]
        self.call("kept_dweight", [*given, *matrix(dweight), int(add)])

    # --- finished gradients ---------------------------------------------------------------------------------------

    def scale(self, x: Tensor, factor: Tensor) -> None:
        self.call("scale", [x, DTYPES.index(x.dtype), x.numel(), factor])


def matrix(x: Tensor) -> list[int | Tensor]:
    return [x, x.stride(0), DTYPES.index(x.dtype)]


def kept_arguments(
    hidden: Tensor | None, weight: Tensor, bias: Tensor | None, kept: KeptIds, tokens: int
) -> list[int | Tensor | None]:
    """gk::KeptArgs."""
    sizes = [*kept.ids.shape, tokens, *weight.shape, 0 if hidden is None else hidden.stride(0), weight.stride(0)]
    return [hidden, weight, bias, kept.ids, 0, kept.rows.index, *sizes, DTYPES.index(weight.dtype)]


def empty_stats(rows: int) -> RowStats:
    return RowStats(*(torch.full((rows,), torch.nan, dtype=t) for t in (torch.float32, torch.float64, torch.float32)))
