"""Faults planted in the CUDA kernels, one at a time, each caught by the checks of test_cuda_kernels.py or by the
emulator. `pytest -rP tests/test_cuda_faults.py` prints how."""

from __future__ import annotations

import multiprocessing
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import kernel_checks as c
import pytest
import torch
from emulator import Kernels, build_kernels
from emulator.build import ROOT, few_types
from emulator.kernels import DEVICES

from grpo_kernels.names import KernelParams, PlanRules

PAIR = (torch.float32, torch.bfloat16)


@dataclass
class Fault:
    name: str
    file: str
    replaced: dict[str, str]  # texts of the file, each there exactly once
    caught_by: str  # part of the name of the check that fails, or of what the emulator says


FAULTS = [
    # --- barriers and shuffles
    Fault(
        "no barrier before the sums of the warps are merged",
        "resident.cuh",
        {"exchange.warps[warp_index()] = of_warp;\n    block_sync();": "exchange.warps[warp_index()] = of_warp;"},
        "check_statistics",
    ),
    Fault(
        "no barrier before the block reads the sweep",
        "resident.cuh",
        {"block_sync();\n\n    const Sweep sweep": "const Sweep sweep"},
        "check_gradient",
    ),
    Fault(
        "no barrier of the warp before the sampled id is written",
        "resident.cuh",
        {"warp_sync();": ""},
        "check_gradient",
    ),
    Fault(
        "no barrier between the sweep and the sampled id",
        "streamed.cuh",
        {"block_sync();  // all is written, and the exchange is free again": ""},
        "check_gradient",
    ),
    Fault(
        "no barrier between reading a group and writing over it",
        "streamed.cuh",
        {"if (overlap) block_sync();": ""},
        "check_in_place",
    ),
    Fault(
        "a barrier that some threads skip",
        "streamed.cuh",
        {"if (overlap)": "if (overlap && vector % 2)"},
        "wait at different places",
    ),
    Fault(
        "a shuffle in a divergent branch",
        "softmax.cuh",
        {"return warp_sums(mine, scales.to_exponent());": "return lane < count ? warp_sums(mine, 1.0) : mine;"},
        "deadlock",
    ),
    # --- clusters
    Fault(
        "no barrier of the cluster before its shared memory is accessed",
        "resident.cuh",
        {
            "if (blocks > 1) cluster_arrive_relaxed();": "",
            "cluster_wait();\n        if (first_warp && lane": "if (first_warp && lane",
        },
        "has not started",
    ),
    Fault(
        "no barrier of the cluster before the sums of its blocks are read",
        "resident.cuh",
        {"        cluster_arrive();\n        cluster_wait();\n": ""},
        "has ended",
    ),
    Fault(
        "a wait for the cluster without an arrival",
        "resident.cuh",
        {"if (blocks > 1) cluster_arrive_relaxed();": ""},
        "without an arrival",
    ),
    Fault(
        "sums sent to the wrong block",
        "resident.cuh",
        {"exchange.blocks[rank], lane_index(), sums": "exchange.blocks[rank], lane_index() + 1, sums"},
        "no block 4 in the cluster",
    ),
    Fault(
        "a cluster that overwrites logits before the others have read theirs",
        "resident.cuh",
        {"make_sampled(args, token, u_id)": "make_sampled(args, token, sampled_logit(args, source, token))"},
        "check_in_place",
    ),
    # --- ends of rows, sizes
    Fault("a column too many", "elements.cuh", {"column < columns()": "column <= columns()"}, "check_statistics"),
    Fault(
        "the columns before the first whole vector taken for part of the row",
        "elements.cuh",
        {"from * kPerVector<Type> >= first && ": ""},
        "check_statistics",
    ),
    Fault(
        "loads past the end of a row",
        "elements.cuh",
        {"if (first + k * workers + worker < end) group[k]": "group[k]"},
        "check_statistics",
    ),
    Fault(
        "a tile that runs into the next",
        "resident.cuh",
        {"if (vector < tile.end) tile.four": "tile.four"},
        "past the end of shared memory",
    ),
    Fault(
        "the vectors that a tile has more than another left out",
        "host.cpp",
        {"static_cast<int32_t>(tiles % warps)": "0"},
        "check_absent_and_zero_gradient",
    ),
    Fault(
        "too little shared memory",
        "host.cpp",
        {"shared = kExchangeBytes + tiles": "shared = kExchangeBytes - 16 + tiles"},
        "past the end of shared memory",
    ),
    Fault(
        "a zero-gradient row that is read",
        "streamed.cuh",
        {"if (sweep.zero_gradient)": "if (false)"},
        "check_absent_and_zero_gradient",
    ),
    # --- sums and numbers
    Fault(
        "sums of a vector not reset for the next",
        "resident.cuh",
        {
            "    for (int vector = tile.begin + lane_index(); vector < tile.end; vector += kWarp) {\n"
            "        GK_UNROLL for (int part = 0; part < Tile<In>::kParts; part++) {\n"
            "            Four four = tile.four(vector, part);\n"
            "            float exps = 0.f, moment = 0.f;\n": "    float exps = 0.f, moment = 0.f;\n"
            "    for (int vector = tile.begin + lane_index(); vector < tile.end; vector += kWarp) {\n"
            "        GK_UNROLL for (int part = 0; part < Tile<In>::kParts; part++) {\n"
            "            Four four = tile.four(vector, part);\n"
        },
        "check_statistics",
    ),
    Fault(
        "sums of a row not reset for the next",
        "streamed.cuh",
        {
            "    for (int64_t row = block_index()": "    double carried = 0.0;\n    for (int64_t row = block_index()",
            "const Sums<double> sums = row_sums<true>": "Sums<double> sums = row_sums<true>",
            "if (thread_index() == 0) {": "carried = sums.exps += carried;\n        if (thread_index() == 0) {",
        },
        "check_statistics",
    ),
    Fault(
        "sums that do not move to a larger maximum",
        "streamed.cuh",
        {"sums = rebase(sums, top, scales.to_exponent)": "sums.top = top"},
        "check_statistics",
    ),
    Fault(
        "the maximum subtracted after scaling",
        "softmax.cuh",
        {"(y - origin) * to_exponent": "y * to_exponent - origin * to_exponent"},
        "check_statistics",
    ),
    Fault(
        "a NaN that the maximum swallows",
        "softmax.cuh",
        {"max_or_nan(": "fmaxf("},
        "check_absent_and_zero_gradient",
    ),
    Fault(
        "an entropy gradient that forgets the sampled id",
        "softmax.cuh",
        {"if (linear && log_p > -1e30) du -=": "if (false) du -="},
        "check_gradient",
    ),
    # --- what belongs to a row, and what is added to it
    Fault(
        "a row taken for a token",
        "resident.cuh",
        {"token = args.token_of[row]": "token = row"},
        "check_statistics",
    ),
    Fault(
        "a sampled logit without its bias",
        "softmax.cuh",
        {"args.bias ? logit + args.bias[id] : logit": "logit"},
        "check_statistics",
    ),
    Fault(
        "the bias of the first columns for all",
        "elements.cuh",
        {"bias + column + 4 * part": "bias + 4 * part"},
        "check_statistics",
    ),
    Fault(
        "every block of a cluster but the first writes the objective",
        "resident.cuh",
        {"found, rank == 0)": "found, rank > 0)"},
        "check_values",
    ),
    Fault(
        "no objective where no gradient is wanted",
        "streamed.cuh",
        {"if (args.tokens.table) evaluate_token": "if (false) evaluate_token"},
        "check_values",
    ),
    # --- the plan
    Fault(
        "no barrier before the rows of other warps are read",
        "plan.cuh",
        {"alones, false);\n        block_sync();": "alones, false);"},
        "check_plan",
    ),
    Fault(
        "no barrier before the next turn",
        "plan.cuh",
        {"block_sync();  // free for the next": ""},
        "check_plan",
    ),
    Fault("turns that all begin at the same row", "plan.cuh", {"before += warps[warp];": ""}, "check_plan"),
    Fault("a tile behind its own rows", "plan.cuh", {"tile < block_index()": "tile <= block_index()"}, "check_plan"),
    Fault(
        "the first token of a sequence in the one before", "plan.cuh", {"[middle] <= t": "[middle] < t"}, "check_plan"
    ),
    Fault(
        "lanes that count themselves",
        "plan.cuh",
        {"(1u << lane_index()) - 1": "(2u << lane_index()) - 1"},
        "check_plan",
    ),
    Fault(
        "a sequence that one thread decides on",
        "plan.cuh",
        {"if (together) has_gradient = block_sum(has_gradient);": ""},
        "check_plan",
    ),
    # --- tokens, sequences and rewards
    Fault(
        "the drift of one thread's tokens",
        "sequences.cuh",
        {"block_sum(sums.drift)": "sums.drift"},
        "check_sequences",
    ),
    Fault(
        "a gradient through the ratio of one thread's tokens",
        "sequences.cuh",
        {"through_ratio = block_sum(through_ratio);": ""},
        "check_sequences",
    ),
    Fault(
        "no barrier before the threads of a sequence are added up",
        "tokens.cuh",
        {
            "columns[c];\n    block_sync();\n    if (thread >= kReducedCount) return;\n    double": "columns[c];\n"
            "    if (thread >= kReducedCount) return;\n    double"
        },
        "check_reduce",
    ),
    Fault(
        "an extremum that starts at 0",
        "tokens.cuh",
        {"if (column == kRatioMin) return infinity();": ""},
        "check_reduce",
    ),
    Fault(
        "no barrier before shared memory is used again",
        "block.cuh",
        {"block_sync();  // free for the next": ""},
        "check_",
    ),
    Fault(
        "squares that still hold those of another group",
        "groups.cuh",
        {
            "Moments mine = {0.0, 0.0, infinity(), -infinity(), 0.0};": "Moments mine = {0.0, 0.0, infinity(), "
            "-infinity(), 1.0};"
        },
        "check_groups",
    ),
    # --- kept ids
    Fault("an id left out", "kept.cuh", {"while (count > 0 && ids[count - 1] < 0) count--;": "count--;"}, "check_kept"),
    Fault(
        "the last id of a group twice",
        "kept.cuh",
        {"first + q < count ? factor_of(k) : 0.f": "factor_of(k)"},
        "check_kept",
    ),
    Fault(
        "counts off by one",
        "kept.cuh",
        {"args.by_id.starts[id + 1] - begin": "args.by_id.starts[id + 1] - begin - 1"},
        "check_kept",
    ),
    Fault(
        "pairs not in the order of their ids",
        "kept.cuh",
        {"pairs.token_of[own[k]]": "pairs.token_of[begin + k]"},
        "check_kept",
    ),
    Fault(
        "a segment cut where a group ends",
        "kept.cuh",
        {"first < count; first += kKeptGroup": "first < count / kKeptGroup * kKeptGroup; first += kKeptGroup"},
        "check_kept",
    ),
    Fault(
        "a row of the weight that keeps what was there",
        "kept.cuh",
        {"if (count == 0 && args.target.add) return;": "if (count == 0) return;"},
        "check_kept",
    ),
    Fault(
        "columns of the first block for all",
        "kept.cuh",
        {"(block_index() % blocks * kKeptThreads + thread_index())": "thread_index()"},
        "check_kept",
    ),
    Fault(
        "an unused place with the logit of another id",
        "kept.cuh",
        {"id < 0 ? -infinity() : kept.bias": "kept.bias"},
        "check_kept",
    ),
    Fault(
        "logits without their bias",
        "kept.cuh",
        {"kept.bias ? sums[q] + kept.bias[id] : sums[q]": "sums[q]"},
        "check_kept",
    ),
    Fault(
        "a row taken for a token of kept ids",
        "kept.cuh",
        {"(kept.hidden) + kept.token_of[row]": "(kept.hidden) + row"},
        "check_kept",
    ),
    Fault(
        "gradients of a row of the result where a row of the matrix is",
        "kept.cuh",
        {"kept.token_of[row] * args.target.row_stride": "row * args.target.row_stride"},
        "check_kept",
    ),
    Fault(
        "too few blocks for the columns",
        "host.cpp",
        {"rows * divide_up(width, columns)": "rows * (width / columns)"},
        "check_kept",
    ),
    # --- finished gradients
    Fault("a factor of 1 that multiplies", "scale.cuh", {"if (factor == 1.f) return;": ""}, "check_scale"),
    Fault(
        "a tile that begins where the one before did not end",
        "scale.cuh",
        {"begin < skipped ? 0 : begin - skipped": "begin"},
        "check_scale",
    ),
    Fault(
        "turns that leave tiles out", "scale.cuh", {"block_count() * tile": "2 * block_count() * tile"}, "check_scale"
    ),
]


