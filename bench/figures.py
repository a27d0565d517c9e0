"""Every picture of the README, from the results that are committed beside this script.

    python bench/figures.py                                     # bench/results/*.json -> bench/figures/*.png

A picture is named after its file of results: cpu.json gives cpu-time.png, cpu-memory.png, ...
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from grpo_kernels.benchmarks.document import read
from grpo_kernels.benchmarks.figures import HEADS, draw
from grpo_kernels.benchmarks.panels import GREY, OURS, STYLE, Record, save, sheet

HERE = Path(__file__).parent
# The eager loss is drawn below, wide and pale: what coincides is seen to coincide.
LOOKS: dict[str, Record] = {
    "eager": {"color": GREY, "alpha": 0.45, "linewidth": 4, "solid_capstyle": "round"},
    "fused": {"color": OURS, "linewidth": 1},
}
TITLES = {"eager": "eager loss", "fused": "ours"}
SMOOTHING = 20  # optimizer steps


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
    """A panel per kind of loss, a line per seed: the reward of the samples, and held-out pass@1 before and after."""
    figure, axes = sheet(document, "GRPO on two-digit addition, from three seeds: reward, smoothed", 2, 2, 2.4)
    kinds = dict.fromkeys(run["loss_type"] for run in document["runs"])
    for axis, kind in zip(axes.flat, kinds, strict=False):
        for loss, look in LOOKS.items():
            for run in _runs(document, kind, loss):
                curve = _smoothed(run["reward"])
                axis.plot(range(1, len(curve) + 1), curve, **look, label=f"{loss}, seed {run['seed']}")
        ends = [
            f"{run['pass_at_1_before']:.2f} to {run['pass_at_1_after']:.2f}" for run in _runs(document, kind, "fused")
        ]
        axis.set(title=f"{kind}: held-out pass@1 {', '.join(ends)}", xlabel="optimizer step", ylim=(0, 1))
        handles = [h for loss, look in LOOKS.items() if _runs(document, kind, loss)
                   for h in axis.plot([], [], **look, label=TITLES[loss])]  # fmt: skip
        axis.legend(handles=handles, loc="lower right", frameon=False)
    return figure


def _smoothed(curve: Sequence[float]) -> list[float]:
    """The mean of the last SMOOTHING values."""
    windows = (curve[max(0, i - SMOOTHING + 1) : i + 1] for i in range(len(curve)))
    return [sum(window) / len(window) for window in windows]


def _runs(document: Record, kind: str, loss: str) -> list[Record]:
    return [run for run in document["runs"] if (run["loss_type"], run["loss"]) == (kind, loss)]


if __name__ == "__main__":
    main()
