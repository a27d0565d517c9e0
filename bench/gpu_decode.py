"""Wrong numbers, explained: which kernel, the first wrong row and column, and which part of the machine they follow.

Called only after a mismatch. The backend's methods are called one by one, past the engine. Their inputs are random, and
then such that an entry tells where it comes from: rows and columns are encoded in logits that bfloat16 holds exactly.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import gpu_device
import gpu_tiles
import torch
from gpu_where import Property, follow, located, properties
from torch import Tensor

from grpo_kernels.backends import get_backend
from grpo_kernels.backends.pytorch.backend import TorchBackend
from grpo_kernels.contract import (
    FIELD,
    TABLE_FIELDS,
    KernelParams,
    LogitChunk,
    RowGradients,
    Rows,
    RowStats,
    TokenValues,
    no_values,
)

PLAIN = KernelParams(surrogate="reinforce", has_old=False)
TOLERANCE, LEAST = 2e-2, 1e-7  # of an entry, relative, and to the largest of its row; bfloat16 rounds by 4e-3
STATISTICS = 1e-3  # nats
UNWRITTEN = 7.0  # what buffers hold before; no encoded value is near
DIGIT = 64  # values of a digit: (n - 32) / 8
SPIKE = 24.0  # a logit beside which all others, which are 0, do not count
MAX_SHIFTS = 64
NAMED = 4  # findings of a kind


class Case(NamedTuple):
    """Inputs of a head on the device: hidden (C, H), weight (V, H), ids (C,), table (fields, C)."""

    backend: Any
    hidden: Tensor
    weight: Tensor
    ids: Tensor
    table: Tensor

    @property
    def temperature(self) -> Tensor:
        return self.table[FIELD["temperature"]]


def explain(backend: str, strategy: str, size: tuple[int, int, int], dtype: torch.dtype) -> list[str]:
    """A sentence per finding; one that says so where the kernels by themselves are right."""
    try:
        return findings(backend, strategy, size, dtype)
    except Exception as error:  # the mismatch is reported all the same
        return [f"looking for what is wrong failed: {gpu_device.describe(error)}"]


def findings(backend: str, strategy: str, size: tuple[int, int, int], dtype: torch.dtype) -> list[str]:
    case = random_case(backend, size, dtype)
    rows, columns = properties(backend, strategy, size, dtype)
    if strategy == "rows":
        found = of_rows(case, rows, columns)
    else:
        found = of_linear(case, rows, columns) if strategy == "linear" else of_anchored(case, rows, columns)
    return found or ["called by themselves, with other inputs, the kernels are right: suspect what is around them"]


def random_case(backend: str, size: tuple[int, int, int], dtype: torch.dtype) -> Case:
    count, width, vocab = size
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(count, width, generator=g).to(dtype)
    weight = (torch.randn(vocab, width, generator=g) * width**-0.5).to(dtype)
    ids = torch.randint(vocab, (count,), generator=g)
    table = torch.zeros(len(TABLE_FIELDS), count)
    table[FIELD["advantage"]] = 1.0 + torch.rand(count, generator=g)
    for name in ("multiplier", "weight_ratio", "weight_direct", "temperature"):
        table[FIELD[name]] = 1.0
    table[FIELD["entropy_threshold"]] = -math.inf
    return Case(get_backend(backend), *(x.to(gpu_device.PLACE) for x in (hidden, weight, ids, table)))


# --- one kernel after another ---------------------------------------------------------------------------------------


def expected_pass(logits: Tensor, case: Case) -> tuple[RowStats, Tensor]:
    """Statistics and d loss / d logits in float64, of tokens that depend on themselves alone."""
    count, table = len(logits), case.table.cpu().double()
    values, dlogits = no_values(count, torch.float64, table.device), torch.empty(logits.shape, dtype=torch.float64)
    chunk = LogitChunk(logits.cpu().double(), Rows(0, count), case.ids.cpu())
    TorchBackend().single_pass(chunk, table, values, PLAIN, RowGradients(dlogits))
    return statistics_in(values), dlogits


def of_rows(case: Case, rows: list[Property], columns: list[Property]) -> list[str]:
    """The row kernels over random logits, then over logits that are all equal."""
    logits = (case.hidden.float() @ case.weight.float().T).contiguous()
    expected, exact = expected_pass(logits, case)
    single = logits.shape[0]
    g_logp = case.table[FIELD["weight_ratio"]] * case.table[FIELD["advantage"]]
    given, known = torch.empty_like(exact), no_values(single, torch.float64, torch.device("cpu"))
    known.lse.copy_(expected.lse)
    known.entropy.copy_(expected.entropy)
    TorchBackend().logits_gradient(
        LogitChunk(logits.cpu().double(), Rows(0, single), case.ids.cpu()), torch.ones(single).double(), known,
        g_logp.cpu().double(), torch.zeros(single).double(), PLAIN, RowGradients(given),
    )  # fmt: skip
    every, temperature = Rows(0, single), case.temperature.contiguous()
    values = no_values(single, torch.float32, logits.device)
    case.backend.statistics(LogitChunk(logits, every, case.ids), temperature, values, PLAIN)
    found = wrong_statistics("statistics", statistics_in(values), expected, rows)
    buffer, grad = in_place(logits, case.hidden.dtype)
    values = no_values(single, torch.float32, logits.device)
    chunk = LogitChunk(buffer, every, case.ids)
    case.backend.single_pass(chunk, case.table, values, PLAIN, RowGradients(grad))
    found += wrong_statistics("single_pass", statistics_in(values), expected, rows)
    found += wrong_entries("single_pass", grad, exact, rows, columns)
    buffer, grad = in_place(logits, case.hidden.dtype)
    values.lse.copy_(expected.lse)
    values.entropy.copy_(expected.entropy)
    chunk, none = LogitChunk(buffer, every, case.ids), torch.zeros_like(g_logp)
    case.backend.logits_gradient(chunk, temperature, values, g_logp, none, PLAIN, RowGradients(grad))
    found += wrong_entries("logits_gradient", grad, given, rows, columns)
    equal = LogitChunk(torch.zeros_like(logits), every, case.ids)
    case.backend.statistics(equal, temperature, values, PLAIN)
    return found + miscounted("statistics", statistics_in(values), logits.shape[1])


def statistics_in(values: TokenValues) -> RowStats:
    return RowStats(values.logp, values.lse, values.entropy)


def in_place(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(float32 logits, the gradient's place over them), as the engine has them."""
    buffer = logits.clone()
    return buffer, buffer if dtype == torch.float32 else buffer.view(dtype)[:, : logits.shape[1]]


