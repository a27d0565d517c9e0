"""Sharded tensors, modules, quantised weights: refused by name, with what to pass instead."""

from __future__ import annotations

import pytest
import torch
from helpers import good_calls, make_batch
from torch import Tensor, nn

import grpo_kernels as gk

FROM_HIDDEN = [name for name, given in good_calls().items() if "completion_ids" in given and "hidden" in given]


def call(function: str, **changes):
    return getattr(gk, function)(**good_calls()[function] | changes)


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
    "quantised layer": (layer_of_codes, r"pass lm_head\.weight dequantised \(Parameter of torch\.int8\)$"),
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
            call(function, lm_head_weight=make())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_hidden_states_are_refused(layout):
    hidden = torch.nested.nested_tensor([torch.zeros(3, 24), torch.zeros(6, 24)], layout=layout)
    for function in FROM_HIDDEN:
        with pytest.raises(TypeError, match=r"hidden is a nested tensor; expected a packed .*cu_seqlens.*offsets\(\)"):
            call(function, hidden=hidden)


def test_harmless_subclasses_are_fine():
    class Named(Tensor):
        pass

    for function in ("fused_grpo_loss", "fused_distillation_loss"):
        given, expected = good_calls()[function], call(function).loss
        for name in ("hidden", "lm_head_weight"):
            x = given[name]
            for harmless in (nn.Parameter(x), nn.Buffer(x), x.as_subclass(Named)):
                found = call(function, **{name: harmless}).loss
                assert torch.equal(found.as_subclass(Tensor), expected)


# --- DTensors ---------------------------------------------------------------------------------------------------------


def check_dtensors(rank: int, group) -> None:
    """Sharded weights are gathered, other DTensors refused: in the two processes of test_vocab_parallel.py, which hold
    two of the four sequences each, and whose gradients are those of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (2,))

    def shard(x: Tensor) -> Tensor:
        return distribute_tensor(x.detach(), mesh, [Shard(0)])

    for function, given in good_calls().items():
        call(function)
        for name, x in given.items():
            if isinstance(x, Tensor) and "lm_head" not in name:
                with pytest.raises(TypeError, match=rf"^{name} is a DTensor; .*{name}\.to_local\(\)"):
                    call(function, **{name: shard(x)})
    weight = torch.ones(67, 24)
    for name, options in dict(
        weight=dict(weight=shard(weight)), bias=dict(weight=weight, bias=shard(weight[:, 0]))
    ).items():
        whole_or_rows = (
            rf"pass Teacher\.{name}\.full_tensor\(\), or with vocab_parallel_group Teacher\.{name}\.to_local\(\)"
        )
        with pytest.raises(TypeError, match=rf"^Teacher\.{name} is a DTensor; .*{whole_or_rows}"):
            gk.Teacher(torch.ones(4, 6, 24), **options)

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
    with CommDebugMode() as communication, pytest.raises(TypeError, match="'epsilon'; it is TRL's; here set"):
        gk.fused_grpo_loss(batch.hidden, weight, batch.ids, batch.advantages, lm_head_bias=bias, epsilon=0.2)
    assert communication.get_total_counts() == 0  # an option that does not exist is named before weights are gathered
    loss(batch.hidden, weight, bias).backward()  # every rank computes the loss of all tokens
    for x, exact in zip((weight, bias), whole[1:], strict=True):
        assert torch.allclose(x.grad.full_tensor(), exact.grad, atol=1e-6)


def test_a_buffer_that_stores_its_elements_negated_is_refused():
    given = good_calls()["fused_grpo_loss"]
    given["lm_head_weight"].requires_grad_()
    total = torch._neg_view(torch.zeros_like(given["lm_head_weight"]))
    with pytest.raises(ValueError, match="accumulate_into is a negated view; expected a buffer that stores its"):
        gk.fused_grpo_loss(**given, accumulate_into=total)
