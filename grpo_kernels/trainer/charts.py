"""The charts of report.html, in groups: which metrics they draw, with the limits of the monitor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from . import monitor
from .records import Record, finite

NOT_PLOTTED = {"step", "rollout", "seconds", "completions/count"}
HISTOGRAMS = 120


class Chart(NamedTuple):
    """lines: labels by metric, drawn where it is known. kinds: alarms whose episodes are shaded. thresholds: (value or
    None, label). band: keys of the first line's lower and upper edge. columns: histograms in place of lines."""

    title: str
    unit: str
    lines: dict[str, str]
    kinds: tuple[str, ...] = ()
    thresholds: tuple[tuple[float | None, str], ...] = ()
    band: tuple[str, ...] = ()
    log: bool = False
    columns: Sequence[Record] = ()


def groups_of(
    series: dict[str, Any], records: list[Record], evaluations: list[Record], config: Record
) -> list[dict[str, Any]]:
    """Returns the charts that have data, in groups. What is in none of them is plotted by its name."""
    charts = all_charts(series, records, evaluations, config)
    shown = {key for entries in charts.values() for chart in entries for key in (*chart.lines, *chart.band)}
    rest = [key for key in series if key not in shown and not key.startswith("eval/")]
    charts["Other metrics"] = tuple(Chart(key, "", {key: key}) for key in rest)
    found = {
        group: [c._asdict() for c in charts if c.columns or series.keys() & c.lines] for group, charts in charts.items()
    }
    return [{"title": group, "charts": entries} for group, entries in found.items() if entries]


