"""How processes share the work: what they tell each other, which with one process is the identity; signals; and the
accelerator, which the launcher's configuration decides, and nothing else."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import RunError
from .arguments import TrainArguments

PROJECT = "grpo-kernels"  # by which trackers call the runs
OF_A_RUN = "made_by_grpo_kernels"  # an attribute of accelerate's state


def on_cpu(use_cpu: bool) -> bool:
    """Says whether a run is on the CPU. accelerate has to be told, or takes each process of torchrun for its own
    run."""
    return use_cpu or not torch.accelerator.is_available()


def forget_earlier_run() -> None:
    """Lets a second run in one process have other options: accelerate keeps those of the first Accelerator. One that
    the user has made is left as it is."""
    if OF_A_RUN in AcceleratorState._shared_state:
        AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())


class Ranks:
    """The processes of a run, each of which holds a contiguous share of every list of rows."""

    def __init__(self, *, use_cpu: bool = False):
        state = PartialState(cpu=on_cpu(use_cpu))
        self.index, self.count, self.device = state.process_index, state.num_processes, state.device

    def share(self, rows: Sequence[Any]) -> list[Any]:
        """This rank's part of rows, whose number the ranks divide."""
        size = len(rows) // self.count
        return list(rows[self.index * size : (self.index + 1) * size])

    def gather(self, rows: list[Any]) -> list[Any]:
        """Returns the rows of all ranks, in the order of the ranks."""
        return list(gather_object(rows))

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Makes an error of one rank within it an error of all: the others would wait for that rank without end.

        Holds no collective operation.
        """
        try:
            yield
        except Exception as error:
            self.gather([f"{type(error).__name__}: {error}"])
            raise
        for rank, message in enumerate(self.gather([""])):
            if message:
                raise RunError(f"rank {rank} failed: {message}")


def whole(tensor: Tensor) -> Tensor:
    """Returns a tensor that FSDP2 shards with the parts of all ranks, each of which has to ask; any other one as it
    is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Interrupted(BaseException):
    """The run was asked to stop. Like KeyboardInterrupt no Exception, which libraries catch."""


class Signals:
    """SIGTERM, Ctrl-C and the SIGHUP of a terminal that closes: the run stops at the next moment at which its state is
    whole, saves it, and leaves."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.received = 0  # the first signal
        self._at_once = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes the first signal within it; a second Ctrl-C interrupts at once."""
        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]  # ignored: by nohup
        is_main = threading.current_thread() is threading.main_thread()  # other threads get no signals
        numbers = [signal.SIGTERM, signal.SIGINT, *hangup] if is_main else []
        before = [(number, signal.signal(number, self._note)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets a signal to a single process interrupt at once what is within it, which may be long and changes no
        state."""
        self._at_once = self.ranks.count == 1
        try:
            if self._at_once and self.received:
                raise Interrupted
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if number == signal.SIGHUP:
            _leave_terminal()
        if self._at_once:
            raise Interrupted
        if self.ranks.index == 0:
            # Not through sys.stderr, in the midst of whose own writing the signal may have come.
            with suppress(OSError):
                os.write(2, b"\nstopping after this step; Ctrl-C again quits now\n")

    def check(self) -> None:
        """Raises Interrupted where any rank got a signal; every rank calls it."""
        self.received = max(self.ranks.gather([self.received]))
        if self.received:
            raise Interrupted


def _leave_terminal() -> None:
    """Writes to nowhere what a terminal would have shown: to write to a closed one is an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for handle in (1, 2):
        with suppress(OSError):  # it was closed before
            if stat.S_ISCHR(os.fstat(handle).st_mode):
                os.dup2(nowhere, handle)
    os.close(nowhere)


def make_accelerator(a: TrainArguments) -> Accelerator:
    """Raises ValueError where the launcher's configuration has what would change the steps."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise ValueError("accelerate's configuration has distributed_type=DEEPSPEED; expected DDP or FSDP2")
    shards = a.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    precision = "bf16" if a.bf16 else "no"
    users = AcceleratorState._shared_state.get("_mixed_precision")
    if users not in (None, precision):
        raise ValueError(f"bf16={a.bf16}: this process has an Accelerator of mixed_precision={users}")
    accelerator = Accelerator(
        cpu=on_cpu(a.use_cpu), mixed_precision=precision, log_with=a.report_to or None,
        project_dir=a.output_dir, fsdp_plugin=sharding if a.fsdp else None,
    )  # fmt: skip
    if users is None:
        setattr(accelerator.state, OF_A_RUN, True)
    if shards and accelerator.distributed_type is DistributedType.MULTI_CPU:
        # On CPUs accelerate ignores the plugin and takes DDP, though all else of its FSDP2 works there.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = sharding if a.fsdp else FullyShardedDataParallelPlugin()
    kind, layout = accelerator.distributed_type, accelerator.parallelism_config
    for name, value, expected in (
        ("distributed_type", kind.value, ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "FSDP")),
        ("fsdp_version", accelerator.state.fsdp_plugin.fsdp_version if kind is DistributedType.FSDP else 2, (2,)),
        ("mixed_precision", os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), ("no", precision)),
        ("gradient_accumulation_steps", accelerator.gradient_accumulation_steps, (1,)),
        ("dynamo_backend", os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(), ("no",)),
        ("non_data_parallel_size", layout.non_data_parallel_size if layout else 1, (1,)),
    ):
        if value not in expected:
            raise ValueError(f"accelerate's configuration has {name}={value}; expected {', '.join(map(str, expected))}")
    if absent := sorted(set(a.report_to) - set(map(str, accelerator.log_with))):  # accelerate says nothing
        raise ValueError(f"report_to={', '.join(absent)}: not installed (pip install {' '.join(absent)})")
    return accelerator


def init_trackers(accelerator: Accelerator, a: TrainArguments, recorded: dict[str, Any]) -> None:
    options = {"wandb": {"dir": os.environ.get("WANDB_DIR", a.output_dir)}} if "wandb" in a.report_to else {}
    settings = {name: str(value) for name, value in recorded.items()}
    try:
        accelerator.init_trackers(PROJECT, settings, options)
    except Exception as error:  # of the trackers, such as an account that is not known
        raise ValueError(f"report_to={', '.join(a.report_to)}: {error}") from error
