"""Fewer kernels for the model's step of a token: parts of it compiled, weights cast before it.

A part is what transformers' models make of many small operations and what does not touch the cache. Whole layers are
not compiled: each has its number in the cache, so that torch.compile would make them one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = "Norm", "MLP", "RotaryEmbedding"  # ends of the names of transformers' classes
FUNCTION = "apply_rotary_pos_emb"  # of the modules that define them


@lru_cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function compiled so that it rounds where the original does: tokens are scored by the original."""
    return torch.compile(function, options={"emulate_precision_casts": True})


@contextmanager
def compiled_parts(lm: nn.Module) -> Iterator[None]:
    """Lets norms, rotary embeddings and MLPs of a model be compiled within it: 18 kernels are left of the 37 of a layer
    of Llama's."""
    classes = {type(module) for module in lm.modules() if not type(module).__module__.startswith("torch.")}
    owners: list[tuple[Any, str]] = [(kind, "forward") for kind in classes if kind.__name__.endswith(CLASSES)]
    files = {sys.modules[kind.__module__] for kind in classes}
    owners += [(file, FUNCTION) for file in files if hasattr(file, FUNCTION)]
    originals = [getattr(owner, name) for owner, name in owners]
    try:
        for (owner, name), original in zip(owners, originals, strict=True):
            setattr(owner, name, compiled(original))
        yield
    finally:
        for (owner, name), original in zip(owners, originals, strict=True):
            setattr(owner, name, original)


class StepKernels:
    """Compiled parts, and weights of linear layers in the type that autocast casts them to, in place of a cast in every
    step; none without autocast. Such weights take memory of their own as long as this object is held."""

    def __init__(self, lm: nn.Module, device: str) -> None:
        self.lm = lm
        dtype = torch.get_autocast_dtype(device)
        self.places = [
            (module, name, weight)
            for module in lm.modules() if type(module) is nn.Linear and torch.is_autocast_enabled(device)
            for name, weight in module.named_parameters(recurse=False)
            if type(weight) is nn.Parameter and weight.dtype in {torch.float32, torch.float16, torch.bfloat16} - {dtype}
        ]  # fmt: skip
        self.copies = [torch.empty_like(weight, dtype=dtype) for *_, weight in self.places]

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)

    @torch.no_grad()
    def refresh(self) -> None:
        """Casts the weights as they are now."""
        for (*_, weight), copy in zip(self.places, self.copies, strict=True):
            copy.copy_(weight)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Lets the model use compiled parts and the cast weights within it."""
        try:
            self._give(self.copies)
            with compiled_parts(self.lm):
                yield
        finally:
            self._give([weight for *_, weight in self.places])

    def _give(self, weights: list[Tensor] | list[nn.Parameter]) -> None:
        for (module, name, _), weight in zip(self.places, weights, strict=True):
            module._parameters[name] = weight  # type: ignore[assignment]  # a tied embedding keeps its own
