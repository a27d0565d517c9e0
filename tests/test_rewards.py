"""Rewards: loading and calling functions, adding up, and failures.

test_pitfall_NN_...: by the number in the list of what goes wrong in GRPO trainers.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
import threading
import time

import numpy as np
import pytest
import torch

from grpo_kernels.trainer import RunError
from grpo_kernels.trainer.rewards import Rewards

NAN = float("nan")
OWN = """
import asyncio

def length(prompts, completions, completion_ids, **columns):
    return [float(len(c)) for c in completions]

def only_answers(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

async def logs(completions, answer, trainer_state, log_metric, log_extra, **_):
    await asyncio.sleep(0)
    log_metric("step", trainer_state.global_step)
    log_metric("step", 0)
    log_extra("upper", [c.upper() for c in completions])
    return [0.5] * len(completions)

def odd(completions, log_metric, log_extra, **_):
    import datetime, fractions, numpy
    log_metric("infinite", float("inf"))
    log_metric("infinite", -float("inf"))
    log_extra("when", [datetime.date(2020, 1, 1)] * len(completions))
    log_extra("array", numpy.ones((len(completions), 2), numpy.float32))
    return [fractions.Fraction(1, 3), numpy.float32(0.1), None, (0.1, numpy.float64(0.2)), 5e-324, float("nan"), True]

def wrong(completions, kind, **_):
    import numpy
    return {"dict": {}, "str": "a", "none": [], "array": numpy.array(1.0), "text": ["1"], "bytes": [b"1"],
            "object": [object()], "long": [10**400], "longer": [10**5000], "no step": [[]], "steps": [["2"]]}[kind[0]]

value = 3
"""


@pytest.fixture(scope="module", autouse=True)
def own_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_rewards.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("own_rewards", None)


def score(rewards, completions, **columns):
    count = len(completions)
    return (rewards if isinstance(rewards, Rewards) else Rewards(rewards)).score(
        prompts=["p"] * count, completions=completions, completion_ids=[[1]] * count, columns=columns, step=7
    )


def assert_total(batch, expected):
    torch.testing.assert_close(batch.total, torch.tensor(expected), equal_nan=True, rtol=0, atol=0)
    assert batch.total.dtype == torch.float32


def returns(*values, name="returns"):
    def function(completions, **_):
        assert len(completions) == len(values)
        return list(values)

    function.__name__ = name
    return function


# ---- adding up -------------------------------------------------------------------------------------------------------


def test_the_total_is_a_weighted_sum():
    rewards = Rewards(["own_rewards:length", "own_rewards.only_answers", returns(1, 2)], [1.0, 10.0, -0.5])
    assert rewards.names == ["length", "only_answers", "returns"]
    batch = score(rewards, ["ab", "c"], answer=["ab", "d"], other=[1, 2])
    assert_total(batch, [11.5, 0.0])
    assert batch.by_name["length"].tolist() == [2.0, 1.0] and batch.by_name["only_answers"].tolist() == [1.0, 0.0]
    assert set(batch.seconds) == set(rewards.names) and batch.steps is None and batch.fatal is None
    numbers = returns(np.float32(1), True, torch.tensor(0.5))
    assert_total(score([numbers, lambda completions, **_: torch.ones(3)], ["a"] * 3), [2.0, 2.0, 1.5])
    # A function that gives None takes no part in the sum of that completion.
    batch = score(Rewards([returns(1, None, None), returns(2, 2, None, name="b")], [1, 3]), ["a", "b", "c"])
    assert_total(batch, [7.0, 6.0, NAN])
    assert batch.by_name["returns"].isnan().tolist() == [False, True, True] and not batch.failures and not batch.fatal


def test_rewards_of_steps():
    batch = score(Rewards([returns([1, 2], [3], None), returns(1, None, 1, name="b")], [2, 3]), ["a", "b", "c"])
    assert batch.steps == [[2.0, 7.0], [6.0], []]  # the reward of the whole completion is the last step's
    assert_total(batch, [9.0, 6.0, 3.0])
    for values, others, steps in (
        (([1, 2],), ([10, 20],), [[11.0, 22.0]]),
        ((torch.ones(2), torch.ones(1)), (None, None), [[1.0, 1.0], [1.0]]),
        (([1, NAN], [1]), (None, None), [[], [1.0]]),
        (([1], [1]), (NAN, 1), [[], [2.0]]),
        # What a reward model gives, (B, 1), is a number for each completion.
        (torch.ones(2, 1), (None, None), None),
        (np.ones((2, 1)), (None, None), None),
        ((torch.ones(1), torch.ones(1, 1)), (None, None), None),
    ):
        batch = score([returns(*values), returns(*others, name="b")], ["a"] * len(values))
        assert batch.steps == steps and batch.by_name["returns"][-1] == (3.0 if len(values) == 1 else 1.0)
    with pytest.raises(ValueError, match=r"completion 0: .* rewards of \[1, 2\] steps"):
        score([returns([1, 2]), returns([1], name="b")], ["a"])


@pytest.mark.parametrize("values", [(1.0, 2), map(float, "12"), {1: 1, 2: 2}.values(), torch.tensor([[1.0], [2.0]])])
def test_a_function_may_return_any_list(values):
    assert_total(score([lambda completions, **_: values], ["a", "b"]), [1.0, 2.0])


# ---- calling ---------------------------------------------------------------------------------------------------------


def test_async_metrics_extra_and_the_step():
    batch = score(["own_rewards:logs", "own_rewards:only_answers"], ["a", "b"], answer=["a", "a"])
    assert_total(batch, [1.5, 0.5])
    assert batch.metrics == {"step": 3.5} and batch.extra == {"upper": ["A", "B"]}


def test_a_function_of_a_file(tmp_path, monkeypatch):
    """Under the name of a module of Python's, which stays what it is; what lies beside the file is found."""
    folder = tmp_path / "rewards"
    folder.mkdir()
    (folder / "beside_it.py").write_text("worth = 2.0")
    (folder / "random.py").write_text(
        "from dataclasses import dataclass\nfrom beside_it import worth\n@dataclass\nclass A:\n    x: float\n"
        "def f(completions, **_):\n    return [A(worth).x for _ in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    rewards = Rewards(["rewards/random.py:f"])
    assert rewards.names == ["f"] and hasattr(__import__("random"), "shuffle")
    assert_total(score(rewards, ["a"]), [2.0])


def test_a_file_that_was_mended_is_read_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("no_such_name")
    with pytest.raises(ValueError, match="NameError"):
        Rewards([f"{path}:f"])
    path.write_text("def f(completions, **_): return [1.0]")
    assert_total(score([f"{path}:f"], ["a"]), [1.0])


def test_numbers_of_any_type_are_rewards():
    batch = score(["own_rewards:odd"], ["a"] * 7)
    assert_total(batch, [1 / 3, 0.1, NAN, 0.1 + 0.2, 5e-324, NAN, 1.0])
    assert batch.steps[3] == [0.1, 0.2] and math.isnan(batch.metrics["infinite"])
    assert [failure.row for failure in batch.failures] == [5]


def test_results_of_the_wrong_length_or_type_are_named():
    rewards = Rewards(["own_rewards:wrong"])
    number = "for a completion, expected a number, None, or"
    for kind, text in {
        "dict": "dict, expected a list of 1 numbers", "str": "str, expected a list", "none": "0 values, expected 1",
        "array": "ndarray, expected a list", "text": f"'1' {number}",
        "bytes": f".*1.* {number}", "object": f".*object object at .* {number}", "long": f".* {number}",
        "steps": rf"\['2'\] {number}",
        "no step": rf"\[\] {number}",
        "longer": f"a int that cannot be shown {number}",
    }.items():  # fmt: skip
        with pytest.raises(RunError, match=f"reward 'wrong' returned {text}") as caught:
            score(rewards, ["a"], kind=[kind])
        assert len(str(caught.value)) < 200


def test_a_column_that_cannot_be_copied_is_one_sentence():
    with pytest.raises(RunError, match=r"^reward 'odd' cannot be called: TypeError: cannot pickle '_thread.lock'"):
        score(["own_rewards:odd"], ["a"], column=[threading.Lock()])


def test_log_extra_takes_a_hundred_levels():
    def nested(levels):
        value = eval("[" * levels + "1" + "]" * levels)
        return lambda completions, log_extra, **_: (
            log_extra("nested", [value] * len(completions)) or [1] * len(completions)
        )

    assert len(score([nested(99)], ["a", "b"]).extra["nested"]) == 2
    with pytest.raises(
        RunError, match=r"^log_extra\('nested'\) got 1 values; expected 1, of at most 100 levels of lists"
    ):
        score([nested(101)], ["a"])


# ---- async functions -------------------------------------------------------------------------------------------------


@pytest.fixture
def make():
    """Rewards whose event loop is closed after the test."""
    made = []

    def build(*specs):
        made.append(Rewards(list(specs)))
        return made[-1]

    yield build
    for rewards in made:
        rewards.close()
        assert rewards.loop._thread is None


def test_async_functions_run_in_a_loop_of_their_own_side_by_side(make):
    """Each waits for the other. The loop is the same in each step: what a client keeps open belongs to it. The caller
    may have a running loop, as every notebook has."""
    events, seen = [asyncio.Event(), asyncio.Event()], []

    async def meets(own, other, completions):
        seen.append((asyncio.get_running_loop(), threading.current_thread()))
        events[own].set()
        await asyncio.wait_for(events[other].wait(), 60)
        return [float(own)] * len(completions)

    async def first(completions, **_):
        return await meets(0, 1, completions)

    async def second(completions, **_):
        return await meets(1, 0, completions)

    rewards = make(first, second)

    async def notebook():
        return [score(rewards, ["a", "b"]) for _ in range(2)]

    for batch in [*asyncio.run(notebook()), score(rewards, ["a", "b"])]:
        assert_total(batch, [1.0, 1.0])
    assert len(set(seen)) == 1 and seen[0][1] is not threading.current_thread()


def test_exceptions_of_async_functions_are_those_of_others(make):
    async def broken(completions, **_):
        await asyncio.sleep(0)
        raise ZeroDivisionError("of my own")

    async def leaves(completions, **_):
        raise SystemExit(3)

    async def is_cancelled(completions, **_):
        raise asyncio.CancelledError("by myself")

    for function, text in ((broken, "ZeroDivisionError: of my own"), (leaves, "SystemExit: 3"),
                           (is_cancelled, "CancelledError: by myself")):  # fmt: skip
        batch = score(make(function, "own_rewards:length"), ["a", "bb"])
        assert_total(batch, [NAN, NAN])
        assert batch.by_name["length"].tolist() == [1.0, 2.0]
        assert batch.fatal.message == text and f"in {function.__name__}" in batch.fatal.traceback

    async def interrupted(completions, **_):
        raise KeyboardInterrupt

    rewards = make(interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            score(rewards, ["a"])


def test_an_interrupt_cancels_what_still_waits(make):
    cancelled = threading.Event()

    async def waits(completions, **_):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupts(completions, **_):
        time.sleep(0.1)  # the other waits by now, or never begins
        raise KeyboardInterrupt

    rewards = make(waits, interrupts)
    with pytest.raises(KeyboardInterrupt):
        score(rewards, ["a"])
    rewards.close()
    assert cancelled.wait(60)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "text"), [
    (dict(specs=["no_such"]), "'no_such' is none of the built-in ones; expected one of exact_answer, arithmetic"),
    (dict(specs=["no_module:f"]), "module 'no_module' cannot be imported: ModuleNotFoundError"),
    (dict(specs=["folder/own.py"]), "'folder/own.py' names no function; expected module:function or"),
    (dict(specs=["own_rewards:"]), "names no function"),
    (dict(specs=["own_rewards:nothing"]), "'nothing' of module 'own_rewards' is None, expected a function"),
    (dict(specs=["own_rewards:value"]), "'value' of module 'own_rewards' is 3, expected a function"),
    (dict(specs=["format"], weights=[1.0, 2.0]), "expected one finite number for each of 1 functions"),
    (dict(specs=["format"], weights=[NAN]), "expected one finite number"),
    (dict(specs=["format", "format"]), "two reward functions have the same name"),
    (dict(specs=["gsm8k=3"]), "reward 'gsm8k=3': expected gsm8k"),
    (dict(specs=["pattern"]), "reward 'pattern': expected pattern=VALUE"),
    (dict(specs=["pattern=("]), "reward 'pattern=(': it is no regular expression: missing )"),
    (dict(specs=["soft_overlong="]), "reward 'soft_overlong=': expected soft_overlong=VALUE"),
    (dict(specs=["soft_overlong=9"], max_length=8), "expected a number of tokens, 1 to max_completion_length=8"),
    (dict(specs=["soft_overlong=x"], max_length=8), "expected a number of tokens"),
])  # fmt: skip
def test_bad_arguments(given, text):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        Rewards(**given)
    assert "\n" not in str(caught.value)


# ---- pitfalls --------------------------------------------------------------------------------------------------------


def test_pitfall_11_a_completion_without_a_score_is_left_out_and_a_batch_without_one_is_fatal():
    for bad in (NAN, math.inf):
        batch = score([returns(1, bad, 0), returns(1, 1, 1, name="other")], ["a", "b", "c"])
        assert_total(batch, [2.0, NAN, 1.0])
        assert [(f.name, f.row) for f in batch.failures] == [("returns", 1)] and batch.fatal is None
        assert batch.by_name["other"].tolist() == [1.0, 1.0, 1.0]

    for function in (returns(NAN, NAN), returns(None, None)):
        batch = score([function], ["a", "b"])
        assert batch.total.isnan().all() and batch.fatal is not None and "returns" in batch.fatal.message


def test_a_function_that_raises_has_failed_for_the_batch_and_is_not_called_again():
    """Alone, each completion would be the best of its batch."""
    calls = []

    def rank(completions, **_):
        calls.append(len(completions))
        if len(calls) == 1:
            raise RuntimeError("rate limit: 429")
        order = sorted(map(len, completions))
        return [order.index(len(completion)) / 4 for completion in completions]

    rewards, texts = Rewards([rank, "own_rewards:length"]), ["a", "bb", "ccc", "dddd"]
    batch = score(rewards, texts)
    assert_total(batch, [NAN] * 4)
    assert batch.by_name["length"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert [(f.name, f.row, f.message) for f in batch.failures] == [
        ("rank", row, "RuntimeError: rate limit: 429") for row in range(4)
    ]
    assert batch.fatal == batch.failures[0] and "in rank" in batch.fatal.traceback
    assert_total(score(rewards, texts), [1.0, 2.25, 3.5, 4.75])
    assert calls == [4, 4]
