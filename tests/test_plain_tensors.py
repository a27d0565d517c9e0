"""Sharded tensors, modules, quantised weights: refused by name, with what to pass instead."""

from __future__ import annotations

import pytest
import torch
from helpers import make_batch, off_policy
from torch import Tensor, nn

import grpo_kernels as gk

FROM_HIDDEN = (gk.fused_grpo_loss, gk.fused_logps, gk.fused_policy_loss)


def arguments(function) -> dict:
    """A good call of a function of hidden states."""
    batch = make_batch(0, bias=True)
    given = dict(hidden=batch.hidden, lm_head_weight=batch.weight, completion_ids=batch.ids, lm_head_bias=batch.bias)
    if function is gk.fused_grpo_loss:
        given["advantages"] = batch.advantages
    if function is gk.fused_policy_loss:
        given["loss_fn"] = lambda chunk: chunk.logps.sum()
    return given


class LoraLinear(nn.Linear):
    """A layer with adapters of somebody else's."""

    def __init__(self) -> None:
        super().__init__(24, 67, bias=False)
        self.lora_A = nn.Linear(24, 2)


class Params4bit(nn.Parameter):
    """What bitsandbytes marks its weights with; the codes may be stored as bfloat16."""

    quant_state = "nf4"


class Int8Params(nn.Parameter):
    SCB = None


