"""Checks of arguments, before any work. The error names the argument, what was given and what is expected.

Checks of values (ids in range, offsets in order) read the data: always on a CPU; on a GPU they would synchronise, so
they run only with GRPO_KERNELS_DEBUG=1.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch as dispatch

from ..argument import FLOATS, Argument
from ..argument import NUMBERS as NUMBERS
from ..config import GRPOConfig
from .plain import PLAIN, check_kind, check_not_released, check_plain, check_shape, refuse_quantised
from .table import ARGUMENTS, THERE

_NUMBER = Argument(expected=f"a number{THERE}")
Sizes = dict[str | int, Any]  # of shapes, by their letter; "tokens": (B, T) or (N,); "S": -1 where it is not known


def check_config(config: object) -> None:
    if not isinstance(config, GRPOConfig):
        kind = f"{type(config).__module__}.{type(config).__qualname__}"
        hint = ": GRPOConfig.from_trl(config) makes one" if kind.startswith("trl.") else ""
        raise TypeError(f"config is a {kind}; expected a grpo_kernels.GRPOConfig{hint}")


def refuse_transforms(function: str, *tensors: object) -> None:
    """Raises inside functorch transforms and forward-mode AD: the kernels have autograd's first backward only."""
    what = "a torch.func transform (grad, vjp, jvp, jacrev, hessian, vmap)"
    if not _inside_transform():
        if forward_ad._current_level < 0:
            return
        what = "forward-mode AD"
        if all(forward_ad.unpack_dual(x).tangent is None for x in tensors if isinstance(x, Tensor)):
            return
    raise RuntimeError(
        f"grpo_kernels.{function} was called inside {what}, which its kernels do not support; use loss.backward() or "
        "torch.autograd.grad outside of it, or the functions of grpo_kernels.reference, which are plain PyTorch"
    )


def _inside_transform() -> bool:
    """Returns whether functorch transforms the caller."""
    return torch._C._functorch.maybe_current_level() is not None


# torch.compile evaluates this once while tracing and puts no call into its graph.
_inside_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def products_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """Returns the type in which torch.nn.functional.linear would compute with these under autocast, else float32 for a
    float32 head of 16-bit hidden states, as in lm_head(hidden.float()). None: in the type of the inputs."""
    device = hidden.device.type if isinstance(hidden, Tensor) else "meta"
    if device == "meta":
        return None  # the checks refuse it
    if torch.is_autocast_enabled(device):
        # Autocast leaves other types as they are; the checks then say which do not fit.
        tensors = [x for x in (hidden, weight, bias) if isinstance(x, Tensor)]
        taken = all(x.dtype != torch.float64 and x.is_floating_point() for x in tensors)
        return torch.get_autocast_dtype(device) if taken else None
    if hidden.dtype not in (torch.bfloat16, torch.float16) or not isinstance(weight, Tensor):
        return None
    is_wide = weight.dtype == torch.float32 and (not isinstance(bias, Tensor) or bias.dtype == torch.float32)
    return torch.float32 if is_wide else None


def check_logits_dtype(logits_dtype: object, dtype: torch.dtype) -> None:
    """Raises unless logits have the type of the products, or float32 from products of 16 bits; None: the default."""
    if logits_dtype is None:
        return
    allowed = (dtype, torch.promote_types(dtype, torch.float32))
    if logits_dtype not in allowed:
        names = " or ".join(sorted({str(x) for x in allowed}))
        raise ValueError(f"logits_dtype={logits_dtype} with {dtype} inputs; expected {names}")


