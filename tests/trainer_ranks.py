"""Of test_trainer_parity.py, under torchrun: runs of the trainer one after another, from a file with command lines."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from grpo_kernels.trainer import commands


def too_few_on_rank_1(completions, **_):
    return [0.0] * (len(completions) - int(os.environ["RANK"]))


class Trainer(commands.Trainer):
    def __init__(self, made):
        assert made.ranks.count == 2
        assert isinstance(made.policy, FSDPModule) is made.arguments.fsdp
        super().__init__(made)


def main() -> None:
    torch.set_num_threads(1)
    commands.Trainer = Trainer
    PartialState.destroy_process_group = lambda self, group=None: None  # a run ends with it; here all use one group
    for argv in json.loads(Path(sys.argv[1]).read_text()):
        assert commands.train(argv) == 0, argv
        AcceleratorState._reset_state()
        PartialState().distributed_type = DistributedType.MULTI_CPU  # as it was, before a run that sharded
    time.sleep(0.2)  # see Run.close
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
