"""The classic failures of GRPO runs, found in the records of log.jsonl and said in words.

`KINDS` lists them; `Monitor.update` takes the record of a step and returns the alarms that begin with it. README.md,
beside this file, says of each what it means, where its threshold comes from, and what to do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

HISTORY = 100  # values kept of each metric
SPAN = 20  # steps of each of two means that are compared, and steps before the first comparison
WINDOW = 10  # steps over which a share is averaged; steps without a finding that end an episode
SOON = 3  # steps that suffice where waiting would waste the run

KL_PER_TOKEN, KL_PER_SEQUENCE = 0.1, 10.0  # nats; both must be exceeded
KL_CRITICAL = 100.0  # nats per sequence
SIGMA_WARNING, SIGMA_CRITICAL = 3.0, 4.5
GRADIENT_WARNING, GRADIENT_CRITICAL = 2.0, 4.0  # times the median: a floor where the standard deviation is tiny
ENTROPY, ENTROPY_OF_START = 0.2, 0.27  # nats per token; share of the start. Both must be undercut
UNIQUE = 0.5  # distinct completions / completions of a group
ZERO_GRADIENT_WARNING, ZERO_GRADIENT_CRITICAL = 0.5, 0.9  # share of groups
EASY = 0.5  # share of groups in which every completion has the highest reward, at the start too
REWARD_RISE = 0.05  # of the range of rewards seen
VARIANCE_RATIO = 3.0
LENGTH_RATIO = 1.25
DIVERGENCE_RATIO = 1.5  # of the start
ESS = 0.3
WEIGHT_LOW, WEIGHT_HIGH = 0.5, 2.0
MISMATCH = 0.036  # nats: mean |difference| of a normal distribution whose KL is 1e-3
CLIPPED, CLIPPED_KL = 0.2, 0.01  # share of tokens; nats per token to the old policy. Both must be exceeded
# Metrics whose first update of a rollout, at a ratio of 1, is compared with other first updates alone.
PER_UPDATE = ("grad_norm", "clip_ratio/region", "cispo_clip_ratio", "approx_kl")

Record = dict[str, Any]
Finding = tuple[str, str]  # severity; what was seen, a sentence


@dataclass(frozen=True)
class Alarm:
    """kind: a key of `KINDS`; severity: "warning" or "critical"; message: what was seen, the threshold, what to do."""

    kind: str
    severity: str
    message: str


class History:
    """values: the last `HISTORY` finite values of each metric; start: its first `SPAN`; reward_range: lowest and
    highest so far; evaluations: of each, its reward and those of the `SPAN` steps before."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.start: dict[str, list[float]] = {}
        self.reward_range: list[float] = []
        self.evaluations: list[list[float]] = []

    def push(self, record: Record) -> None:
        for key, value in record.items():
            if not is_number(value) or not math.isfinite(value):
                continue
            if key in ("reward_min", "reward_max"):
                self.reward_range = [min([*self.reward_range, value]), max([*self.reward_range, value])]
            key = key_of(key, record)
            self.values.setdefault(key, []).append(float(value))
            del self.values[key][:-HISTORY]
            if len(self.start.setdefault(key, [])) < SPAN:
                self.start[key].append(float(value))

    def mean(self, key: str, count: int = WINDOW, least: int = WINDOW) -> float | None:
        """Of the last `count` values; None where there are fewer than `least`."""
        values = self.values.get(key, [])
        return fmean(values[-count:]) if len(values) >= least else None

    def start_mean(self, key: str) -> float | None:
        values = self.start.get(key, [])
        return fmean(values) if len(values) == SPAN else None

    def change(self, key: str, over: int = 2 * SPAN) -> tuple[float, float] | None:
        """Mean of the last `SPAN` values less that of the first `SPAN` of the last `over`, and its standard error."""
        values = self.values.get(key, [])[-over:]
        return difference(values[-SPAN:], values[:SPAN]) if len(values) >= 2 * SPAN else None


