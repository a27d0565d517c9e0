"""The targets of this project, against results.

    python bench/bars.py [bench/results/cpu.json ...]
    python bench/bars.py --paper H200           # against what grpo_kernels/benchmarks/limits.py expects

Files from one device are taken together. A ratio is one of medians of the same process, or of peak memory. A bar whose
case was not measured says so. On paper peers have a lower bound of their time, so that ours is at most this part of it,
and no memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from grpo_kernels.benchmarks.devices import DEVICES, Device
from grpo_kernels.benchmarks.document import Document, read
from grpo_kernels.benchmarks.limits import predict, way_of
from grpo_kernels.benchmarks.machine import OUT_OF_MEMORY
from grpo_kernels.benchmarks.sets import jobs
from grpo_kernels.benchmarks.show import table

RESULTS = Path(__file__).parent / "results"
# Of a case; older results lack the last two.
DEFAULTS = {"mode": "step", "idle_share": 0.0, "beta": 0.04, "kept_ids": 0, "masked_share": 1.0}
Found = dict[str, dict[str, Any]]
Lookup = Callable[..., Found]


class Bar(NamedTuple):
    """`measured(lookup)` is the ratio that should be at most `limit`; KeyError where something was not measured."""

    what: str
    limit: float
    measured: Callable[[Lookup], float]


def _time(shape: str, dtype: str, rival: str, limit: float, **case: Any) -> Bar:
    """Ours to a rival's time."""

    def measured(lookup: Lookup) -> float:
        ratio: float = lookup(shape, dtype, **case)[rival]["ours_to_this"]
        return ratio

    mode = f", {case['mode']}" if "mode" in case else ""
    kept = f", {case['kept_ids']} kept ids" if "kept_ids" in case else ""
    return Bar(f"{shape} {dtype}{mode}{kept}: time to {rival}", limit, measured)


def _memory(shape: str, dtype: str, rival: str, limit: float, **case: Any) -> Bar:
    def measured(lookup: Lookup) -> float:
        found = lookup(shape, dtype, **case)
        ratio: float = found["ours"]["peak_bytes"] / found[rival]["peak_bytes"]
        return ratio

    mode = f", {case['mode']}" if "mode" in case else ""
    return Bar(f"{shape} {dtype}{mode}: memory to {rival}", limit, measured)


def _idle(shape: str, dtype: str, name: str, limit: float) -> Bar:
    """Half the prompts at equal rewards to none: two processes, so each in units of its own floor."""

    def measured(lookup: Lookup) -> float:
        half, dense = (lookup(shape, dtype, idle_share=share, beta=0.0) for share in (0.5, 0.0))
        ratio: float = half[name]["ratio_to_floor"] / dense["ours"]["ratio_to_floor"]
        return ratio

    return Bar(f"{shape} {dtype}, half the prompts without gradient: {name} to all prompts with one", limit, measured)


def _masked(dtype: str, limit: float, **case: Any) -> Bar:
    """Time with a sampling mask to that of the same call without."""

    def measured(lookup: Lookup) -> float:
        found = lookup("2048x576x49152", dtype, **case)
        ratio: float = found["ours"]["seconds"]["median"] / found["ours-unmasked"]["seconds"]["median"]
        return ratio

    what = ", ".join([dtype, *(f"{name}={value}" for name, value in case.items())])
    return Bar(f"2048x576x49152 {what}: time to that without a sampling mask", limit, measured)


def _masked_memory(dtype: str, limit: float, **case: Any) -> Bar:
    """Bytes per kept id beyond inputs and gradients."""

    def measured(lookup: Lookup) -> float:
        peak: float = lookup("2048x576x49152", dtype, **case)["ours"]["peak_bytes"]
        return peak / (2048 * case["kept_ids"])

    return Bar(f"2048x576x49152 {dtype}, kept_ids={case['kept_ids']}: bytes per kept id", limit, measured)


def _precision(shape: str, dtype: str, limit: float) -> Bar:
    def measured(lookup: Lookup) -> float:
        error: float = lookup(shape, dtype)["ours"]["errors"]["logps_max"]
        return error

    return Bar(f"{shape} {dtype}: largest error of a log-probability, nats", limit, measured)


def _cpu() -> list[Bar]:
    wide, bars = "512x2048x128256", []
    for shape in ("2048x576x49152", "1024x896x151936", wide):
        limits = {
            "float32": {"floor": 1.10, "eager": 0.80, "trl": 0.55, "liger": 0.72, "compiled": 0.98},
            "bfloat16": {"floor": 1.12, "eager": 0.62, "trl": 0.35, "liger": 0.50, "compiled": 0.98},
        }
        if shape == wide:  # where eager is nearer to the floor
            limits["float32"] |= {"eager": 0.93, "trl": 0.64}
            limits["bfloat16"] |= {"eager": 0.80}
        bars += [_time(shape, dtype, *pair) for dtype, rivals in limits.items() for pair in rivals.items()]
    for shape, limit in (("2048x576x49152", 0.12), ("1024x896x151936", 0.25), ("4096x896x151936", 0.08)):
        dtypes = ("bfloat16",) if shape.startswith("4096") else ("float32", "bfloat16")
        bars += [_memory(shape, dtype, "eager", limit) for dtype in dtypes]
    for name, limit in (("ours", 0.78), ("ours-unscored", 0.58)):
        bars += [_idle("1024x576x49152", dtype, name, limit) for dtype in ("float32", "bfloat16")]
    masked = {"float32": {8: 0.03, 32: 0.04, 512: 0.35}, "bfloat16": {8: 0.03, 32: 0.08, 512: 0.35}}
    for dtype, limits in masked.items():
        bars += [_masked(dtype, limit, kept_ids=kept) for kept, limit in limits.items()]
        bars.append(_masked(dtype, 0.55, kept_ids=32, masked_share=0.5))
        bars.append(_masked(dtype, 0.03, kept_ids=32, mode="forward"))
        bars += [_masked_memory(dtype, 64.0, kept_ids=kept) for kept in (32, 512)]
    return bars