def battery(kernels: Kernels) -> None:
    """The checks that must notice a fault: on clusters, one block and the streamed kernels, in four orders."""
    for order in range(4):
        for device in ("cluster 1", "cluster 4", "cluster 8", "streamed"):
            kernels.use(DEVICES[device], order)
            c.check_rows(kernels, 5003, PAIR, KernelParams(), shift=order, biased=order % 2 == 0)
            c.check_in_place(kernels, 5003, PAIR, shift=order)
            if order == 0:
                c.check_extremes(kernels, PAIR)
                c.check_absent_and_zero_gradient(kernels, PAIR)
        kernels.use(order=order)
        for rules in (PlanRules(), PlanRules(whole_sequences=True, score_inactive=False)):
            c.check_plan(kernels, *c.make_plan_inputs([7, 300, 0, 64, 1, 1300, *[9] * 20]), rules)
        c.check_sequences(kernels, KernelParams(level="sequence", off_policy_threshold=0.02, has_rollout=True))
        c.check_reduce(kernels, "clip", True)
        c.check_groups(kernels, "batch", "leave_one_out", 1)
        c.check_kept(kernels, 1031, torch.float32, wide=True, shift=order)
        kernels.use((90, 1, *DEVICES["cluster 1"][2:]), order)
        for dtype, shift in zip(c.DTYPES, (3, 7, 0), strict=True):
            c.check_scale(kernels, dtype, 60001, shift)


