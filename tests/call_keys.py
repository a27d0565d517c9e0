"""Which Triton kernels a call would compile anew after an ordinary warm-up, as JSON: {call: {kernel: keys}}.

    python tests/call_keys.py

Real calls of the package on CPU tensors, up to Triton's question whether it has a kernel of these types, alignments and
constants: a stub stands in for the driver, and nothing is compiled or run. The warm-up leaves masked rows out, as calls
outside of a CUDA graph do. A call in a graph computes every row and may compile nothing; nor may an odd number of
tokens.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import triton
from compile_gate import TARGETS, StubDriver

import grpo_kernels as gk
from grpo_kernels import kernels as registry
from grpo_kernels.head import logps_op, loss_op
from grpo_kernels.kernels import launch
from grpo_kernels.kernels.triton.backend import TRITON

H, V, K = 64, 512, 4
TARGET = "sm_80"


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden states, weight, ids and a mask of the first three quarters of a sequence."""
    hidden, weight = torch.randn(1, tokens, H).bfloat16(), torch.randn(V, H).bfloat16()
    ids = torch.randint(V, (1, tokens))
    return hidden.requires_grad_(), weight.requires_grad_(), ids, torch.arange(tokens)[None] < tokens * 3 // 4


def loss(tokens: int, **options: Any) -> None:
    hidden, weight, ids, mask = inputs(tokens)
    teacher = gk.Teacher(hidden.detach(), weight.detach()) if "distill_coef" in options else None
    config = gk.GRPOConfig(logits_dtype=torch.float32, chunk_rows=128, **options)
    given = dict(completion_mask=mask, old_logps=-torch.rand(1, tokens), teacher=teacher, backend="triton")
    gk.fused_grpo_loss(hidden, weight, ids, torch.randn(1), config=config, **given).loss.backward()


def logps(tokens: int, *, k: int | None = None) -> None:
    hidden, weight, ids, mask = inputs(tokens)
    ids = ids if k is None else ids[..., None].expand(1, tokens, k)
    found, entropy = gk.fused_logps(hidden, weight, ids, completion_mask=mask, entropy=True, backend="triton")
    (found.sum() + entropy.sum()).backward()


CALLS: dict[str, Callable[[int], None]] = {
    "loss": loss,
    "loss with an entropy bonus": lambda tokens: loss(tokens, entropy_coef=0.01),
    "loss with a teacher": lambda tokens: loss(tokens, distill_coef=0.1),
    "log-probabilities": logps,
    "log-probabilities of K ids": lambda tokens: logps(tokens, k=K),
}


def main() -> None:
    found: dict[str, set[str]] = defaultdict(set)

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found[f"{fn.module.rpartition('.')[2]}.{fn.name.rpartition('.')[2]}"].add(key)
        return True  # that is enough: do not compile

    def set_capturing(is_capturing: bool) -> None:
        for module in (loss_op, logps_op):
            module.is_capturing = lambda device: is_capturing  # type: ignore[attr-defined]

    entry = registry._REGISTRY["triton"]
    registry._REGISTRY["triton"] = entry._replace(load=lambda: (TRITON, ""), devices=("cpu",))
    launch.architecture = lambda device: TARGETS[TARGET].launch
    triton.runtime.driver.set_active(StubDriver(TARGET))
    triton.knobs.runtime.jit_cache_hook = note
    results: dict[str, dict[str, int]] = {}
    for name, call in CALLS.items():
        set_capturing(False)
        found.clear()
        call(512)
        if not found:
            raise SystemExit(f"{name} launched no kernel of Triton")
        for after, tokens, in_graph in (("513 tokens", 513, False), ("515 tokens", 515, False), ("a graph", 512, True)):
            known = {kernel: set(keys) for kernel, keys in found.items()}
            set_capturing(in_graph)
            call(tokens)
            new = {kernel: len(keys - known.get(kernel, set())) for kernel, keys in found.items()}
            results[f"{name}: {after}"] = {kernel: count for kernel, count in new.items() if count}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
