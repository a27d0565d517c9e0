"""The accelerator, of which the launcher's configuration decides how processes share the work, and nothing else."""

from __future__ import annotations

import os

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from .arguments import TrainArguments, to_json

PROJECT = "grpo-kernels"  # by which trackers call the runs


def make_accelerator(a: TrainArguments) -> Accelerator:
    """Raises ValueError where the launcher's configuration has what would change the steps."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # which accelerate ignores on CPUs
        raise ValueError("accelerate's configuration has distributed_type=DEEPSPEED; expected DDP or FSDP2")
    shards = a.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(
        cpu=a.use_cpu, mixed_precision="bf16" if a.bf16 else "no", log_with=a.report_to or None,
        project_dir=a.output_dir, fsdp_plugin=sharding if a.fsdp else None,
    )  # fmt: skip
    if shards and accelerator.distributed_type is DistributedType.MULTI_CPU:
        # On CPUs accelerate ignores the plugin and takes DDP, though all else of its FSDP2 works there.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = sharding if a.fsdp else FullyShardedDataParallelPlugin()
    kind, settings, layout = accelerator.distributed_type, accelerator.state, accelerator.parallelism_config
    for name, found, expected, instead in (
        ("distributed_type", kind.value, ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "FSDP"),
         "DDP or FSDP2"),
        ("fsdp_version", settings.fsdp_plugin.fsdp_version if kind is DistributedType.FSDP else 2, (2,), "2"),
        ("mixed_precision", os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), ("no", accelerator.mixed_precision),
         "no, or bf16 with --bf16"),
        ("gradient_accumulation_steps", accelerator.gradient_accumulation_steps, (1,),
         "1, and --gradient-accumulation-steps"),
        ("dynamo_backend", os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(), ("no",), "no"),
        ("tensor, context or sequence parallelism", bool(layout and layout.non_data_parallel_size > 1), (False,),
         "data parallelism"),
    ):  # fmt: skip
        if found not in expected:
            raise ValueError(f"accelerate's configuration has {name}={found}; expected {instead}")
    absent = sorted(set(a.report_to) - set(map(str, accelerator.log_with)))  # accelerate says nothing
    if absent:
        raise ValueError(f"report_to={', '.join(absent)}: not installed (pip install {' '.join(absent)})")
    return accelerator


def init_trackers(accelerator: Accelerator, a: TrainArguments) -> None:
    options = {"wandb": {"dir": os.environ.get("WANDB_DIR", a.output_dir)}} if "wandb" in a.report_to else {}
    settings = {name: str(value) for name, value in to_json(a, accelerator.num_processes).items()}
    try:
        accelerator.init_trackers(PROJECT, settings, options)
    except Exception as error:  # of the trackers, such as an account that is not known
        raise ValueError(f"report_to={', '.join(a.report_to)}: {error}") from error
