"""Of test_trainer_parity.py, under torchrun: runs of the trainer one after another.

    torchrun --nproc_per_node 2 trainer_ranks.py FOLDER

FOLDER/jobs.json is a list of runs: {"name": ..., "argv": [...], "replay": a folder of rollouts, or null}. Rank r writes
FOLDER/rank-r.json: for each name the exit status, or the error with its type.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import training
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from grpo_kernels.trainer import arithmetic, commands

RANK = int(os.environ.get("RANK", "0"))


def length(prompts, completions, completion_ids, log_metric, **columns):
    log_metric("rank", RANK)
    return training.length(prompts, completions, completion_ids)


def short_on_rank_1(prompts, completions, completion_ids, **columns):
    return [0.0] * (len(prompts) - RANK)


def raises_on_rank_1(prompts, completions, completion_ids, **columns):
    if RANK == 1:
        raise KeyError("only here")
    return training.length(prompts, completions, completion_ids)


def breaks_rank_1(prompts, completions, completion_ids, **columns):
    return training.length(prompts, completions, completion_ids)


def signals_rank_1(prompts, completions, completion_ids, **columns):
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return training.length(prompts, completions, completion_ids)


class Trainer(training.Recorder):
    def __init__(self, run):
        assert run.ranks.count == 2
        assert isinstance(run.policy, FSDPModule) is run.arguments.fsdp
        super().__init__(run)

    def _clip(self):
        """With a reward function of that name the state of one rank is broken before the last step."""
        if "trainer_ranks:breaks_rank_1" in self.arguments.reward_funcs and self.progress.step == 3 and RANK == 1:
            for state in self.run.optimizer.state.values():
                getattr(state["exp_avg_sq"], "_local_tensor", state["exp_avg_sq"]).fill_(torch.inf)
        return super()._clip()


def run(argv: list[str], replay: str | None) -> int | str:
    try:
        with training.replayed(Path(replay)) if replay else contextlib.nullcontext():
            return commands.train(argv)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        AcceleratorState._reset_state()
        PartialState().distributed_type = DistributedType.MULTI_CPU  # as it was, before a run that sharded
        os.environ.pop("ACCELERATE_USE_FSDP", None)


def main() -> None:
    torch.set_num_threads(1)
    commands.Trainer = Trainer
    arithmetic.start_model = lambda folder, **options: training.make_model(Path(folder))
    PartialState.destroy_process_group = lambda self, group=None: None  # a run ends with it; here all use one group
    folder, seen = Path(sys.argv[1]), {}
    for job in json.loads((folder / "jobs.json").read_text()):
        seen[job["name"]] = run(job["argv"], job["replay"])
    (folder / f"rank-{RANK}.json").write_text(json.dumps(seen))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # taking the process group down may wait forever, see Run.close


if __name__ == "__main__":
    main()