def all_charts(
    series: dict[str, Any], records: list[Record], evaluations: list[Record], config: Record
) -> dict[str, tuple[Chart, ...]]:
    start = flat(evaluations[0]) if evaluations else {}
    n, k = start.get("eval/samples", "n"), max(map(int, start.get("eval/pass_at_k") or [1]))
    names = [key.split("/")[1] for key in series if key.startswith("rewards/") and key.endswith("/mean")]
    return {
        "What matters first": (
            Chart("Reward", "mean", {"reward": "training", "eval/reward": "held out"},
                  ("reward_hacking", "reward_outliers", "constant_reward")),
            Chart("Held-out accuracy", "share of problems",
                  {"eval/pass_at_1": "pass@1", "eval/pass_at_n": f"pass@{k}", "eval/majority_at_k": f"majority@{n}",
                   "eval/greedy": "greedy"}, (), ((finite(start.get("eval/pass_at_n")), f"pass@{k} at the start"),)),
            Chart("KL to the reference", "nats per token", {"kl": "KL"}, ("kl_explosion",),
                  ((monitor.KL_PER_TOKEN, "limit, with 10 per sequence"),)),
            Chart("Entropy", "nats per token", {"entropy": "entropy"}, ("mode_collapse",),
                  ((monitor.ENTROPY, "limit, with repeated completions"),)),
            Chart("Gradient norm", "before clipping, log scale", {"grad_norm": "norm"}, ("gradient_instability",),
                  ((finite(config.get("max_grad_norm")) or None, "max_grad_norm"),), log=True),
            Chart("Learning rate", "of AdamW", {"learning_rate": "rate"}),
        ),
        "Rewards and advantages": (
            Chart("Range of rewards", "shaded: lowest to highest", {"reward": "mean"}, ("reward_outliers",),
                  band=("reward_min", "reward_max")),
            Chart("Spread of rewards", "standard deviation",
                  {"reward_std": "all", "reward_group_std": "within groups"}),
            Chart("Advantages", "normalised rewards and their range",
                  {"advantage_mean": "mean", "advantage_std": "std"}, band=("advantage_min", "advantage_max")),
            Chart("Without gradient", "share of groups, and of tokens",
                  {"zero_gradient_groups": "equal rewards", "all_min_groups": "all lowest",
                   "all_max_groups": "all highest", "zero_gradient": "tokens"}, ("no_learning_signal",),
                  ((monitor.ZERO_GRADIENT_WARNING, "limit, less all highest"),)),
            Chart("Unscored completions", "count", {"unscored": "unscored"}, ("unscored",)),
            *(Chart(f"Reward {name}", "", {f"rewards/{name}/mean": "mean", f"rewards/{name}/std": "std"})
              for name in names),
            Chart("Distribution of advantages", "share of completions, darker: more", {},
                  columns=histograms_of(records)),
        ),
        "Policy": (
            Chart("Clipped tokens", "share of tokens",
                  {"clip_ratio/region": "all", "clip_ratio/low": "low", "clip_ratio/high": "high",
                   "cispo_clip_ratio": "CISPO"}, ("clipping",), ((monitor.CLIPPED, "limit"),)),
            Chart("Importance ratio", "shaded: lowest to highest", {"ratio/mean": "mean"},
                  band=("ratio/min", "ratio/max")),
            Chart("First log-ratio", "largest, nats", {"log_ratio_first_max": "first update"}, ("first_ratio",)),
            Chart("KL per sequence", "nats", {"kl_sequence": "KL"}, ("kl_explosion",),
                  ((monitor.KL_PER_SEQUENCE, "limit"),)),
            Chart("Divergence to the teacher", "nats per token", {"divergence": "mean"}, ("divergence_rises",)),
            Chart("Loss", "near 0 by construction", {"loss": "loss"}, ("gradient_instability",)),
        ),
        "Completions": (
            Chart("Length", "tokens, shaded: shortest to longest",
                  {"completions/mean_length": "mean", "eval/mean_length": "held out"}, ("length_bias",),
                  band=("completions/min_length", "completions/max_length")),
            Chart("Truncated", "share of completions", {"completions/clipped_ratio": "no end"}, ("truncation",)),
            Chart("Diversity", "distinct completions of a group, share", {"completions/unique_ratio": "distinct"},
                  ("mode_collapse",)),
            Chart("Held out", "reward",
                  {"eval/best_of_n": f"best of {n}", "eval/reward": "mean", "eval/greedy_reward": "greedy"}),
        ),
        "Rollouts against the model": (
            Chart("Mismatch", "mean |difference of logps|, nats", {"rollout_mismatch/mean": "mean"}, ("off_policy",),
                  ((monitor.MISMATCH, "limit"),)),
            Chart("Importance weights", "mean weight; effective sample size, share",
                  {"rollout_weight/mean": "weight", "rollout_ess": "sample size"}, ("off_policy",)),
        ),
        "Speed": (
            Chart("Tokens per second", "completion tokens", {"tokens_per_second": "tokens/s"}),
            Chart("Seconds per step", "by part",
                  {"seconds/rollout": "rollout", "seconds/rewards": "rewards", "seconds/update": "update"},
                  ("slow_rewards",)),
        ),
    }  # fmt: skip


def flat(record: Record) -> Record:
    """An evaluation with keys eval/...; eval/pass_at_n is pass@k for the largest k."""
    found = {"step": record["step"]} | {f"eval/{key}": value for key, value in record["evaluation"].items()}
    at_k = record["evaluation"].get("pass_at_k") or {}
    if at_k and max(map(int, at_k)) > 1:
        found["eval/pass_at_n"] = at_k[str(max(map(int, at_k)))]
    return found


def histograms_of(records: list[Record]) -> list[Record]:
    """Returns distributions of advantages, as shares, at up to `HISTOGRAMS` steps."""
    result = []
    for record in pick([r for r in records if "advantage_histogram" in r], HISTOGRAMS):
        edges, counts = (record["advantage_histogram"][name] for name in ("edges", "counts"))
        shares = [finite(count / (sum(counts) or 1)) for count in counts]
        result.append({"step": record["step"], "edges": list(map(finite, edges)), "shares": shares})
    return result


def pick(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly, with the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
