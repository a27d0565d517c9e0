"""The curves of a run in one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

# key of the record -> title
PANELS = {
    "reward_smoothed": "reward (smoothed)",
    "reward": "reward (raw)",
    "kl": "KL to the warm-up policy (nats per token)",
    "entropy": "entropy (nats per token)",
    "clip_ratio": "clip ratio (share of tokens)",
    "completion_length": "completion length (tokens)",
}


def plot(records: Sequence[dict[str, float]], path: Path, title: str) -> None:
    """Six panels over the steps of GRPO; overwrites `path`."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")  # no pyplot: no display, no global state
    figure.suptitle(title)
    steps = [r["step"] for r in records]
    for axis, (key, name) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
        axis.plot(steps, [r[key] for r in records], linewidth=1.2)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if key.startswith("reward"):
            axis.set_ylim(0, 1)
    figure.savefig(path, dpi=110)