def build_with(fault: Fault | None, folder: Path) -> Path:
    few_types(ROOT / "csrc", folder, "f32, bf16")
    # So few tiles that each takes several turns.
    header = folder / "cuda" / "kernels.h"
    header.write_text(header.read_text().replace("kMaxPlanTiles = 2048", "kMaxPlanTiles = 3"))
    if fault:
        file = folder / "cuda" / fault.file
        text = file.read_text()
        for old, new in fault.replaced.items():
            assert text.count(old) == 1, f"{fault.file} holds this {text.count(old)} times: {old}"
            text = text.replace(old, new)
        file.write_text(text)
    return build_kernels(folder, ("-O0",))


def complaint(library: Path) -> str:
    """What the checks say of these kernels, "" for nothing. In a process of its own: a fault may well corrupt it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=report, args=(library, sender))
    child.start()
    sender.close()
    try:
        said = receiver.recv()
    except EOFError:
        said = "a crash"
    child.join()
    return said


def report(library: Path, sender: Connection) -> None:
    torch.set_num_threads(1)  # the threads of the parent are not here
    try:
        battery(Kernels(library))
        sender.send("")
    except (AssertionError, RuntimeError) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == c.__file__]
        where = " > ".join(frame.name for frame in frames)
        sender.send(f"{where}: {' '.join(str(error).split()) or frames[-1].line}")


def test_without_a_fault_nothing_is_found(tmp_path):
    assert complaint(build_with(None, tmp_path)) == ""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found(fault, tmp_path):
    said = complaint(build_with(fault, tmp_path))
    print(f"{fault.name}: {said[:160]}")
    assert said
    assert fault.caught_by in said