def key_of(key: str, record: Record) -> str:
    """The name of a metric of this record in the history."""
    return f"{key}, first" if key in PER_UPDATE and "log_ratio_first_max" in record else key


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def variance(values: list[float]) -> float:
    mean = fmean(values)
    return fmean((value - mean) ** 2 for value in values)


def difference(new: list[float], old: list[float]) -> tuple[float, float]:
    """Difference of two means and its standard error."""
    return fmean(new) - fmean(old), math.sqrt(variance(new) / len(new) + variance(old) / len(old))


def deviation(value: float, past: list[float]) -> float:
    """Distance from the mean of `past` in standard deviations; 0 where there is too little to compare with."""
    return (value - fmean(past)) / max(math.sqrt(variance(past)), 1e-12) if len(past) >= SPAN else 0.0


def groups_at(history: History, key: str) -> float:
    """Mean share of groups in which every completion has the lowest ("all_min_groups") or the highest reward
    ("all_max_groups"). Where all rewards of a step are equal, the range of the run says which they are."""
    rows = list(zip(*(history.values.get(k, [])[-WINDOW:] for k in (key, "reward_std", "reward")), strict=False))
    low, high = history.reward_range or (0.0, 0.0)
    end = low if key == "all_min_groups" else high
    shares = [share if std > 0 else float(reward == end and low < high) for share, std, reward in rows]
    return fmean(shares) if shares else 0.0


# --- one number and a threshold ---------------------------------------------------------------------------------------

Check = Callable[[History, Record], "Finding | None"]
Value = Callable[[History, Record], "float | None"]


def rule(severity: str, value: Value, threshold: float, seen: str, *, below: bool = False) -> Check:
    """Finds a value above the threshold (`below`: under it), or NaN. seen: a sentence with {value}, {threshold} and
    metrics of the record."""

    def check(history: History, record: Record) -> Finding | None:
        found = value(history, record)
        if found is None or (found >= threshold if below else found <= threshold):
            return None
        return severity, seen.format_map({**record, "value": found, "threshold": threshold})

    return check


def mean(key: str, count: int = WINDOW, least: int = SOON) -> Value:
    return lambda history, record: history.mean(key, count, least)


def first_ratio(history: History, record: Record) -> float:
    return abs(record["log_ratio_first_max"])


def unscored(history: History, record: Record) -> float | None:
    failed, completions = history.mean("unscored"), history.mean("completions/count")
    return failed / completions if failed is not None and completions else None


def reward_time(history: History, record: Record) -> float:
    means = [history.mean(f"seconds/{part}") or 0.0 for part in ("rewards", "rollout", "update")]
    return means[0] / (sum(means) or 1.0)


FIRST_RATIO = "The largest |log-ratio| of the first update of a rollout is {value:.3g} (threshold {threshold:g})."
WEIGHT = f"The mean importance weight is {{value:.3g}} (thresholds {WEIGHT_LOW:g} and {WEIGHT_HIGH:g})."

# --- several numbers --------------------------------------------------------------------------------------------------


def reward_hacking(history: History, record: Record) -> Finding | None:
    """The held-out reward against the best before it, and the training reward then and now."""
    evaluation = record["evaluation"]
    reward = evaluation.get("reward")
    if reward is None:
        return None
    problems = int(evaluation.get("problems") or 100)
    rewards = history.values.get("reward", [])[-SPAN:]
    earlier = max(history.evaluations, key=lambda row: row[0], default=None)
    history.evaluations.append([float(reward), *rewards])
    if earlier is None or not rewards or not history.reward_range:
        return None
    rise, error = difference(rewards, earlier[1:] or history.start["reward"])
    low, high = history.reward_range
    # Of two evaluations; above 0 even where all problems have the same reward.
    noise = math.sqrt(2) * max(evaluation.get("reward_error") or 0.0, (high - low) / (problems + 2))
    threshold = max(REWARD_RISE * (high - low), 2 * noise)
    change = reward - earlier[0]
    if rise <= max(threshold, 2 * error) or change >= noise or reward >= high - 2 * noise:
        return None
    seen = (
        f"The training reward rose by {rise:.3g} (threshold {threshold:.3g}) while the held-out reward went from "
        f"{earlier[0]:.3g} to {reward:.3g} ({problems} problems, standard error {noise:.2g})."
    )
    return "critical" if change < -2 * noise else "warning", seen


