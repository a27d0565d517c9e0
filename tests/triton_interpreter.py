"""Triton's interpreter made fit for tests without a GPU: bfloat16 and masks repaired, every address checked.

Unrepaired (Triton 3.4 to 3.9) it holds bfloat16 as uint16, truncates float32 to it, and multiplies bit patterns in
tl.dot; a bool that is broadcast to a block becomes an int32, which no load takes as a mask from Triton 3.9 on.
`install` must come before the first launch; it needs TRITON_INTERPRET=1 before the kernels are imported.
"""

from __future__ import annotations

import inspect
import math
from importlib import import_module
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle


class OutOfBounds(IndexError):
    """A kernel touched memory outside the tensors of its launch."""


def install() -> None:
    _repair_bfloat16()
    _repair_masks()
    _check_addresses()
    _patch_once()
    _remember_types()


def serve(package: str) -> None:
    """Lets this copy of the package take its Triton kernels for CPU tensors, which without the repairs it refuses."""
    kernels = import_module(f"{package}.kernels")
    entry = kernels._REGISTRY["triton"]
    load = lambda: (import_module(f"{package}.kernels.triton.backend").TRITON, "")  # noqa: E731
    kernels._REGISTRY["triton"] = entry._replace(load=load, devices=("cpu",))


# --- bfloat16 -------------------------------------------------------------------------------------------------------


