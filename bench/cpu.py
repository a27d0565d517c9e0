"""Time of forward + backward against the floor and the peers: `python bench/cpu.py [--shapes ...] [--rounds 5]`.

One process per shape and type. In it: inputs, a float64 reference, every implementation once (warm-up, compilation and
check), settings of a peer tried once and the best kept, then interleaved rounds.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from equal_rewards import measure as measure_equal_rewards
from inputs import Inputs, make_inputs
from peers import PEERS, Step, missing
from reference import Reference, errors, is_wrong, off_policy, reference
from report import RESULTS, describe, environment, isolated, table, write
from rounds import interleave, seconds, summary
from shapes import DTYPES, SHAPES, TIMED, Shape


def main() -> None:
    options = _parser().parse_args()
    document: dict[str, Any] = {"environment": environment(torch.device(options.device)), "cases": []}
    for shape in options.shapes:
        for dtype in options.dtypes:
            found = isolated(
                _case, shape, dtype, options.device, options.rounds, options.against, options.equal_rewards
            )
            document["cases"].append({"shape": SHAPES[shape]._asdict(), "dtype": dtype, **found})
            print(_show(SHAPES[shape], dtype, found), flush=True)
            write(options.output, document)
    print(f"written: {options.output}")


def _case(
    shape: str, dtype_name: str, device_name: str, rounds: int, against: list[str], equal_rewards: bool
) -> dict[str, Any]:
    """Everything about one shape and type; runs in a process of its own."""
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    found: dict[str, Any] = {"implementations": _compare(SHAPES[shape], dtype, device, rounds, against)}
    if not equal_rewards:
        return found
    try:
        found["equal_rewards"] = measure_equal_rewards(SHAPES[shape], dtype, device, rounds)
    except Exception as error:  # the times above are kept
        found["equal_rewards"] = {"error": describe(error)}
    return found


def _compare(
    shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int, against: list[str]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    ready: dict[str, Step] = {}
    inputs = off_policy(make_inputs(shape, dtype, device))
    right = reference(inputs)
    for name in against:
        why = missing(name)
        if why is not None:
            found[name] = {"missing": why}
            continue
        step, found[name] = _prepare(name, inputs, right, device)
        if step is not None:
            ready[name] = step
    del right
    steps = {name: functools.partial(step, inputs) for name, step in ready.items()}
    medians = {}
    for name, times in interleave(steps, rounds, device).items():
        found[name]["seconds"] = summary(times)
        medians[name] = found[name]["seconds"]["median"]
    for name, median in medians.items():
        if "floor" in medians:
            found[name]["ratio_to_floor"] = median / medians["floor"]
        if "ours" in medians:
            found[name]["ours_to_this"] = medians["ours"] / median
    return found


def _prepare(name: str, inputs: Inputs, right: Reference, device: torch.device) -> tuple[Step | None, dict[str, Any]]:
    """Try every setting of an implementation: (the fastest right one, what was found)."""
    variants = PEERS[name].variants(inputs)
    several = len(variants) > 1
    tried = {setting: _try(step, inputs, right, device, several) for setting, step in variants.items()}
    usable = [setting for setting, report in tried.items() if "error" not in report]
    if not usable:
        return None, {"error": next(iter(tried.values()))["error"], "tried": tried}
    best = min(usable, key=lambda setting: tried[setting].get("trial_seconds", 0.0))
    return variants[best], {"setting": best, "errors": tried[best]["errors"]} | ({"tried": tried} if several else {})


def _try(step: Step, inputs: Inputs, right: Reference, device: torch.device, trial: bool) -> dict[str, Any]:
    """Run a step for the first time and compare its results; with `trial`, time a second run."""
    report: dict[str, Any] = {"errors": None}
    try:
        loss, dhidden, dweight = step(inputs)
        if loss is not None:  # the floor has none, and its products are torch's own
            report["errors"] = errors(right, loss, dhidden, dweight)
            if is_wrong(report["errors"], inputs.weight.dtype):
                return report | {"error": "wrong result"}
        del loss, dhidden, dweight
        if trial:
            report["trial_seconds"] = seconds(functools.partial(step, inputs), device)
    except Exception as error:  # a setting that fails is a result
        return report | {"error": describe(error)}
    return report


def _show(shape: Shape, dtype: str, case: dict[str, Any]) -> str:
    title = f"\n{shape}, {dtype}: forward + backward"
    if "error" in case:
        return f"{title}\n  {case['error']}"
    rows = [_row(name, found) for name, found in case["implementations"].items()]
    header = ("", "median ms", "min", "max", "to floor", "ours to it", "error dW", "setting")
    below = _show_equal_rewards(case["equal_rewards"]) if "equal_rewards" in case else ""
    return f"{title}\n{table(header, rows)}\n{below}"


def _row(name: str, found: dict[str, Any]) -> list[str]:
    if "seconds" not in found:
        return [name, found.get("missing") or found["error"]]
    times = [f"{found['seconds'][key] * 1e3:.1f}" for key in ("median", "min", "max")]
    ratios = [f"{found[key]:.3f}" if key in found else "" for key in ("ratio_to_floor", "ours_to_this")]
    error = f"{found['errors']['dweight']:.1e}" if found["errors"] else ""
    return [name, *times, *ratios, error, found["setting"]]


def _show_equal_rewards(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"half the groups with equal rewards: {found['error']}"
    scored, unscored = (found["ratio_to_dense"][name] for name in ("half_scored", "half_unscored"))
    dense = found["seconds"]["dense"]["median"] * 1e3
    return (
        f"half the groups with equal rewards, beta 0, of the dense batch's {dense:.1f} ms: "
        f"{scored:.3f} every token scored, {unscored:.3f} only those with a gradient"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(TIMED), metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--against", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME")
    parser.add_argument("--equal-rewards", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    return parser


if __name__ == "__main__":
    main()