def reward_outliers(history: History, record: Record) -> Finding | None:
    """Variance far above the start's, from rewards higher than any before: the mark of a newly found loophole. A
    reward of 0 and 1 gains variance by learning alone, and has no higher value to show."""
    start = history.start.get("reward_std", [])
    highest = history.values.get("reward_max", [])
    before, now = highest[:-WINDOW], highest[-WINDOW:]
    if len(start) < SPAN or not before or max(now) <= max(before):
        return None
    first, last = (fmean(x * x for x in stds) for stds in (start, history.values["reward_std"][-WINDOW:]))
    if first <= 0 or last <= VARIANCE_RATIO * first:
        return None
    seen = (
        f"The variance of the reward is {last / first:.1f} times that of the first {SPAN} steps (threshold "
        f"{VARIANCE_RATIO:g}), and the highest reward, {max(now):.3g}, is above all before it ({max(before):.3g})."
    )
    return "warning", seen


def mode_collapse(history: History, record: Record) -> Finding | None:
    entropy, start = history.mean("entropy"), history.start_mean("entropy")
    unique, solved = history.mean("completions/unique_ratio"), groups_at(history, "all_max_groups")
    trend = history.change("reward")
    if entropy is None or start is None or trend is None or (unique is not None and unique >= UNIQUE):
        return None
    if entropy >= min(ENTROPY, ENTROPY_OF_START * start) or solved >= 0.5 or trend[0] > 2 * trend[1]:
        return None
    alike = "" if unique is None else f", {unique:.0%} of a group's completions are distinct (threshold {UNIQUE:.0%})"
    seen = (
        f"Entropy is {entropy:.3f} nats per token, {entropy / start:.0%} of the start (thresholds {ENTROPY:g} nats and "
        f"{ENTROPY_OF_START:.0%}){alike}, and the reward does not rise."
    )
    return "critical" if trend[0] < -2 * trend[1] else "warning", seen


def kl_explosion(history: History, record: Record) -> Finding | None:
    if not math.isfinite(record["kl"]):
        return "critical", f"The KL to the reference policy is {record['kl']}."
    # Three steps: a single rare token can give the estimator k3 a large value, in both updates of a rollout.
    recent = history.values["kl"][-SOON:]
    length = record.get("completions/mean_length", math.inf)
    kl = min(recent)
    sequence = min(history.values.get("kl_sequence", [])[-SOON:] or [value * length for value in recent])
    if len(recent) < SOON or kl <= KL_PER_TOKEN or sequence <= KL_PER_SEQUENCE:
        return None
    sigma = deviation(kl, history.values["kl"][:-SOON])
    jump = f", {sigma:.1f} standard deviations above the steps before" if sigma > SIGMA_WARNING else ""
    total = f" and {sequence:.3g} per sequence" if math.isfinite(sequence) else ""
    seen = (
        f"For {SOON} steps, the KL to the reference policy is at least {kl:.3g} nats per token{total} (thresholds "
        f"{KL_PER_TOKEN:g} and {KL_PER_SEQUENCE:g}){jump}."
    )
    critical = sigma > SIGMA_CRITICAL or KL_CRITICAL < sequence < math.inf
    return "critical" if critical else "warning", seen


def divergence_rises(history: History, record: Record) -> Finding | None:
    recent, start = history.mean("divergence", SPAN, 2 * SPAN), history.start_mean("divergence")
    # From a teacher that is the model of the start, the divergence begins at 0.
    if recent is None or start is None or recent <= max(DIVERGENCE_RATIO * start, KL_PER_TOKEN):
        return None
    return "warning", (
        f"The divergence to the teacher is {recent:.3g} nats per token in the mean of {SPAN} steps, and was "
        f"{start:.3g} in the first {SPAN} (thresholds {KL_PER_TOKEN:g} and {DIVERGENCE_RATIO:g} times as much)."
    )