def to_float32(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def _widen(handle: Any) -> Any:
    return Handle(to_float32(handle.data), tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle


def _repair_bfloat16() -> None:
    cast, dot, binary = Builder.cast_impl, Builder.create_dot, Builder.binary_op

    def cast_impl(self, source, target):
        source_type, target_type = source.dtype.scalar, target.scalar
        if source_type == tl.bfloat16 and target_type != tl.bfloat16:
            wide = _widen(source)
            return wide if target_type == tl.float32 else cast(self, wide, target)
        if target_type == tl.bfloat16 and source_type != tl.bfloat16:
            return Handle(to_bfloat16(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source, target)

    def create_dot(self, a, b, accumulator, *rest):
        return dot(self, _widen(a), _widen(b), accumulator, *rest)

    def binary_op(self, left, right, op):
        assert left.dtype.scalar != tl.bfloat16, "the kernels compute in float32; bfloat16 is for memory and tl.dot"
        return binary(self, left, right, op)

    Builder.cast_impl = Builder.create_fp_to_fp = lambda self, x, target, *_: cast_impl(self, x, target)
    Builder.create_dot, Builder.binary_op = create_dot, binary_op


# --- masks ----------------------------------------------------------------------------------------------------------


def _repair_masks() -> None:
    splat = Builder.create_splat

    def create_splat(self, block_type, value):
        """A comparison's handle keeps the type of what was compared, from which Triton makes the block."""
        block = splat(self, block_type, value)
        return Handle(block.data.astype(bool), tl.int1) if block_type.scalar == tl.int1 else block

    Builder.create_splat = create_splat


# --- speed ----------------------------------------------------------------------------------------------------------


def _patch_once() -> None:
    """A launch patches triton.language, and each function that a kernel calls would again: a third of all the time."""
    patch = interpreter._patch_lang
    done: set[str] = set()

    def patch_lang(function):
        modules = {x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core}
        if modules and modules <= done:
            return None
        scope = patch(function)
        done.update(modules)
        restore = scope.restore

        def undo() -> None:  # called at the end of a launch
            restore()
            done.clear()

        scope.restore = undo
        return scope

    interpreter._patch_lang = patch_lang
    members: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(package, builder, scope):
        if package not in members:
            members[package] = [pair for pair in inspect.getmembers(package) if tl.core.is_builtin(pair[1])]
        for name, member in members[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def _remember_types() -> None:
    """The attributes of a type are computed once per type. Triton computes them for each value: a third of the time."""
    dtype_of, dtypes = interpreter._get_np_dtype, {}
    make_block, blocks = tl.block_type.__init__, {}
    broadcast = TritonSemantic.broadcast_impl_value
    make_tuple, field = tl.core.tuple.__init__, tl.core.tuple.__getattr__
    equals = tl.core.dtype.__eq__
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def np_dtype(type_):
        if type_.name not in dtypes:
            dtypes[type_.name] = dtype_of(type_)
        return dtypes[type_.name]

    def init_block(self, element_ty, shape):
        key = element_ty.name, *(x.value if isinstance(x, tl.constexpr) else x for x in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def broadcast_impl_value(self, left, right):
        """Blocks of equal shape need no broadcast. Triton compares a tuple with a list there and finds them unequal."""
        if left.type.is_block() and right.type.is_block() and left.type.shape.values == right.type.shape.values:
            return left, right
        return broadcast(self, left, right)

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            shapes[key] = tl.constexpr(math.prod(key)), tl.core.tuple([tl.constexpr(x) for x in key])
        self.numel, self.shape = shapes[key]

    def init_tuple(self, args, type=None):
        if type is None:
            self.values = list(args)
        else:
            make_tuple(self, args, type)

    def getattr_tuple(self, name):
        if name == "type":  # computed on demand, since it is rarely read
            make_tuple(self, self.values)
            return self.type
        return field(self, name)

    interpreter._get_np_dtype = np_dtype
    tl.core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
    tl.block_type.__init__, tl.core.tensor.__init__ = init_block, init_tensor
    TritonSemantic.broadcast_impl_value = broadcast_impl_value
    tl.core.tuple.__init__, tl.core.tuple.__getattr__ = init_tuple, getattr_tuple


# --- addresses ------------------------------------------------------------------------------------------------------


def _check_addresses() -> None:
    """Every unmasked lane of a load or store must lie inside a tensor of the launch."""
    spans = np.zeros((0, 2), np.uint64)  # of the launch in progress: disjoint, in order
    prepare, load, store = (
        interpreter.GridExecutor._init_args_hst,
        Builder.create_masked_load,
        Builder.create_masked_store,
    )

    def init_args(self, arguments, options):
        nonlocal spans
        prepared = prepare(self, arguments, options)
        spans = _merged(sorted(_extents([*prepared[0], *prepared[1].values()])))
        return prepared

    def check(what: str, pointers: Any, mask: Any) -> None:
        address = pointers.data.ravel()
        on = np.ones(address.shape, bool)
        if mask is not None:
            on = np.broadcast_to(mask.data, pointers.data.shape).ravel()
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        before = np.searchsorted(spans[:, 0], address, side="right").astype(np.int64) - 1
        bad = on & ((before < 0) | (address + size > spans[np.maximum(before, 0), 1]))
        if bad.any():
            raise OutOfBounds(f"{what}: {int(bad.sum())} of {int(on.sum())} addresses lie outside the launch's tensors")

    def create_masked_load(self, pointers, mask, *rest, **options):
        check("load", pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def create_masked_store(self, pointers, value, mask, *rest, **options):
        check("store", pointers, mask)
        return store(self, pointers, value, mask, *rest, **options)

    interpreter.GridExecutor._init_args_hst = init_args
    Builder.create_masked_load, Builder.create_masked_store = create_masked_load, create_masked_store


def _extents(arguments: Any) -> list[tuple[int, int]]:
    """[first byte, end) of every tensor view among a launch's arguments."""
    found = []
    for x in arguments:
        if isinstance(x, tuple):
            found += _extents(x)
        elif hasattr(x, "base") and hasattr(x, "block_shape"):  # a tensor descriptor
            found += _extents([x.base])
        elif hasattr(x, "data_ptr") and x.numel():
            view = interpreter._unwrap_tensor(x)
            elements = 1 + sum((size - 1) * stride for size, stride in zip(view.size(), view.stride(), strict=True))
            found.append((view.data_ptr(), view.data_ptr() + elements * view.element_size()))
    return found


def _merged(extents: list[tuple[int, int]]) -> np.ndarray:
    merged: list[list[int]] = []
    for first, end in extents:
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([first, end])
    return np.array(merged or [[0, 0]], np.uint64)
