"""What every backend does per token, without logits: plan, objective of sequences, sums. Plain torch is the reference.

Random configurations and batches, tiny: the interpreter runs each many times.
"""

from __future__ import annotations

import itertools

import kernel_checks as c
import pytest
import torch

from grpo_kernels.backends import get_backend
from grpo_kernels.backends.pytorch.plan import plan_tokens
from grpo_kernels.contract import TokenInputs
from grpo_kernels.names import COLUMNS, FIELD, KernelParams, PlanRules

KERNELS = ("cpu", "triton", "cuda")
CASES = range(28)  # of each test; on a CPU every surrogate at every level of the ratio
EACH = [(name, case) for name in KERNELS for case in CASES if name == "cpu" or case < 12]


@pytest.mark.parametrize(("name", "case"), EACH)
def test_plan(name, case):
    draw = c.Draw(case)
    c.check_plan(get_backend(name), *c.make_inputs(draw), c.make_rules(draw))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("sequences", "packed"), [(0, False), (3, False), (3, True)])
def test_plan_of_nothing(name, sequences, packed):
    ids = torch.zeros((0,) if packed else (sequences, 0), dtype=torch.int64)
    cu_seqlens = torch.zeros(sequences + 1, dtype=torch.int64) if packed else None
    inputs, rules = TokenInputs(torch.zeros(sequences), cu_seqlens=cu_seqlens), PlanRules(whole_sequences=True)
    found = get_backend(name).plan(inputs, ids, rules, torch.float32, ordered=True)
    assert found.counts.tolist() == [0] * (2 + sequences) and not found.lengths.any()
    assert found.offsets.tolist() == [0] * (sequences + 1)
    assert found.table.shape == (len(FIELD), 0) and found.order.numel() == 0


@pytest.mark.parametrize("name", KERNELS[1:])  # a CPU's are checked
@pytest.mark.parametrize("given", [[0, 5, 10**12], [-7, 5, 9], [5, -(10**12), 9], [8, 3, 10]])
def test_offsets_that_were_not_checked_stay_among_the_tokens(name, given):
    inputs = TokenInputs(torch.ones(9), cu_seqlens=torch.tensor(given))
    rules = PlanRules(whole_sequences=True, level="sequence")
    found = get_backend(name).plan(inputs, torch.zeros(9, dtype=torch.int64), rules, torch.float32, ordered=True)
    expected = [min(max(x, 0), 9) for x in given]
    assert found.offsets.tolist() == expected
    assert found.lengths.tolist() == [max(b - a, 0) for a, b in itertools.pairwise(expected)]
    params = KernelParams(level="sequence")
    get_backend(name).sequence_objective(slice(0, 2), None, found, params)
    assert get_backend(name).sums(found, params, None, 0).numbers.shape == (len(COLUMNS) * 3 + 3,)


@pytest.mark.parametrize("name", KERNELS)
def test_plan_of_more_blocks_than_are_scanned_at_once(name, monkeypatch):
    """Places in the order, across many blocks and sequences."""
    if name == "triton":
        from grpo_kernels.backends.triton import plan

        monkeypatch.setattr(plan, "ADDED_AT_ONCE", 2)
    draw = c.Draw(0)
    shape = (17, 12)
    advantages = draw.normal(17)
    advantages[::3] = 0.0
    inputs = TokenInputs(advantages, completion_mask=draw.chance(shape))
    ids, rules = torch.zeros(shape, dtype=torch.int64), PlanRules(aggregation="seq_mean", whole_sequences=True)
    assert plan_tokens(inputs, ids, rules, torch.float32, ordered=True).counts[:2].all()
    c.check_plan(get_backend(name), inputs, ids, rules)


@pytest.mark.parametrize(("name", "case"), EACH)
def test_sequence_objective(name, case):
    c.check_sequences(get_backend(name), case)


@pytest.mark.parametrize("case", CASES[::2])
@pytest.mark.parametrize("name", KERNELS)
def test_sums(name, case):
    before = torch.get_num_threads()
    torch.set_num_threads(1 + case % 3)
    try:
        c.check_sums(get_backend(name), case)
    finally:
        torch.set_num_threads(before)
