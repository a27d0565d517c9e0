"""What an argument may be: a row of the table of arguments; and the checks of what a row says of numbers, counts, flags
and names."""

from __future__ import annotations

import math
import sys
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch

# Kernels compute in float32, and some GPUs take what is smaller for 0.
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
FINITE = sys.float_info.max
LARGEST_COUNT = 2**31 - 1
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Argument(NamedTuple):
    """What an argument may be.

    shapes: of a tensor. A size is a number, a large letter for one of at least 1, a small letter for any; "tokens" is
        (B, T) or packed (N,), "S" the number of sequences. () is one number in any shape.
    dtypes: of a tensor; None: any. low, high: the ends of its numbers; above, below: ends that do not belong to them.
    allows_nan: NaN has a meaning. expected: what errors about a tensor's numbers say in place of these ends.

    The rest is what the annotation says whose row this is (`arguments_of`): "other" has a check of its own.
    """

    shapes: tuple[tuple[str | int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] | None = None
    low: float = -math.inf
    above: float = -math.inf
    high: float = math.inf
    below: float = math.inf
    allows_nan: bool = False
    expected: str = ""
    kind: Literal["number", "count", "flag", "choice", "other"] = "other"
    choices: tuple[str, ...] = ()
    optional: bool = False
    takes_tensor: bool = False


AT_LEAST_0, ABOVE_0 = Argument(low=0.0), Argument(above=0.0)
PER_TOKEN = (("tokens",),)
PER_SEQUENCE: tuple[tuple[str | int, ...], ...] = (*PER_TOKEN, ("S",), ("S", 1))
ONE: tuple[tuple[str | int, ...], ...] = ((),)


def arguments_of(fields: type) -> dict[str, Argument]:
    """Returns the rows that the annotations of a class are, `name: Annotated[type, row]` or only `name: type`."""
    rows = {}
    for name, hint in get_type_hints(fields, include_extras=True).items():
        hint, row = get_args(hint) if get_origin(hint) is Annotated else (hint, Argument())
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kind, *others = [x for x in kinds if x not in (NoneType, torch.Tensor)] or [None]
        rows[name] = row._replace(
            kind="choice" if get_origin(kind) is Literal else "other" if others else _KINDS.get(kind, "other"),
            choices=get_args(kind) if get_origin(kind) is Literal else (),
            optional=NoneType in kinds, takes_tensor=torch.Tensor in kinds,
        )  # fmt: skip
    return rows


_KINDS: dict[type, Any] = {float: "number", int: "count", bool: "flag"}


def check_value(name: str, value: Any, row: Argument) -> Any:
    """Returns an argument as a value of Python's own types, or the tensor that it may be."""
    value = to_builtin(value)
    if (value is None and row.optional) or (row.takes_tensor and isinstance(value, torch.Tensor)):
        return value
    if row.kind == "number":
        return check_number(name, value, low=row.low, above=row.above, high=row.high, below=row.below)
    if row.kind == "count":
        return check_count(name, value, least=1 if row.low < 0 else int(row.low), most=min(row.high, LARGEST_COUNT))
    if row.kind == "flag":
        return check_flag(name, value)
    if row.kind == "choice":
        check_one_of(name, value, row.choices)
    return value


def no_effect(name: str, value: object, why: str, *, unless: object = None, instead: str = "leave it out") -> None:
    """Refuses a value that changes nothing: a trainer that ignores an option trains another loss than its user asked
    for. None and False are no value."""
    if not unless and value is not None and value is not False:
        came = name if isinstance(value, torch.Tensor) else f"{name}={value!r}"
        raise ValueError(f"{came} has no effect {why}; {instead}")


def to_builtin(x: Any) -> Any:
    """Returns a number, flag or text of NumPy or of a subclass as Python's own, in a tuple too; else x itself."""
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, tuple):
        return tuple([to_builtin(each) for each in x])
    for kind in (bool, int, float):
        if isinstance(x, kind):
            return kind(x)
    if getattr(x, "shape", None) == ():
        return to_builtin(x.item())
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
    x = to_builtin(x)
    if not isinstance(x, bool):
        raise TypeError(f"{name} is a {type(x).__name__}; expected True or False")
    return x


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r}; expected one of {', '.join(allowed)}")


def check_ddof(name: str, value: object) -> int:
    """Returns 0 or 1 as an integer of Python."""
    return check_count(name, value, least=0, most=1)


def check_count(name: str, value: object, *, least: int = 1, most: float = LARGEST_COUNT) -> int:
    """Returns a number of items, at least `least`, as an integer of Python."""
    value = to_builtin(value)
    if type(value) is not int or not least <= value <= most:
        came = format_number(value) if type(value) is int else repr(value)
        expected = "0 or 1" if (least, most) == (0, 1) else f"an integer >= {least}, and at most {most}"
        raise ValueError(f"{name}={came}; expected {expected}")
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
    value = to_builtin(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a number")
    if abs(value) <= torch.finfo(dtype).max:
        rounded = round_float(value, dtype)
        if low <= rounded <= high and above < rounded < below:
            return value
    ends = finite_number(Argument(low=low, above=above, high=high, below=below))
    raise ValueError(f"{name}={format_number(value)}; expected {ends}, in {str(dtype).removeprefix('torch.')}")


def finite_number(row: Argument) -> str:
    """Returns the numbers between the ends of a row, in words."""
    low, high = row.low if row.above == -math.inf else row.above, min(row.high, row.below)
    if high < LARGEST:
        start, stop = "[" if row.above == -math.inf else "(", "]" if row.below == math.inf else ")"
        return f"a finite number in {start}{low:g}, {high:g}{stop}"
    if low > -LARGEST:
        return f"a finite number {'>=' if row.above == -math.inf else '>'} {low:g}"
    return "a finite number"


def round_float(x: float, dtype: torch.dtype) -> float:
    """Returns a finite x in float32 or float64; 0 where it has no normal number, which some GPUs take for 0."""
    limits = torch.finfo(dtype)
    if abs(x) < limits.tiny:
        return 0.0
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 2 / limits.eps) * limits.eps / 2, exponent)


def format_number(number: Any) -> object:
    """Returns a number as an error message has it: an integer of any size is a number in Python."""
    return number if isinstance(number, float) or abs(number) <= LARGEST else f"an integer of {len(bin(number))} bits"