def check_lm_head(
    function: str, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[torch.dtype | None, Sizes]:
    """Checks that hidden (B, T, H) or (N, H), weight (V, H) and bias (V,) fit together.

    They have one type, unless the products are computed in another, which is returned, with the sizes.
    """
    refuse_transforms(function, hidden, weight, bias)
    compute_dtype = products_dtype(hidden, weight, bias)
    sizes: Sizes = {}
    check_by_table("hidden", hidden, sizes)
    head = {"lm_head_weight": weight} | ({} if bias is None else {"lm_head_bias": bias})
    for name, x in head.items():
        check_tensor(name, x, hidden)
        if x.dtype is not hidden.dtype or type(x) not in PLAIN:
            refuse_quantised(name, x)
        check_not_released(name, x)
        if compute_dtype is None and x.dtype is not hidden.dtype:
            raise TypeError(
                f"{name} is {x.dtype} and hidden {hidden.dtype}; expected one type, a float32 head of 16-bit hidden "
                "states, or torch.autocast"
            )
        check_sizes(name, x, ARGUMENTS[name], sizes)
    return compute_dtype, sizes


def check_ids(ids: Tensor, sizes: Sizes, input_name: str, like: Tensor, *, several: bool = False) -> None:
    """Checks that completion_ids are one for each token of the input of this name, with `several` also K of them."""
    row, tokens = ARGUMENTS["completion_ids"], sizes["tokens"]
    check_type("completion_ids", ids, row.dtypes, like)
    if ids.shape == tokens:
        return
    if len(tokens) == 2 and ids.dim() == 2 and tokens[1] == ids.shape[1] + 1:
        raise ValueError(
            f"completion_ids has shape {tuple(ids.shape)} and {input_name} {tuple(tokens)} before its last dimension; "
            f"row t must predict completion_ids[:, t], so drop the last position: {input_name}[:, :-1]"
        )
    check_sizes("completion_ids", ids, row._replace(shapes=(*row.shapes, ("tokens", "K"))) if several else row, sizes)


def check_accumulate_into(total: Tensor, weight: Tensor) -> None:
    """Checks that `total` is a float32 buffer that can take the gradient of this weight, and that there is one."""
    name = "accumulate_into"
    check_tensor(name, total, weight)
    if total.dtype != torch.float32 or weight.dtype == torch.float64:
        kinds = f"{total.dtype} for a weight of {weight.dtype}"
        raise TypeError(f"{name} is {kinds}; expected float32, and no float64 weight")
    fits = total.shape == weight.shape and total.is_contiguous()
    check_shape(name, total, fits, f"a contiguous {tuple(weight.shape)} like lm_head_weight")
    # Tracers have neither bits nor addresses, and such a call takes no buffer.
    eager = not torch.compiler.is_compiling() and not in_tracing_mode()
    problems = {
        "has no effect under no_grad; leave it out": not torch.is_grad_enabled(),
        "requires a gradient; expected a buffer that gradients are added to": total.requires_grad,
        "is given, and lm_head_weight is no leaf that requires a gradient: nothing would be added": (
            not (weight.requires_grad and weight.is_leaf)
        ),
        "is a negated view; expected a buffer that stores its elements": eager and total.is_neg(),
        "was made in inference mode; expected a buffer that can be written": eager and total.is_inference(),
        "is the memory of lm_head_weight; expected a buffer of its own": (
            eager and total.numel() > 0 and total.data_ptr() == weight.data_ptr()
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"{name} {problem}")


# --- one tensor -------------------------------------------------------------------------------------------------------


def check_by_table(name: str, x: Tensor, sizes: Sizes, like: Tensor | None = None) -> None:
    """Checks that x is what its row of the table says, on the device of `like`. sizes: those that are known; the sizes
    of x that are not yet are added."""
    row = ARGUMENTS[name]
    check_type(name, x, row.dtypes, like)
    check_sizes(name, x, row, sizes)


def check_type(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] | None, like: Tensor | None = None) -> None:
    """Checks that x is a plain tensor of one of these types, on the device of `like`, else on one that holds values."""
    check_tensor(name, x, like)
    if like is None and x.is_meta:
        raise ValueError(f"{name} is on the meta device, where tensors have no values")
    if dtypes is not None and x.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} is {x.dtype}; expected {', '.join(others)} or {last}")


def check_float(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Checks that x is a plain tensor on the device of `like`, of a type that the kernels take."""
    check_type(name, x, FLOATS, like)


def check_tensor(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Checks that x is a plain tensor on the device of `like`."""
    if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or not x.numel():
        check_plain(name, x)
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} is on {x.device}; expected {like.device} like the other inputs")


def check_sizes(name: str, x: Tensor, row: Argument, sizes: Sizes) -> None:
    """Checks that x has one of the row's shapes. sizes: as in `check_by_table`."""
    for letters in row.shapes:
        if _fits(x.shape, letters, sizes):
            return
    raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {_described(row.shapes, sizes)}")


