"""Every pair of options on the CPU, the pairs that reach a kernel on every backend, against the float64 reference.

A point that cannot be computed is a failure, never a skip. The bound is the error of eager float32.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import lru_cache
from types import SimpleNamespace
from typing import get_args

import pytest
from conftest import SLOW, beyond_each_value
from helpers import (
    assert_within,
    call_counter,
    errors,
    fused,
    make_batch,
    off_policy,
    reference,
    use_mask_path,
)
from option_space import (
    CASES,
    CHUNK_ROWS,
    KERNEL_CASES,
    POINTS,
    Point,
    build,
    choose,
    eager_errors,
    name_of,
    rounding_of,
    values_of,
)

import grpo_kernels as gk
from grpo_kernels import reference as specification
from grpo_kernels.commands.harness import size_of_loss
from grpo_kernels.config import SURROGATE_RULES, Surrogate
from grpo_kernels.head.loop import TokenBatch

WALK = [(x, backend) for x in CASES for backend in ("cpu", "torch", *(("triton", "cuda") if x in KERNEL_CASES else ()))]
SEQUENCE = {"importance_sampling_level": "sequence"}


@lru_cache(maxsize=4)
def computed(point: Point, variation: int):
    """(batch, configuration, exact result, size of the loss, errors of eager float32): the same for every backend."""
    batch, config = build(point, choose(point, variation))
    exact, size = reference(batch, config), size_of_loss(batch, config)
    return batch, config, exact, size, eager_errors(batch, config, exact, size)


@pytest.mark.parametrize(("case", "backend"), WALK, ids=lambda x: x if isinstance(x, str) else name_of(x))
def test_variant_is_as_exact_as_eager_float32(case, backend, monkeypatch):
    point, variation = case
    batch, config, exact, size, eager = computed(point, variation)
    chosen = choose(point, variation)
    use_mask_path(monkeypatch, chosen["sampling_mask"], len(batch.weight))
    slack = rounding_of(point, chosen)
    assert exact.grads["hidden"].norm() > 0
    # The interpreter is slow, and chunks are the engine's: there each variation has one size of its own.
    for rows in CHUNK_ROWS if backend != "triton" else CHUNK_ROWS[1 + variation % 2 :][:1]:
        found = fused(batch, dataclasses.replace(config, chunk_rows=rows), backend)
        assert_within(errors(found, exact, size), eager, slack)


def test_the_walk_is_complete():
    assert {point[:2] for point, _ in CASES} == {point[:2] for point in POINTS} and len(CASES) > 100
    assert {"cpu", "cuda", "triton", "torch"} <= set(gk.available_backends())
    assert set(specification.SURROGATES) == set(SURROGATE_RULES) - {"vespo"}
    assert set(get_args(Surrogate)) == set(SURROGATE_RULES)


def test_the_walk_of_the_kernels_has_every_pair_of_options_and_every_loss():
    def pairs(cases):
        options = [sorted(choose(*case).items()) for case in cases]
        return {pair for x in options for pair in itertools.combinations(x, 2)}.union(*map(values_of, cases))

    assert pairs(KERNEL_CASES) == pairs([(point, variation) for point in POINTS for variation in range(3)])
    assert len(KERNEL_CASES) <= 60


class Marked:
    """A test that is marked `each_value`."""

    path, originalname = "", "test"

    def __init__(self, **params):
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return name == "each_value"


def test_the_mark_each_value_leaves_slow_backends_every_value_and_the_others_every_combination():
    items = [Marked(backend=x, n=n, c=c) for x, n, c in itertools.product(("cpu", *SLOW), range(3), "ab")]
    left = [item.callspec.params for item in items if item not in beyond_each_value(items)]
    for backend in ("cpu", *SLOW):
        own = [x for x in left if x["backend"] == backend]
        assert {x["n"] for x in own} == {0, 1, 2} and {x["c"] for x in own} == {"a", "b"}
        assert len(own) == (3 if backend in SLOW else 6)


@pytest.mark.parametrize(
    ("options", "off", "rows", "expected"),
    [
        ({}, True, 3, set()),
        (SEQUENCE, False, 3, set()),  # on-policy: its ratio is known
        ({**SEQUENCE, "beta": 0.1, "use_bias_correction_kl": True}, False, 7, {"sequences"}),
        (SEQUENCE, True, 7, {"sequences"}),
        (SEQUENCE, True, None, {"sequences"}),
        (SEQUENCE, True, 3, {"backward"}),
        ({"surrogate": "vespo"}, True, 6, {"sequences"}),
        ({"surrogate": "vespo"}, True, 5, {"backward"}),
        ({"off_policy_mask_threshold": 0.1}, True, 12, {"sequences"}),
        ({"off_policy_mask_threshold": 0.1}, True, 1, {"backward"}),
    ],
)
def test_sequences_are_one_chunk_or_their_logits_are_computed_again(monkeypatch, options, off, rows, expected):
    """A loss of single tokens; whole sequences in a chunk; statistics of all tokens first, and their logits again."""
    batch, calls = make_batch(3), []
    batch = off_policy(batch) if off else batch.with_options(ref_logps=batch.hidden.new_full(batch.ids.shape, -3.0))
    for method in ("sequences", "backward"):
        call_counter(monkeypatch, TokenBatch, method, calls, lambda *_, method=method, **__: method)
    fused(batch, gk.GRPOConfig(chunk_rows=rows, **options))
    assert set(calls) == expected
