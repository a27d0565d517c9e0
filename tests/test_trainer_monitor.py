"""The monitor: each failure gives its alarm, once per episode; a run that learns gives none."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest
from training_logs import FAILURES, failing, log, step_record

from grpo_kernels.trainer.monitor import KINDS, Monitor, diagnose

README = Path(__file__).resolve().parents[1] / "grpo_kernels" / "trainer" / "README.md"


def alarms(records):
    monitor = Monitor()
    return [(record["step"], alarm) for record in records for alarm in monitor.update(record)]


@pytest.mark.parametrize(("steps", "seed"), [(60, 0), (300, 1), (1000, 2)])
def test_a_run_that_learns_gives_no_alarm(steps, seed):
    assert alarms(log(steps, seed=seed)) == []


SENTENCES = {
    "slow_rewards": "; the slowest is arithmetic. Profile",
    "constant_reward": "All rewards of the run are equal (0): nothing is learned. Check the reward",
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_failure_gives_its_alarm_once_for_each_severity(kind):
    found = [alarm for _, alarm in alarms(failing(kind))]
    assert {alarm.kind for alarm in found} == {kind}
    if kind not in ("gradient_instability", "mode_collapse", "kl_explosion"):  # these have several episodes
        assert [alarm.severity for alarm in found] in (["warning"], ["critical"], ["warning", "critical"])
    assert found[-1].severity == FAILURES[kind][1] and found[-1].message.endswith(KINDS[kind].advice)
    assert SENTENCES.get(kind, "") in found[-1].message


def test_an_episode_ends_and_may_begin_again_and_may_become_critical():
    def found(ratio_at):
        records = log(200, every=1000)
        for record in records[1:]:
            record["log_ratio_first_max"] = ratio_at(record["step"])
        return records, [(e.first, e.last, e.alarm.kind, e.alarm.severity) for e in diagnose(records)[0]]

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
    for second in ({"kl_sequence": kl * length}, {"completions/mean_length": length}):
        found = alarms([{"step": step, "kl": kl, **second} for step in range(1, 10)])
        assert [(step, alarm.severity) for step, alarm in found] == ([(3, severity)] if severity else [])
        spikes = [{"step": step, "kl": kl if step % 3 else 0.0, **second} for step in range(1, 10)]
        assert alarms(spikes) == []


@pytest.mark.parametrize(
    ("after", "problems", "severity"),
    [(0.40, 400, "warning"), (0.2, 400, "critical"), (0.7, 400, None), (0.4, 5, None)],
)
def test_hacking_compares_the_rewards_of_training_and_held_out_prompts(after, problems, severity):
    records = log(200, every=1000, accuracy=lambda share: 0.4)
    last = {"step": 200, "evaluation": {"reward": after, "problems": problems}}
    last["evaluation"]["reward_error"] = math.sqrt(after * (1 - after) / problems)
    found = alarms([*records, last])
    assert [alarm.severity for _, alarm in found] == ([severity] if severity else [])


def test_hacking_knows_no_accuracy_and_any_range_of_rewards():
    """A graded reward that rises on held-out prompts too, though no completion reaches 1; the same of rewards <= 0."""

    def found(low, high, held_out):
        records = log(200, every=100)
        for record in records:
            if "evaluation" in record:
                at = 0.35 + (held_out - 0.35) * record["step"] / 200
                record["evaluation"] = {"reward": low + (high - low) * at, "problems": 400, "pass_at_1": 0.0}
            else:
                record |= {key: low + (high - low) * record[key] for key in ("reward", "reward_min", "reward_max")}
                record["reward_std"] *= high - low
        return [alarm.kind for _, alarm in alarms(records)]

    for low, high in ((0.0, 0.3), (-8.0, -1.0)):
        assert found(low, high, 0.7) == [] and found(low, high, 0.35) == ["reward_hacking"]


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
    assert ["too easy" in a.message for a in found(since=0, **solved)] == [True]


def test_the_readme_describes_every_alarm():
    text = README.read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []
