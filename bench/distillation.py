"""The divergence to a teacher's distribution, forward and backward: this package, its peers, and the bare products.

    OMP_NUM_THREADS=2 python bench/distillation.py [--output bench/results/distillation/cpu.json] [--rounds 5]
    python bench/distillation.py --device cuda --output out/distillation.json

Heads of real models, a teacher of the same shape: that of SmolLM2 with each divergence, the others with the reverse
KL. Rounds are interleaved. F_t, the floor, are the four bare products: two forward, and the student's two backward.
Errors are relative, in the Euclidean norm, against float64 from the same inputs; memory is beyond inputs and
gradients.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import GRPOConfig, Teacher, TopKTeacher, fused_distillation_loss, fused_grpo_loss
from grpo_kernels.benchmarks.cases import HEADS
from grpo_kernels.benchmarks.machine import environment, limit_memory, peak, restart_peak, write
from grpo_kernels.benchmarks.measure import interleave
from grpo_kernels.benchmarks.process import Died, OnProgress, run_in_subprocess
from grpo_kernels.benchmarks.reference import relative_error
from grpo_kernels.benchmarks.show import table

TOKENS = {
    "cpu": {"smollm2-135m": 2048, "qwen2.5-0.5b": 1024, "llama-3.2-1b": 512},
    "cuda": {"llama-3-8b": 16384, "qwen2.5-7b": 16384},
}
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
DIVERGENCES = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}  # TRL's and Liger's beta
PIECE, K = 256, 64  # rows of a teacher's logits at a time; its ids per token


class Batch(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    teacher: Teacher
    ids: Tensor
    advantages: Tensor

    @property
    def offsets(self) -> Tensor:
        """Of one packed sequence."""
        return torch.tensor([0, len(self.hidden)], device=self.hidden.device)


def make_batch(head: str, tokens: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Logits of a spread of 3; the teacher's are near the student's."""
    (width, vocab), g = HEADS[head], torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tokens, width, generator=g), torch.randn(vocab, width, generator=g) * 3 / width**0.5
    others = [x + 0.3 * x.std() * torch.randn(x.shape, generator=g) for x in (hidden, weight)]
    ids = torch.randint(vocab, (tokens,), generator=g)
    teacher = Teacher(*(x.to(device, dtype) for x in others))
    advantages = torch.randn(tokens, generator=g).to(device)
    return Batch(hidden.to(device, dtype), weight.to(device, dtype), teacher, ids.to(device), advantages)


def top_k(batch: Batch, mode: Any) -> TopKTeacher:
    pieces = [
        (rows.float() @ batch.teacher.weight.float().T).log_softmax(-1).topk(K)
        for rows in batch.teacher.hidden.split(PIECE)
    ]
    logps, ids = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return TopKTeacher(ids, logps, mode)


Gradients = tuple[Tensor, Tensor]


def backward(batch: Batch, loss: Callable[[Tensor, Tensor], Tensor]) -> Gradients:
    hidden, weight = (x.detach().requires_grad_() for x in (batch.hidden, batch.weight))
    loss(hidden, weight).backward()
    assert hidden.grad is not None and weight.grad is not None
    return hidden.grad, weight.grad


def ours(batch: Batch, divergence: Any, teacher: Teacher | TopKTeacher | None = None) -> Gradients:
    return backward(
        batch,
        lambda hidden, weight: (
            fused_distillation_loss(
                hidden, weight, teacher or batch.teacher, divergence=divergence, cu_seqlens=batch.offsets
            ).loss
        ),
    )


def policy_step(batch: Batch, teacher: TopKTeacher | None = None) -> Gradients:
    config = GRPOConfig.preset("dapo", distill_coef=0.0 if teacher is None else 0.1)
    return backward(
        batch,
        lambda hidden, weight: (
            fused_grpo_loss(
                hidden, weight, batch.ids, batch.advantages, cu_seqlens=batch.offsets, config=config, teacher=teacher
            ).loss
        ),
    )


def trl(batch: Batch, divergence: str) -> Gradients:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        given = hidden, weight, None, batch.teacher.hidden, batch.teacher.weight, None, DIVERGENCES[divergence]
        found: Tensor = ChunkedDivergenceFunction.apply(*given)[0]
        return found.mean()

    return backward(batch, loss)


