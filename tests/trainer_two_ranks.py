"""Of test_trainer_ranks.py, under torchrun with two processes: runs one after another, and what each one leaves.

    torchrun --nproc_per_node 2 trainer_two_ranks.py FOLDER

FOLDER holds model/, problems.jsonl and three.jsonl. Rank r writes what it saw to FOLDER/rank-r.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import training
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from grpo_kernels.trainer import arithmetic, commands

RANK = int(os.environ["RANK"])
STEPS = {"max_steps": 4, "save_steps": 1, "num_iterations": 2, "steps_per_generation": 2, "beta": 0.1,
         "per_device_train_batch_size": 4, "reward_funcs": "trainer_two_ranks:length"}  # fmt: skip


def length(prompts, completions, completion_ids, log_metric, **columns):
    log_metric("rank", RANK)
    return [float(len(ids)) + 0.1 * ids[0] for ids in completion_ids]


def short_on_rank_1(prompts, completions, completion_ids, **columns):
    return [0.0] * (len(prompts) - RANK)


def raises_on_rank_1(prompts, completions, completion_ids, **columns):
    if RANK == 1:
        raise KeyError("only here")
    return [float(len(ids)) + 0.1 * ids[0] for ids in completion_ids]


def signals_rank_1(prompts, completions, completion_ids, **columns):
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(len(ids)) + 0.1 * ids[0] for ids in completion_ids]


def run(folder: Path, name: str, **options):
    """The exit status, or the error's type."""
    model, data = folder / "model", folder / "problems.jsonl"
    try:
        return commands.train(training.arguments(model, data, folder / name, **{**STEPS, **options}))
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        AcceleratorState._reset_state()
        PartialState().distributed_type = DistributedType.MULTI_CPU  # as it was, before a run that sharded
        os.environ.pop("ACCELERATE_USE_FSDP", None)


def halved(folder: Path, name: str) -> None:
    """A copy of the run as it was after step 2."""
    if RANK == 0:
        shutil.copytree(folder / name, folder / f"{name}, resumed")
        for gone in ("model", "checkpoint-3", "checkpoint-4"):
            shutil.rmtree(folder / f"{name}, resumed" / gone)
    torch.distributed.barrier()


def small_start_model(folder, **options):
    training.make_model(Path(folder))


def main() -> None:
    torch.set_num_threads(1)
    folder, seen = Path(sys.argv[1]), {}
    PartialState.destroy_process_group = lambda self, group=None: None  # a run ends with it; here all use one group
    for name, options in (("DDP", {}), ("FSDP2", {"fsdp": True})):
        seen[name] = run(folder, name, save_total_limit=9, **options)
        halved(folder, name)
        seen[f"{name}, resumed"] = run(
            folder, f"{name}, resumed", save_total_limit=9, resume_from_checkpoint="auto", **options
        )
    three = {"eval_dataset_name": folder / "three.jsonl", "eval_num_samples": 2}
    seen["three held out"] = run(folder, "three held out", **three, max_steps=1)
    begin = time.perf_counter()
    seen["short"] = run(folder, "short", reward_funcs="trainer_two_ranks:short_on_rank_1")
    seen["seconds"] = time.perf_counter() - begin
    seen["raises"] = run(folder, "raises", reward_funcs="trainer_two_ranks:raises_on_rank_1", max_steps=1)
    seen["signal"] = run(folder, "signal", reward_funcs="trainer_two_ranks:signals_rank_1")
    arithmetic.start_model = small_start_model
    task = {"model_name_or_path": None, "dataset_name": None, "reward_funcs": "arithmetic"}
    model, data = folder / "model", folder / "problems.jsonl"
    seen["dry run"] = commands.train(["--dry-run", *training.arguments(model, data, folder / "dry", **STEPS | task)])
    (folder / f"rank-{RANK}.json").write_text(json.dumps(seen))
    time.sleep(0.2)  # see Run.close
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
