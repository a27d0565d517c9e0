"""Of test_trl.py, in two processes: runs under DDP, gradients under FSDP2, runs under ZeRO-3."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import trl_calls
import trl_parity
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl.trainer import grpo_trainer

from grpo_kernels.integrations import trl as integration


def trainer(options: dict[str, Any]) -> Any:
    made = trl_parity.make_trainer(trl_parity.trainer_class("fused"), "qwen2", options)
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def check_fsdp2(options: dict[str, Any], *, head_alone: bool) -> None:
    """The gradients are averages over the ranks."""
    whole, sharded = trainer(options), trainer(options)  # which start the process group
    inputs = trl_calls.crafted_inputs(seed=dist.get_rank())
    whole._compute_loss(whole.model, inputs).backward()
    shard(sharded.model, head_alone=head_alone)
    sharded._compute_loss(sharded.model, inputs).backward()
    assert_same_gradients(sharded.model, whole.model, (options, head_alone))


def shard(model: Any, *, head_alone: bool = False) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, *([model.lm_head] if head_alone else []), model):
        fully_shard(part, mesh=mesh)


def assert_same_gradients(sharded: Any, whole: Any, what: object) -> None:
    found = dict(sharded.named_parameters())
    for name, parameter in whole.named_parameters():
        expected = parameter.grad
        dist.all_reduce(expected)
        expected /= dist.get_world_size()
        error = (found[name].grad.full_tensor() - expected).norm()
        assert error <= 1e-5 * expected.norm() + 1e-8, (what, name)


class Sharded(integration.FusedGRPOTrainer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        shard(self.model, head_alone=True)


def check_truncated_sampling_under_fsdp2() -> None:
    """The kept ids are recomputed from sharded weights; scores over them, and gradients, are those of whole ones."""
    options = dict(top_k=9, top_p=0.9, beta=0.1, vllm_importance_sampling_mode="token_truncate")
    runs = []
    for cls in (integration.FusedGRPOTrainer, Sharded):
        made, batch = trl_calls.sampled_by(cls, trl_calls.sampled_elsewhere, **options)
        made.current_gradient_accumulation_steps = 1
        made._compute_loss(made.model, batch).backward()
        runs.append((made, batch))
    (whole, expected), (sharded, found) = runs
    assert torch.equal(found["support_counts"], expected["support_counts"]) and found["support_counts"].max() <= 10
    assert all(map(torch.equal, found["support_ids"], expected["support_ids"]))
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        torch.testing.assert_close(found[name], expected[name])
    assert_same_gradients(sharded.model, whole.model, options)


ZERO_3: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # small parameters are sharded too
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
}  # fmt: skip


def check_zero_3(title: str, expected: dict[str, Any]) -> None:
    """Runs with a reference model equal that of TRL's own trainer under DDP, which is expected."""
    import deepspeed
    from accelerate import DistributedType, PartialState

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile: gloo serves
    deepspeed.utils.logger.setLevel("ERROR")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # DeepSpeed calls torch.compile where it is imported, for 2 s
    del os.environ["ACCELERATE_USE_CPU"]  # accelerate takes DeepSpeed for no CPU, and then chooses no backend
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.NO)
    for name in ("fused", "patched"):
        case = trl_parity.CASES[title]
        found = trl_parity.run(name, case._replace(options={**case.options, "deepspeed": ZERO_3, "use_cpu": False}))
        errors = trl_parity.differences(found, expected)
        assert max(errors) < trl_parity.TOLERANCE, (name, errors)


def check_truncated_sampling() -> None:
    """Each rank's rows keep their own ids; the kept mass that is logged is that of all ranks."""
    options = dict(top_k=9, learning_rate=0.0, beta=0.1, max_steps=2)
    log = trl_parity.result_of(trl_parity.make_trainer(trl_calls.Watched, "qwen2", options))["log"]
    assert trl_calls.Watched.watched == 4  # micro-batches
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, [entry["sampling/kept_mass"] for entry in log if "sampling/kept_mass" in entry])
    assert found[0] == found[1] and len(found[0]) == 1 and 0.2 < found[0][0] < 0.9, found


def check_corrections() -> None:
    """Weights of the sampling engine have a mean of 1 over both ranks, and the rejected tokens of both are counted."""
    cls = partial(
        integration.FusedGRPOTrainer, rollout_is_batch_normalize=True, rollout_rs=trl_calls.RS,
        rollout_rs_mask=True, rollout_func=trl_calls.sampled_elsewhere,
    )  # fmt: skip
    options = dict(use_vllm=True, vllm_importance_sampling_mode="token_truncate")
    grpo_trainer.VLLMGeneration = lambda **_: SimpleNamespace(sync_weights=int)
    made = trl_parity.make_trainer(cls, "qwen2", options)
    made.state.global_step = 7 * dist.get_rank()  # other completions on each
    batch = made._generate_and_score_completions([{"prompt": "w11"}] * 8)
    mask, kept = batch["completion_mask"].bool(), batch["tool_mask"].sum()
    sums = torch.stack([batch["importance_sampling_ratio"][mask].sum(), mask.sum(), kept])
    own = sums.clone()
    dist.all_reduce(sums)
    assert abs(sums[0] / sums[1] - 1) < 1e-5 < abs(own[0] / own[1] - 1) and 0 < kept < sums[2] < sums[1]
    assert batch["num_items_in_batch"] == sums[2]


def check(runs: dict[tuple[str, str], dict[str, Any]]) -> None:
    """runs: results of these processes so far."""
    check_truncated_sampling()
    check_truncated_sampling_under_fsdp2()
    check_corrections()
    check_fsdp2({"loss_type": "dapo"}, head_alone=False)
    check_fsdp2({"loss_type": "grpo", "top_entropy_quantile": 0.5}, head_alone=True)
    if find_spec("deepspeed"):
        title = "dapo, two processes"
        check_zero_3(title, runs["trl", title])