def of_linear(case: Case, rows: list[Property], columns: list[Property]) -> list[str]:
    """Statistics alone come out: of random inputs, of equal logits, and of one large logit at a time."""
    table = case.table.clone()
    table[FIELD["temperature"]] = case.temperature
    expected, _ = expected_pass(exact_logits(case), case._replace(table=table))
    found = wrong_statistics("linear_logp", linear(case), expected, rows)
    vocab = len(case.weight)
    found += miscounted("linear_logp", linear(case._replace(weight=torch.zeros_like(case.weight))), vocab)
    return found + spikes(case, rows, columns)


def of_anchored(case: Case, rows: list[Property], columns: list[Property]) -> list[str]:
    expected, exact = expected_pass(exact_logits(case), case)
    stats, exps, scale = exponentials(case)
    found = wrong_statistics("anchored", stats, expected, rows)
    gradient = (scale[:, None].double() * exps.double()).cpu()
    unwritten = (exps == UNWRITTEN).cpu() & bad_entries(gradient, exact)
    if unwritten.any():
        found += located("anchored leaves unwritten", unwritten, rows, columns)
    found += wrong_entries("anchored", gradient, exact, rows, columns)
    return found + misplaced(case)


def exact_logits(case: Case) -> Tensor:
    return case.hidden.cpu().double() @ case.weight.cpu().double().T


