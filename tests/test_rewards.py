"""Rewards: loading and calling functions, adding up, failures, and the built-in ones.

test_pitfall_NN_...: by the number in the list of what goes wrong in GRPO trainers.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import TEMPLATE, tiny_chat
from transformers import AutoTokenizer

from grpo_kernels.trainer import RunError
from grpo_kernels.trainer.data import load_prompts
from grpo_kernels.trainer.rewards import Rewards
from grpo_kernels.trainer.rewards import worker as module
from grpo_kernels.trainer.rewards.answers import exact_answer, final_number, gold_number, gsm8k, last_number, reply

NAN = float("nan")
OWN = """
import asyncio, os, re, sys, time

def length(prompts, completions, completion_ids, **columns):
    return [float(len(c)) for c in completions]

def acts(completions, log_extra, data=None, **_):
    for i, word in enumerate(completions):
        if word == "match":
            re.match("(a+)+$", "a" * 60 + "b")
        if word == "sleep":
            open(os.environ.get("ASLEEP", os.devnull), "w").close()
            time.sleep(1000)
        if word == "leave":
            os._exit(3)
        if word == "raise":
            raise ZeroDivisionError("of my own")
        if word == "nap":
            time.sleep(0.4)
        if word == "answer":
            os.write(int(sys.argv[1]), data[i])
            time.sleep(1000)
        if word == "key":
            log_extra("key", [{(1, 2): 3}] * len(completions))
        if word == "deep":
            log_extra("deep", [eval("[" * 99 + "]" * 99)] * len(completions))
    return [1.0] * len(completions)

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


@pytest.fixture
def make():
    """Rewards that are closed after the test."""
    made = []

    def build(*specs, **options):
        made.append(Rewards(list(specs), **options))
        return made[-1]

    yield build
    for rewards in made:
        rewards.close()


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


# ---- here and in a process ------------------------------------------------------------------------------------------

in_both = pytest.mark.parametrize("timeout", [None, 20.0])


@in_both
def test_async_metrics_extra_and_the_step(timeout, make):
    batch = score(make("own_rewards:logs", "own_rewards:only_answers", timeout=timeout), ["a", "b"], answer=["a", "a"])
    assert_total(batch, [1.5, 0.5])
    assert batch.metrics == {"step": 3.5} and batch.extra == {"upper": ["A", "B"]}


