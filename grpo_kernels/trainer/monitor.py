"""The classic failures of GRPO runs, found in the records of log.jsonl and said in words.

`RULES` lists them; `Monitor.update` takes the record of a step and returns the alarms that begin with it. README.md,
beside this file, says of each where its threshold comes from and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

from .records import Record, is_number

HISTORY = 100  # steps whose median a gradient norm is compared with
SPAN = 20  # steps of each of two means that are compared, and steps before the first comparison
WINDOW = 10  # steps over which a share is averaged; steps without a finding that end an episode
SOON = 3  # steps in a row that suffice where waiting would waste the run
LARGEST = 1e100  # of a value in a history: sums of larger ones overflow

KL_PER_TOKEN, KL_PER_SEQUENCE = 0.1, 10.0  # nats; both must be exceeded
ENTROPY, ENTROPY_OF_START = 0.2, 0.27  # nats per token; share of the start. Both must be undercut
UNIQUE = 0.5  # distinct completions / completions of a group
REWARD_SHARE = 0.05  # of the range of rewards: what counts as a rise, and as near the highest
DIVERGENCE_OF_START = 1.5  # times the start, above which a divergence has risen
CLIPPED_KL = 0.01  # nats per token to the old policy, without which many clipped tokens are no failure
# Of the first update of a rollout, at a ratio of 1, these say nothing.
OF_LATER_UPDATES = ("clip_ratio/region", "cispo_clip_ratio", "approx_kl")
EFFECTIVE = ("rollout_ratio/ess", "rollout_ess")
NAN = math.nan


@dataclass
class Alarm:
    """kind: a key of `RULES`; severity: "warning" or "critical"; seen: what, and the threshold; first: its step; last:
    the step after which it was over, None where it was not; quiet: steps without the finding."""

    kind: str
    severity: str
    seen: str
    first: int
    last: int | None = None
    quiet: int = 0

    @property
    def message(self) -> str:
        return f"{self.seen} {RULES[self.kind].advice}"


class History:
    """record: the one to check; values: of each metric; limits: lowest and highest reward so far; best: the highest
    held-out reward so far, and the training reward at that time.

    A mean of too few values is NaN, which is neither above nor under a threshold.
    """

    def __init__(self) -> None:
        self.record: Record = {}
        self.values: dict[str, list[float]] = {}
        self.limits: tuple[float, float] = math.inf, -math.inf
        self.best: tuple[float, float] | None = None

    def push(self, record: Record) -> None:
        self.record = record
        skipped = OF_LATER_UPDATES if "log_ratio_first_max" in record else ()
        for key, value in record.items():
            if key not in skipped and is_number(value) and abs(value) <= LARGEST:  # nor NaN
                self.values.setdefault(key, []).append(float(value))
        lowest, highest = (self.last(key, 1) for key in ("reward_min", "reward_max"))
        self.limits = min([*lowest, self.limits[0]]), max([*highest, self.limits[1]])

    def last(self, key: str, count: int) -> list[float]:
        return self.values.get(key, [])[-count:]

    def mean(self, key: str, count: int = WINDOW) -> float:
        return fmean(values) if len(values := self.last(key, count)) == count else NAN

    def least(self, key: str) -> float:
        """Returns the lowest of the last `SOON` values."""
        return min(values) if len(values := self.last(key, SOON)) == SOON else NAN

    def start_mean(self, key: str) -> float:
        return fmean(values[:SPAN]) if len(values := self.values.get(key, [])) >= SPAN else NAN

    def reward_range(self) -> float:
        low, high = self.limits
        return max(0.0, high - low)

    def rises(self, steps: int) -> bool:
        """Says whether the reward is higher than it was so many steps ago, in means of `SPAN` steps."""
        earlier = fmean(self.last("reward", steps)[:SPAN] or [NAN])
        return self.mean("reward", SPAN) - earlier > REWARD_SHARE * self.reward_range()

    def is_solved(self) -> bool:
        """Says whether most groups, or all but a few completions, have the highest reward."""
        near = self.limits[1] - REWARD_SHARE * self.reward_range()
        return self.mean("all_max_groups") >= 0.5 or (self.reward_range() > 0 and self.mean("reward") >= near)


def held_out_change(h: History) -> float:
    """Returns the held-out reward less the best before it, in standard errors; NaN where the training reward did not
    rise."""
    evaluation = h.record["evaluation"]
    now, training = evaluation.get("reward"), fmean(h.last("reward", SPAN) or [NAN])
    if now is None:
        return NAN
    best, spread = h.best, h.reward_range()
    if best is None or now > best[0]:
        h.best = now, training
    # Of a difference of two evaluations; above 0 even where all problems have the same reward.
    error = max(math.sqrt(2) * (evaluation.get("reward_error") or 0.0), spread / 100)
    if best is None or not error > 0 or now > h.limits[1] - 2 * error:  # it cannot rise
        return NAN
    before = h.start_mean("reward") if math.isnan(best[1]) else best[1]
    return (now - best[0]) / error if training - before > max(REWARD_SHARE * spread, 2 * error) else NAN


def entropy(h: History) -> float:
    if h.mean("completions/unique_ratio") >= UNIQUE or h.rises(2 * SPAN) or h.is_solved():
        return NAN
    return h.mean("entropy") / max(1e-9, min(ENTROPY, ENTROPY_OF_START * h.start_mean("entropy")))


def gradient_norm(h: History) -> float:
    before = h.last("grad_norm", HISTORY)[:-SOON]
    return h.least("grad_norm") / max(1e-9, median(before)) if len(before) >= SPAN else NAN


def growth(h: History) -> float:
    lengths = h.last("completions/mean_length", HISTORY)
    if len(lengths) < HISTORY or h.rises(HISTORY):
        return NAN
    return fmean(lengths[-SPAN:]) / max(1e-9, fmean(lengths[:SPAN]))


def effective_sample(h: History) -> float:
    """Returns the smaller effective sample: of the ratios to the sampling engine, or of the weights in use."""
    return min((fmean(x) for key in EFFECTIVE if len(x := h.last(key, SOON)) == SOON), default=NAN)


def clipped(h: History) -> float:
    share = h.mean("clip_ratio/region" if "clip_ratio/region" in h.record else "cispo_clip_ratio")
    return NAN if h.mean("approx_kl") <= CLIPPED_KL else share


class Rule(NamedTuple):
    """An alarm where `value` is above `warning`, or under it with `below`; critical beyond `critical`.

    title: for headings; needs: keys of a record, one of which must be there for the check to run; seen: a sentence with
    {value} and {limit}; advice: what to do.
    """

    title: str
    needs: tuple[str, ...]
    value: Callable[[History], float]
    warning: float
    critical: float
    seen: str
    advice: str
    below: bool = False

    def check(self, history: History) -> tuple[str, str]:
        """Returns severity and sentence, or two empty texts."""
        value = self.value(history)
        for severity, limit in (("critical", self.critical), ("warning", self.warning)):
            if value < limit if self.below else value > limit:
                return severity, self.seen.format(value=value, limit=limit)
        return "", ""


RULES = {
    "reward_hacking": Rule("Reward hacking", ("evaluation",), held_out_change, 1, -2,
        "The training reward rose; the held-out reward changed by {value:.1f} standard errors from its best (threshold "
        "{limit:g}).",
        "Read the completions of the highest rewards; tighten the reward, raise beta, or go back to a checkpoint.",
        below=True),
    "mode_collapse": Rule("Mode collapse", ("entropy",), entropy, 1, 0.25,
        f"Entropy is {{value:.0%}} of its limit (threshold {{limit:.0%}} of {ENTROPY:g} nats per token, or of "
        f"{ENTROPY_OF_START:.0%} of the start), completions of a group repeat, and the reward does not rise.",
        "Raise entropy_coef or the temperature, or epsilon_high where tokens are clipped above it; lower the learning "
        "rate.", below=True),
    "kl_explosion": Rule("KL explosion", ("kl",),
        lambda h: min(h.least("kl") / KL_PER_TOKEN, h.least("kl_sequence") / KL_PER_SEQUENCE), 1, 10,
        f"For {SOON} steps, the KL to the reference policy is {{value:.3g}} times its limit, {KL_PER_TOKEN:g} nats per "
        f"token and {KL_PER_SEQUENCE:g} per sequence (threshold {{limit:g}}).",
        "Lower the learning rate, raise beta or set kl_target, and read the completions."),
    "divergence_rises": Rule("Divergence to the teacher rises", ("divergence",),
        lambda h: h.mean("divergence", SPAN) / max(KL_PER_TOKEN, DIVERGENCE_OF_START * h.start_mean("divergence")),
        1, math.inf,
        f"The divergence to the teacher is {{value:.3g}} times its limit (threshold {{limit:g}}): "
        f"{DIVERGENCE_OF_START:g} times the first {SPAN} steps, and at least {KL_PER_TOKEN:g} nats per token.",
        "Lower the learning rate; beside rewards, raise distill_coef, or take them for what moves the policy away."),
    "gradient_instability": Rule("Gradient instability", ("grad_norm",), gradient_norm, 4, 10,
        f"For {SOON} steps, the gradient norm is {{value:.3g}} times the median before (threshold {{limit:g}}).",
        "Lower the learning rate or max_grad_norm; look for extreme advantages and ratios at this step."),
    "vanishing_steps": Rule("Vanishing steps", ("relative_step",), lambda h: h.mean("relative_step"), 0.01, 1e-9,
        f"In the last {WINDOW} steps, AdamW's step was {{value:.2g}} of the learning rate, or that was 0 (threshold "
        "{limit:g}): the weights do not move.",
        "Check learning_rate and its schedule, max_grad_norm, and the eps of optim_args, which outweighs small "
        "gradients.", below=True),
    "no_learning_signal": Rule("No learning signal", ("zero_gradient_groups",),
        lambda h: NAN if h.is_solved() else h.mean("zero_gradient_groups") - h.mean("all_max_groups"), 0.5, 0.9,
        f"{{value:.0%}} of the groups of {WINDOW} steps have equal rewards and no gradient (threshold {{limit:.0%}}, "
        "all-correct ones not counted).",
        "Check the reward function on samples.jsonl; choose other prompts, raise num_generations, or set "
        "dynamic_sampling."),
    "unscored": Rule("Unscored completions", ("unscored",),
        lambda h: h.mean("unscored") / (h.mean("completions/count") or NAN), 0.05, math.inf,
        f"{{value:.0%}} of the completions of the last {WINDOW} steps got no reward (threshold {{limit:.0%}}).",
        "Read the errors of the reward functions in the log."),
    "length_bias": Rule("Length bias", ("completions/mean_length",), growth, 1.25, math.inf,
        f"Completions grew {{value:.2f}} times in {HISTORY} steps (threshold {{limit:g}}); the reward did not rise.",
        "Add the reward soft_overlong, or take a loss that does not divide by a sequence's length (dapo, dr_grpo)."),
    "truncation": Rule("Truncated completions", ("completions/clipped_ratio",),
        lambda h: h.mean("completions/clipped_ratio"), 0.5, 0.99,
        "{value:.0%} of the completions were cut at max_completion_length (threshold {limit:.0%}).",
        "Raise max_completion_length; check that the model's EOS ids are those that end a completion."),
    "first_ratio": Rule("First ratio is not 1", ("log_ratio_first_max",),
        lambda h: abs(h.record["log_ratio_first_max"]), 0.01, 0.5,
        "The largest |log-ratio| of a rollout's first update is {value:.3g} (threshold {limit:g}); it should be 0.",
        "Look for dropout, padding, temperature or precision that differ between old and current policy."),
    "clipping": Rule("Clipping", ("clip_ratio/region", "cispo_clip_ratio"), clipped, 0.2, math.inf,
        f"{{value:.0%}} of the tokens of {WINDOW} updates after first ones were clipped (threshold {{limit:.0%}}), and "
        f"the policy moved by more than {CLIPPED_KL:g} nats per token.",
        "Lower the learning rate, use fewer updates per rollout, or widen epsilon."),
    "rollout_mismatch": Rule("Rollout mismatch", ("rollout_mismatch/mean",),
        lambda h: h.mean("rollout_mismatch/mean", SOON), 0.036, math.inf,  # of a normal distribution whose KL is 1e-3
        "Log-probabilities of the sampling engine are off by {value:.3g} nats in the mean (threshold {limit:g}).",
        "The check at set-up found no such difference: look for weights that the engine does not get after an update, "
        "and for rounding that grows with them."),
    "off_policy": Rule("Off-policy samples", EFFECTIVE, effective_sample, 0.3, 0.1,
        "Importance weights leave an effective sample of {value:.0%} (threshold {limit:.0%}).",
        "Check the sampling engine as for rollout_mismatch; where completions are long, weight tokens "
        "(vllm_importance_sampling_mode token_truncate), or widen rollout_rs.", below=True),
}  # fmt: skip


class Monitor:
    """Checks the records of a run in order. An alarm is returned once per episode, and again where a warning becomes
    critical; an episode ends after `WINDOW` steps without the finding (reward hacking: with the next evaluation).

    records: of a log so far; then it goes on with the alarms that an uninterrupted run gives. alarms: of all episodes,
    in order. measured: kinds whose metrics the log has.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.alarms: list[Alarm] = []
        self.measured: set[str] = set()
        self._active: dict[str, Alarm] = {}
        self._history = History()
        for record in records:
            self.update(record)

    def update(self, record: Record) -> list[Alarm]:
        """Returns the alarms that begin with this record: of a step, or an evaluation (with the key "evaluation")."""
        record = {key: value for key, value in record.items() if value is not None}
        self._history.push(record)
        kinds = [kind for kind, rule in RULES.items() if any(key in record for key in rule.needs)]
        self.measured.update(kinds)
        return [replace(alarm) for kind in kinds if (alarm := self._check(kind, record["step"]))]

    def _check(self, kind: str, step: int) -> Alarm | None:
        severity, seen = RULES[kind].check(self._history)
        if kind not in self._active:
            if not seen:
                return None
            self._active[kind] = Alarm(kind, severity, seen, step)
            self.alarms.append(self._active[kind])
            return self._active[kind]
        alarm = self._active[kind]
        alarm.quiet = 0 if seen else alarm.quiet + 1
        if alarm.quiet >= (1 if kind == "reward_hacking" else WINDOW):
            alarm.last = step
            del self._active[kind]
        if severity != "critical" or alarm.severity == "critical":
            return None
        alarm.severity, alarm.seen = severity, seen
        return alarm
