"""The monitor: each failure gives its alarm, once per episode; a run that learns gives none."""

from __future__ import annotations

from pathlib import Path

import pytest
import training
from training_logs import FAILURES, failing, log

from grpo_kernels.trainer.monitor import RULES, Monitor

README = Path(__file__).resolve().parents[1] / "grpo_kernels" / "trainer" / "README.md"


def alarms(records):
    monitor = Monitor()
    return [(record["step"], alarm) for record in records for alarm in monitor.update(record)]


@pytest.mark.parametrize(("steps", "seed"), [(60, 0), (300, 1), (1000, 2)])
def test_a_run_that_learns_gives_no_alarm(steps, seed):
    assert alarms(log(steps, seed=seed)) == []


@pytest.mark.parametrize("kind", RULES)
def test_each_failure_gives_its_alarm_once_for_each_severity(kind):
    found = [alarm for _, alarm in alarms(failing(kind))]
    assert {alarm.kind for alarm in found} == {kind}
    assert [alarm.severity for alarm in found] in (["warning"], ["critical"], ["warning", "critical"])
    assert found[-1].severity == FAILURES[kind][1]
    assert found[-1].message.endswith(RULES[kind].advice) and "threshold" in found[-1].seen


def test_an_episode_ends_and_may_begin_again_and_may_become_critical():
    def found(ratio_at):
        records = log(200, every=1000)
        for record in records[1:]:
            record["log_ratio_first_max"] = ratio_at(record["step"])
        return records, [(a.first, a.last, a.kind, a.severity) for a in Monitor(records).alarms]

    _, twice = found(lambda step: 0.2 if step % 2 == 0 and (40 <= step < 60 or 120 <= step < 140) else 0.0)
    assert twice == [(40, 68, "first_ratio", "warning"), (120, 148, "first_ratio", "warning")]
    records, rising = found(lambda step: 0.0 if step < 50 else 0.2 if step < 53 else 3.0)
    assert [(step, a.severity) for step, a in alarms(records)] == [(50, "warning"), (53, "critical")]
    assert rising == [(50, None, "first_ratio", "critical")]


# --- single rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kl", "length", "severity"), [
    (0.5, 4, None), (0.05, 400, None), (0.2, 400, "warning"), (1.2, 100, "critical"),
])  # fmt: skip
def test_kl_must_be_large_per_token_and_per_sequence_for_three_steps(kl, length, severity):
    steps = [{"step": step, "kl": kl, "kl_sequence": kl * length} for step in range(1, 10)]
    assert [(step, alarm.severity) for step, alarm in alarms(steps)] == ([(3, severity)] if severity else [])
    assert alarms([record if record["step"] % 3 else {**record, "kl": 0.0} for record in steps]) == []


@pytest.mark.parametrize(("norms", "severity"), [
    ([1.0] * 20 + [5.0] * 3, "warning"), ([1.0] * 20 + [11.0] * 3, "critical"), ([1.0] * 20 + [3.9] * 3, None),
    ([1.0] * 20 + [99.0, 99.0, 1.0], None),  # clipped, and over
    ([20.0, 1.0] * 20, None),  # the first of two updates has the larger gradient
    ([1.0] * 19 + [11.0] * 3, None),  # too few to compare with
])  # fmt: skip
def test_gradient_norms_are_compared_with_the_median_before(norms, severity):
    found = alarms([{"step": step, "grad_norm": norm} for step, norm in enumerate(norms, 1)])
    assert [alarm.severity for _, alarm in found] == ([severity] if severity else [])


