"""The classic failures of GRPO runs, found in the records of log.jsonl and said in words.

`KINDS` lists them; `Monitor.update` takes the record of a step and returns the alarms that begin with it. README.md,
beside this file, says of each what it means, where its threshold comes from, and what to do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from .records import Record, is_number

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
LARGEST = 1e100  # of a value in a history: squares of larger ones, and their sums, overflow
CLIPPED, CLIPPED_KL = 0.2, 0.01  # share of tokens; nats per token to the old policy. Both must be exceeded
# Metrics whose first update of a rollout, at a ratio of 1, is compared with other first updates alone.
PER_UPDATE = ("grad_norm", "clip_ratio/region", "cispo_clip_ratio", "approx_kl")

NAN = math.nan

Finding = tuple[str, str]  # severity; what was seen, a sentence


@dataclass(frozen=True)
class Alarm:
    """kind: a key of `KINDS`; severity: "warning" or "critical"; seen: what, and the threshold; advice: what to do."""

    kind: str
    severity: str
    seen: str
    advice: str

    @property
    def message(self) -> str:
        return f"{self.seen} {self.advice}"


class History:
    """record: the one to check; values: of each metric the last `HISTORY` up to `LARGEST`; start: its first `SPAN`;
    reward_range: lowest and highest so far; evaluations: of each, its reward and those of the `SPAN` steps before.

    A mean of too few values is NaN, which is neither above nor under a threshold.
    """

    def __init__(self) -> None:
        self.record: Record = {}
        self.values: dict[str, list[float]] = {}
        self.start: dict[str, list[float]] = {}
        self.reward_range: list[float] = []
        self.evaluations: list[list[float]] = []

    def push(self, record: Record) -> None:
        self.record = record
        for key, value in record.items():
            if not is_number(value) or not abs(value) <= LARGEST:  # or NaN
                continue
            if key in ("reward_min", "reward_max"):
                self.reward_range = [min([*self.reward_range, value]), max([*self.reward_range, value])]
            key = self.key_of(key)
            self.values.setdefault(key, []).append(float(value))
            del self.values[key][:-HISTORY]
            if len(self.start.setdefault(key, [])) < SPAN:
                self.start[key].append(float(value))

    def key_of(self, key: str) -> str:
        """The name of a metric of this record in the history."""
        return f"{key}, first" if key in PER_UPDATE and "log_ratio_first_max" in self.record else key

    def last(self, key: str, count: int) -> list[float]:
        return self.values.get(key, [])[-count:]

    def mean(self, key: str, count: int = WINDOW, least: int = WINDOW) -> float:
        """Of the last `count` values, of which there have to be `least`."""
        return fmean(self.last(key, count)) if len(self.values.get(key, [])) >= least else NAN

    def start_mean(self, key: str) -> float:
        values = self.start.get(key, [])
        return fmean(values) if len(values) == SPAN else NAN

    def change(self, key: str, over: int = 2 * SPAN) -> tuple[float, float]:
        """Mean of the last `SPAN` values less that of the first `SPAN` of the last `over`, and its standard error."""
        values = self.last(key, over)
        return difference(values[-SPAN:], values[:SPAN]) if len(values) >= 2 * SPAN else (NAN, NAN)

    def groups_at(self, key: str) -> float:
        """Mean share of groups in which every completion has the lowest ("all_min_groups") or the highest reward
        ("all_max_groups"). Where all rewards of a step are equal, the range of the run says which they are."""
        low, high = self.reward_range or (0.0, 0.0)
        end = low if key == "all_min_groups" else high
        rows = zip(*(self.last(k, WINDOW) for k in (key, "reward_std", "reward")), strict=False)
        shares = [share if std > 0 else float(reward == end and low < high) for share, std, reward in rows]
        return fmean(shares) if shares else 0.0


def variance(values: list[float]) -> float:
    mean = fmean(values)
    return fmean((value - mean) ** 2 for value in values)


def difference(new: list[float], old: list[float]) -> tuple[float, float]:
    """Difference of two means and its standard error."""
    return fmean(new) - fmean(old), math.sqrt(variance(new) / len(new) + variance(old) / len(old))


def deviation(value: float, past: list[float]) -> float:
    """Distance from the mean of `past` in standard deviations; 0 where there is too little to compare with."""
    return (value - fmean(past)) / max(math.sqrt(variance(past)), 1e-12) if len(past) >= SPAN else 0.0


# --- checks: of what they find, the first holds -----------------------------------------------------------------------


def reward_hacking(h: History) -> Iterator[Finding]:
    """The held-out reward against the best before it, and the training reward then and now."""
    evaluation = h.record["evaluation"]
    reward = evaluation.get("reward")
    if reward is None:
        return
    problems = evaluation.get("problems") or 100
    rewards = h.last("reward", SPAN)
    earlier = max(h.evaluations, key=lambda row: row[0], default=None)
    h.evaluations.append([float(reward), *rewards])
    if earlier is None or not rewards or not h.reward_range:
        return
    rise, error = difference(rewards, earlier[1:] or h.start["reward"])
    low, high = h.reward_range
    # Of two evaluations; above 0 even where all problems have the same reward.
    noise = math.sqrt(2) * max(evaluation.get("reward_error") or 0.0, (high - low) / (problems + 2))
    threshold = max(REWARD_RISE * (high - low), 2 * noise)
    change = reward - earlier[0]
    if rise > max(threshold, 2 * error) and change < noise and reward < high - 2 * noise:
        text = f"The training reward rose by {rise:.3g} (threshold {threshold:.3g}) while the held-out reward went "
        text += f"from {earlier[0]:.3g} to {reward:.3g} ({problems:,.0f} problems, standard error {noise:.2g})."
        yield "critical" if change < -2 * noise else "warning", text


def reward_outliers(h: History) -> Iterator[Finding]:
    """Variance far above the start's, from rewards higher than any before: the mark of a newly found loophole. A
    reward of 0 and 1 gains variance by learning alone, and has no higher value to show."""
    start, highest = h.start.get("reward_std", []), h.values.get("reward_max", [])
    before, now = (max(values, default=NAN) for values in (highest[:-WINDOW], highest[-WINDOW:]))
    if len(start) == SPAN and now > before:
        first, last = (fmean(x * x for x in stds) for stds in (start, h.last("reward_std", WINDOW)))
        if last > VARIANCE_RATIO * first > 0:
            text = f"The variance of the reward is {last / first:.1f} times that of the first {SPAN} steps (threshold "
            text += f"{VARIANCE_RATIO:g}), and the highest reward, {now:.3g}, is above all before it ({before:.3g})."
            yield "warning", text


def mode_collapse(h: History) -> Iterator[Finding]:
    entropy, start, unique = h.mean("entropy"), h.start_mean("entropy"), h.mean("completions/unique_ratio")
    low = entropy < min(ENTROPY_OF_START * start, ENTROPY) and not unique >= UNIQUE
    change, error = h.change("reward")
    if low and h.groups_at("all_max_groups") < 0.5 and change <= 2 * error:
        text = f"Entropy is {entropy:.3f} nats per token, {entropy / start:.0%} of the start (thresholds {ENTROPY:g} "
        text += f"nats and {ENTROPY_OF_START:.0%})"
        if unique < UNIQUE:
            text += f", {unique:.0%} of a group's completions are distinct (threshold {UNIQUE:.0%})"
        yield "critical" if change < -2 * error else "warning", f"{text}, and the reward does not rise."


def kl_explosion(h: History) -> Iterator[Finding]:
    if not math.isfinite(h.record["kl"]):
        yield "critical", f"The KL to the reference policy is {h.record['kl']}."
    # Three steps: a single rare token can give the estimator k3 a large value, in both updates of a rollout.
    kl, sequence = (min(h.last(key, SOON), default=NAN) for key in ("kl", "kl_sequence"))
    if kl > KL_PER_TOKEN and sequence > KL_PER_SEQUENCE and len(h.last("kl", SOON)) == SOON:
        sigma = deviation(kl, h.values["kl"][:-SOON])
        jump = f", {sigma:.1f} standard deviations above the steps before" if sigma > SIGMA_WARNING else ""
        text = (
            f"For {SOON} steps, the KL to the reference policy is at least {kl:.3g} nats per token and {sequence:.3g} "
        )
        text += f"per sequence (thresholds {KL_PER_TOKEN:g} and {KL_PER_SEQUENCE:g}){jump}."
        yield "critical" if sigma > SIGMA_CRITICAL or sequence > KL_CRITICAL else "warning", text


def divergence_rises(h: History) -> Iterator[Finding]:
    recent, start = h.mean("divergence", SPAN, 2 * SPAN), h.start_mean("divergence")
    # From a teacher that is the model of the start, the divergence begins at 0.
    if recent > max(DIVERGENCE_RATIO * start, KL_PER_TOKEN):
        text = f"The divergence to the teacher is {recent:.3g} nats per token in the mean of {SPAN} steps, and was "
        text += f"{start:.3g} in the first {SPAN} (thresholds {KL_PER_TOKEN:g} and {DIVERGENCE_RATIO:g} times as much)."
        yield "warning", text


def gradient_instability(h: History) -> Iterator[Finding]:
    for key in ("loss", "grad_norm"):
        if not math.isfinite(value := h.record.get(key, 0.0)):
            yield "critical", f"{key} is {value}: an update with it destroys the weights."
    # Norms vary by factors: on a logarithmic scale a normal distribution describes them better.
    norms = [math.log(norm) for norm in h.values.get(h.key_of("grad_norm"), []) if norm > 0]
    if not norms or h.record.get("grad_norm", 0.0) <= 0:
        return
    spike, rise = deviation(norms[-1], norms[:-1]), norms[-1] - median(norms[:-1] or norms)
    if spike > SIGMA_CRITICAL and rise > math.log(GRADIENT_CRITICAL):
        text = f"The gradient norm is {h.record['grad_norm']:.3g}: {math.exp(min(rise, 700.0)):.3g} times the median "
        text += f"of the steps before, {spike:.1f} standard deviations above them (threshold {SIGMA_CRITICAL:g})."
        yield "critical", text
    # One such step in 700 is chance: so many within a window are not.
    before, recent = norms[:-WINDOW], norms[-WINDOW:]
    high = sum(deviation(norm, before) > SIGMA_WARNING for norm in recent)
    if high >= SOON and max(recent) - median(before) > math.log(GRADIENT_WARNING):
        text = f"{high} of the last {WINDOW} gradient norms are more than {SIGMA_WARNING:g} standard deviations above "
        yield "warning", f"{text}the steps before (threshold {SOON} of them), up to {math.exp(max(recent)):.3g}."


def constant_reward(h: History) -> Iterator[Finding]:
    low, high = h.reward_range or (0.0, 1.0)
    if low == high and not math.isnan(h.mean("reward")):
        yield "critical", f"All rewards of the run are equal ({low:.4g}): nothing is learned."


def no_learning_signal(h: History) -> Iterator[Finding]:
    zero, lowest, highest = h.mean("zero_gradient_groups"), h.groups_at("all_min_groups"), h.groups_at("all_max_groups")
    if math.isnan(zero) or any(constant_reward(h)):
        return
    if highest > EASY and h.start_mean("all_max_groups") > EASY:
        seen = f"In {highest:.0%} of the groups every completion has the highest reward (threshold {EASY:.0%}), and "
        yield "warning", f"{seen}so it was at the start: the prompts are too easy."
    for severity, threshold in (("critical", ZERO_GRADIENT_CRITICAL), ("warning", ZERO_GRADIENT_WARNING)):
        if zero - highest > threshold:
            text = f"{zero:.0%} of the groups of the last {WINDOW} steps have equal rewards and no gradient (threshold "
            text += f"{threshold:.0%}, all-correct ones not counted); in {lowest:.0%} every completion has the lowest "
            yield severity, f"{text}reward."


def length_bias(h: History) -> Iterator[Finding]:
    (longer, error), (change, noise) = (h.change(key, HISTORY) for key in ("completions/mean_length", "reward"))
    now = h.mean("completions/mean_length", SPAN)
    if now > LENGTH_RATIO * (now - longer) > 0 and longer > 2 * error and change <= 2 * noise:
        text = f"Completions grew to {now / (now - longer):.2f} times their length within {HISTORY} steps, {now:.0f} "
        text += f"tokens now (threshold {LENGTH_RATIO:g}), while the reward did not rise (change {change:+.3g})."
        yield "warning", text


def truncation(h: History) -> Iterator[Finding]:
    if h.mean("completions/clipped_ratio", SOON, SOON) > 0.999:
        yield "critical", f"All completions of the last {SOON} steps were cut at max_completion_length."
    if (share := h.mean("completions/clipped_ratio")) > 0.5:
        yield "warning", f"{share:.0%} of the completions were cut at max_completion_length (threshold 50%)."


def off_policy(h: History) -> Iterator[Finding]:
    keys = "rollout_ess", "rollout_weight/mean", "rollout_mismatch/mean"
    ess, weight, mismatch = (h.mean(key, least=SOON) for key in keys)
    if ess < ESS:
        yield "critical", f"The effective sample size of the importance weights is {ess:.2f} (threshold {ESS:g})."
    if weight < WEIGHT_LOW or weight > WEIGHT_HIGH:
        limits = f"{WEIGHT_LOW:g} and {WEIGHT_HIGH:g}"
        yield "warning", f"The mean importance weight is {weight:.3g} (thresholds {limits})."
    if mismatch > MISMATCH:
        text = f"Log-probabilities of the sampling engine differ from the model's by {mismatch:.3g} nats in the mean "
        yield "warning", f"{text}(threshold {MISMATCH:g}, which is a KL of 1e-3)."


def first_ratio(h: History) -> Iterator[Finding]:
    ratio = abs(h.record["log_ratio_first_max"])
    for severity, threshold in (("critical", 0.5), ("warning", 0.01)):
        if not ratio <= threshold:  # or NaN
            yield (
                severity,
                f"The largest |log-ratio| of a rollout's first update is {ratio:.3g} (threshold {threshold:g}).",
            )


def clipping(h: History) -> Iterator[Finding]:
    """Of updates after the first of a rollout, which clips nothing. A clip range over sequences (GSPO) is so narrow
    that a large share says nothing by itself."""
    share = h.mean("clip_ratio/region" if "clip_ratio/region" in h.record else "cispo_clip_ratio")
    if share > CLIPPED and not (kl := h.mean("approx_kl")) <= CLIPPED_KL:
        moved = f", and the policy moved by {kl:.2g} nats per token (threshold {CLIPPED_KL:g})" if kl == kl else ""
        text = f"{share:.0%} of the tokens of the last {WINDOW} such updates were clipped (threshold {CLIPPED:.0%})"
        yield "warning", f"{text}{moved}."


def unscored(h: History) -> Iterator[Finding]:
    if (share := h.mean("unscored") / (h.mean("completions/count") or NAN)) > 0.05:
        yield "warning", f"{share:.0%} of the completions of the last {WINDOW} steps got no reward (threshold 5%)."


def slow_rewards(h: History) -> Iterator[Finding]:
    rewards, *others = (h.mean(f"seconds/{part}") for part in ("rewards", "rollout", "update"))
    share = rewards / (sum((x for x in others if not math.isnan(x)), rewards) or NAN)
    if share > 0.5:
        slowest = h.record.get("slowest_reward", "not known")
        yield "warning", f"Rewards take {share:.0%} of a step's time (threshold 50%); the slowest is {slowest}."


# --- advice that depends on the log -----------------------------------------------------------------------------------


def against_collapse(h: History) -> str:
    clips = h.mean("clip_ratio/high") > 0 or h.mean("cispo_clip_ratio") > 0
    first = "Raise epsilon_high, add" if clips else "Add"
    return f"{first} an entropy bonus (entropy_coef), lower the learning rate, or sample at a higher temperature."


def for_a_signal(h: History) -> str:
    prompts = "harder" if h.groups_at("all_max_groups") > EASY else "easier"
    more = (
        ", or raise num_generations."
        if h.mean("dropped_groups") > 0
        else ", raise num_generations, or set dynamic_sampling."
    )
    return f"Choose {prompts} prompts{more}"


# --- the table --------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """title: for headings; needs: keys of a record, one of which must be there for the check to run; least: records
    that it takes to find something; advice: ends each message, by what the history shows where it depends on that."""

    title: str
    needs: tuple[str, ...]
    least: int
    check: Callable[[History], Iterator[Finding]]
    advice: str | Callable[[History], str]


KINDS = {
    "reward_hacking": Kind("Reward hacking", ("evaluation",), 2, reward_hacking,
        "Read the completions of the highest rewards; tighten the reward, raise beta, or go back to an earlier "
        "checkpoint."),
    "reward_outliers": Kind("Reward outliers", ("reward_std",), SPAN, reward_outliers,
        "Read the completions of the highest rewards: a loophole of the reward looks like this when it is found."),
    "mode_collapse": Kind("Mode collapse", ("entropy",), 2 * SPAN, mode_collapse, against_collapse),
    "kl_explosion": Kind("KL explosion", ("kl",), SOON, kl_explosion,
        "Lower the learning rate, raise beta or set kl_target, and read the completions."),
    "divergence_rises": Kind("Divergence to the teacher rises", ("divergence",), 2 * SPAN, divergence_rises,
        "Lower the learning rate; beside rewards, raise distill_coef, or take them for what moves the policy away."),
    "gradient_instability": Kind("Gradient instability", ("grad_norm", "loss"), 1, gradient_instability,
        "Lower the learning rate or max_grad_norm; look for extreme advantages and ratios at this step. After a "
        "non-finite value, resume from the checkpoint before it."),
    "constant_reward": Kind("Constant reward", ("reward",), WINDOW, constant_reward,
        "Check the reward function on completions of samples.jsonl; if it is right, choose easier or harder prompts."),
    "no_learning_signal": Kind("No learning signal", ("zero_gradient_groups",), WINDOW, no_learning_signal,
        for_a_signal),
    "length_bias": Kind("Length bias", ("completions/mean_length",), 2 * SPAN, length_bias,
        "Let a reward fall with the length near max_completion_length; where the loss divides by a sequence's "
        "length (grpo, gspo), use one that does not (dapo, dr_grpo)."),
    "truncation": Kind("Truncated completions", ("completions/clipped_ratio",), SOON, truncation,
        "Raise max_completion_length; check that the model's EOS ids are those that end a completion."),
    "off_policy": Kind("Off-policy rollouts", ("rollout_mismatch/mean", "rollout_weight/mean", "rollout_ess"), SOON,
        off_policy,
        "Check that the sampling engine has the current weights and the same temperature and precision; use fewer "
        "updates per rollout."),
    "first_ratio": Kind("First ratio is not 1", ("log_ratio_first_max",), 1, first_ratio,
        "Before the first update of a rollout, old and current policy are the same. Look for dropout, padding, "
        "temperature or precision that differ between the two computations."),
    "clipping": Kind("Clipping", ("clip_ratio/region", "cispo_clip_ratio"), WINDOW, clipping,
        "Lower the learning rate, use fewer updates per rollout, or widen epsilon."),
    "unscored": Kind("Unscored completions", ("unscored",), WINDOW, unscored,
        "Read the errors of the reward functions in the log; raise reward_timeout where calls time out."),
    "slow_rewards": Kind("Slow rewards", ("seconds/rewards",), WINDOW, slow_rewards,
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

    records: of a log so far; then it goes on with the alarms that an uninterrupted run gives. episodes: in order.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.episodes: list[Episode] = []
        self._active: dict[str, Episode] = {}
        self._history = History()
        self._counts: Counter[str] = Counter()  # records that each kind has checked
        for record in records:
            self.update(record)

    def update(self, record: Record) -> list[Alarm]:
        """The alarms that begin with this record: of a step, or an evaluation (with the key "evaluation")."""
        record = {key: value for key, value in record.items() if value is not None}
        self._history.push(record)
        measured = [name for name, kind in KINDS.items() if any(key in record for key in kind.needs)]
        self._counts.update(measured)
        return [alarm for name in measured if (alarm := self._check(name, record["step"]))]

    def checked(self) -> set[str]:
        """The kinds whose metrics were in enough records."""
        return {name for name, count in self._counts.items() if count >= KINDS[name].least}

    def _check(self, name: str, step: int) -> Alarm | None:
        kind, episode = KINDS[name], self._active.get(name)
        severity, seen = next(kind.check(self._history), ("", ""))
        if episode:
            episode.quiet = 0 if seen else episode.quiet + 1
            if episode.quiet >= (1 if name == "reward_hacking" else WINDOW):
                episode.last = step
                del self._active[name]
            if not seen or severity == "warning" or episode.alarm.severity == "critical":
                return None
        elif not seen:
            return None
        advice = kind.advice if isinstance(kind.advice, str) else kind.advice(self._history)
        alarm = Alarm(name, severity, seen, advice)
        if episode:
            episode.alarm = alarm
        else:
            self._active[name] = Episode(step, None, alarm)
            self.episodes.append(self._active[name])
        return alarm
