"""The accelerator. The launcher's configuration decides how processes share the work, and nothing else."""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from .arguments import TrainArguments, to_json
from .ranks import on_cpu

PROJECT = "grpo-kernels"  # by which trackers call the runs


def make_accelerator(a: TrainArguments) -> Accelerator:
    """Raises ValueError where the launcher's configuration has what would change the steps."""
    zero = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if zero and (a.use_cpu or PartialState().backend is None):  # accelerate would take each process for a run
        raise ValueError("DeepSpeed needs GPUs and `accelerate launch`; expected DDP or FSDP2 (--fsdp) on CPUs")
    if zero and a.fsdp:
        raise ValueError("accelerate's configuration has distributed_type=DEEPSPEED; expected no fsdp=True with it")
    shards = a.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    precision = "bf16" if a.bf16 else "no"
    accelerator = Accelerator(
        cpu=on_cpu(a.use_cpu), mixed_precision="no" if zero else precision, log_with=a.report_to or None,
        project_dir=a.output_dir, fsdp_plugin=sharding if a.fsdp else None,
    )  # fmt: skip
    if zero:
        configure_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, a, accelerator.num_processes)
        unset_hf_deepspeed_config()  # transformers loads whole models, which DeepSpeed shards where they are prepared
    if shards and accelerator.distributed_type is DistributedType.MULTI_CPU:
        # On CPUs accelerate ignores the plugin and takes DDP, though all else of its FSDP2 works there.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = sharding if a.fsdp else FullyShardedDataParallelPlugin()
    kind, settings, layout = accelerator.distributed_type, accelerator.state, accelerator.parallelism_config
    for name, found, expected, instead in (
        ("distributed_type", kind.value,
         ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "FSDP", "DEEPSPEED"), "DDP, FSDP2 or DeepSpeed"),
        ("fsdp_version", settings.fsdp_plugin.fsdp_version if kind is DistributedType.FSDP else 2, (2,), "2"),
        ("mixed_precision", os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), ("no", precision),
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


def configure_deepspeed(config: dict[str, Any], a: TrainArguments, num_processes: int) -> None:
    """Set what the run's options decide in DeepSpeed's configuration; raise ValueError where it has other values.

    Stage 3 is refused: it gathers parameters in the order of the first forward, and the policy's forward samples,
    scores or computes the loss. FSDP2 shards them too. --bf16 means what it means under DDP: float32 weights, autocast.
    """
    if a.dtype != "float32":
        raise ValueError(f"dtype={a.dtype} under DeepSpeed; expected float32, and --bf16")
    zero, rows = config["zero_optimization"], a.per_device_train_batch_size
    devices = {zero.get(f"offload_{part}", {}).get("device", "none") for part in ("optimizer", "param")}
    decided = {
        "gradient_clipping": a.max_grad_norm, "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": rows,
        "train_batch_size": rows * num_processes,
    }  # fmt: skip
    for name, found, expected in (
        ("zero_optimization.stage", zero.get("stage", 0), (1, 2)),
        ("offload", "nvme" if "nvme" in devices else "none", ("none", "cpu")),
        ("bf16.enabled", config["bf16"]["enabled"], (False, "auto")),
        ("fp16.enabled", config["fp16"]["enabled"], (False, "auto")),
        ("optimizer", config.get("optimizer"), (None,)),
        ("scheduler", config.get("scheduler"), (None,)),
        *((name, config.get(name, "auto"), ("auto", value)) for name, value in decided.items()),
    ):  # fmt: skip
        if found not in expected:
            wanted = " or ".join(map(str, expected))
            raise ValueError(f"DeepSpeed's configuration has {name}={found}; expected {wanted}")
    autocast = {"enabled": a.bf16, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    config |= {**decided, "torch_autocast": autocast}


def init_trackers(accelerator: Accelerator, a: TrainArguments) -> None:
    options = {"wandb": {"dir": os.environ.get("WANDB_DIR", a.output_dir)}} if "wandb" in a.report_to else {}
    settings = {name: str(value) for name, value in to_json(a, accelerator.num_processes).items()}
    try:
        accelerator.init_trackers(PROJECT, settings, options)
    except Exception as error:  # of the trackers, such as an account that is not known
        raise ValueError(f"report_to={', '.join(a.report_to)}: {error}") from error


# --- DeepSpeed: each rank has a part of the state of AdamW ------------------------------------------------------------


def zero_stage(accelerator: Accelerator) -> int:
    """The stage of DeepSpeed's ZeRO; 0 without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return 0 if plugin is None else int(plugin.zero_stage)


def partition_states(optimizer: Any) -> list[dict[str, Any]]:
    """AdamW's state of this rank's partitions, in their order. optimizer: as the accelerator prepared it."""
    return [optimizer.optimizer.optimizer.state.get(partition, {}) for partition in _partitions(optimizer)]


def load_partition_states(optimizer: Any, states: list[dict[str, Any]]) -> None:
    """Set what `partition_states` returned."""
    for partition, state in zip(_partitions(optimizer), states, strict=True):
        if state:
            optimizer.optimizer.optimizer.state[partition] = {
                name: x.to(partition.device) if isinstance(x, Tensor) and x.dim() else x for name, x in state.items()
            }


def _partitions(optimizer: Any) -> list[Tensor]:
    found: list[Tensor] = optimizer.optimizer.single_partition_of_fp32_groups
    return found
