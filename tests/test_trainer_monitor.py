"""The monitor: each failure gives its alarm, once per episode; a run that learns gives none."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest
from training_logs import FAILURES, failing, log, step_record

from grpo_kernels.trainer.monitor import KINDS, Monitor

README = Path(__file__).resolve().parents[1] / "grpo_kernels" / "trainer" / "README.md"


def alarms(records):
    monitor = Monitor()
    return [(record["step"], alarm) for record in records for alarm in monitor.update(record)]


@pytest.mark.parametrize(("steps", "seed"), [(60, 0), (300, 1), (1000, 2)])
def test_a_run_that_learns_gives_no_alarm(steps, seed):
    assert alarms(log(steps, seed=seed)) == []


SENTENCES = {
    "mode_collapse": "the reward does not rise. Raise epsilon_high, add an entropy bonus",
    "slow_rewards": "; the slowest is arithmetic. Profile",
    "constant_reward": "All rewards of the run are equal (0): nothing is learned. Check the reward",
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_failure_gives_its_alarm_once_for_each_severity(kind):
    found = [alarm for _, alarm in alarms(failing(kind))]
    assert {alarm.kind for alarm in found} == {kind}
    if kind not in ("gradient_instability", "mode_collapse", "kl_explosion"):  # these have several episodes
        assert [alarm.severity for alarm in found] in (["warning"], ["critical"], ["warning", "critical"])
    advice = KINDS[kind].advice
    assert found[-1].severity == FAILURES[kind][1]
    assert found[-1].advice == advice if isinstance(advice, str) else found[-1].advice
    assert SENTENCES.get(kind, "") in found[-1].message


def test_an_episode_ends_and_may_begin_again_and_may_become_critical():
    def found(ratio_at):
        records = log(200, every=1000)
        for record in records[1:]:
            record["log_ratio_first_max"] = ratio_at(record["step"])
        return records, [(e.first, e.last, e.alarm.kind, e.alarm.severity) for e in Monitor(records).episodes]

    _, twice = found(lambda step: 0.2 if step % 2 == 0 and (40 <= step < 60 or 120 <= step < 140) else 0.0)
    assert twice == [(40, 68, "first_ratio", "warning"), (120, 148, "first_ratio", "warning")]
    records, rising = found(lambda step: 0.0 if step < 50 else 0.2 if step < 53 else 3.0)
    assert [(step, a.severity) for step, a in alarms(records)] == [(50, "warning"), (53, "critical")]
    assert rising == [(50, None, "first_ratio", "critical")]


# --- single rules -----------------------------------------------------------------------------------------------------


def test_the_divergence_to_the_model_of_the_start_grows_from_0():
    assert alarms([{"step": step, "divergence": 1e-4 * step} for step in range(1, 200)]) == []


@pytest.mark.parametrize(("key", "kind", "value"), [
    ("loss", "gradient_instability", math.nan), ("grad_norm", "gradient_instability", math.inf),
    ("kl", "kl_explosion", -math.inf),
])  # fmt: skip
def test_a_value_that_is_not_finite_is_critical_at_once(key, kind, value):
    first = step_record(1, 100, random.Random(0))
    (found,) = Monitor().update({**first, key: value})
    assert (found.kind, found.severity) == (kind, "critical") and str(value) in found.message


@pytest.mark.parametrize(("kl", "length", "severity"), [(0.5, 4, None), (0.05, 400, None), (0.2, 400, "warning")])
def test_kl_must_be_large_per_token_and_per_sequence_for_three_steps(kl, length, severity):
    steps = [{"step": step, "kl": kl, "kl_sequence": kl * length} for step in range(1, 10)]
    assert [(step, alarm.severity) for step, alarm in alarms(steps)] == ([(3, severity)] if severity else [])
    assert alarms([record if record["step"] % 3 else {**record, "kl": 0.0} for record in steps]) == []


def after(rewards, evaluations, limits=(0.0, 1.0)):
    """The alarms of each evaluation, by step, of a run with these training rewards."""
    monitor, found = Monitor(), {}
    for step, reward in enumerate([None, *rewards]):
        if step:
            monitor.update({"step": step, "reward": reward, "reward_min": limits[0], "reward_max": limits[1]})
        if step in evaluations:
            found[step] = monitor.update({"step": step, "evaluation": evaluations[step]})
    return found


def hacking(*held_out, train=(0.2, 0.8), limits=(0.0, 1.0), error=0.01, problems=1000, wave=0.0):
    """Severity of the alarm at the last of the evaluations, whose rewards are given. The training reward is train[0] in
    the 20 steps before all but the last of them, and train[1] in those before the last."""
    count = 20 * len(held_out)
    rewards = [train[i >= count - 20] + wave * (-1) ** i for i in range(count)]
    evaluations = {
        20 * i: {"reward": reward, "reward_error": error, "problems": problems} for i, reward in enumerate(held_out, 1)
    }
    found = after(rewards, evaluations, limits)[count]
    assert {alarm.kind for alarm in found} <= {"reward_hacking"}
    return found[0].severity if found else None


@pytest.mark.parametrize(("held_out", "options", "severity"), [
    # The training reward has to rise by 5 % of the range of rewards, whatever that is,
    ((0.4, 0.4), dict(train=(0.2, 0.26), error=0.001, problems=10**6), "warning"),
    ((0.4, 0.4), dict(train=(0.2, 0.24), error=0.001, problems=10**6), None),
    ((-4.0, -4.0), dict(train=(-6.0, -5.4), limits=(-8.0, 0.0), error=0.001, problems=10**6), "warning"),
    ((-4.0, -4.0), dict(train=(-6.0, -5.7), limits=(-8.0, 0.0), error=0.001, problems=10**6), None),
    ((0.4, 0.4), dict(train=(0.8, 0.2), error=0.001), None),
    # by twice the noise of the difference of two evaluations, which is 1.41 times their standard error,
    ((0.4, 0.4), dict(train=(0.2, 0.5), error=0.1), "warning"),
    ((0.4, 0.4), dict(train=(0.2, 0.46), error=0.1), None),
    # and by twice its own standard error, here 0.4 / sqrt(10).
    ((0.4, 0.4), dict(train=(0.2, 0.48), wave=0.4), "warning"),
    ((0.4, 0.4), dict(train=(0.2, 0.44), wave=0.4), None),
    # The noise of few problems, of range / (problems + 2), counts where all of them have the same reward.
    ((0.4, 0.4), dict(train=(0.2, 0.4), error=0.0, problems=20), "warning"),
    ((0.4, 0.4), dict(train=(0.2, 0.4), error=0.0, problems=10), None),
    ((0.4, 0.4), dict(train=(0.2, 0.4), error=None, problems=10), None),
    ((40.0, 40.0), dict(train=(20.0, 40.0), limits=(0.0, 100.0), error=0.0, problems=10), None),
    # 100 problems where their number is not known.
    ((0.4, 0.4), dict(train=(0.2, 0.26), error=0.0, problems=None), "warning"),
    ((0.4, 0.4), dict(train=(0.2, 0.2 + 0.051), error=0.018, problems=None), "warning"),
    ((0.4, 0.4 + 0.013), dict(error=0.0, problems=None), "warning"),
    ((0.4, 0.4 + 0.015), dict(error=0.0, problems=None), None),
    # The held-out reward rose by less than the noise, 0.14; it fell by two, which is critical.
    ((0.4, 0.53), dict(error=0.1), "warning"),
    ((0.4, 0.55), dict(error=0.1), None),
    ((0.4, 0.13), dict(error=0.1), "warning"),
    ((0.4, 0.11), dict(error=0.1), "critical"),
    # It is compared with the best evaluation before, and with the training reward of that time.
    ((0.1, 0.6, 0.4, 0.5), dict(error=0.03), "critical"),
    ((0.1, 0.4, 0.2, 0.6), dict(error=0.03), None),
    # The highest reward everywhere is no failure: there is no room to rise.
    ((0.9, 0.9), dict(error=0.05), None),
    ((0.8, 0.8), dict(error=0.05), "warning"),
    ((-1.0, -1.0), dict(train=(-6.0, -2.0), limits=(-8.0, -1.0), error=0.05), None),
    ((-1.2, -1.2), dict(train=(-6.0, -2.0), limits=(-8.0, -1.0), error=0.05), "warning"),
])  # fmt: skip
def test_hacking_compares_the_rewards_of_training_and_held_out_prompts(held_out, options, severity):
    assert hacking(*held_out, **options) == severity


def test_hacking_compares_with_the_training_reward_at_the_best_evaluation():
    """Without an evaluation before it the first steps count; an evaluation that scored nothing is passed over."""
    at = [0.2] * 20 + [0.8] * 60
    for rewards, held_out, limits, alarm in (
        (at, {20: 0.4, 40: 0.4}, (0.0, 1.0), True),  # 0.2 then, 0.8 now
        (at, {40: 0.4, 60: 0.4}, (0.0, 1.0), False),  # 0.8 at both
        (at, {20: 0.4, 40: None}, (0.0, 1.0), False),
        (at, {20: 0.4, 40: None, 60: 0.4}, (0.0, 1.0), True),
        (at, {0: 0.4, 80: 0.4}, (0.0, 1.0), True),  # before the first step
        ([0.2] * 10 + [0.8] * 20, {10: 0.4, 30: 0.4}, (0.0, 1.0), True),
        # 5 % of the range, 2, are more than 0.06. Without rewards and their range there is none.
        ([0.2] * 20 + [0.26] * 20, {20: 0.4, 40: 0.4}, (0.0, 1.0), True),
        ([0.2] * 20 + [0.26] * 20, {20: 0.4, 40: 0.4}, (0.0, 2.0), False),
        (at, {20: 0.4, 40: 0.4}, (None, None), False),
        ([None] * 40, {20: 0.4, 40: 0.4}, (0.0, 1.0), False),
    ):
        evaluations = {step: {"reward": reward, "problems": 10**6} for step, reward in held_out.items()}
        assert any(after(rewards, evaluations, limits).values()) == alarm, (held_out, limits)


def test_hacking_is_over_with_the_next_evaluation():
    evaluations = {20 * i: {"reward": x, "problems": 10**6} for i, x in enumerate((0.4, 0.4, 0.5, 0.5), 1)}
    found = after([0.2] * 20 + [0.5] * 40 + [0.9] * 20, evaluations)
    assert [len(alarms) for alarms in found.values()] == [0, 1, 0, 1]


def test_hacking_names_its_numbers():
    records = log(200, every=1000, accuracy=lambda share: 0.4)
    last = {"step": 200, "evaluation": {"reward": 0.3, "reward_error": 0.023, "problems": 400}}
    (found,) = [alarm for _, alarm in alarms([*records, last])]
    text = r"The training reward rose by 0\.\d+ \(threshold 0\.065\d*\) while the held-out reward went from 0.4 to 0.3 "
    assert re.match(text + r"\(400 problems, standard error 0.033\)\.", found.message)
    assert found.severity == "critical"


def test_advice_fits_what_the_log_shows():
    def found(kind, **changes):
        return [alarm.advice for _, alarm in alarms([{**r, **changes} for r in failing(kind)]) if alarm.kind == kind]

    unclipped = {"clip_ratio/high": 0.0}
    assert all(advice.startswith("Raise epsilon_high, add") for advice in found("mode_collapse"))
    assert all(advice.startswith("Add an entropy bonus") for advice in found("mode_collapse", **unclipped))
    assert found("mode_collapse", **unclipped, cispo_clip_ratio=0.1)[0].startswith("Raise epsilon_high")
    (advice,) = found("no_learning_signal", dropped_groups=0)
    assert advice == "Choose easier prompts, raise num_generations, or set dynamic_sampling."
    assert found("no_learning_signal", dropped_groups=3) == ["Choose easier prompts, or raise num_generations."]


def test_solved_groups_are_told_from_dead_ones():
    def found(since=40, **changes):
        records = log(60, every=1000)
        for record in records[1:]:
            record.update(changes if record["step"] > since else {})
        return [alarm for _, alarm in alarms(records)]

    dead = dict(zero_gradient_groups=0.96, all_min_groups=0.95, all_max_groups=0.01)
    solved = dict(zero_gradient_groups=0.96, all_min_groups=0.01, all_max_groups=0.95, reward=0.99)
    # All rewards of a step are equal: neither share says whether they are the lowest or the highest.
    equal = dict(zero_gradient_groups=1.0, all_min_groups=0.0, all_max_groups=0.0, reward_std=0.0)
    assert [a.severity for a in found(**dead)] == ["warning", "critical"]
    assert [a.severity for a in found(**equal, reward=0.0)] == ["warning", "critical"]
    assert re.search(r"in 9\d% every completion has the lowest reward", found(**equal, reward=0.0)[1].message)
    assert found(**solved) == found(**equal, reward=1.0) == []  # a task that was learned is no failure
    assert ["the prompts are too easy. Choose harder prompts" in a.message for a in found(since=0, **solved)] == [True]


@pytest.mark.parametrize("big", [1e300, -1e300, 1e155, 5e-324])
def test_every_float_is_taken(big):
    records = log(60)
    for record in records[1::2]:
        record |= {key: big for key, value in record.items() if isinstance(value, float)}
        if "evaluation" in record:
            record["evaluation"] |= {"reward": big, "reward_error": abs(big), "problems": abs(big)}
    alarms(records)


def test_the_readme_describes_every_alarm():
    text = README.read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []
