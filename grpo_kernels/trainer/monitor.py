"""The classic failures of GRPO runs, found in the records of log.jsonl and said in words.

`Monitor.update` takes the record of a step and returns the alarms that begin with it. README.md, beside this file, says
of each what it means, where its threshold comes from, and what to do.
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
TRUNCATED_WARNING, TRUNCATED_CRITICAL = 0.5, 0.999  # share of completions
ESS = 0.3
WEIGHT_LOW, WEIGHT_HIGH = 0.5, 2.0
MISMATCH = 0.036  # nats: mean |difference| of a normal distribution whose KL is 1e-3
FIRST_LOG_RATIO_WARNING, FIRST_LOG_RATIO_CRITICAL = 0.01, 0.5  # nats
CLIPPED, CLIPPED_KL = 0.2, 0.01  # share of tokens; nats per token to the old policy. Both must be exceeded
# Metrics whose first update of a rollout, at a ratio of 1, is compared with other first updates alone.
PER_UPDATE = ("grad_norm", "clip_ratio/region", "cispo_clip_ratio", "approx_kl")
UNSCORED = 0.05  # share of completions
REWARD_TIME = 0.5  # share of the time of a step


@dataclass(frozen=True)
class Alarm:
    """kind: a key of `KINDS`; severity: "warning" or "critical"; message: what was seen, the threshold, what to do;
    value and threshold: the two numbers (value is NaN or infinite where that is the finding)."""

    kind: str
    severity: str
    message: str
    value: float
    threshold: float


class Kind(NamedTuple):
    """title: for headings; needs: keys of a record, one of which must be there for the check to run; least: records
    that the check takes to find something; advice: what people do about it, which ends each message."""

    title: str
    needs: tuple[str, ...]
    least: int
    advice: str


KINDS = {
    "reward_hacking": Kind("Reward hacking", ("evaluation",), 2,
        "Read the completions of the highest rewards; tighten the reward, raise beta, or go back to an earlier "
        "checkpoint."),
    "reward_outliers": Kind("Reward outliers", ("reward_std",), SPAN,
        "Read the completions of the highest rewards: a loophole of the reward looks like this when it is found."),
    "mode_collapse": Kind("Mode collapse", ("entropy",), 2 * SPAN,
        "Raise epsilon_high, add an entropy bonus (entropy_coef), lower the learning rate, or sample at a higher "
        "temperature."),
    "kl_explosion": Kind("KL explosion", ("kl",), SOON,
        "Lower the learning rate, raise beta or set kl_target, and read the completions."),
    "gradient_instability": Kind("Gradient instability", ("grad_norm", "loss"), 1,
        "Lower the learning rate or max_grad_norm; look for extreme advantages and ratios at this step. After a "
        "non-finite value, resume from the checkpoint before it."),
    "constant_reward": Kind("Constant reward", ("reward",), WINDOW,
        "Check the reward function on completions of samples.jsonl; if it is right, choose easier or harder prompts."),
    "no_learning_signal": Kind("No learning signal", ("zero_gradient_groups",), WINDOW,
        "Choose easier prompts (harder ones where all are right), raise num_generations, or set dynamic_sampling."),
    "length_bias": Kind("Length bias", ("completions/mean_length",), 2 * SPAN,
        "Use a loss that does not divide by a sequence's length (dapo, dr_grpo), or a soft penalty of overlong "
        "completions (soft_overlong_cache)."),
    "truncation": Kind("Truncated completions", ("completions/clipped_ratio",), SOON,
        "Raise max_completion_length; check that the model's EOS ids are those that end a completion."),
    "off_policy": Kind("Off-policy rollouts", ("rollout_mismatch/mean", "rollout_weight/mean", "rollout_ess"), SOON,
        "Check that the sampling engine has the current weights and the same temperature and precision; use fewer "
        "updates per rollout."),
    "first_ratio": Kind("First ratio is not 1", ("log_ratio_first_max",), 1,
        "Before the first update of a rollout, old and current policy are the same. Look for dropout, padding, "
        "temperature or precision that differ between the two computations."),
    "clipping": Kind("Clipping", ("clip_ratio/region", "cispo_clip_ratio"), WINDOW,
        "Lower the learning rate, use fewer updates per rollout, or widen epsilon."),
    "unscored": Kind("Unscored completions", ("unscored",), WINDOW,
        "Read the errors of the reward functions in the log; raise reward_timeout where calls time out."),
    "slow_rewards": Kind("Slow rewards", ("seconds/rewards",), WINDOW,
        "Profile that reward function, or let it work in parallel."),
}  # fmt: skip


class Finding(NamedTuple):
    severity: str
    seen: str
    value: float
    threshold: float


class History:
    """values: the last `HISTORY` finite values of each metric; start: its first `SPAN`; reward_range: lowest and
    highest so far; evaluations: of each, its reward and those of the `SPAN` steps before. All plain JSON."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.start: dict[str, list[float]] = {}
        self.reward_range: list[float] = []
        self.evaluations: list[list[float]] = []

    def push(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if not is_number(value) or not math.isfinite(value):
                continue
            key = key_of(key, record)
            self.values.setdefault(key, []).append(float(value))
            del self.values[key][:-HISTORY]
            if len(self.start.setdefault(key, [])) < SPAN:
                self.start[key].append(float(value))
            if key in ("reward_min", "reward_max"):
                self.reward_range = [min([*self.reward_range, value]), max([*self.reward_range, value])]

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
        if len(values) < 2 * SPAN:
            return None
        return difference(values[-SPAN:], values[:SPAN])


def key_of(key: str, record: dict[str, Any]) -> str:
    """The name of a metric of this record in the history."""
    return f"{key}, first" if key in PER_UPDATE and "log_ratio_first_max" in record else key


def difference(new: list[float], old: list[float]) -> tuple[float, float]:
    """Difference of two means and its standard error."""
    return fmean(new) - fmean(old), math.sqrt(variance(new) / len(new) + variance(old) / len(old))


def groups_at(history: History, key: str) -> float:
    """Mean share of groups in which every completion has the lowest ("all_min_groups") or the highest reward
    ("all_max_groups"). Where all rewards of a step are equal, the range of the run says which they are."""
    rows = list(zip(*(history.values.get(k, [])[-WINDOW:] for k in (key, "reward_std", "reward")), strict=False))
    low, high = history.reward_range or (0.0, 0.0)
    end = low if key == "all_min_groups" else high
    shares = [share if std > 0 else float(reward == end and low < high) for share, std, reward in rows]
    return fmean(shares) if shares else 0.0


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def variance(values: list[float]) -> float:
    mean = fmean(values)
    return fmean((value - mean) ** 2 for value in values)


def deviations(new: list[float], past: list[float]) -> list[float]:
    """Distances of new values from the mean of `past` in standard deviations; none where `past` is too short."""
    if len(past) < SPAN:
        return []
    mean, sigma = fmean(past), max(math.sqrt(variance(past)), 1e-12)
    return [(value - mean) / sigma for value in new]


class Monitor:
    """Checks the records of a run in order. An alarm is returned once per episode, and again where a warning becomes
    critical; an episode ends after `WINDOW` steps without the finding.

    Given the records of a log so far, it goes on with the alarms that an uninterrupted run gives.
    """

    def __init__(self) -> None:
        self._history = History()
        self._episodes: dict[str, list[Any]] = {}  # kind -> severity, steps without the finding

    def update(self, record: dict[str, Any]) -> list[Alarm]:
        """The alarms that begin with this record: of a step, or an evaluation (with the key "evaluation")."""
        if not isinstance(record, dict):
            raise TypeError(f"record is {type(record).__name__}; expected the dict of a line of log.jsonl")
        if "evaluation" in record:
            return self._settle("reward_hacking", _reward_hacking(self._history, record["evaluation"]), patience=1)
        record = {key: value for key, value in record.items() if value is not None}
        self._history.push(record)
        alarms = []
        for kind, check in CHECKS.items():
            if any(key in record for key in KINDS[kind].needs):
                alarms += self._settle(kind, check(self._history, record))
        return alarms

    def active(self) -> dict[str, str]:
        """Severity of each episode that has not ended, by kind."""
        return {kind: severity for kind, (severity, _) in self._episodes.items()}

    def _settle(self, kind: str, finding: Finding | None, *, patience: int = WINDOW) -> list[Alarm]:
        episode = self._episodes.get(kind)
        if finding is None:
            if episode:
                episode[1] += 1
                if episode[1] >= patience:
                    del self._episodes[kind]
            return []
        if episode and (episode[0] == "critical" or finding.severity == "warning"):
            episode[1] = 0
            return []
        self._episodes[kind] = [finding.severity, 0]
        message = f"{finding.seen} {KINDS[kind].advice}"
        return [Alarm(kind, finding.severity, message, finding.value, finding.threshold)]


def _reward_hacking(history: History, evaluation: dict[str, Any]) -> Finding | None:
    """The held-out reward against the best before it, and the training reward then and now."""
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
    return Finding("critical" if change < -2 * noise else "warning", seen, rise, threshold)


def _reward_outliers(history: History, record: dict[str, Any]) -> Finding | None:
    """Variance far above the start's, from rewards higher than any before: the mark of a newly found loophole. A
    reward of 0 and 1 gains variance by learning alone, and has no higher value to show."""
    recent = history.values.get("reward_std", [])[-WINDOW:]
    start = history.start.get("reward_std", [])
    highest = history.values.get("reward_max", [])
    before, now = highest[:-WINDOW], highest[-WINDOW:]
    if len(start) < SPAN or not before or max(now) <= max(before):
        return None
    first, last = fmean(x * x for x in start), fmean(x * x for x in recent)
    if first <= 0 or last <= VARIANCE_RATIO * first:
        return None
    seen = (
        f"The variance of the reward is {last / first:.1f} times that of the first {SPAN} steps (threshold "
        f"{VARIANCE_RATIO:g}), and the highest reward, {max(now):.3g}, is above all before it ({max(before):.3g})."
    )
    return Finding("warning", seen, last / first, VARIANCE_RATIO)


def _mode_collapse(history: History, record: dict[str, Any]) -> Finding | None:
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
    return Finding("critical" if trend[0] < -2 * trend[1] else "warning", seen, entropy, ENTROPY)


def _kl_explosion(history: History, record: dict[str, Any]) -> Finding | None:
    if not math.isfinite(record["kl"]):
        return Finding("critical", f"The KL to the reference policy is {record['kl']}.", record["kl"], KL_PER_TOKEN)
    # Three steps: a single rare token can give the estimator k3 a large value, in both updates of a rollout.
    recent = history.values["kl"][-SOON:]
    length = record.get("completions/mean_length", math.inf)
    kl = min(recent)
    sequence = min(history.values.get("kl_sequence", [])[-SOON:] or [value * length for value in recent])
    if len(recent) < SOON or kl <= KL_PER_TOKEN or sequence <= KL_PER_SEQUENCE:
        return None
    sigma = sum(deviations([kl], history.values["kl"][:-SOON]))  # 0 where there is too little to compare with
    jump = f", {sigma:.1f} standard deviations above the steps before" if sigma > SIGMA_WARNING else ""
    total = f" and {sequence:.3g} per sequence" if math.isfinite(sequence) else ""
    seen = (
        f"For {SOON} steps, the KL to the reference policy is at least {kl:.3g} nats per token{total} (thresholds "
        f"{KL_PER_TOKEN:g} and {KL_PER_SEQUENCE:g}){jump}."
    )
    critical = sigma > SIGMA_CRITICAL or KL_CRITICAL < sequence < math.inf
    return Finding("critical" if critical else "warning", seen, kl, KL_PER_TOKEN)


def _gradient_instability(history: History, record: dict[str, Any]) -> Finding | None:
    for key in ("loss", "grad_norm"):
        value = record.get(key, 0.0)
        if not math.isfinite(value):
            return Finding("critical", f"{key} is {value}: an update with it destroys the weights.", value, math.inf)
    # Norms vary by factors: on a logarithmic scale a normal distribution describes them better.
    norms = [math.log(norm) for norm in history.values.get(key_of("grad_norm", record), []) if norm > 0]
    if not norms or record.get("grad_norm", 0.0) <= 0:
        return None
    spike = sum(deviations(norms[-1:], norms[:-1]))
    if spike > SIGMA_CRITICAL and (times := math.exp(norms[-1] - median(norms[:-1]))) > GRADIENT_CRITICAL:
        seen = (
            f"The gradient norm is {record['grad_norm']:.3g}: {times:.1f} times the median of the steps before, "
            f"{spike:.1f} standard deviations above them (threshold {SIGMA_CRITICAL:g})."
        )
        return Finding("critical", seen, spike, SIGMA_CRITICAL)
    # One such step in 700 is chance: so many within a window are not.
    before, recent = norms[:-WINDOW], norms[-WINDOW:]
    high = [sigma for sigma in deviations(recent, before) if sigma > SIGMA_WARNING]
    if len(high) < SOON or math.exp(max(recent) - median(before)) <= GRADIENT_WARNING:
        return None
    seen = (
        f"{len(high)} of the last {WINDOW} gradient norms are more than {SIGMA_WARNING:g} standard deviations above "
        f"the steps before (threshold {SOON} of them), up to {math.exp(max(recent)):.3g}."
    )
    return Finding("warning", seen, max(high), SIGMA_WARNING)


def _constant_reward(history: History, record: dict[str, Any]) -> Finding | None:
    low, high = history.reward_range or (0.0, 1.0)
    if low < high or history.mean("reward") is None:
        return None
    return Finding("critical", f"All rewards of the run are equal ({low:.4g}): nothing is learned.", low, low)


def _no_learning_signal(history: History, record: dict[str, Any]) -> Finding | None:
    zero = history.mean("zero_gradient_groups")
    if zero is None or _constant_reward(history, record) is not None:
        return None
    lowest, highest = groups_at(history, "all_min_groups"), groups_at(history, "all_max_groups")
    if highest > EASY and (history.start_mean("all_max_groups") or 0.0) > EASY:
        seen = f"In {highest:.0%} of the groups every completion has the highest reward (threshold {EASY:.0%}), and "
        return Finding("warning", f"{seen}so it was at the start: the prompts are too easy.", highest, EASY)
    useless = zero - highest
    if useless <= ZERO_GRADIENT_WARNING:
        return None
    critical = useless > ZERO_GRADIENT_CRITICAL
    threshold = ZERO_GRADIENT_CRITICAL if critical else ZERO_GRADIENT_WARNING
    seen = (
        f"{zero:.0%} of the groups of the last {WINDOW} steps have equal rewards and no gradient (threshold "
        f"{threshold:.0%}, all-correct ones not counted); in {lowest:.0%} every completion has the lowest reward."
    )
    return Finding("critical" if critical else "warning", seen, useless, threshold)


def _length_bias(history: History, record: dict[str, Any]) -> Finding | None:
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
    return Finding("warning", seen, times, LENGTH_RATIO)


def _truncation(history: History, record: dict[str, Any]) -> Finding | None:
    soon = history.mean("completions/clipped_ratio", count=SOON, least=SOON)
    share = history.mean("completions/clipped_ratio")
    if soon is not None and soon >= TRUNCATED_CRITICAL:
        seen = f"No completion of the last {SOON} steps ended by itself: all were cut at max_completion_length."
        return Finding("critical", seen, soon, TRUNCATED_CRITICAL)
    if share is not None and share > TRUNCATED_WARNING:
        seen = f"{share:.0%} of the completions were cut at max_completion_length (threshold {TRUNCATED_WARNING:.0%})."
        return Finding("warning", seen, share, TRUNCATED_WARNING)
    return None


def _off_policy(history: History, record: dict[str, Any]) -> Finding | None:
    ess = history.mean("rollout_ess", least=SOON)
    weight = history.mean("rollout_weight/mean", least=SOON)
    mismatch = history.mean("rollout_mismatch/mean", least=SOON)
    if ess is not None and ess < ESS:
        seen = f"The effective sample size of the importance weights is {ess:.2f} of the batch (threshold {ESS:g})."
        return Finding("critical", seen, ess, ESS)
    if weight is not None and not WEIGHT_LOW <= weight <= WEIGHT_HIGH:
        seen = f"The mean importance weight is {weight:.3g} (thresholds {WEIGHT_LOW:g} and {WEIGHT_HIGH:g})."
        return Finding("warning", seen, weight, WEIGHT_LOW if weight < WEIGHT_LOW else WEIGHT_HIGH)
    if mismatch is not None and mismatch > MISMATCH:
        seen = (
            f"Log-probabilities of the sampling engine differ from the model's by {mismatch:.3g} nats in the mean "
            f"(threshold {MISMATCH:g}, which is a KL of 1e-3)."
        )
        return Finding("warning", seen, mismatch, MISMATCH)
    return None


def _first_ratio(history: History, record: dict[str, Any]) -> Finding | None:
    value = abs(record["log_ratio_first_max"])
    if value <= FIRST_LOG_RATIO_WARNING:
        return None
    critical = not value <= FIRST_LOG_RATIO_CRITICAL
    threshold = FIRST_LOG_RATIO_CRITICAL if critical else FIRST_LOG_RATIO_WARNING
    seen = f"The largest |log-ratio| of the first update of a rollout is {value:.3g} (threshold {threshold:g})."
    return Finding("critical" if critical else "warning", seen, value, threshold)


def _clipping(history: History, record: dict[str, Any]) -> Finding | None:
    """Of updates after the first of a rollout, which clips nothing. A clip range over sequences (GSPO) is so narrow
    that a large share says nothing by itself."""
    key = "clip_ratio/region" if "clip_ratio/region" in record else "cispo_clip_ratio"
    share, kl = history.mean(key), history.mean("approx_kl")
    if share is None or share <= CLIPPED or (kl is not None and kl <= CLIPPED_KL):
        return None
    moved = "" if kl is None else f", and the policy moved by {kl:.2g} nats per token (threshold {CLIPPED_KL:g})"
    seen = f"{share:.0%} of the tokens of the last {WINDOW} such updates were clipped (threshold {CLIPPED:.0%}){moved}."
    return Finding("warning", seen, share, CLIPPED)


def _unscored(history: History, record: dict[str, Any]) -> Finding | None:
    failed, all_of_them = (history.mean(key) for key in ("unscored", "completions/count"))
    if failed is None or not all_of_them or failed / all_of_them <= UNSCORED:
        return None
    share = failed / all_of_them
    seen = f"{share:.0%} of the completions of the last {WINDOW} steps got no reward (threshold {UNSCORED:.0%})."
    return Finding("warning", seen, share, UNSCORED)


def _slow_rewards(history: History, record: dict[str, Any]) -> Finding | None:
    means = [history.mean(f"seconds/{part}") for part in ("rewards", "rollout", "update")]
    total = sum(mean for mean in means if mean is not None)
    if means[0] is None or total <= 0 or means[0] / total <= REWARD_TIME:
        return None
    name = record.get("slowest_reward")
    which = f"; the slowest is {name}" if name else ""
    seen = f"Rewards take {means[0] / total:.0%} of the time of a step (threshold {REWARD_TIME:.0%}){which}."
    return Finding("warning", seen, means[0] / total, REWARD_TIME)


Check = Callable[[History, dict[str, Any]], "Finding | None"]
CHECKS: dict[str, Check] = {
    "reward_outliers": _reward_outliers,
    "mode_collapse": _mode_collapse,
    "kl_explosion": _kl_explosion,
    "gradient_instability": _gradient_instability,
    "constant_reward": _constant_reward,
    "no_learning_signal": _no_learning_signal,
    "length_bias": _length_bias,
    "truncation": _truncation,
    "off_policy": _off_policy,
    "first_ratio": _first_ratio,
    "clipping": _clipping,
    "unscored": _unscored,
    "slow_rewards": _slow_rewards,
}


class Episode(NamedTuple):
    """An alarm over its steps; last: the step after which it was over, None where it was not."""

    first: int
    last: int | None
    alarm: Alarm


def diagnose(records: Iterable[dict[str, Any]]) -> tuple[list[Episode], set[str]]:
    """Episodes of a whole log, in order, and the kinds whose metrics were in enough records to be checked."""
    monitor = Monitor()
    episodes: list[Episode] = []
    current: dict[str, int] = {}  # kind -> index of its episode that has not ended
    seen: Counter[str] = Counter()
    for record in records:
        step = int(record["step"])
        seen.update(kind for kind, entry in KINDS.items() if any(record.get(key) is not None for key in entry.needs))
        for alarm in monitor.update(record):
            if alarm.kind in current:
                episodes[current[alarm.kind]] = episodes[current[alarm.kind]]._replace(alarm=alarm)
            else:
                current[alarm.kind] = len(episodes)
                episodes.append(Episode(step, None, alarm))
        for kind in current.keys() - monitor.active().keys():
            index = current.pop(kind)
            episodes[index] = episodes[index]._replace(last=step)
    return episodes, {kind for kind, count in seen.items() if count >= KINDS[kind].least}
