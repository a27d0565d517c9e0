"""What an argument of Python may be: numbers, counts, flags, names."""

from __future__ import annotations

import math
from typing import Any

import torch

# Kernels compute in float32, and some GPUs take what is smaller for 0.
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
LARGEST_COUNT = 2**31 - 1


def as_python(x: Any) -> Any:
    """Returns a number, flag or text of NumPy or of a subclass as Python's own, in a tuple too; else x itself."""
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, tuple):
        return tuple([as_python(each) for each in x])
    for kind in (bool, int, float):
        if isinstance(x, kind):
            return kind(x)
    if getattr(x, "shape", None) == ():
        return as_python(x.item())
    return str.__str__(x) if isinstance(x, str) else x  # str() of an enumeration's member is its name


def as_constant(x: Any) -> Any:
    """Returns a number, or a tuple with some, that torch.compile holds for symbolic as the constant that it is in this
    graph; else x itself."""
    if isinstance(x, tuple):
        return tuple([as_constant(each) for each in x])
    if not torch.compiler.is_compiling() or not isinstance(x, (int, float)):
        return x
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(x)


def check_flag(name: str, x: object) -> bool:
    """Returns x as a flag of Python."""
    x = as_python(x)
    if not isinstance(x, bool):
        raise TypeError(f"{name} is a {type(x).__name__}; expected True or False")
    return x


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r}; expected one of {', '.join(allowed)}")


def check_ddof(name: str, value: object) -> int:
    """Returns 0 or 1 as an integer of Python."""
    value = as_python(value)
    if type(value) is not int or value not in (0, 1):
        raise ValueError(f"{name}={value!r}; expected 0 or 1")
    return value


def check_count(name: str, value: object, *, least: int = 1) -> int:
    """Returns a number of items, at least `least`, as an integer of Python."""
    value = as_python(value)
    if type(value) is not int or not least <= value <= LARGEST_COUNT:
        came = shown(value) if type(value) is int else repr(value)
        raise ValueError(f"{name}={came}; expected an integer >= {least}, and at most {LARGEST_COUNT}")
    return value


def check_number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Returns value as a number of Python: finite, >= low, > above, <= high and < below, also when rounded to the type
    that kernels compute in."""
    value = as_python(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a number")
    if abs(value) <= torch.finfo(dtype).max:
        rounded = round_to(value, dtype)
        if low <= rounded <= high and above < rounded < below:
            return value
    bound = f" > {above:g}" if above != -math.inf else f" >= {low:g}" if low != -math.inf else ""
    if min(high, below) != math.inf:
        ends = "[" if above == -math.inf else "(", "]" if below == math.inf else ")"
        bound = f" in {ends[0]}{max(low, above):g}, {min(high, below):g}{ends[1]}"
    raise ValueError(f"{name}={shown(value)}; expected a finite number{bound}, in {str(dtype).removeprefix('torch.')}")


def round_to(x: float, dtype: torch.dtype) -> float:
    """Returns a finite x in float32 or float64; 0 where it has no normal number, which some GPUs take for 0."""
    limits = torch.finfo(dtype)
    if abs(x) < limits.tiny:
        return 0.0
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 2 / limits.eps) * limits.eps / 2, exponent)


def shown(number: Any) -> object:
    """Returns a number as an error message has it: an integer of any size is a number in Python."""
    return number if isinstance(number, float) or abs(number) <= LARGEST else f"an integer of {len(bin(number))} bits"