def linear(case: Case) -> RowStats:
    return case.backend.linear_logp(
        case.hidden, case.weight, None, case.ids, case.temperature.contiguous(), PLAIN, entropy=True
    )


def exponentials(case: Case) -> tuple[RowStats, Tensor, Tensor]:
    vocab = len(case.weight)
    row_stride = (vocab + 7) // 8 * 8  # rows on 16 bytes, as the engine's
    shape = (len(case.ids), row_stride)
    exps = torch.full(shape, UNWRITTEN, dtype=torch.bfloat16, device=gpu_device.PLACE)[:, :vocab]
    stats, scale = case.backend.anchored(case.hidden, case.weight, None, case.ids, case.table, exps, PLAIN)
    return stats, exps, scale


# --- inputs that say where a number comes from ----------------------------------------------------------------------


def miscounted(kernel: str, stats: RowStats, vocab: int) -> list[str]:
    """Of logits that are all 0: e^lse is the number of columns that a row has counted."""
    counted = stats.lse.cpu().double().exp()
    wrong = ((counted - vocab).abs() > 0.5) | counted.isnan()
    if not wrong.any():
        return []
    row = int(wrong.nonzero()[0])
    return [f"{kernel}: of equal logits row {row} counts {float(counted[row]):.1f} of {vocab} columns"]


def spikes(case: Case, rows: list[Property], columns: list[Property]) -> list[str]:
    """Row r has one large logit, in tile r + shift of the vocabulary, through one entry of H: is it seen, and once?"""
    count, width = case.hidden.shape
    vocab = len(case.weight)
    tiles = gpu_tiles.divide_up(vocab, gpu_tiles.TILE_COLUMNS)
    here, each_row = gpu_device.PLACE, torch.arange(count)
    expected = SPIKE + math.log1p((vocab - 1) * math.exp(-SPIKE))
    bad_rows, bad_columns, seen = torch.zeros(count), torch.zeros(vocab), ""
    for shift in range(min(tiles, MAX_SHIFTS)):
        slot = torch.arange(width)  # rows with the same r % H share a column
        column = ((slot + shift) % tiles * gpu_tiles.TILE_COLUMNS + (37 * shift + 11) % gpu_tiles.TILE_COLUMNS) % vocab
        weight = torch.zeros(vocab, width)
        weight[column, slot] = SPIKE
        hidden = torch.nn.functional.one_hot(each_row % width, width)
        spiked = case._replace(weight=weight.to(here, case.weight.dtype), hidden=hidden.to(here, case.hidden.dtype))
        lse = linear(spiked).lse.cpu().double()
        bad = ~((lse - expected).abs() <= STATISTICS)
        if bad.any() and not seen:
            row = int(bad.nonzero()[0])
            seen = f"row {row}, column {int(column[row % width])}: lse {float(lse[row]):.3f} for {expected:.3f}"
        bad_rows += bad
        bad_columns.index_add_(0, column[each_row % width], bad.float())
    if not seen:
        return []
    return [f"linear_logp: single large logits are lost or moved, first {seen}"] + [
        f"linear_logp, of these: {text}" for text in [*follow(bad_rows, rows)[:2], *follow(bad_columns, columns)[:2]]
    ]