def _gpu() -> list[Bar]:
    """For an H200, in bfloat16."""
    llama, qwen, small, gemma = "16384x4096x128256", "16384x3584x152064", "16384x1536x151936", "16384x2304x256000"
    heads, dtype = (llama, qwen, small, gemma), "bfloat16"
    bars = [_time(shape, dtype, "floor", limit) for shape, limit in zip(heads, (1.08, 1.08, 1.15, 1.15), strict=True)]
    for rival, faster in (("trl", 1.25), ("liger", 1.5)):
        bars += [_time(shape, dtype, rival, 1 / faster) for shape in heads]
    bars += [_idle(small, dtype, "ours", 0.72), _idle(small, dtype, "ours-unscored", 0.55)]
    bars += [_time(llama, dtype, "floor", 1.08, mode="forward"), _time(qwen, dtype, "floor", 1.12, mode="frozen")]
    for mode in ("step", "frozen"):
        for rival, limit in (("trl", 1.0), ("eager", 0.125)):
            bars.append(_memory("65536x3584x151936", dtype, rival, limit, mode=mode))
    bars += [_time(f"{n}x1536x151936", dtype, "eager", 1.0) for n in (128, 256, 512, 1024)]
    bars.append(_time(llama, dtype, "floor", 0.12, kept_ids=32))
    bars += [_precision(shape, dtype, 2e-5) for shape in heads]
    return bars


def _bounded(name: str, found: dict[str, Any], device_memory: int | None) -> dict[str, Any]:
    """A rival that ran out of memory needs more than the device has, which bounds the ratio to it from above."""
    if device_memory and OUT_OF_MEMORY in found.get("error", "") and not name.startswith("ours"):
        return found | {"peak_bytes": device_memory}
    return found


def report(document: Document) -> str:
    """A line per bar of the document's kind of device."""
    device = document["environment"]["device"]
    bars = _cpu() if device == "cpu" else _gpu()
    memory = document["environment"].get("device_memory")

    def lookup(shape: str, dtype: str, **wanted: Any) -> Found:
        """Of the case with these fields; the others as cases have them by default."""
        wanted = DEFAULTS | wanted | {"dtype": dtype}
        for found in document["cases"]:
            case = found["case"]
            same = shape == f"{case['tokens']}x{case['hidden_size']}x{case['vocab_size']}"
            if same and all(case.get(key, DEFAULTS.get(key)) == value for key, value in wanted.items()):
                return {name: _bounded(name, one, memory) for name, one in found["implementations"].items()}
        raise KeyError(shape)

    rows = []
    for bar in bars:
        try:
            value = bar.measured(lookup)
        except KeyError:
            rows.append([bar.what, "", f"{bar.limit:.3g}", "not measured"])
            continue
        rows.append([bar.what, f"{value:.3g}", f"{bar.limit:.3g}", "met" if value <= bar.limit else "MISSED"])
    return table(("bar", "found", "at most", ""), rows)


def on_paper(device: Device) -> Document:
    """What the model of limits.py expects of the set "targets", in the form of results."""
    cases = []
    for job in jobs("targets", device.type):
        ways = {name: way_of(name, job.case.kept_ids) for name in job.names()}
        found = {name: predict(job.case, device, way) for name, way in ways.items() if way is not None}
        implementations = {
            name: {
                "seconds": {"median": one.seconds},
                "ratio_to_floor": one.seconds / found["floor"].seconds,
                "ours_to_this": found["ours"].seconds / one.seconds,
                **({} if ways[name] == "recompute" else {"peak_bytes": one.peak_bytes}),
            }
            for name, one in found.items()
        }
        cases.append({"case": asdict(job.case), "implementations": implementations})
    return {"environment": {"device": device.name, "device_memory": device.memory}, "cases": cases}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, default=[RESULTS / "cpu.json", RESULTS / "cpu-sweeps.json"])
    parser.add_argument("--paper", choices=[name for name, device in DEVICES.items() if device.type == "cuda"])
    chosen = parser.parse_args(arguments)
    if chosen.paper:
        device = DEVICES[chosen.paper]
        print(f"{device.name} on paper: {device.source}")
        print(report(on_paper(device)))
        return
    documents = [read(path) for path in chosen.results]
    for device in dict.fromkeys(document["environment"]["device"] for document in documents):
        same = [document for document in documents if document["environment"]["device"] == device]
        where = same[0]["environment"]
        print(f"{device}, {where['cpu']}, {where['date'][:10]}")
        print(report({"environment": where, "cases": [case for document in same for case in document["cases"]]}))


if __name__ == "__main__":
    main()