class Wrapped(Tensor):
    """A tensor that holds its elements elsewhere, as those of torchao do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")

    def __tensor_flatten__(self):
        return [], None

    def dequantize(self) -> Tensor:
        raise AssertionError("never called for the caller")


def zero_3_partition() -> Tensor:
    partition = nn.Parameter(torch.empty(0))
    partition.ds_id = 3
    return partition


def released_by_fsdp() -> Tensor:
    weight = torch.zeros(67, 24)
    weight.untyped_storage().resize_(0)
    return weight


def frozen(kind: type, *size: int, dtype: torch.dtype) -> nn.Parameter:
    return kind(torch.zeros(*size, dtype=dtype), requires_grad=False)


def layer_of_codes() -> nn.Module:
    layer = nn.Linear(24, 67, bias=False)
    layer.weight = frozen(nn.Parameter, 67, 24, dtype=torch.int8)
    return layer


REFUSED = {  # what makes a weight: the message
    "Linear": (lambda: nn.Linear(24, 67, bias=False), r"is a Linear; .*: pass lm_head\.weight$"),
    "Linear with a bias": (lambda: nn.Linear(24, 67), r"pass lm_head\.weight, and lm_head_bias=lm_head\.bias$"),
    "other adapters": (LoraLinear, r"is a LoraLinear; .*pass lm_head\.weight \+ scaling \* B @ A\. The base"),
    "quantised layer": (
        layer_of_codes,
        r"pass lm_head\.weight dequantised \(Parameter of torch\.int8\)$",
    ),
    "no weight": (nn.Sequential, r"is a Sequential; expected a torch\.Tensor$"),
    "float8": (
        lambda: torch.zeros(67, 24).to(torch.float8_e4m3fn),
        r"is quantised \(Tensor of torch\.float8_e4m3fn\).*codes times their",
    ),
    "bitsandbytes, 4 bits": (
        lambda: frozen(Params4bit, 804, 1, dtype=torch.bfloat16),
        r"is quantised \(Params4bit of torch\.bfloat16\).*bitsandbytes\.functional\.dequantize_4bit\(",
    ),
    "bitsandbytes, 8 bits": (
        lambda: frozen(Int8Params, 67, 24, dtype=torch.int8),
        r"is quantised \(Int8Params of torch\.int8\).*int8_vectorwise_dequant\(",
    ),
    "torchao": (lambda: Wrapped(torch.zeros(67, 24)), r"is a Wrapped, a subclass.*lm_head_weight\.dequantize\(\)"),
    "sparse": (lambda: torch.zeros(67, 24).to_sparse(), r"is a torch\.sparse_coo tensor.*to_dense\(\)"),
    "ZeRO-3": (zero_3_partition, r"is a ZeRO-3 partition.*GatheredParameters"),
    "FSDP": (released_by_fsdp, r"has no memory, as .*FullyShardedDataParallel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_weight_without_its_numbers_is_refused_with_what_to_pass(name):
    make, message = REFUSED[name]
    for function in FROM_HIDDEN:
        with pytest.raises(TypeError, match=f"^lm_head_weight .*{message}"):
            function(**arguments(function) | {"lm_head_weight": make()})


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_hidden_states_are_refused(layout):
    hidden = torch.nested.nested_tensor([torch.zeros(3, 24), torch.zeros(6, 24)], layout=layout)
    for function in FROM_HIDDEN:
        with pytest.raises(TypeError, match=r"hidden is a nested tensor; expected a packed .*cu_seqlens.*offsets\(\)"):
            function(**arguments(function) | {"hidden": hidden})


def test_harmless_subclasses_are_fine():
    class Named(Tensor):
        pass

    given = arguments(gk.fused_grpo_loss)
    expected = gk.fused_grpo_loss(**given).loss
    weight = given["lm_head_weight"]
    for harmless in (nn.Parameter(weight), nn.Buffer(weight), weight.as_subclass(Named)):
        found = gk.fused_grpo_loss(**given | {"lm_head_weight": harmless}).loss
        assert torch.equal(found.as_subclass(Tensor), expected)


# --- DTensors ---------------------------------------------------------------------------------------------------------


def calls_with_tensors() -> list[tuple]:
    """(public function, a good call of it by keywords)."""
    batch = off_policy(make_batch(0, bias=True))
    old, ids, mask = batch.options["old_logps"], batch.ids, torch.ones(4, 6)
    per_token = {name: old.clone() for name in ("old_logps", "ref_logps", "rollout_logps")}
    per_token["rollout_weights"] = old.exp()
    shared = dict(advantages=torch.ones(4), completion_mask=mask, group_ids=torch.tensor([0, 0, 1, 1]), **per_token)
    losses = shared | {"normalizer": torch.tensor([24.0])}
    return [
        (gk.fused_grpo_loss, arguments(gk.fused_grpo_loss) | losses),
        (gk.fused_logps, arguments(gk.fused_logps) | {"completion_mask": mask, "temperature": torch.ones(4, 6)}),
        (gk.fused_policy_loss, arguments(gk.fused_policy_loss) | {"completion_mask": mask}),
        (gk.grpo_loss_from_logps, {"logps": old, "entropy": old} | losses),
        (gk.grpo_loss_from_logits, {"logits": torch.zeros(4, 6, 67), "completion_ids": ids} | losses),
        (gk.group_advantages, {"rewards": torch.ones(4), "group_ids": torch.tensor([0, 0, 1, 1])}),
        (
            gk.process_advantages,
            dict(step_rewards=mask, step_ends=mask.long(), length=6, group_ids=torch.tensor([0, 0, 1, 1])),
        ),
        (gk.rollout_weights, {"old_logps": old, "rollout_logps": old, "completion_mask": mask}),
        (gk.entropy_quantile, {"entropy": old, "completion_mask": mask}),
    ]


def check_dtensors(rank: int, group) -> None:
    """Sharded weights are gathered, other DTensors refused: in the two processes of test_vocab_parallel.py, which hold
    two of the four sequences each, and whose gradients are those of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (2,))

    def shard(x: Tensor) -> Tensor:
        return distribute_tensor(x.detach(), mesh, [Shard(0)])

    for function, given in calls_with_tensors():
        function(**given)
        for name, x in given.items():
            if isinstance(x, Tensor) and "lm_head" not in name:
                with pytest.raises(TypeError, match=rf"^{name} is a DTensor; .*{name}\.to_local\(\)"):
                    function(**given | {name: shard(x)})

    batch, mine = make_batch(0, bias=True), slice(2 * rank, 2 * rank + 2)
    names = ("hidden", "weight", "bias")
    whole = [getattr(batch, name).clone().requires_grad_() for name in names]

    def loss(hidden, weight, bias, part=slice(None)):
        ids, advantages = batch.ids[part], batch.advantages[part]
        return gk.fused_grpo_loss(hidden, weight, ids, advantages, lm_head_bias=bias, normalizer=24).loss

    loss(*whole).backward()
    hidden, weight, bias = (shard(getattr(batch, name)).requires_grad_() for name in names)
    loss(hidden.to_local(), weight, bias, part=mine).backward()
    for x, exact, factor in zip((hidden, weight, bias), whole, (1, 2, 2), strict=True):
        assert torch.allclose(factor * x.grad.full_tensor(), exact.grad, atol=1e-6)  # averages, as FSDP2's
    weight, bias = (shard(getattr(batch, name)).requires_grad_() for name in names[1:])
    with CommDebugMode() as communication, pytest.raises(TypeError, match="'epsilon'; this package has epsilon_low"):
        gk.fused_grpo_loss(batch.hidden, weight, batch.ids, batch.advantages, lm_head_bias=bias, epsilon=0.2)
    assert communication.get_total_counts() == 0  # an option that does not exist is named before weights are gathered
    loss(batch.hidden, weight, bias).backward()  # every rank computes the loss of all tokens
    for x, exact in zip((weight, bias), whole[1:], strict=True):
        assert torch.allclose(x.grad.full_tensor(), exact.grad, atol=1e-6)
