"""Peak memory of one call on a CPU, in a freshly executed process per implementation. Linux.

There: a tiny call (thread pools, lazily loaded libraries), the inputs, a reset of the kernel's high-water mark of
resident memory, one call, and
    peak - resident before the call - bytes of the returned gradients.
That is what a call needs on top of what any call needs. Eager's peak comes before its gradients exist, so this counts
them in its favour. The allocator is glibc's as it comes: blocks of 32 MiB and more are mapped one by one and go back
when freed, except those that the engine keeps for its next scratch (engine/recycled.py), which are counted. Memory that
matrix libraries take for packed operands is counted, too.

On a GPU the allocator of torch counts, in the process that measures time: see measure.py.
"""

from __future__ import annotations

from typing import Any

import torch

from .cases import Case, make_case
from .implementations import Unserved, implementations
from .inputs import make_inputs
from .machine import limit_memory, peak, restart_peak
from .measure import SILENCE_S, returned_bytes
from .process import Died, Tell, apart

# Not the floor, which has a buffer that no loss needs; not compiled eager, whose peak includes the compiler.
UNWEIGHED = ("floor", "compiled")


def weigh(case: Case, name: str, tell: Tell = lambda text: None) -> dict[str, Any]:
    """{"peak_bytes", "returned_bytes"} of an implementation's first setting, or {"memory_error"}; {} if it has none."""
    implementation = implementations()[name]
    if name in UNWEIGHED or implementation.why_not(torch.device("cpu"), case.torch_dtype) is not None:
        return {}
    try:
        found: dict[str, Any] = apart(_weigh, case, name, tell=tell, silence_s=SILENCE_S["cpu"])
    except Died as death:
        return {"memory_error": str(death)}
    return found


def _weigh(case: Case, name: str, tell: Tell) -> dict[str, Any]:
    device = torch.device("cpu")
    limit_memory()
    tell(name)
    implementation = implementations()[name]
    kept_ids = min(case.kept_ids, 8)  # with a sampling mask other libraries are loaded
    tiny_case = make_case("32x64x512", case.dtype, mode=case.mode, beta=case.beta, kept_ids=kept_ids)
    tiny = make_inputs(tiny_case, device)
    try:
        next(iter(implementation.settings(tiny, case.mode).values()))(tiny)
        inputs = make_inputs(case, device)
        step = next(iter(implementation.settings(inputs, case.mode).values()))
    except Unserved:
        return {}
    before = restart_peak(device)
    if before is None:
        return {"memory_error": "this system has no high-water mark of memory that can be reset"}
    returned = returned_bytes(step(inputs))
    return {"peak_bytes": peak(device) - before - returned, "returned_bytes": returned}