@in_both
def test_a_function_of_a_file(timeout, make, tmp_path, monkeypatch):
    """Under the name of a module of Python's, which stays what it is; what lies beside the file is found."""
    folder = tmp_path / "rewards"
    folder.mkdir()
    (folder / "beside_it.py").write_text("worth = 2.0")
    (folder / "random.py").write_text(
        "from dataclasses import dataclass\nfrom beside_it import worth\n@dataclass\nclass A:\n    x: float\n"
        "def f(completions, **_):\n    return [A(worth).x for _ in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    rewards = make("rewards/random.py:f", timeout=timeout)
    assert rewards.names == ["f"] and hasattr(__import__("random"), "shuffle")
    assert_total(score(rewards, ["a"]), [2.0])


def test_a_file_that_was_mended_is_read_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("no_such_name")
    with pytest.raises(ValueError, match="NameError"):
        Rewards([f"{path}:f"])
    path.write_text("def f(completions, **_): return [1.0]")
    assert_total(score([f"{path}:f"], ["a"]), [1.0])


def test_a_process_gives_the_bits_that_a_call_here_gives(make):
    here, there = (score(make("own_rewards:odd", timeout=timeout), ["a"] * 7) for timeout in (None, 20.0))
    assert_total(there, here.total.tolist())
    assert str(here.steps) == str(there.steps) and math.isnan(here.metrics["infinite"])
    assert [f.row for f in there.failures] == [f.row for f in here.failures] == [5]
    assert math.isnan(there.metrics["infinite"])
    assert there.extra == {"when": ["2020-01-01"] * 7, "array": [[1.0, 1.0]] * 7}


@in_both
def test_results_of_the_wrong_length_or_type_are_named(timeout, make):
    rewards = make("own_rewards:wrong", timeout=timeout)
    number = "for a completion, expected a number, None, or"
    for kind, text in {
        "dict": "dict, expected a list of 1 numbers", "str": "str, expected a list", "none": "0 values, expected 1",
        "array": f"{'float' if timeout else 'ndarray'}, expected a list", "text": f"'1' {number}",
        "bytes": f".*1.* {number}", "object": f".*object object at .* {number}", "long": f".* {number}",
        "steps": rf"\['2'\] {number}",
        "no step": rf"\[\] {number}",
        **({} if timeout else {"longer": f"a int that cannot be shown {number}"}),
    }.items():  # fmt: skip
        with pytest.raises(RunError, match=f"reward 'wrong' returned {text}") as caught:
            score(rewards, ["a"], kind=[kind])
        assert len(str(caught.value)) < 200


@in_both
def test_a_column_that_cannot_be_copied_is_one_sentence(timeout, make):
    with pytest.raises(RunError, match=r"^reward 'odd' cannot be called: TypeError: cannot pickle '_thread.lock'"):
        score(make("own_rewards:odd", timeout=timeout), ["a"], column=[threading.Lock()])


def test_what_json_lacks_costs_the_completion_alone(make):
    batch = score(make("own_rewards:acts", timeout=20.0), ["a", "key"])
    assert_total(batch, [1.0, NAN])
    assert "its answer cannot be JSON" in batch.failures[0].message


@in_both
def test_log_extra_takes_a_hundred_levels(timeout, make):
    rewards = make("own_rewards:acts", timeout=timeout)
    assert len(score(rewards, ["a", "deep"]).extra["deep"]) == 2
    with pytest.raises(
        RunError, match=r"^log_extra\('nested'\) got 1 values; expected 1, of at most 100 levels of lists"
    ):
        score(
            [lambda completions, log_extra, **_: log_extra("nested", [eval("[" * 101 + "1" + "]" * 101)]) or [1]], "a"
        )


# ---- what comes from a process is data ------------------------------------------------------------------------------


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("answer", [
    b"\xff\xfe garbage", b"[" * 100_000, b"5", b'{"value": [1.0]}',
    *(b'{"value": [1], "metrics": {%s}, "extra": {%s}, "error": %s}' % parts for parts in (
        (b'"a": ["x"]', b"", b"null"), (b'"a": []', b"", b"null"), (b"", b'"a": 1', b"null"), (b"", b"", b"1"))),
], ids=range(8))  # fmt: skip
def test_an_answer_that_is_none_is_said(answer):
    with pytest.raises(ValueError, match=": "):
        module.read_answer(answer)


def message(data):
    return struct.pack("!i", len(data)) + data


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("data", [
    lambda path: message(pickle.dumps(Touch(path))), lambda path: struct.pack("!iQ", -1, 1 << 60),
], ids=["pickle", "long"])  # fmt: skip
def test_an_answer_of_a_process_that_is_none_is_no_verdict(data, make, tmp_path):
    """It is counted, by its reason; the trainer runs nothing of it, and goes on."""
    sent = data(tmp_path / "made")
    batch = score(make("own_rewards:acts", timeout=0.2), ["a", "answer", "c"], data=[sent] * 3)
    assert_total(batch, [1.0, NAN, 1.0])
    [failure] = batch.failures
    assert failure.row == 1 and "'own_rewards:acts'" in failure.message and "is no answer: " in failure.message
    assert not (tmp_path / "made").exists()


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
    (dict(specs=["format"], timeout=0), "reward timeout is 0, expected seconds above 0"),
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

    batch = score(["own_rewards:acts", "own_rewards:length"], ["a", "raise", "c"])
    assert_total(batch, [2.0, NAN, 2.0])
    [failure] = batch.failures
    assert failure.row == 1 and failure.message == "ZeroDivisionError: of my own" and "in acts" in failure.traceback

    for function in (returns(NAN, NAN), returns(None, None)):
        batch = score([function], ["a", "b"])
        assert batch.total.isnan().all() and batch.fatal is not None and "returns" in batch.fatal.message


@pytest.fixture
def patient(monkeypatch):
    """However busy this machine is: CPU time alone ends a call."""
    monkeypatch.setattr(module, "WALL_PER_CPU", 1000)


@pytest.mark.parametrize(("hang", "why"), [
    ("match", "0.2 s of CPU"), ("sleep", "2 s of wall-clock"), ("leave", "ended with status 3"),
    ("answer", "2 s of wall-clock"),  # of which half comes
])  # fmt: skip
def test_pitfall_12_a_reward_that_hangs_is_killed(hang, why, make, monkeypatch):
    """In the middle of the batch; scores are by index, and the next batch is scored as if nothing had been."""
    monkeypatch.setattr(module, "WALL_PER_CPU", 10 if "wall-clock" in why else 1000)
    rewards = make("own_rewards:acts", timeout=0.2)
    batch = score(rewards, ["a", hang, "aaa"], data=[struct.pack("!i", 1000) + b"half"] * 3)
    assert_total(batch, [1.0, NAN, 1.0])
    assert_total(score(rewards, ["a", "aa"]), [1.0, 1.0])
    [failure] = batch.failures
    assert failure.row == 1 and why in failure.message
    pid = rewards.functions[0].worker.process.pid
    rewards.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("hanging", [16, 64])
def test_pitfall_12_a_function_that_always_hangs_is_fatal_soon(hanging, make, monkeypatch):
    """After all at once, and eight of the 64 alone, which are not those of the first prompts."""
    rewards, calls = make("own_rewards:acts", timeout=0.1), []

    def call(arguments):
        calls.append(pickle.loads(arguments)["completions"])
        late = module.failed("timed out")._replace(late=True)
        return late if "match" in calls[-1] else module.Result([1.0], {}, {})

    monkeypatch.setattr(rewards.functions[0].worker, "call", call)
    batch = score(rewards, ["match"] * hanging + ["a"] * (64 - hanging))
    assert batch.total.isnan().sum() == len(batch.failures) == hanging
    assert len(calls) == 1 + (8 if hanging == 64 else 64)
    assert (hanging < 64 and batch.fatal is None) or "timed out" in batch.fatal.message


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


OWNER = f"""
import pickle, sys
sys.path[:0] = [{str(Path(module.__file__).parent)!r}, sys.argv[1]]
from worker import Worker
worker = Worker("own_rewards:acts", 100)
worker.call(pickle.dumps({{"completions": ["a"]}}))
print(worker.process.pid, flush=True)
worker.call(pickle.dumps({{"completions": ["sleep"]}}))
"""


def test_pitfall_12_a_worker_ends_with_the_trainer(own_module, tmp_path):
    """SIGKILL in the middle of a call that would not end for 1000 seconds."""
    command, asleep = [sys.executable, "-c", OWNER, own_module], tmp_path / "asleep"
    environment = os.environ | {"ASLEEP": str(asleep)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        pid = int(owner.stdout.readline())
        wait_until(asleep.exists)
        owner.kill()
    try:
        wait_until(lambda: state_of(pid) in ("gone", "Z"))
    finally:
        if state_of(pid) != "gone":
            os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("patient")
def test_pitfall_12_cpu_time_decides(make):
    """Of a busy machine, which keeps a process waiting: longer than the limit, it is within it."""
    assert_total(score(make("own_rewards:acts", timeout=0.3), ["a", "nap"]), [1.0, 1.0])


@pytest.mark.parametrize("gold", ["", "####", "#### x", "3 or 4", "#### 1/0", None])
def test_pitfall_13_bad_gold_fails_the_dry_run_and_scores_nothing(gold):
    with pytest.raises(ValueError, match=r"row 1, reward 'gsm8k': answer .* has no single number"):
        Rewards(["gsm8k"]).check({"answer": ["1", gold]})
    batch = score(["gsm8k"], ["#### 1", f"#### {gold}"], answer=["1", gold])
    assert_total(batch, [1.0, NAN])


def test_pitfall_13_a_completion_that_lists_every_number_scores_0():
    numbers = range(100)
    lists = [
        " ".join(map(str, numbers)),
        "#### " + " ".join(map(str, numbers)),
        "\n".join(f"#### {n}" for n in numbers),
        " ".join(f"\\boxed{{{n}}}" for n in numbers),
        "\\boxed{" + ",".join(map(str, numbers)) + "}",
        "The answer is " + " or ".join(map(str, numbers)),
        "\n".join(f"<answer>{n}</answer>" for n in numbers),
    ]
    for gold in ("0", "42", "99", "4"):
        assert gsm8k(lists, [gold] * len(lists)) == exact_answer(lists, [gold] * len(lists)) == [0.0] * len(lists)


# ---- built-in rewards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "answer"), [
    ("6 * 7 = 42\n#### 42", "42"),
    ("#### $1,234.50", "1234.5"),
    ("#### 1,234 apples", "1234"),
    ("#### -3.0", "-3"),
    ("\\boxed{\\$7} is right", "7"),
    ("\\boxed{1/2}", "0.5"),
    ("The answer is: **42**, because 6 is", None),
    ("The answer is 5. No: the answer is 7 apples. 3 are left.", "7"),
    ("the answer is 5\n#### 6", "6"),
    ("#### 42\n#### 42.0", "42"),
    ("#### 42\n#### 43", None),
    ("#### forty-two\nThe answer is 42", None),
    ("42", None),
    ("#### 1/0", None),
    ("She sold 48+24 = <<48+24=72>>72.\n#### 72", "48/2 = <<48/2=24>>24 clips in May.\n#### 72"),
    ("#### 1,000", 1000),
    ("#### " + "9" * 5000, None),
    ("####" * 50000, None),
    ("\\boxed{" * 50000, None),
    ("answer is " * 50000, None),
], ids=lambda text: str(text)[:40])  # fmt: skip
def test_final_number(text, answer):
    start = time.process_time()
    assert final_number(text) == (None if answer is None else gold_number(answer))
    assert time.process_time() - start < 20, "about 0.01; minutes where it is quadratic"