@pytest.mark.parametrize(("key", "at", "rise", "found"), [
    ("divergence", lambda step: 1e-4 * step, 0, []),  # from a teacher that is the model of the start
    ("divergence", lambda step: 0.2 if step <= 20 else 0.29, 0, []),
    ("divergence", lambda step: 0.2 if step <= 20 else 0.31, 0, ["divergence_rises"]),
    ("completions/mean_length", lambda step: 100 + step, 0, ["length_bias"]),
    ("completions/mean_length", lambda step: 100 + step, 1e-3, []),  # longer, and better
    ("completions/mean_length", lambda step: 100 + 0.3 * step, 0, []),
    ("unscored", lambda step: 1, 0, ["unscored"]),
    ("unscored", lambda step: step % 2, 0, []),
])  # fmt: skip
def test_what_grows_is_compared_with_earlier_steps(key, at, rise, found):
    limits = {"reward_min": 0.0, "reward_max": 1.0, "completions/count": 16}
    records = [{"step": step, key: at(step), "reward": 0.3 + rise * step, **limits} for step in range(1, 150)]
    assert [alarm.kind for _, alarm in alarms(records)] == found


def test_clipping_goes_by_updates_after_the_first_of_a_rollout():
    def found(**changes):
        records = [{"step": step, "clip_ratio/region": 0.3, "approx_kl": 0.05, **changes} for step in range(1, 30)]
        for record in records[::2]:
            record.update({"log_ratio_first_max": 0.0, "clip_ratio/region": 0.0, "approx_kl": 0.0})
        return [(step, alarm.kind) for step, alarm in alarms(records)]

    assert found() == [(20, "clipping")]
    # A clip range over sequences is so narrow that a large share says nothing by itself.
    assert found(approx_kl=0.004) == []


def hacking(*held_out, train=(0.2, 0.8), limits=(0.0, 1.0), error=0.01):
    """Severity of the alarm at the last of the evaluations, whose rewards are given. The training reward is train[0] in
    the 20 steps before all but the last of them, and train[1] in those before the last."""
    monitor, found = Monitor(), []
    for i, reward in enumerate(held_out, 1):
        for step in range(20 * (i - 1) + 1, 20 * i + 1):
            training = train[i == len(held_out)]
            monitor.update({"step": step, "reward": training, "reward_min": limits[0], "reward_max": limits[1]})
        found = monitor.update({"step": 20 * i, "evaluation": {"reward": reward, "reward_error": error}})
    assert {alarm.kind for alarm in found} <= {"reward_hacking"}
    return found[0].severity if found else None


@pytest.mark.parametrize(("held_out", "options", "severity"), [
    # The training reward has to rise by 5 % of the range of rewards, whatever that is,
    ((0.4, 0.4), dict(train=(0.2, 0.26), error=0.001), "warning"),
    ((0.4, 0.4), dict(train=(0.2, 0.24), error=0.001), None),
    ((-4.0, -4.0), dict(train=(-6.0, -5.4), limits=(-8.0, 0.0), error=0.001), "warning"),
    ((-4.0, -4.0), dict(train=(-6.0, -5.7), limits=(-8.0, 0.0), error=0.001), None),
    ((0.4, 0.4), dict(train=(0.8, 0.2), error=0.001), None),
    # and by twice the noise of the difference of two evaluations, which is 1.41 times their standard error.
    ((0.4, 0.4), dict(train=(0.2, 0.5), error=0.1), "warning"),
    ((0.4, 0.4), dict(train=(0.2, 0.46), error=0.1), None),
    # Where all problems have the same reward, or the error is not known, 1 % of the range is the noise.
    ((0.4, 0.409), dict(error=0.0), "warning"),
    ((0.4, 0.411), dict(error=None), None),
    # The held-out reward rose by less than the noise, 0.14; it fell by two, which is critical.
    ((0.4, 0.53), dict(error=0.1), "warning"),
    ((0.4, 0.55), dict(error=0.1), None),
    ((0.4, 0.13), dict(error=0.1), "warning"),
    ((0.4, 0.11), dict(error=0.1), "critical"),
    # It is compared with the best evaluation before; one that scored nothing is passed over.
    ((0.1, 0.6, 0.4, 0.5), dict(error=0.03), "critical"),
    ((0.1, 0.4, 0.2, 0.6), dict(error=0.03), None),
    ((0.4, None, 0.4), dict(), "warning"),
    ((0.4, None), dict(), None),
    # The highest reward everywhere is no failure: there is no room to rise.
    ((0.9, 0.9), dict(error=0.05), None),
    ((0.8, 0.8), dict(error=0.05), "warning"),
])  # fmt: skip
def test_hacking_compares_the_rewards_of_training_and_held_out_prompts(held_out, options, severity):
    assert hacking(*held_out, **options) == severity