def liger(batch: Batch, divergence: str, *, compiled: bool) -> Gradients:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    module = LigerFusedLinearJSDLoss(0.0, 1.0, DIVERGENCES[divergence], compiled=compiled)
    given = batch.teacher.hidden, batch.teacher.weight, batch.ids
    return backward(batch, lambda hidden, weight: module(hidden, weight, *given))


def eager_loss(hidden: Tensor, weight: Tensor, batch: Batch, divergence: str) -> Tensor:
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    with torch.no_grad():
        log_q = (batch.teacher.hidden @ batch.teacher.weight.T).float().log_softmax(-1)
    if divergence == "reverse_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    if divergence == "forward_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (log_q.exp() * (log_q - log_m) + log_p.exp() * (log_p - log_m)).sum(-1).mean()


def eager(batch: Batch, divergence: str) -> Gradients:
    return backward(batch, lambda hidden, weight: eager_loss(hidden, weight, batch, divergence))


def compiled_eager(batch: Batch, divergence: str) -> Callable[[], Gradients]:
    loss = torch.compile(partial(eager_loss, batch=batch, divergence=divergence))
    return lambda: backward(batch, loss)


def products(batch: Batch) -> Callable[[], None]:
    """F_t, at full N; the (N, V) buffers are made once, outside the time."""
    hidden, weight = batch.hidden, batch.weight
    logits, others = (hidden.new_empty(len(hidden), len(weight)) for _ in range(2))

    def run() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(batch.teacher.hidden, batch.teacher.weight.T, out=others)
        torch.mm(logits, weight), torch.mm(logits.T, hidden)

    return run


IMPLEMENTATIONS: dict[str, Callable[[Batch, str], Gradients]] = {
    "ours": ours, "TRL": trl, "Liger": partial(liger, compiled=False), "Liger, compiled": partial(liger, compiled=True),
    "eager": eager,
}  # fmt: skip


def exact(batch: Batch, divergence: str) -> Gradients:
    """In float64, in pieces of rows."""
    dhidden, dweight = [], torch.zeros_like(batch.weight, dtype=torch.float64)
    weight, teacher = batch.weight.double(), batch.teacher.weight.double()
    for rows, other in zip(batch.hidden.split(64), batch.teacher.hidden.split(64), strict=True):
        part = Batch(rows.double(), weight, Teacher(other.double(), teacher), batch.ids, batch.advantages)
        found = eager(part, divergence)
        share = len(rows) / len(batch.hidden)
        dhidden.append(found[0] * share)
        dweight += found[1] * share
    return torch.cat(dhidden), dweight


def peak_of(batch: Batch, name: str, divergence: str) -> int | None:
    device = batch.hidden.device
    before = restart_peak(device)
    found = IMPLEMENTATIONS[name](batch, divergence)
    return None if before is None else peak(device) - before - sum(x.nbytes for x in found)


def measure_peak_memory(
    head: str, tokens: int, dtype: torch.dtype, name: str, divergence: str, on_progress: OnProgress
) -> int | None:
    """On a CPU, in a fresh process, after a small call."""
    limit_memory()
    cpu = torch.device("cpu")
    on_progress(name)
    IMPLEMENTATIONS[name](make_batch(head, 16, dtype, cpu), divergence)
    on_progress(name)
    return peak_of(make_batch(head, tokens, dtype, cpu), name, divergence)