def misplaced(case: Case) -> list[str]:
    """What stands where, decoded from the exponentials of three digits each of column, row and entry of H."""
    count, width = case.hidden.shape
    vocab = len(case.weight)
    row, column, depth = torch.arange(count), torch.arange(vocab), torch.arange(width)
    ids = torch.full_like(case.ids, vocab - 1)  # the anchor: its logit is 0
    place = {"column": column.expand(count, vocab), "row": row[:, None].expand(count, vocab)}
    place["entry of H"] = (row % width)[:, None].expand(count, vocab)
    held, wrong = (
        {name: torch.zeros(count, vocab, dtype=torch.long) for name in place},
        torch.zeros(count, vocab).bool(),
    )
    unreadable = torch.zeros(count, vocab).bool()
    for name, most in (("column", vocab), ("row", count), ("entry of H", width)):
        for digit in range(3):
            if DIGIT**digit >= most:
                break
            hidden, weight = torch.zeros(count, width), torch.zeros(vocab, width)
            if name == "column":
                hidden[:, 0], weight[:, 0] = 1.0, encoded(column, digit)
            elif name == "row":
                hidden[:, 0], weight[:, 0] = encoded(row, digit), 1.0
            else:
                hidden[row, row % width], weight[:] = 1.0, encoded(depth, digit)
            weight[-1] = 0.0
            inputs = (x.to(gpu_device.PLACE, case.hidden.dtype) for x in (hidden, weight))
            _, exps, _ = exponentials(Case(case.backend, *inputs, ids, case.table))
            z = exps.cpu().double().log()
            n = (8 * z + DIGIT / 2).round()
            unreadable |= ~((8 * z + DIGIT / 2 - n).abs() < 0.3) | (n < 0) | (n >= DIGIT)
            held[name] += n.nan_to_num().clamp(0, DIGIT - 1).long() * DIGIT**digit
    for name, where in place.items():
        wrong |= held[name] != where % DIGIT**3
    unreadable[:, -1] = wrong[:, -1] = False  # the anchor's own entry is -rest
    wrong &= ~unreadable
    texts = []
    for r, c in wrong.nonzero()[:NAMED].tolist():
        has = ", ".join(f"{name} {int(held[name][r, c])} for {int(where[r, c])}" for name, where in place.items())
        texts.append(f"anchored: at row {r}, column {c} stands {has}")
    if unreadable.any():
        r, c = unreadable.nonzero()[0].tolist()
        texts.append(f"anchored: {int(unreadable.sum())} encoded entries hold no code, first row {r}, column {c}")
    return texts


def encoded(n: Tensor, digit: int) -> Tensor:
    """A digit of n to base 64 as a logit within [-4, 4), in steps of 1/8: exact in bfloat16, and so is e^z's order."""
    return (n // DIGIT**digit % DIGIT - DIGIT // 2).float() / 8


# --- against what is right ----------------------------------------------------------------------------------------


def wrong_statistics(kernel: str, found: RowStats, expected: RowStats, rows: list[Property]) -> list[str]:
    texts = []
    for name, x, y in zip(RowStats._fields, found, expected, strict=True):
        bad = ~((x.cpu().double() - y).abs() <= STATISTICS)
        if bad.any():
            row = int(bad.nonzero()[0])
            where = "; ".join(follow(bad.float(), rows)[:NAMED])
            texts.append(
                f"{kernel}: {name} wrong in {int(bad.sum())} of {len(bad)} rows, first row {row}: "
                f"{float(x[row]):.6g} for {float(y[row]):.6g}; {where or 'in rows of every kind'}"
            )
    return texts


def bad_entries(values: Tensor, expected: Tensor) -> Tensor:
    """Each against itself: beside the sampled id's own, which is near 1, all others are small."""
    least = LEAST * expected.abs().amax(1, keepdim=True)
    return ~((values - expected).abs() <= TOLERANCE * expected.abs() + least)


def wrong_entries(
    kernel: str, found: Tensor, expected: Tensor, rows: list[Property], columns: list[Property]
) -> list[str]:
    values = found.cpu().double()
    bad = bad_entries(values, expected)
    if not bad.any():
        return []
    r, c = bad.nonzero()[0].tolist()
    texts = located(f"{kernel}: gradient wrong", bad, rows, columns)
    return [f"{texts[0]}: {float(values[r, c]):.6g} for {float(expected[r, c]):.6g}", *texts[1:]]