def test_last_number():
    scores = {"56": 1.0, "7 times 8 is 56.": 1.0, "56, or 54": 0.0, "fifty-six": 0.0, "": 0.0, "-56": 0.0, "56.0": 1.0}
    assert last_number([*scores], ["56"] * len(scores)) == [*scores.values()]


def test_exact_answer():
    think, twice = "<think>1</think><answer> 95 </answer>", "<answer>95</answer><answer>1</answer>"
    scores = {"95": 1.0, " 95 \n": 1.0, "95.": 0.0, think: 1.0, twice: 0.0}
    messages = [[{"role": "assistant", "content": text}] for text in scores]
    messages += [[{"role": "assistant", "content": [{"type": "text", "text": "95"}]}]]
    assert exact_answer([*scores, *messages], ["95"] * 11) == [*scores.values(), *scores.values(), 1.0]
    with pytest.raises(ValueError, match="row 0, reward 'exact_answer': answer is empty"):
        Rewards(["exact_answer"]).check({"answer": [" "]})
    for missing in (None, NAN, ["95"]):
        text = re.escape(f"row 1, reward 'exact_answer': answer is {missing!r}; expected a text or a number")
        with pytest.raises(ValueError, match=text):
            Rewards(["exact_answer"]).check({"answer": [95, missing]})
    with pytest.raises(ValueError, match="reads the column 'answer'; there are: prompt"):
        Rewards(["arithmetic"]).check({"prompt": ["1"]})


