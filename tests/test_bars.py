"""bench/bars.py: the targets, and whether the set of measurements named after them measures every one."""

from __future__ import annotations

from typing import Any

import bars
import pytest

from grpo_kernels.benchmarks.cases import make_case
from grpo_kernels.benchmarks.devices import DEVICES
from grpo_kernels.benchmarks.machine import OUT_OF_MEMORY
from grpo_kernels.benchmarks.sets import jobs

LONG, GIB = "65536x3584x151936", 2**30


def document(device: str, found: dict[str, dict[str, Any]], shape: str = LONG, **fields: Any) -> dict[str, Any]:
    case = make_case(shape, "bfloat16", **fields)
    names = ("tokens", "hidden_size", "vocab_size", "dtype", *bars.DEFAULTS)
    return {
        "environment": {"device": device, "device_memory": 141 * GIB},
        "cases": [{"case": {name: getattr(case, name) for name in names}, "implementations": found}],
    }


def line(text: str, *words: str) -> str:
    (found,) = (line for line in text.splitlines() if all(word in line for word in words))
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_target_is_measured_by_the_set_of_that_name(device):
    for bar in bars._cpu() if device == "cpu" else bars._gpu():
        read = []

        def lookup(shape: str, dtype: str, read: list[str] = read, **wanted: Any) -> dict[str, Any]:
            fields = bars.DEFAULTS | wanted | {"dtype": dtype}
            (job,) = (
                job
                for job in jobs("targets", device)
                if shape == f"{job.case.tokens}x{job.case.hidden_size}x{job.case.vocab_size}"
                and all(getattr(job.case, name) == value for name, value in fields.items())
            )
            read.append(shape)
            times = {
                "ours_to_this": 1.0,
                "ratio_to_floor": 1.0,
                "seconds": {"median": 1.0},
                "errors": {"logps_max": 1.0},
            }
            memory = {"peak_bytes": 1}
            weighed = job.names() if device == "cuda" else job.weighed_names()
            timed = job.names() if job.timed else []
            return {
                name: (times if name in timed else {}) | (memory if name in weighed else {}) for name in job.names()
            }

        assert bar.measured(lookup) > 0 and read, bar.what


def test_a_target_is_met_missed_or_not_measured():
    found = {"ours": {"peak_bytes": 10 * GIB}, "trl": {"peak_bytes": 9 * GIB}, "eager": {"peak_bytes": 100 * GIB}}
    text = bars.report(document("NVIDIA H200", found))
    assert line(text, f"{LONG} bfloat16, step: memory to trl").split()[-1] == "MISSED"
    assert line(text, f"{LONG} bfloat16, step: memory to eager").split()[-3:] == ["0.1", "0.125", "met"]
    assert line(text, f"{LONG} bfloat16, frozen: memory to trl").endswith("not measured")


def test_what_runs_out_of_memory_needs_more_than_the_device_has():
    lost = {"error": f"{OUT_OF_MEMORY}: OutOfMemoryError: CUDA out of memory"}
    text = bars.report(document("NVIDIA H200", {"ours": {"peak_bytes": 141 * GIB // 10}, "eager": lost}))
    assert line(text, f"{LONG} bfloat16, step: memory to eager").split()[-3:] == ["0.1", "0.125", "met"]
    text = bars.report(document("NVIDIA H200", {"ours": lost, "eager": {"peak_bytes": GIB}}))
    assert line(text, f"{LONG} bfloat16, step: memory to eager").endswith("not measured")


def test_on_paper_every_bar_of_a_ratio_is_expected_but_the_memory_of_peers():
    text = bars.report(bars.on_paper(DEVICES["H200"]))
    unknown = [line for line in text.splitlines() if line.endswith("not measured")]
    assert all("memory to trl" in line or "largest error" in line for line in unknown) and len(unknown) == 6
    assert line(text, "16384x4096x128256 bfloat16: time to floor").split()[-3:] == ["1.06", "1.08", "met"]
    assert float(line(text, "frozen: memory to eager").split()[-3]) < 0.01