def not_finite(history: History, record: Record) -> Finding | None:
    for key in ("loss", "grad_norm"):
        value = record.get(key, 0.0)
        if not math.isfinite(value):
            return "critical", f"{key} is {value}: an update with it destroys the weights."
    return None


def gradient_norms(history: History, record: Record) -> Finding | None:
    # Norms vary by factors: on a logarithmic scale a normal distribution describes them better.
    norms = [math.log(norm) for norm in history.values.get(key_of("grad_norm", record), []) if norm > 0]
    if not norms or record.get("grad_norm", 0.0) <= 0:
        return None
    spike = deviation(norms[-1], norms[:-1])
    if spike > SIGMA_CRITICAL and (times := math.exp(norms[-1] - median(norms[:-1]))) > GRADIENT_CRITICAL:
        seen = (
            f"The gradient norm is {record['grad_norm']:.3g}: {times:.1f} times the median of the steps before, "
            f"{spike:.1f} standard deviations above them (threshold {SIGMA_CRITICAL:g})."
        )
        return "critical", seen
    # One such step in 700 is chance: so many within a window are not.
    before, recent = norms[:-WINDOW], norms[-WINDOW:]
    high = [sigma for norm in recent if (sigma := deviation(norm, before)) > SIGMA_WARNING]
    if len(high) < SOON or math.exp(max(recent) - median(before)) <= GRADIENT_WARNING:
        return None
    seen = (
        f"{len(high)} of the last {WINDOW} gradient norms are more than {SIGMA_WARNING:g} standard deviations above "
        f"the steps before (threshold {SOON} of them), up to {math.exp(max(recent)):.3g}."
    )
    return "warning", seen


def constant_reward(history: History, record: Record) -> Finding | None:
    low, high = history.reward_range or (0.0, 1.0)
    if low < high or history.mean("reward") is None:
        return None
    return "critical", f"All rewards of the run are equal ({low:.4g}): nothing is learned."


def no_learning_signal(history: History, record: Record) -> Finding | None:
    zero = history.mean("zero_gradient_groups")
    if zero is None or constant_reward(history, record) is not None:
        return None
    lowest, highest = groups_at(history, "all_min_groups"), groups_at(history, "all_max_groups")
    if highest > EASY and (history.start_mean("all_max_groups") or 0.0) > EASY:
        seen = f"In {highest:.0%} of the groups every completion has the highest reward (threshold {EASY:.0%}), and "
        return "warning", f"{seen}so it was at the start: the prompts are too easy."
    useless = zero - highest
    if useless <= ZERO_GRADIENT_WARNING:
        return None
    critical = useless > ZERO_GRADIENT_CRITICAL
    threshold = ZERO_GRADIENT_CRITICAL if critical else ZERO_GRADIENT_WARNING
    seen = (
        f"{zero:.0%} of the groups of the last {WINDOW} steps have equal rewards and no gradient (threshold "
        f"{threshold:.0%}, all-correct ones not counted); in {lowest:.0%} every completion has the lowest reward."
    )
    return "critical" if critical else "warning", seen


def length_bias(history: History, record: Record) -> Finding | None:
    length = history.change("completions/mean_length", over=HISTORY)
    reward = history.change("reward", over=HISTORY)
    now = history.mean("completions/mean_length", count=SPAN)
    if length is None or reward is None or now is None or now - length[0] <= 0:
        return None
    times = now / (now - length[0])
    if times <= LENGTH_RATIO or length[0] <= 2 * length[1] or reward[0] > 2 * reward[1]:
        return None
    seen = (
        f"Completions grew to {times:.2f} times their length within {HISTORY} steps, {now:.0f} tokens now (threshold "
        f"{LENGTH_RATIO:g}), while the reward did not rise (change {reward[0]:+.3g})."
    )
    return "warning", seen