def _fits(shape: torch.Size, letters: tuple[str | int, ...], sizes: Sizes) -> bool:
    new_sizes: Sizes = {}
    if letters[:1] == ("tokens",):
        count = len(shape) - len(letters) + 1
        new_sizes["tokens"] = shape[:count]
        if count not in (1, 2) or new_sizes["tokens"] != sizes.get("tokens", new_sizes["tokens"]):
            return False
        shape, letters = shape[count:], letters[1:]
    if len(shape) != len(letters):
        return False
    for size, letter in zip(shape, letters, strict=True):
        if isinstance(letter, str) and letter not in sizes and (size > 0 or letter.islower()):
            new_sizes[letter] = size
        elif size != sizes.get(letter, letter):
            return False
    sizes.update(new_sizes)
    return True


def _described(shapes: tuple[tuple[str | int, ...], ...], sizes: Sizes) -> str:
    """Returns shapes in words: sizes that are known as numbers, others as letters."""
    texts, unknown = [], []
    for letters in shapes:
        if not letters or ("S" in letters and sizes["S"] < 0):
            continue
        leading = (sizes["tokens"],) if "tokens" in sizes else (("B", "T"), ("N",))
        for tokens in leading if letters[0] == "tokens" else ((),):
            parts = [*tokens, *(sizes.get(x, x) for x in letters if x != "tokens")]
            text = f"({', '.join(map(str, parts))}{',' * (len(parts) == 1)})"
            texts.append(f"packed {text}" if tokens == ("N",) else text)
        unknown += [f", {x} >= 1" for x in letters if isinstance(x, str) and x.isupper() and x not in sizes]
    return " or ".join(texts) + "".join(dict.fromkeys(unknown))


def constant(name: str, x: Tensor) -> Tensor:
    """Returns x, to which no gradient goes; raises where one is asked for."""
    if not x.requires_grad:
        return x
    if torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, and gets none here: it is a constant; pass its detach()")
    return x.detach()


def check_one_element(name: str, x: Tensor) -> None:
    """Checks that x holds one real number, on any device that holds values."""
    check_plain(name, x)
    check_shape(name, x, x.numel() == 1, "a number or a tensor of one element")
    check_type(name, x, NUMBERS)


def num_sequences_of(tokens: Tensor, cu_seqlens: Tensor | None, input_name: str = "hidden") -> int:
    """Returns the number of sequences of tokens (B, T), or of packed ones (N,), whose offsets are checked."""
    if tokens.dim() == 2:
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens is for packed (N, ...) inputs; {input_name} holds a (B, T) batch: give one")
        return tokens.shape[0]
    if cu_seqlens is None:
        raise ValueError(f"{input_name} is packed, {len(tokens)} tokens without a batch dimension; cu_seqlens is None")
    check_tensor("cu_seqlens", cu_seqlens, tokens)
    fits = cu_seqlens.dim() == 1 and cu_seqlens.numel() >= 2
    check_kind("cu_seqlens", cu_seqlens, fits, "int32 or int64 (S + 1,), S >= 1")
    check_offsets(cu_seqlens, tokens.numel())
    return cu_seqlens.numel() - 1


# --- checks of values -------------------------------------------------------------------------------------------------


