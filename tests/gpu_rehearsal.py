"""A GPU machine that is none, for `bench/gpu_report.py`: probes run for real, on kernels of plain torch on the CPU.

Probes are forked from a process that has imported torch, so that one takes a moment. Kernels can be told to hang, to be
wrong, to lose the device or not to compile; what is no probe (builds, pytest, the benchmarks) is a script of stand-ins.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, BinaryIO

import gpu_device
import gpu_events
import gpu_headline
import gpu_probes
import torch
from gpu_stand_in import HANGS
from torch import Tensor

from grpo_kernels import backends
from grpo_kernels.backends.pytorch.backend import TorchBackend
from grpo_kernels.backends.pytorch.objective import objective
from grpo_kernels.contract import FIELD, LogitChunk, Rows, RowStats, no_values

HEAD, TOKENS = "tiny", 64
FAULTS = "REHEARSAL_FAULTS"  # JSON: "PROBE:BACKEND/STRATEGY" to one of hang, wrong, lose, compile; PROBE may be empty


class CompilationError(Exception):
    """As Triton's."""


class Device:
    """`faults`: "backend/strategy" to what happens there. A lost device answers nothing any more."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        self.faults, self.lost = faults, False

    def launch(self, kernel: str) -> str:
        """Before a kernel: what is wrong with it, if it runs at all."""
        self.check()
        fault = self.faults.get(kernel, "")
        if fault == "hang":
            time.sleep(0.5)
            with open(os.environ[HANGS], "a") as hangs:
                print(kernel, file=hangs)
            time.sleep(600)
        if fault == "lose":
            self.lost = True
            self.check()
        if fault == "compile":
            raise CompilationError("at 95:4:\n    plane = parts.to(tl.int64) * count\nerror: constexpr has no cast")
        return fault

    def check(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Kernels(TorchBackend):
    """All three strategies; each has one entry that a fault is about."""

    def __init__(self, name: str, device: Device) -> None:
        self.name, self.device = name, device

    def strategies(self, hidden: Tensor, weight: Tensor) -> tuple[str, ...]:
        return ("rows",) if weight.dtype == torch.float32 else ("rows", "linear", "anchored")

    def single_pass(self, chunk, table, values, params, gradients=None) -> None:
        fault = self.device.launch(f"{self.name}/rows") if gradients else ""
        super().single_pass(chunk, table, values, params, gradients)
        if fault == "wrong":
            gradients.dlogits[:, 1::4] = 0.0

    def row_statistics(self, logits, ids, temperature, params) -> RowStats:
        values = no_values(len(ids), torch.float32, logits.device)
        self.statistics(LogitChunk(logits, Rows(0, len(ids)), ids), temperature, values, params)
        return RowStats(values.logp, values.lse, values.entropy)

    def linear_logp(self, hidden, weight, bias, ids, temperature, params, *, entropy) -> RowStats:
        fault = self.device.launch(f"{self.name}/linear")
        logits = hidden.float() @ weight.float().T
        if fault == "wrong" and logits.shape[1] > 256:  # one consumer of a block does not see the second tile
            logits[torch.arange(len(ids)) % 128 >= 64, 256:512] = -math.inf
        return self.row_statistics(logits, ids, temperature, params)

    def anchored(self, hidden, weight, bias, ids, table, exponentials, params) -> tuple[RowStats, Tensor]:
        fault = self.device.launch(f"{self.name}/anchored")
        z = hidden.float() @ weight.float().T
        stats = self.row_statistics(z, ids, table[FIELD["temperature"]], params)
        log_ratio = stats.logp - table[FIELD["old"]] if params.has_old else torch.zeros_like(stats.logp)
        result = objective(log_ratio, stats.logp, stats.entropy, table, params)
        g = table[FIELD["weight_ratio"]] * result.d_ratio + table[FIELD["weight_direct"]] * result.d_direct
        exps = (z - z.gather(1, ids[:, None])).exp()
        rest = exps.sum(1) - 1.0
        exps.scatter_(1, ids[:, None], -rest[:, None])
        if fault == "wrong":  # two columns change places
            exps[:, [2, 3]] = exps[:, [3, 2]]
        exponentials.copy_(exps)
        return stats, -g / (1.0 + rest)

    def scale(self, x: Tensor, factor: Tensor) -> None:
        if self.device.launch(f"{self.name}/scale") != "wrong":
            super().scale(x, factor)


# --- a probe's process ----------------------------------------------------------------------------------------------


def install(faults: Mapping[str, str], built: bool) -> None:
    """This process becomes one on a GPU machine with these faults, with or without compiled CUDA kernels."""
    device = Device(faults)
    torch.set_num_threads(1)
    missing = None if built else "this installation has no CUDA kernels"
    for name in ("cuda", "triton"):
        found = (None, missing) if missing and name == "cuda" else (Kernels(name, device), "")
        entry = backends.Entry(lambda found=found: found, ("cpu",), (torch.float32, torch.bfloat16, torch.float16))
        backends._REGISTRY[name] = entry
    for function in (backends._load, backends.auto_choice):
        function.cache_clear()
    backends._ORDER["cpu"] = ("cuda", "triton", "torch")
    gpu_device.PLACE, gpu_device.WARM_UP, gpu_device.ROUNDS = "cpu", 0, 1
    gpu_device.synchronize = device.check
    gpu_device.multiprocessors = lambda: 4
    gpu_device.free_memory = lambda: 2**33
    gpu_device.milliseconds = milliseconds
    gpu_events.HEADS.clear()
    gpu_events.HEADS[HEAD] = TOKENS
    gpu_events.PRODUCT_ROWS, gpu_events.COPIED = (16,), 2**16
    gpu_headline.CHUNK_ROWS, gpu_headline.ROUNDS, gpu_headline.SWEPT_ROUNDS = (16, 64), 2, 1
    gpu_headline.KEPT_IDS = (4, 2)
    # A CPU's products round logits to bfloat16, and none of them gives float32.
    gpu_probes.LOGP_TOLERANCE = gpu_headline.LOGP_TOLERANCE = gpu_headline.GRADIENT_TOLERANCE = 0.1
    torch.mm, torch.addmm = in_float32(torch.mm), in_float32(torch.addmm)


def in_float32(product: Any) -> Any:
    """A product that knows `out_dtype`, which a CPU's do not."""

    @functools.wraps(product)
    def call(*arguments: Tensor, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return product(*(x.to(out_dtype) for x in arguments) if out_dtype else arguments, **options)

    return call


def milliseconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def probe(arguments: Sequence[str], log: str, environment: Mapping[str, str], built: bool) -> None:
    os.setsid()
    target = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ |= environment
    planned = json.loads(environment.get(FAULTS, "{}"))
    faults = {}
    for where, fault in planned.items():
        kind, _, kernel = where.rpartition(":")
        if arguments[0].startswith(kind):
            faults[kernel] = fault
    install(faults, built)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    code = gpu_probes.main(arguments[0], arguments[1:])
    sys.stdout.flush()
    os._exit(code)


@functools.cache
def ensure_server() -> None:
    """Start it with what it has to find: it imports before it is told this process's path."""
    Forked.context.set_forkserver_preload([f"{__name__}_server"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Forked:
    """A probe, as gpu_work.Process."""

    context = multiprocessing.get_context("forkserver")

    def __init__(self, *arguments: Any) -> None:
        ensure_server()
        self.process = self.context.Process(target=probe, args=arguments, daemon=True)
        self.process.start()
        self.pid: int = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode


def start(
    faults: Mapping[str, str], folder: Path, command: Sequence[str], log: BinaryIO, environment: Mapping[str, str]
) -> Any:
    """Settings.start: probes in a forked process, everything else as it is called."""
    if "bench/gpu_probes.py" in command and command[-1] != "device":
        arguments = list(command[command.index("bench/gpu_probes.py") + 1 :])
        built = (folder / "grpo_kernels" / "_cuda.so").exists()
        with (folder / "calls").open("a") as calls:
            print("bench/gpu_probes.py", *arguments, file=calls)
        return Forked(arguments, log.name, {**environment, FAULTS: json.dumps(dict(faults))}, built)
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