THINKS = TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
USER = [{"role": "user", "content": "begin with <think>"}]
BEGUN = [*USER, {"role": "assistant", "content": "<think>\n"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_chat(tmp_path_factory.mktemp("chat")))


@pytest.mark.parametrize(("template", "prompt", "begins"), [
    (TEMPLATE, USER, False), (TEMPLATE, BEGUN, True), (TEMPLATE, "2? <think>\n", True), (TEMPLATE, "<think> 2?", False),
    (THINKS, USER, True), (THINKS, BEGUN, True), (THINKS, "2?", False),
])  # fmt: skip
def test_format_counts_the_tag_that_a_prompt_ends_with(template, prompt, begins, tokenizer):
    """By the chat template, in a message of the assistant that is continued, or in a text; and no other one."""
    tokenizer.chat_template = template
    rewards, prompts = Rewards(["format"]), load_prompts([{"prompt": prompt}], tokenizer=tokenizer)
    rewards.check_form(tokenizer, prompts)
    completions = [reply(prompt, f"{tag}1</think> <answer>2</answer>\n") for tag in ("<think>\n", "")]
    given = dict(prompts=[prompt] * 2, completions=completions, completion_ids=[[1]] * 2, columns={}, step=0)
    assert rewards.score(**given).total.tolist() == [1.0 - begins, float(begins)]


@pytest.mark.usefixtures("patient")
def test_a_pattern_takes_the_whole_completion_and_is_killed_where_it_hangs(make):
    found = score(make("pattern=(a+)+.", timeout=0.3), ["a\n", " ab\n", "aab c", "a" * 60 + "bc"])
    assert_total(found, [0.0, 1.0, 0.0, NAN])
    assert_total(score(make("pattern=1.*2"), ["1\n2", "12", "0 1 2"]), [1.0, 1.0, 0.0])


def test_soft_overlong_is_dapos_penalty():
    rewards = Rewards(["soft_overlong=4"], [0.5], max_length=10)
    ids = [[1] * length for length in (1, 6, 7, 8, 10, 12)]
    given = dict(prompts=["p"] * 6, completions=["a"] * 6, completion_ids=ids, columns={}, step=0)
    assert rewards.score(**given).total.tolist() == [0.0, 0.0, -0.125, -0.25, -0.5, -0.5] and rewards.names == [
        "soft_overlong"
    ]
    rewards.check({"prompt": ["p"]})


@pytest.mark.parametrize("text", [
    "", "<think>1</think>2<answer>3</answer>", "<answer>3</answer><think>1</think>", "<think>1</think><answer>3",
    "<think><think>1</think><answer>3</answer>", "<think>1</think><answer>3</answer><answer>4</answer>", "0<think>" * 9,
    "<think>" * 50_000, "<think>" + "</think" * 50_000, "<think></think>" + " " * 300_000 + "x",
], ids=range(10))  # fmt: skip
def test_what_has_not_the_form_soon_has_0(text):
    assert score(["format"], [text, f" <think>{'<' * 9}\n</think>\n<answer></answer>\n"]).total.tolist() == [0.0, 1.0]


def test_format_needs_tags_that_the_tokenizer_writes():
    class Silent:
        def __call__(self, text, **_):
            return {"input_ids": [text]}

        def decode(self, ids, **_):
            return "" if ids == ["</think>"] else ids[0]

    with pytest.raises(ValueError, match=r"'format' would be 0 for every completion: .* has </think>, for which"):
        Rewards(["format"]).check_form(Silent(), [])
    Rewards(["arithmetic"]).check_form(Silent(), [])
