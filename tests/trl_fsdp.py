"""Of test_trl.py, under torchrun: gradients of FusedGRPOTrainer under FSDP2 are the averages over the ranks."""

from __future__ import annotations

from typing import Any

import test_trl
import torch
import torch.distributed as dist
import trl_parity
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def trainer(options: dict[str, Any]) -> Any:
    made = trl_parity.make_trainer(trl_parity.trainer_class("fused"), "qwen2", options)
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def check(options: dict[str, Any], *, head_alone: bool) -> None:
    whole, sharded = trainer(options), trainer(options)  # which start the process group
    inputs = test_trl.crafted_inputs(seed=dist.get_rank())
    whole._compute_loss(whole.model, inputs).backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded.model
    for part in (*model.model.layers, *([model.lm_head] if head_alone else []), model):
        fully_shard(part, mesh=mesh)
    sharded._compute_loss(model, inputs).backward()
    found = dict(model.named_parameters())
    for name, parameter in whole.model.named_parameters():
        expected = parameter.grad
        dist.all_reduce(expected)
        expected /= dist.get_world_size()
        error = (found[name].grad.full_tensor() - expected).norm()
        assert error <= 1e-5 * expected.norm() + 1e-8, (options, head_alone, name)


def main() -> None:
    torch.set_num_threads(1)
    check({"loss_type": "dapo"}, head_alone=False)
    check({"loss_type": "grpo", "top_entropy_quantile": 0.5}, head_alone=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
