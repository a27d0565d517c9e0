"""The CUDA kernels of rows, tokens and rewards on an emulated GPU, against float64: every element type, odd shapes and
addresses, clusters of every size and none, several orders of the threads; each kernel is called twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import kernel_checks as c
import pytest
import torch
from emulator import Kernels, build_kernels
from emulator.build import ROOT, compiler, few_types
from emulator.kernels import DEVICES
from helpers import planned_tokens
from kernel_checks import some_values

from grpo_kernels import names
from grpo_kernels.backends.pytorch.coefficients import token_objective
from grpo_kernels.contract import RowGradients, Rows, TokenInputs, TokenValues
from grpo_kernels.names import KernelParams, PlanRules

ORDERS = (0, 1, 2, 3)  # the lowest warp first, the highest first, two random ones
OPTIONS = ({}, {"logit_scale": 0.25}, {"softcap": 5.0, "logit_scale": 1.5})


@pytest.fixture(scope="module")
def library() -> Path:
    return build_kernels()


@pytest.fixture
def kernels(library) -> Kernels:
    kernels = Kernels(library)
    kernels.use()
    return kernels


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


def pair_name(pair: tuple[torch.dtype, torch.dtype]) -> str:
    return "-".join(str(t).removeprefix("torch.") for t in pair)


# --- rows -----------------------------------------------------------------------------------------------------------


def test_devices_take_the_ways_that_they_are_named_for(kernels, device):
    kernels.use(DEVICES[device])
    logits, ids = c.make_logits(30, 5003, torch.float32)
    c.single_pass(kernels, logits, logits, ids, c.make_table(30), KernelParams())
    launch = kernels.last_launch()
    if "streamed" in device:
        assert launch.kernel == "gk_single_pass_streamed_f32_f32"
        assert launch.grid == 2  # blocks do several rows each
        assert launch.cluster == 1
    else:
        assert launch.kernel == "gk_single_pass_resident_f32_f32"
        assert launch.cluster == (int(device[-1]) if "cluster" in device else 1)


def test_an_h200_holds_large_vocabularies(kernels):
    """As single_pass would launch them there: rows up to V = 262,144 stay in shared memory, 768 threads share an SM."""
    for vocab, blocks_per_multiprocessor in ((32000, 3), (128256, 3), (152064, 3), (202048, 2), (262144, 1)):
        logits, ids = c.make_logits(1, vocab, torch.float32)
        c.single_pass(kernels, logits, logits, ids, c.make_table(1), KernelParams())
        launch = kernels.last_launch()
        assert launch.kernel.startswith("gk_single_pass_resident")
        assert blocks_per_multiprocessor * (launch.shared + 1024) <= 233472
        assert blocks_per_multiprocessor * launch.block == 768
    logits, ids = c.make_logits(1, 2**19, torch.bfloat16)
    c.single_pass(kernels, logits, logits, ids, c.make_table(1), KernelParams())
    assert kernels.last_launch().kernel.startswith("gk_single_pass_streamed")


@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_leave_room_for_one_block_or_two(kernels, order):
    kernels.use(DEVICES["capability 8.0, resident"], order)
    for vocab, threads in ((17001, 384), (32003, 768)):
        c.check_rows(kernels, vocab, (torch.float32, torch.bfloat16), KernelParams(), shift=order)
        logits, ids = c.make_logits(1, vocab, torch.float32)
        c.single_pass(kernels, logits, logits.bfloat16(), ids, c.make_table(1), KernelParams())
        launch = kernels.last_launch()
        assert (launch.kernel, launch.block) == ("gk_single_pass_resident_f32_bf16", threads)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("pair", c.PAIRS, ids=pair_name)
def test_rows(kernels, pair, options):
    for i, vocab in enumerate(c.VOCABS):
        for j, device in enumerate(("cluster 1", "cluster 8", "streamed")):
            kernels.use(DEVICES[device], ORDERS[(i + j) % 4])
            c.check_rows(kernels, vocab, pair, KernelParams(**options), shift=i % 7, biased=(i + j) % 2 == 1)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_on_every_device(kernels, device, order):
    kernels.use(DEVICES[device], order)
    for pair, options in zip(c.PAIRS, [{}, {}, *OPTIONS], strict=True):
        c.check_rows(kernels, 5003, pair, KernelParams(**options), shift=order, biased=order % 2 == 1)


@pytest.mark.parametrize("shift", range(8))
def test_rows_at_every_address(kernels, device, shift):
    kernels.use(DEVICES[device])
    for pair in c.PAIRS[::2]:
        c.check_rows(kernels, 70, pair, KernelParams(softcap=5.0 * (shift % 2)), shift, biased=shift % 4 < 2)


@pytest.mark.parametrize("pair", c.PAIRS, ids=pair_name)
def test_gradient_over_the_logits(kernels, device, pair):
    for i, vocab in enumerate(c.VOCABS):
        kernels.use(DEVICES[device], ORDERS[i % 4])
        c.check_in_place(kernels, vocab, pair, shift=i % 5)
    for order in ORDERS:
        kernels.use(DEVICES[device], order)
        c.check_in_place(kernels, 5003, pair)


@pytest.mark.parametrize("pair", c.PAIRS, ids=pair_name)
def test_extreme_rows(kernels, device, pair):
    kernels.use(DEVICES[device])
    c.check_extremes(kernels, pair)


def test_masked_absent_zero_gradient_and_nan(kernels, device):
    kernels.use(DEVICES[device])
    for pair in c.PAIRS:
        c.check_absent_and_zero_gradient(kernels, pair)


@pytest.mark.parametrize("dtype", c.DTYPES)
def test_single_pass_is_stats_objective_gradient(kernels, device, dtype):
    kernels.use(DEVICES[device])
    c.check_parts(kernels, dtype, 1000, same_bits=False)


def test_logp_is_as_accurate_as_torch(kernels):
    c.check_accuracy(kernels)


@pytest.mark.parametrize("dtype", c.DTYPES[1:])
def test_sixteen_bit_conversion(kernels, dtype):
    c.check_sixteen_bits(kernels, dtype, every=37)


def test_refused_before_anything_is_launched(kernels):
    logits, ids = c.make_logits(3, 8, torch.bfloat16)
    planned = planned_tokens(c.make_table(3), some_values(3), torch.ones(3).bool(), torch.tensor([0, 3]))
    with pytest.raises(RuntimeError, match="dtype"):
        c.single_pass(kernels, logits, torch.empty(3, 8), ids, c.make_table(3), KernelParams())
    with pytest.raises(RuntimeError, match="vocab"):
        c.statistics(kernels, logits[:, :0], ids, torch.ones(3), KernelParams())
    with pytest.raises(RuntimeError, match="cover the tokens"):
        kernels.plan(TokenInputs(torch.ones(())), torch.zeros(2, 3).long(), PlanRules(), row_length=4)
    with pytest.raises(RuntimeError, match="range"):
        kernels.sequence_objective(slice(2, 1), None, planned, KernelParams())
    before = kernels.launches()
    c.statistics(kernels, logits[:0], ids[:0], torch.ones(0), KernelParams())
    kernels.token_objective(Rows(2, 2), c.make_table(3), some_values(3), KernelParams())
    kernels.sequence_objective(slice(1, 1), None, planned, KernelParams())
    assert kernels.launches() == before


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", names.SURROGATES)
def test_token_objective(kernels, surrogate):
    """csrc/objective.h at every token of a chunk, past the first block too, and at no other."""
    count = 700
    values = some_values(count)
    values.columns[0], values.columns[1], ref = torch.randn(3, count)
    table = c.make_table(
        count, ref=ref, old=torch.randn(count), multiplier=torch.rand(count), entropy_threshold=-0.5,
        weight_ratio=torch.rand(count), weight_direct=torch.rand(count),
    )  # fmt: skip
    for i, kl in enumerate(names.KL_ESTIMATORS):
        rows = Rows(0, 300, torch.randperm(count)[:300]) if i % 2 else Rows(100, 690)
        params = KernelParams(surrogate=surrogate, kl=kl, beta=0.1, bias_correction=kl == "k3", has_old=kl != "k1")
        found, expected = (TokenValues(values.columns.to(t), values.lse) for t in (torch.float32, torch.float64))
        kernels.token_objective(rows, table, found, params)
        token_objective(rows, table.double(), expected, params)
        torch.testing.assert_close(found.columns.double(), expected.columns, rtol=3e-5, atol=3e-6)


SEQUENCES = {
    "gspo": dict(level="sequence"),
    "sum": dict(level="sequence_sum", kl="k3", beta=0.1, bias_correction=True),
    "gmpo": dict(level="sequence", surrogate="gmpo", epsilon_low=0.1, epsilon_high=0.1),
    "cispo": dict(level="sequence", surrogate="cispo", kl="k2", beta=0.1),
    "vespo": dict(surrogate="reinforce", vespo=True),
    "off policy": dict(off_policy_threshold=0.02, has_rollout=True, kl="k1", beta=0.1),
    "off policy, by the old": dict(off_policy_threshold=0.02),
    "all": dict(level="sequence", vespo=True, off_policy_threshold=0.02, has_rollout=True),
    "no old policy": dict(level="sequence", off_policy_threshold=0.02, has_old=False),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence_objective(kernels, name):
    for order in ORDERS[:3]:
        kernels.use(order=order)
        c.check_sequences(kernels, KernelParams(**SEQUENCES[name]))


# --- the plan -------------------------------------------------------------------------------------------------------

RULES = {
    "defaults": PlanRules(),
    "sequence mean": PlanRules(aggregation="seq_mean", score_inactive=False),
    "entropy": PlanRules(aggregation="token_mean", entropy_coef=0.01, temperature=0.7),
    "fixed length": PlanRules(aggregation="fixed_length", max_completion_length=50.0, divides_by_rollout=True),
    "sum": PlanRules(aggregation="seq_sum", multiplies_rollout_weight=False, entropy_threshold=0.1),
    "KL": PlanRules(kl_has_gradient=True, needs_advantage=False),
    "sequence level": PlanRules(level="sequence", score_inactive=False),
    "sequence sum": PlanRules(aggregation="seq_mean", level="sequence_sum"),
    "whole sequences": PlanRules(whole_sequences=True, level="sequence"),
    "off policy": PlanRules(whole_sequences=True, needs_advantage=False, score_inactive=False, entropy_coef=0.01),
}
BATCHES = {"rows": (5, 300), "packed": [7, 300, 0, 0, 1, 900, 65], "many": [3] * 400, "one": [1500], "short": (3, 1)}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rules", RULES)
def test_plan(kernels, rules, batch):
    inputs, ids = c.make_plan_inputs(BATCHES[batch])
    kernels.use(order=len(rules) % 4)
    c.check_plan(kernels, inputs, ids, RULES[rules])


OPTIONAL = (
    "completion_mask",
    "old_logps",
    "ref_logps",
    "rollout_weights",
    "rollout_logps",
    "normalizer",
    "temperature",
)


@pytest.mark.parametrize("missing", [*[(name,) for name in OPTIONAL], OPTIONAL, ("old_logps", "rollout_weights")])
def test_plan_without_what_is_optional(kernels, missing):
    for batch in ("rows", "packed"):
        inputs, ids = c.make_plan_inputs(BATCHES[batch])
        inputs = inputs._replace(**dict.fromkeys(missing), entropy_threshold=None)
        if inputs.completion_mask is None:  # what was padding is a token like any other
            inputs = TokenInputs(*(None if x is None else x.nan_to_num(0.3) for x in inputs))
        for rules in ("defaults", "fixed length", "sequence level", "whole sequences"):
            c.check_plan(kernels, inputs, ids, RULES[rules])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_plan_of_masks_of_other_types(kernels, dtype):
    inputs, ids = c.make_plan_inputs((4, 100))
    mask = inputs.completion_mask.to(dtype) * (1 if dtype.itemsize == 1 else 2**20 - 256)  # its low byte is 0
    c.check_plan(kernels, inputs._replace(completion_mask=mask), ids, PlanRules())


def test_plan_of_one_number_per_sequence_or_for_all(kernels):
    inputs, ids = c.make_plan_inputs(BATCHES["packed"])
    sequences = len(BATCHES["packed"])
    for per_sequence in (torch.arange(sequences) % 3 - 1.0, torch.tensor(0.5), torch.tensor(0.0)):
        given = inputs._replace(
            advantages=per_sequence, rollout_weights=per_sequence + 1, temperature=torch.tensor(0.6)
        )
        for rules in ("defaults", "whole sequences"):
            c.check_plan(kernels, given, ids, RULES[rules])


def test_plan_with_a_normalizer_that_is_no_number_to_divide_by(kernels):
    inputs, ids = c.make_plan_inputs((3, 50))
    for normalizer in (0.0, torch.nan, torch.inf):
        for rules in ("defaults", "entropy"):
            c.check_plan(kernels, inputs._replace(normalizer=torch.tensor(normalizer)), ids, RULES[rules])


def test_plan_of_nothing(kernels):
    empty = torch.empty(0)
    for sequences in (0, 3):
        inputs = TokenInputs(empty, cu_seqlens=torch.zeros(sequences + 1).long())
        found = kernels.plan(inputs, empty.long(), PlanRules(whole_sequences=True))
        assert found.counts.tolist() == [0] * (2 + sequences) and not found.lengths.any() and not found.offsets.any()


@pytest.mark.slow
def test_plan_of_tiles_that_take_several_turns(kernels):
    """More tokens than a block has threads for each tile."""
    inputs, ids = c.make_plan_inputs([100_000, 3, 0, 434_000])
    c.check_plan(kernels, inputs, ids, RULES["sequence mean"])
    assert kernels.last_launch().grid <= 2048 and kernels.last_launch().block == 256


def test_launches(kernels):
    """How many kernels an operation takes."""
    inputs, ids = c.make_plan_inputs((3, 50))
    logits, chosen = c.make_logits(4, 100, torch.bfloat16)
    rows, table, values, params = Rows(0, 4), c.make_table(4), some_values(4), KernelParams()
    chunk = c.chunk_of(logits, chosen)
    operations = {
        lambda: kernels.plan(inputs, ids, PlanRules()): 3,
        lambda: kernels.plan(inputs, ids, PlanRules(), ordered=False): 2,
        lambda: kernels.single_pass(chunk, table, values, params, RowGradients(logits.clone())): 1,
        lambda: kernels.single_pass(chunk, table, values, params): 1,
        lambda: kernels.token_objective(rows, table, values, params): 1,
        lambda: c.check_sequences(kernels, KernelParams(level="sequence")): 2,  # two calls
    }
    for operation, expected in operations.items():
        before = kernels.launches()
        operation()
        assert kernels.launches() - before == expected


# --- sums and rewards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("surrogate", "has_old"), [("clip", True), ("clip", False), ("dppo_tv", True), ("ipo", True)])
@pytest.mark.parametrize("order", ORDERS)
def test_reduce(kernels, order, surrogate, has_old):
    kernels.use(order=order)
    c.check_reduce(kernels, surrogate, has_old)


def test_reduce_of_nothing(kernels):
    c.check_reduce_of_nothing(kernels)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_group_statistics(kernels, scale, baseline, ddof):
    kernels.use(order=ORDERS[ddof + 1])
    c.check_groups(kernels, scale, baseline, ddof)


@pytest.mark.parametrize("dtype", c.DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_scale(kernels, order, dtype):
    one_multiprocessor = (90, 1, *DEVICES["cluster 1"][2:])  # whose four blocks take several turns
    for device in (None, one_multiprocessor):
        kernels.use(device, order)
        for count, shift in ((1, 0), (7, 3), (8, 8), (101, 1), (4096, 5), (8193, 7), (60001, 2)):
            c.check_scale(kernels, dtype, count, shift)
    assert kernels.last_launch().grid == 4
    kernels.use()
    kernels.scale(torch.empty(2**16), torch.tensor(1.0))
    assert kernels.last_launch().grid == 16  # as many as there are tiles
    kernels.scale(torch.empty(0), torch.tensor(2.0))


# --- kept ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [*c.KEPT_WIDTHS, 2053])
@pytest.mark.parametrize("dtype", c.DTYPES)
def test_kept_ids(kernels, dtype, width):
    for wide in (False, True):
        kernels.use(order=ORDERS[2 * (width % 2) + wide])
        c.check_kept(kernels, width, dtype, wide=wide, shift=width % 5)


# --- the emulator, and what it finds on its own ---------------------------------------------------------------------


def test_under_sanitizers(tmp_path):
    """Address and undefined-behaviour sanitizers see every access of the kernels, of two pairs of types."""
    few_types(ROOT / "csrc", tmp_path, "f32, bf16", "bf16, bf16")
    flags = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    library = build_kernels(tmp_path, flags)
    # The sanitizer must come first, and finds the C++ library's functions only if that is there at once too.
    runtime = [
        subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(name.strip() for name in runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, "-m", "emulator.sanitized", str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout


def test_without_a_compiler_it_fails(monkeypatch, tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(FileNotFoundError, match="no-such-compiler"):
        build_kernels(tmp_path / "csrc")