def measure(
    head: str, tokens: int, dtype: torch.dtype, divergence: str, rounds: int, device: torch.device
) -> dict[str, Any]:
    batch = make_batch(head, tokens, dtype, device)
    right = exact(batch, divergence)
    found: dict[str, Any] = {"head": head, "tokens": tokens, "dtype": str(dtype), "divergence": divergence}
    entries: dict[str, dict[str, Any]] = {name: {} for name in (*IMPLEMENTATIONS, "compiled eager", "products")}
    steps: dict[str, Callable[[], object]] = {"products": products(batch)}
    steps |= {name: partial(function, batch, divergence) for name, function in IMPLEMENTATIONS.items()}
    steps["compiled eager"] = compiled_eager(batch, divergence)
    for name, step in list(steps.items()):
        try:
            result: Any = step()
        except Exception as error:  # of a peer: a result
            entries[name]["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            del steps[name]
            continue
        if name != "products":
            pairs = zip(("dhidden", "dweight"), result, right, strict=True)
            entries[name]["errors"] = {key: relative_error(x, y) for key, x, y in pairs}
        del result
    del right
    times = interleave(steps, rounds, device, time.time() + 3600.0, lambda name: None)
    for name, taken in times.items():
        entries[name] |= {"seconds": taken, "of_products": taken["median"] / times["products"]["median"]}
        entries[name]["ours_of_this"] = times["ours"]["median"] / taken["median"]
    for name in IMPLEMENTATIONS if divergence == "reverse_kl" else ():
        if "error" in entries[name]:
            continue
        try:
            given = head, tokens, dtype, name, divergence
            if device.type != "cpu":
                entries[name]["peak_bytes"] = peak_of(batch, name, divergence)
                continue
            entries[name]["peak_bytes"] = run_in_subprocess(measure_peak_memory, *given, silence_s=300.0)
        except Died as death:
            entries[name]["memory_error"] = str(death)
    return found | {"implementations": entries}


def measure_top_k(head: str, tokens: int, dtype: torch.dtype, rounds: int, device: torch.device) -> dict[str, Any]:
    """A teacher of K ids, beside the DAPO loss ("tail") and alone ("renormalize"), of the step without a teacher."""
    batch = make_batch(head, tokens, dtype, device)
    given = {mode: top_k(batch, mode) for mode in ("tail", "renormalize")}
    steps: dict[str, Callable[[], object]] = {
        "step": lambda: policy_step(batch), "tail": lambda: policy_step(batch, given["tail"]),
        "renormalize": lambda: ours(batch, "reverse_kl", given["renormalize"]),
    }  # fmt: skip
    for step in steps.values():
        step()
    times = interleave(steps, rounds, device, time.time() + 3600.0, lambda name: None)
    ratios = {name: taken["median"] / times["step"]["median"] for name, taken in times.items()}
    return {"head": head, "tokens": tokens, "dtype": str(dtype), "k": K, "of_step": ratios, "seconds": times}


def show(document: dict[str, Any]) -> str:
    """Markdown: a row per case and implementation."""
    rows = []
    for case in document["cases"]:
        title = (
            f"{case['head']}, {case['tokens']:,} tokens, {case['dtype'].removeprefix('torch.')}, {case['divergence']}"
        )
        for name, entry in case["implementations"].items():
            if name == "products":
                continue
            numbers = [f"{entry[key]:.2f}" if key in entry else "" for key in ("of_products", "ours_of_this")]
            wrong = [f"{x:.1e}" for x in entry.get("errors", {}).values()] or ["", ""]
            memory = f"{entry['peak_bytes'] / 2**20:,.0f}" if entry.get("peak_bytes") else ""
            rows.append((title, name, *numbers, *wrong, memory or entry.get("error", "").split(":")[0]))
    header = "case", "", "time of F_t", "ours of this", "error of dhidden", "of dweight", "peak MiB"
    others = [
        (
            f"{c['head']}, {c['dtype'].removeprefix('torch.')}",
            *(f"{c['of_step'][m]:.3f}" for m in ("tail", "renormalize")),
        )
        for c in document["top_k"]
    ]
    return (
        f"{table(header, rows)}\n\nA teacher of {K} ids, time of the step without a teacher:\n\n"
        f"{table(('head', 'step with tail', 'renormalize alone'), others)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, default=Path("build/distillation.json"))
    add("--device", choices=list(TOKENS), default="cpu")
    add("--heads", nargs="+", help="default: all of the device")
    add("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    device, tokens = torch.device(chosen.device), TOKENS[chosen.device]
    document: dict[str, Any] = {"environment": environment(device), "cases": [], "top_k": []}
    for head in chosen.heads or tokens:
        for dtype in DTYPES[chosen.device]:
            for divergence in DIVERGENCES if head == "smollm2-135m" else ("reverse_kl",):
                document["cases"].append(measure(head, tokens[head], dtype, divergence, chosen.rounds, device))
                write(chosen.output, document)
            document["top_k"].append(measure_top_k(head, tokens[head], dtype, chosen.rounds, device))
            write(chosen.output, document)
            print(f"{head}, {dtype}\n{show(document)}\n", flush=True)


if __name__ == "__main__":
    main()