def test_solved_groups_are_told_from_dead_ones():
    def found(**changes):
        records = log(60, every=1000)
        for record in records[1:]:
            record.update(changes)
        return [alarm.severity for _, alarm in alarms(records)]

    # All rewards of a step are equal: neither share says whether they are the lowest or the highest.
    equal = dict(zero_gradient_groups=1.0, all_min_groups=0.0, all_max_groups=0.0, reward_std=0.0)
    assert found(zero_gradient_groups=0.96, all_min_groups=0.95, all_max_groups=0.01, reward=0.1) == ["critical"]
    assert found(**equal, reward=0.0) == ["critical"]
    # A task that was learned is no failure, but rewards that are 1 from the start are none that can be learned.
    assert found(zero_gradient_groups=0.96, all_min_groups=0.01, all_max_groups=0.95, reward=0.99) == []
    assert found(**equal, reward=1.0) == []
    assert found(**equal, reward=1.0, reward_min=1.0, reward_max=1.0) == ["critical"]


@pytest.mark.parametrize("big", [1e300, -1e300, 1.7e308, 1e155, 5e-324])
def test_every_float_is_taken(big):
    records = log(60)
    for record in records[1::2]:
        record |= {key: big for key, value in record.items() if isinstance(value, float)}
        if "evaluation" in record:
            record["evaluation"] |= {"reward": big, "reward_error": abs(big), "problems": abs(big)}
    alarms(records)


@pytest.mark.parametrize(("options", "kinds"), [
    ({"max_grad_norm": 1e-12}, ["vanishing_steps"]), ({"max_grad_norm": 1e-3}, []),
    ({"optim_args": {"eps": 1e6}}, ["vanishing_steps"]),
])  # fmt: skip
def test_a_run_whose_weights_do_not_move(options, kinds, trained, capfd):
    records = training.steps(trained(reward_funcs="training:length", max_steps=10, **options))
    found = [alarm["kind"] for record in records for alarm in record.get("warnings", [])]
    assert [kind for kind in found if kind == "vanishing_steps"] == kinds


def test_a_warm_up_beyond_the_run_is_said(trained, capfd):
    trained(lr_scheduler_type="constant_with_warmup", warmup_steps=5, max_steps=2)
    assert "warmup_steps=5 is beyond max_steps=2: learning_rate is not reached\n" in capfd.readouterr().err


def test_the_readme_describes_every_alarm():
    text = README.read_text(encoding="utf-8")
    assert [kind for kind in RULES if f"`{kind}`" not in text] == []


def test_low_entropy_where_half_of_the_groups_are_solved_is_no_collapse():
    records = failing("mode_collapse")
    assert {alarm.kind for _, alarm in alarms(records)} == {"mode_collapse"}
    for record in records[1:]:
        if "loss" in record or "entropy" in record:
            record["all_max_groups"] = 0.6
    assert alarms(records) == []


def test_an_episode_of_hacking_ends_with_the_next_evaluation():
    monitor, limits = Monitor(), {"reward_min": 0.0, "reward_max": 1.0}
    for i, held_out in enumerate((0.4, 0.2, 0.45, 0.2), 1):
        for step in range(20 * (i - 1) + 1, 20 * i + 1):
            monitor.update({"step": step, "reward": 0.2 * i, **limits})
        monitor.update({"step": 20 * i, "evaluation": {"reward": held_out, "reward_error": 0.01}})
    assert [(alarm.kind, alarm.first, alarm.last) for alarm in monitor.alarms] == [
        ("reward_hacking", 40, 60), ("reward_hacking", 80, None),
    ]  # fmt: skip