def in_tracing_mode() -> bool:
    """Returns whether a mode records operations, to be run later or elsewhere: on fake or functional tensors, or
    proxies of them."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    modes = dispatch._get_current_dispatch_mode_stack()
    return any(getattr(mode, "_mode_key", None) is not None for mode in modes)  # those that torch knows by a key


def checks_values(device: torch.device) -> bool:
    """Returns whether checks that read data are on for this device.

    A function that is being compiled or traced has no data yet. The operators in it look at theirs when it runs.
    """
    if torch.compiler.is_compiling() or in_tracing_mode():
        return False
    return device.type == "cpu" or os.environ.get("GRPO_KERNELS_DEBUG") == "1"


def check_values(ids: Tensor, mask: Tensor | None, vocab_size: int, cu_seqlens: Tensor | None) -> None:
    """Checks that ids lie in [0, V) at unmasked positions, and cu_seqlens."""
    if checks_values(ids.device):
        expected = f"0 <= id < {vocab_size} (the rows of lm_head_weight){THERE}"
        check_numbers("completion_ids", ids, mask, row=Argument(low=0, high=vocab_size - 1, expected=expected))
        if cu_seqlens is not None:
            check_offsets(cu_seqlens, ids.numel())


def check_top_k(name: str, k: int, vocab_size: int) -> None:
    """Checks that a vocabulary has k ids."""
    if k > vocab_size:
        raise ValueError(f"{name}={k}; expected at most {vocab_size}, the rows of the lm_head")


def check_allowed_ids(ids: Tensor, counts: Tensor, vocab_size: int | None = None) -> None:
    """Checks that the counts of a SamplingMask add up to its ids, which ascend within a token, in [0, vocab_size)."""
    if not checks_values(ids.device):
        return
    check_range("SamplingMask.counts", counts)
    ends = counts.reshape(-1).cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    if total != ids.numel():
        raise ValueError(f"SamplingMask.counts add up to {total}; expected {ids.numel()}, one per id")
    check_range("SamplingMask.ids", ids, vocab_size, "the vocabulary")
    wrong = ids[1:] <= ids[:-1]
    firsts = ends[(ends > 0) & (ends < total)]
    wrong[firsts - 1] = False  # from the last id of a token to the first of the next
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0]) + 1
        token = int(torch.searchsorted(ends, place, right=True))
        where = [token] if counts.dim() == 1 else [*divmod(token, counts.shape[1])]
        raise ValueError(
            f"SamplingMask.ids of token {where} hold {int(ids[place])} after {int(ids[place - 1])}; expected ascending "
            f"ids without repetition"
        )


def check_range(name: str, x: Tensor, end: int | None = None, what: str = "") -> None:
    """Checks that integers are at least 0, and below `end`, which is the size of `what`."""
    low, high = (int(bound) for bound in x.aminmax()) if x.numel() else (0, -1)
    noun = name.rpartition(".")[2]
    if low < 0:
        raise ValueError(f"{name} holds {low}; expected {noun} >= 0")
    if end is not None and high >= end:
        raise ValueError(f"{name} holds {high}; expected {noun} < {end}, {what}")


def check_offsets(cu_seqlens: Tensor | None, num_tokens: int) -> None:
    """Checks that cu_seqlens runs from 0 to N without a step back: kernels use it as addresses."""
    if cu_seqlens is not None and checks_values(cu_seqlens.device):
        ends = (int(cu_seqlens[0]), int(cu_seqlens[-1]))
        if ends != (0, num_tokens) or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(f"cu_seqlens = {cu_seqlens.tolist()}; expected offsets from 0 to {num_tokens} in order")


def check_numbers(
    name: str, x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None, row: Argument = _NUMBER
) -> None:
    """Checks that numbers lie between the ends of a row, and none is NaN unless it has a meaning, at unmasked positions
    of x: (S,), (S, 1), of the mask's shape, or one number for all. Reads x: see `checks_values`."""
    if x.numel():
        least, most = x.aminmax()
        if not row.low <= least.item() <= most.item() <= row.high:
            wide = x.double() if x.is_floating_point() else x  # in 16 bits the ends are infinite
            wrong = (wide < row.low) | (wide > row.high)
            if not row.allows_nan:
                wrong |= wide != wide
            name_first(name, x, wrong, row.expected, mask, cu_seqlens)


def name_first(
    name: str, x: Tensor, wrong: Tensor, expected: str, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> None:
    """Raises with the first position of `wrong` that the mask leaves, if there is one."""
    mask = None if mask is None else mask.bool()
    if mask is not None and x.shape == mask.shape:
        wrong = wrong & mask
    elif mask is not None and x.numel() == (len(mask) if cu_seqlens is None else len(cu_seqlens) - 1):
        # One value per sequence, which counts if a token of it does.
        if cu_seqlens is None:
            cu_seqlens = torch.arange(len(mask) + 1, device=mask.device) * mask.shape[-1]
        before = torch.nn.functional.pad(mask.reshape(-1).cumsum(0), (1, 0))
        wrong = wrong & (before[cu_seqlens.long()].diff() > 0).view(x.shape)
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        place = f"{where} = " if where else "="
        raise ValueError(f"{name}{place}{x[tuple(where)].item()}; expected {expected}")


def check_finite(name: str, x: Tensor, expected: str, *, allows_nan: bool = False) -> None:
    """Checks that there is no infinity, and no NaN either unless it `allows_nan`."""
    if checks_values(x.device) and not math.isfinite(x.sum().item()):
        name_first(name, x, x.isinf() if allows_nan else ~x.isfinite(), expected)
