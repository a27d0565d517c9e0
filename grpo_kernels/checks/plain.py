"""Refuses modules and quantised or wrapped tensors where a plain tensor is expected, and gathers a sharded lm_head.

The error names the argument and says what to pass instead.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
INTEGERS = (torch.int32, torch.int64)


def check_plain(name: str, x: object) -> None:
    """Checks that x is a torch.Tensor whose memory holds its elements, all of them."""
    if not isinstance(x, Tensor):
        hint = _instead_of_module(name, x) if isinstance(x, torch.nn.Module) else ""
        raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor{hint}")
    if x.is_nested:
        packed = "a packed (N, ...) tensor with cu_seqlens: its values() and offsets()"
        raise TypeError(f"{name} is a nested tensor; expected {packed}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} is a {x.layout} tensor; expected a dense one: pass to_dense()")
    if type(x) not in PLAIN:
        _refuse_subclass(name, x)
    check_not_released(name, x)


def materialized(*tensors: Tensor | None) -> list[Any]:
    """Returns the same with their elements in memory as they are. A view like z.conj().imag stores them negated, with a
    bit that says so, which no kernel looks at; a conjugated real tensor is itself."""
    return [None if x is None else x.resolve_neg() for x in tensors]


def check_shape(name: str, x: Tensor, fits: bool, expected: object) -> None:
    """Raises unless it `fits`. expected: text, or a shape: in a text torch.compile would take numbers as constants."""
    if not fits:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {expected}")


def check_kind(name: str, x: Tensor, fits: bool, expected: str, dtypes: tuple[torch.dtype, ...] = INTEGERS) -> None:
    """Checks that x has the shape that `expected` says, and one of these types."""
    if not fits or x.dtype not in dtypes:
        raise ValueError(f"{name} is {x.dtype} of shape {tuple(x.shape)}; expected {expected}")


def check_not_released(name: str, x: Tensor) -> None:
    """Refuses a parameter whose elements DeepSpeed ZeRO-3 or FSDP1 has released until its next forward or backward."""
    if x.numel() == 0:
        if hasattr(x, "ds_id"):
            raise TypeError(
                f"{name} is a ZeRO-3 partition; expected the loss to be computed inside the forward of the module that "
                f"deepspeed.initialize was given, or loss and backward inside deepspeed.zero.GatheredParameters({name})"
            )
    elif not torch.compiler.is_compiling() and x.untyped_storage().size() == 0:
        raise TypeError(
            f"{name} has no memory, as a parameter of FullyShardedDataParallel(use_orig_params=False) outside of its "
            "forward; expected the loss to be computed inside the forward of the module that it wraps"
        )


def is_dtensor(x: Tensor) -> bool:
    """Returns whether x is sharded; asks by name, because torch.distributed.tensor takes long to import."""
    return any(kind.__name__ == "DTensor" for kind in type(x).__mro__)


def gather_dtensor(x: Any) -> Any:
    """Returns a DTensor gathered from all ranks; anything else as it is.

    Its gradient is averaged over the ranks, as FSDP2 averages the other parameters': right where each rank computes
    the loss of its own tokens, and where all compute it of the same tokens (tensor parallelism). One
    all-gather, and in the backward one reduce-scatter, in which every rank has to take part.
    """
    if type(x) in PLAIN or not isinstance(x, Tensor) or not is_dtensor(x):
        return x
    from torch.distributed.tensor import DTensor, Partial

    sharded = cast(DTensor, x)
    return sharded.full_tensor(grad_placements=[Partial("avg")] * sharded.device_mesh.ndim)


def is_quantised(x: Tensor) -> bool:
    """Returns whether elements are codes that stand for numbers: types of one byte, and what bitsandbytes marks."""
    if x.dtype.itemsize == 1 or x.is_quantized:
        return True
    # Params4bit may store its codes as bfloat16.
    return type(x) not in PLAIN and (hasattr(x, "quant_state") or hasattr(x, "SCB"))


def refuse_quantised(name: str, x: Tensor) -> None:
    """Raises for quantised weights, with the call that dequantises them."""
    if not is_quantised(x):
        return
    advice = "its codes times their scales"
    if hasattr(x, "quant_state"):
        advice = f"bitsandbytes.functional.dequantize_4bit({name}.data, {name}.quant_state)"
    elif hasattr(x, "SCB"):
        advice = f"bitsandbytes.functional.int8_vectorwise_dequant({name}.data, {name}.SCB)"
    elif x.is_quantized or hasattr(type(x), "__tensor_flatten__"):
        advice = f"{name}.dequantize()"
    raise TypeError(
        f"{name} is quantised ({type(x).__name__} of {x.dtype}); expected float32, bfloat16, float16 or float64: "
        f"dequantise it first, {advice}"
    )


def _refuse_subclass(name: str, x: Tensor) -> None:
    """Raises for subclasses with a dispatch of their own, which hold their elements elsewhere; others are plain."""
    if is_dtensor(x):
        advice = (
            f"pass {name}.to_local() where each rank computes the loss of its own tokens (sharded along the batch), "
            f"{name}.full_tensor() where each computes the loss of all tokens"
        )
        if name in ("lm_head_weight", "lm_head_bias"):  # only with vocab_parallel_group: see gather_dtensor
            advice = f"with vocab_parallel_group pass {name}.to_local(), the rows of this rank"
        elif name in ("Teacher.weight", "Teacher.bias"):  # to_local() would have some rows of the vocabulary alone
            advice = f"pass {name}.full_tensor(), or with vocab_parallel_group {name}.to_local(), the rows of this rank"
        raise TypeError(f"{name} is a DTensor; expected a plain tensor: {advice}")
    traced = type(x).__name__ in ("FakeTensor", "FunctionalTensor")  # of a tracer: shapes without memory
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not traced:
        hint = "its memory does not hold its elements"
        if hasattr(x, "dequantize") and hasattr(type(x), "__tensor_flatten__"):
            hint = f"if it is quantised, dequantise it first: {name}.dequantize()"
        raise TypeError(f"{name} is a {type(x).__name__}, a subclass of torch.Tensor; expected a plain tensor ({hint})")


def _instead_of_module(name: str, module: torch.nn.Module) -> str:
    """Returns what to pass for an lm_head, with or without adapters."""
    layer = name.removesuffix("_weight")
    if hasattr(module, "base_layer") or hasattr(module, "original_module"):
        return (
            f": a layer of PEFT; pass what lm_head_inputs({layer}, hidden) of grpo_kernels.integrations.lm_head gives. "
            f"{layer}.weight is only the base weight: the adapters would get no gradient"
        )
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return ""
    has_lora = any("lora" in key.lower() for key, _ in module.named_parameters())
    is_packed = is_quantised(weight) or hasattr(type(weight), "__tensor_flatten__")
    return "".join(
        (
            f": pass {layer}.weight",
            f" dequantised ({type(weight).__name__} of {weight.dtype})" if is_packed else "",
            " + scaling * B @ A" if has_lora else "",
            "" if getattr(module, "bias", None) is None else (
                f", and {'' if '.' in name else 'lm_head_'}bias={layer}.bias"
            ),
            ". The base weight would give its LoRA adapters no gradient" if has_lora else "",
        )
    )  # fmt: skip