def clipping(history: History, record: Record) -> Finding | None:
    """Of updates after the first of a rollout, which clips nothing. A clip range over sequences (GSPO) is so narrow
    that a large share says nothing by itself."""
    key = "clip_ratio/region" if "clip_ratio/region" in record else "cispo_clip_ratio"
    share, kl = history.mean(key), history.mean("approx_kl")
    if share is None or share <= CLIPPED or (kl is not None and kl <= CLIPPED_KL):
        return None
    moved = "" if kl is None else f", and the policy moved by {kl:.2g} nats per token (threshold {CLIPPED_KL:g})"
    seen = f"{share:.0%} of the tokens of the last {WINDOW} such updates were clipped (threshold {CLIPPED:.0%}){moved}."
    return "warning", seen


# --- the table --------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """title: for headings; needs: keys of a record, one of which must be there for the checks to run, in order, until
    one finds something; least: records that they take to find something; advice: ends each message."""

    title: str
    needs: tuple[str, ...]
    least: int
    checks: tuple[Check, ...]
    advice: str


KINDS = {
    "reward_hacking": Kind("Reward hacking", ("evaluation",), 2, (reward_hacking,),
        "Read the completions of the highest rewards; tighten the reward, raise beta, or go back to an earlier "
        "checkpoint."),
    "reward_outliers": Kind("Reward outliers", ("reward_std",), SPAN, (reward_outliers,),
        "Read the completions of the highest rewards: a loophole of the reward looks like this when it is found."),
    "mode_collapse": Kind("Mode collapse", ("entropy",), 2 * SPAN, (mode_collapse,),
        "Raise epsilon_high, add an entropy bonus (entropy_coef), lower the learning rate, or sample at a higher "
        "temperature."),
    "kl_explosion": Kind("KL explosion", ("kl",), SOON, (kl_explosion,),
        "Lower the learning rate, raise beta or set kl_target, and read the completions."),
    "divergence_rises": Kind("Divergence to the teacher rises", ("divergence",), 2 * SPAN, (divergence_rises,),
        "Lower the learning rate; beside rewards, raise distill_coef, or take them for what moves the policy away."),
    "gradient_instability": Kind("Gradient instability", ("grad_norm", "loss"), 1, (not_finite, gradient_norms),
        "Lower the learning rate or max_grad_norm; look for extreme advantages and ratios at this step. After a "
        "non-finite value, resume from the checkpoint before it."),
    "constant_reward": Kind("Constant reward", ("reward",), WINDOW, (constant_reward,),
        "Check the reward function on completions of samples.jsonl; if it is right, choose easier or harder prompts."),
    "no_learning_signal": Kind("No learning signal", ("zero_gradient_groups",), WINDOW, (no_learning_signal,),
        "Choose easier prompts (harder ones where all are right), raise num_generations, or set dynamic_sampling."),
    "length_bias": Kind("Length bias", ("completions/mean_length",), 2 * SPAN, (length_bias,),
        "Use a loss that does not divide by a sequence's length (dapo, dr_grpo), or a soft penalty of overlong "
        "completions (soft_overlong_cache)."),
    "truncation": Kind("Truncated completions", ("completions/clipped_ratio",), SOON, (
            rule("critical", mean("completions/clipped_ratio", SOON), 0.999,
                 f"No completion of the last {SOON} steps ended by itself: all were cut at max_completion_length."),
            rule("warning", mean("completions/clipped_ratio", least=WINDOW), 0.5,
                 "{value:.0%} of the completions were cut at max_completion_length (threshold {threshold:.0%}).")),
        "Raise max_completion_length; check that the model's EOS ids are those that end a completion."),
    "off_policy": Kind("Off-policy rollouts", ("rollout_mismatch/mean", "rollout_weight/mean", "rollout_ess"), SOON, (
            rule("critical", mean("rollout_ess"), ESS, below=True, seen=
                 "The effective sample size of the importance weights is {value:.2f} of the batch (threshold "
                 "{threshold:g})."),
            rule("warning", mean("rollout_weight/mean"), WEIGHT_LOW, WEIGHT, below=True),
            rule("warning", mean("rollout_weight/mean"), WEIGHT_HIGH, WEIGHT),
            rule("warning", mean("rollout_mismatch/mean"), MISMATCH,
                 "Log-probabilities of the sampling engine differ from the model's by {value:.3g} nats in the mean "
                 "(threshold {threshold:g}, which is a KL of 1e-3).")),
        "Check that the sampling engine has the current weights and the same temperature and precision; use fewer "
        "updates per rollout."),
    "first_ratio": Kind("First ratio is not 1", ("log_ratio_first_max",), 1, (
            rule("critical", first_ratio, 0.5, FIRST_RATIO), rule("warning", first_ratio, 0.01, FIRST_RATIO)),
        "Before the first update of a rollout, old and current policy are the same. Look for dropout, padding, "
        "temperature or precision that differ between the two computations."),
    "clipping": Kind("Clipping", ("clip_ratio/region", "cispo_clip_ratio"), WINDOW, (clipping,),
        "Lower the learning rate, use fewer updates per rollout, or widen epsilon."),
    "unscored": Kind("Unscored completions", ("unscored",), WINDOW, (
            rule("warning", unscored, 0.05, "{value:.0%} of the completions of the last "
                 f"{WINDOW} steps got no reward (threshold {{threshold:.0%}})."),),
        "Read the errors of the reward functions in the log; raise reward_timeout where calls time out."),
    "slow_rewards": Kind("Slow rewards", ("seconds/rewards",), WINDOW, (
            rule("warning", reward_time, 0.5, "Rewards take {value:.0%} of the time of a step (threshold "
                 "{threshold:.0%}); the slowest is {slowest_reward}."),),
        "Profile that reward function, or let it work in parallel."),
}  # fmt: skip


@dataclass
class Episode:
    """An alarm over its steps; last: the step after which it was over, None where it was not; quiet: steps without the
    finding."""

    first: int
    last: int | None
    alarm: Alarm
    quiet: int = 0


class Monitor:
    """Checks the records of a run in order. An alarm is returned once per episode, and again where a warning becomes
    critical; an episode ends after `WINDOW` steps without the finding (reward hacking: with the next evaluation).

    Given the records of a log so far, it goes on with the alarms that an uninterrupted run gives.
    """

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self._active: dict[str, Episode] = {}
        self._history = History()
        self._counts: Counter[str] = Counter()  # records that each kind has checked

    def update(self, record: Record) -> list[Alarm]:
        """The alarms that begin with this record: of a step, or an evaluation (with the key "evaluation")."""
        record = {key: value for key, value in record.items() if value is not None}
        self._history.push(record)
        alarms = []
        for name, kind in KINDS.items():
            if any(key in record for key in kind.needs):
                self._counts[name] += 1
                found = next(filter(None, (check(self._history, record) for check in kind.checks)), None)
                alarms += self._settle(name, found, record["step"])
        return alarms

    def checked(self) -> set[str]:
        """The kinds whose metrics were in enough records."""
        return {name for name, count in self._counts.items() if count >= KINDS[name].least}

    def _settle(self, kind: str, finding: Finding | None, step: int) -> list[Alarm]:
        episode = self._active.get(kind)
        if finding is None:
            if episode:
                episode.quiet += 1
                if episode.quiet >= (1 if kind == "reward_hacking" else WINDOW):
                    episode.last = step
                    del self._active[kind]
            return []
        severity, seen = finding
        alarm = Alarm(kind, severity, f"{seen} {KINDS[kind].advice}")
        if episode is None:
            self._active[kind] = Episode(step, None, alarm)
            self.episodes.append(self._active[kind])
            return [alarm]
        episode.quiet = 0
        if episode.alarm.severity == "critical" or severity == "warning":
            return []
        episode.alarm = alarm
        return [alarm]


def diagnose(records: Iterable[Record]) -> tuple[list[Episode], set[str]]:
    """Episodes of a whole log, in order, and the kinds whose metrics were in enough records to be checked."""
    monitor = Monitor()
    for record in records:
        monitor.update(record)
    return monitor.episodes, monitor.checked()
