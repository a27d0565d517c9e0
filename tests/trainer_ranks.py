"""Of test_trainer_parity.py, in two processes: runs of the trainer one after another."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import training
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed import get_rank
from torch.distributed.fsdp import FSDPModule

from grpo_kernels.trainer import arithmetic, commands


class Job(NamedTuple):
    name: str
    argv: list[str]
    replay: Path | None = None  # a folder of rollouts
    of_rank_1: tuple[str, ...] = ()  # what it has after these words: paths, where machines have disks of their own


def length(prompts, completions, completion_ids, log_metric, **columns):
    log_metric("rank", get_rank())
    return training.length(prompts, completions, completion_ids)


def short_on_rank_1(prompts, completions, completion_ids, **columns):
    return [0.0] * (len(prompts) - get_rank())


def raises_on_rank_1(prompts, completions, completion_ids, **columns):
    if get_rank() == 1:
        raise KeyError("only here")
    return training.length(prompts, completions, completion_ids)


def breaks_rank_1(prompts, completions, completion_ids, **columns):
    return training.length(prompts, completions, completion_ids)


def signals_rank_1(prompts, completions, completion_ids, **columns):
    if get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return training.length(prompts, completions, completion_ids)


class Trainer(training.Recorder):
    def __init__(self, run):
        assert run.ranks.count == 2
        assert isinstance(run.policy, FSDPModule) is run.arguments.fsdp
        super().__init__(run)

    def _clip(self):
        """With a reward function of that name the state of one rank is broken before the last step."""
        if "trainer_ranks:breaks_rank_1" in self.arguments.reward_funcs and self.progress.step == 3 and get_rank() == 1:
            for state in self.run.optimizer.state.values():
                getattr(state["exp_avg_sq"], "_local_tensor", state["exp_avg_sq"]).fill_(torch.inf)
        return super()._clip()


def run(job: Job) -> int | str:
    """The exit status, or the error with its type."""
    argv = [*job.argv, *job.of_rank_1 * get_rank()]
    try:
        with training.replayed(job.replay) if job.replay else contextlib.nullcontext():
            return commands.train(argv)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        AcceleratorState._reset_state()
        PartialState().distributed_type = DistributedType.MULTI_CPU  # as it was, before a run that sharded
        os.environ.pop("ACCELERATE_USE_FSDP", None)


def all_of_them(rank: int, group: Any, *, folder: Path, jobs: list[Job]) -> None:
    """What a rank says is in FOLDER/said-RANK.txt; the results of `run` by name are in FOLDER/rank-RANK.json."""
    with (folder / f"said-{rank}.txt").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    AcceleratorState._reset_state(reset_partial_state=True)  # which a fork has of its parent
    commands.Trainer = Trainer
    arithmetic.start_model = lambda folder, **options: training.make_model(Path(folder))
    PartialState.destroy_process_group = lambda self, group=None: None  # a run ends with it; here all use one group
    (folder / f"rank-{rank}.json").write_text(json.dumps({job.name: run(job) for job in jobs}))
    torch.distributed.barrier()
    os._exit(0)  # taking the process group down may wait forever, see Run.close
