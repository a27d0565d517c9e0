"""Every picture of the README, from the results that are committed beside this script.

    python bench/figures.py                                     # bench/results/*.json -> bench/figures/*.png

A picture is named after its file of results: cpu.json gives cpu-time.png, cpu-memory.png, ...
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_kernels.benchmarks.document import read
from grpo_kernels.benchmarks.figures import HEADS, draw
from grpo_kernels.benchmarks.panels import BESIDE, GREY, OURS, STYLE, Record, save, sheet

HERE = Path(__file__).parent
CURVES = {"reward_smoothed": "reward, smoothed", "kl": "KL to the warm-up policy, nats", "entropy": "entropy, nats"}
# The reference is drawn below, wide and pale: what coincides is seen to coincide.
LOOKS: dict[str, Record] = {
    "reference": {"color": GREY, "alpha": 0.45, "linewidth": 4, "solid_capstyle": "round"},
    "fused": {"color": OURS, "linewidth": 1},
}
TITLES = {"reference": "eager reference", "fused": "ours"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the README from the committed results.")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--output", type=Path, default=HERE / "figures")
    options = parser.parse_args(argv)
    for path in sorted(options.results.glob("*.json")):
        document = read(path)
        if "runs" in document:
            written = [save(learning(document), options.output / f"{path.stem}.png")]
        else:
            written = draw(document, options.output, f"{path.stem}-", HEADS if path.stem.endswith("-sweeps") else ())
        print(f"{path.name}: {', '.join(picture.name for picture in written) or 'nothing to draw'}")


@rc_context(STYLE)
def learning(document: Record) -> Figure:
    """The curves of every run, a line per seed and loss, and what greedy decoding solves before and after."""
    figure, axes = sheet(document, "GRPO on two-digit addition, from the same seeds with either loss", 2, 2, 2.4)
    for axis, (curve, name) in zip(axes.flat, CURVES.items(), strict=False):
        for loss, look in LOOKS.items():
            for run in _runs(document, loss):
                axis.plot(range(1, len(run[curve]) + 1), run[curve], **look, label=f"{loss}, seed {run['seed']}")
        axis.set(title=name, xlabel="step")
    axes[0, 0].set_ylim(0, 1)
    handles = [
        handle
        for loss, look in LOOKS.items()
        if _runs(document, loss)
        for handle in axes[0, 0].plot([], [], **look, label=TITLES[loss])
    ]
    axes[0, 0].legend(handles=handles, loc="lower right", frameon=False)
    _accuracies(axes[1, 1], document)
    return figure


def _accuracies(axis: Axes, document: Record) -> None:
    """A line per run, from before to after."""
    seeds = sorted({run["seed"] for run in document["runs"]})
    for loss, look in LOOKS.items():
        for run in _runs(document, loss):
            y, ends = seeds.index(run["seed"]), [run["accuracy_before"], run["accuracy_after"]]
            axis.plot(
                ends, [y, y], **look, marker="o", markersize=3 + look["linewidth"], label=f"{loss}, seed {run['seed']}"
            )
            if loss == "fused":
                for x, at in zip(ends, ((-8, 0), (8, 0)), strict=True):
                    axis.annotate(f"{x:.2f}", (x, y), at, color=OURS, ha="right" if at[0] < 0 else "left", **BESIDE)
    axis.set(
        title="held-out accuracy of greedy decoding before and after; numbers of ours",
        xlim=(0, 1.1),
        ylim=(len(seeds) - 0.5, -0.5),
    )
    axis.set_yticks(range(len(seeds)), [f"seed {seed}" for seed in seeds])


def _runs(document: Record, loss: str) -> list[Record]:
    return [run for run in document["runs"] if run["loss"] == loss]


if __name__ == "__main__":
    main()
