"""Ranks with their own rows under DDP, FSDP and DeepSpeed: the gradients and the step of one process on all rows.

The ranks have different numbers of scored tokens. One that has none has to take part in every collective nevertheless.
All runs share two processes, in one test.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_models import VOCAB, tiny_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from grpo_kernels import fused_grpo_loss, fused_logps

pytest.importorskip("transformers")
from grpo_kernels.integrations.transformers import fused_forward

LENGTH = 6
RATE = 0.3


def loss_of_logps(hidden, weight, ids, *, advantages, num_items_in_batch, **options) -> Tensor:
    """A loss whose backward needs the weight again."""
    logps, _ = fused_logps(hidden, weight, ids, **options)
    return -(logps * advantages.unsqueeze(1)).sum() / num_items_in_batch


class Step(nn.Module):
    """A model whose forward is its loss, or with hidden=True its hidden states."""

    def __init__(self, tied: bool = False, *, frozen_head: bool = False) -> None:
        super().__init__()
        self.model = tiny_model("llama", tie_word_embeddings=tied)
        self.model.lm_head.weight.requires_grad_(not frozen_head)

    def forward(self, loss=fused_grpo_loss, hidden=False, **batch) -> Tensor:
        if hidden:
            return self.model.model(batch["input_ids"]).last_hidden_state[:, -LENGTH - 1 : -1]
        out = fused_forward(self.model, **batch, loss=loss)
        return out if isinstance(out, Tensor) else out.loss


def make_batch() -> dict[str, Tensor]:
    """Four rows, of which the third has no scored token."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (4, 5 + LENGTH), generator=g)
    mask = torch.ones_like(ids)
    mask[0, :2], mask[1, -2:] = 0, 0
    scored = mask[:, -LENGTH:].clone()
    scored[2] = 0
    return dict(
        input_ids=ids, attention_mask=mask, completion_ids=ids[:, -LENGTH:], completion_mask=scored,
        advantages=torch.randn(4, generator=g),
    )  # fmt: skip


def rows_of(batch: dict[str, Tensor], rows: slice, shares: int) -> dict[str, Any]:
    """Some rows; the sum of a step is the mean over `shares` ranks and micro-batches."""
    part = {name: x[rows] for name, x in batch.items()}
    return part | {"num_items_in_batch": batch["completion_mask"].sum() / shares}


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def weights_of_one_process(steps: int, loss=fused_grpo_loss, **options) -> dict[str, Tensor]:
    one = Step(**options)
    optimizer = optimizer_of(one)
    for _ in range(steps):
        one(**rows_of(make_batch(), slice(None), 1), loss=loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.detach() for name, x in one.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], case: object) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.allclose(found[name], x, atol=1e-6), (case, name)


# --- torch's own --------------------------------------------------------------------------------------------------


def sharded(tied: bool) -> nn.Module:
    model = Step(tied)
    for layer in model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def flat(tied: bool, use_orig_params: bool) -> FullyShardedDataParallel:
    options: Any = dict(use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    model = Step(tied)
    layers = model.model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def weights(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            found = [(name, x.detach().clone()) for name, x in model.named_parameters()]
    else:
        found = [(name, x.full_tensor() if hasattr(x, "full_tensor") else x) for name, x in model.named_parameters()]
    return {name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): x for name, x in found}


def equal_to_one_process(rank: int, group) -> None:
    mine = rows_of(make_batch(), slice(2 * rank, 2 * rank + 2), 2)
    for tied, wrappers in {
        False: (sharded, lambda tied: flat(tied, True)),
        True: (sharded, lambda tied: DistributedDataParallel(Step(tied)), lambda tied: flat(tied, False)),
    }.items():
        expected = weights_of_one_process(2, tied=tied)
        for wrap in wrappers:
            model = wrap(tied)
            optimizer = optimizer_of(model)
            for _ in range(2):  # the first call compares the model's own logits
                model(**mine).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(weights(model), expected, (type(model), tied))

    alone = fully_shard(Step().model)
    with pytest.raises(TypeError, match=r"lm_head\.weight is a DTensor; expected fused_forward to run inside"):
        fused_forward(alone, **mine)
    weight = flat(False, False).model.lm_head.weight
    with pytest.raises(TypeError, match=r"lm_head_weight has no memory, as .*; expected .* inside the forward"):
        fused_logps(torch.randn(2, LENGTH, weight.shape[1]), weight, mine["completion_ids"])


# --- DeepSpeed ----------------------------------------------------------------------------------------------------


def engine_of(stage: int, **options) -> Any:
    """An engine with accumulation 2, which shards every parameter, however small, and clips no gradient."""
    import deepspeed

    model = Step(**options)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]


def gathered_weights(model: nn.Module) -> dict[str, Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: x.detach().clone() for name, x in model.named_parameters()}


def equal_under_deepspeed(rank: int, group) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # DeepSpeed calls torch.compile where it is imported, for 2 s
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile: gloo serves
    deepspeed.utils.logger.setLevel("ERROR")
    batch = make_batch()
    micro_batches = [rows_of(batch, slice(row, row + 1), 4) for row in (2 * rank, 2 * rank + 1)]
    for stage, loss, options in (
        (3, fused_grpo_loss, {"tied": True}),
        (3, loss_of_logps, {"tied": False}),
        (3, loss_of_logps, {"frozen_head": True}),
        (2, fused_grpo_loss, {"tied": True}),
    ):
        engine = engine_of(stage, **options)
        with torch.no_grad():
            engine(**micro_batches[0], loss=loss)
        for micro_batch in micro_batches * 2:
            engine.backward(engine(**micro_batch, loss=loss))
            engine.step()
        expected = weights_of_one_process(2, loss, **options)
        assert_equal(gathered_weights(engine.module), expected, (stage, loss, options))
    refused_outside(micro_batches[0])


def refused_outside(batch: dict[str, Any]) -> None:
    """Beside the engine's forward; gathered for the forward alone, where the backward needs the weight again."""
    import deepspeed

    engine = engine_of(3)
    model, ids = engine.module.model, batch["completion_ids"]
    with pytest.raises(TypeError, match=r"lm_head\.weight is a ZeRO-3 partition; expected .* inside the forward of"):
        fused_forward(model, **batch)
    hidden, weight = engine(**batch, hidden=True), model.lm_head.weight
    with pytest.raises(TypeError, match=r"lm_head_weight is a ZeRO-3 partition; expected .* inside the forward of"):
        fused_logps(hidden, weight, ids)
    with deepspeed.zero.GatheredParameters(weight):
        logps, _ = fused_logps(hidden, weight, ids)
    with pytest.raises(TypeError, match=r"lm_head_weight is a ZeRO-3 partition; .*or loss and backward inside"):
        logps.sum().backward()


@pytest.mark.slow
def test_the_step_of_one_process(tmp_path):
    run_ranks(under_every_wrapper, 2, tmp_path)
    if not find_spec("deepspeed"):
        pytest.skip("DDP and FSDP are tested; deepspeed is not installed: run make test")


def under_every_wrapper(rank: int, group) -> None:
    equal_to_one_process(rank, group)
    if find_spec("deepspeed"):
        equal_under_deepspeed(rank, group)
