"""What `gpu_report.py` runs on the device, a process each: `python bench/gpu_probes.py NAME`.

device                     what torch sees, and versions, as JSON
product                    one matrix product of torch's
cuda/load                  the CUDA kernels, loaded by the driver
BACKEND/STRATEGY/SIZES     this library against its reference in float64, at those SIZES
ceilings                   what the bare products and a copy reach, a line of JSON each
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

PACKAGES = (
    *("torch", "triton", "numpy", "pytest", "pytest-xdist", "pybind11", "ninja", "setuptools", "transformers", "trl"),
    *("liger-kernel", "verl", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl"),
)
# (rows, hidden size, vocabulary). Odd ones; then one number of steps of the product's pipeline after another; then more
# tiles than a GPU has multiprocessors; for the row kernels, rows that fit a cluster of blocks, and one too long for it.
SIZES = {
    "tiny": ((1, 8, 2), (129, 72, 257), (300, 24, 1032)),
    "64": ((130, 64, 1000),),
    "256": ((130, 256, 1000),),
    "320": ((130, 320, 1000),),
    "4096": ((260, 4096, 2056),),
    "tiles": ((1100, 512, 20000),),
    "wide": ((4, 16, 151936), (2, 16, 600001)),
}
# Relative errors of gradients that no rounding explains; of log-probabilities, in nats.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
LOGP_TOLERANCE = 1e-3
LOG_RATIOS = (0.1, -0.1, 0.45, -0.45)  # of row after row: no rounding takes one over a bound of the clip range
HEADS = ("llama-3-8b", "qwen2.5-7b", "qwen2.5-1.5b", "gemma-2-2b")
ROWS = (4096, 8192, 2048, 1024)
WARM_UP, ROUNDS = 2, 7
COPIED = 2**32  # bytes


def device() -> None:
    facts: dict[str, Any] = {"versions": {name: version(name) for name in PACKAGES}, "no_gpu": ""}
    # The metadata of PyPI's torch do not name its CUDA.
    facts["versions"] |= {"torch": str(torch.__version__), "cuda_of_torch": torch.version.cuda}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cache": getattr(properties, "L2_cache_size", None),
        }
    else:
        facts["no_gpu"] = f"no CUDA device: torch {torch.__version__} sees none"
    print(json.dumps(facts))


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- first contact --------------------------------------------------------------------------------------------------


def product() -> None:
    a, b = (torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    error = relative((a @ b).double(), a.double() @ b.double())
    assert error < 1e-2, f"relative error {error:.1e}"


def load() -> None:
    from grpo_kernels.backends import cuda_

    backend, reason = cuda_.load()
    assert backend is not None, reason
    major, minor = torch.cuda.get_device_capability()
    image = backend.module.image_for(10 * major + minor)
    print(f"image {image}, CUDA {backend.module.built_for_cuda()}, driver's {backend.module.driver_cuda()}")
    assert image, backend.why_not(torch.device("cuda", 0))


def smoke(backend: str, strategy: str, sizes: str, place: str = "cuda") -> None:
    """Each size in its types, said before it begins: the last line of a hang is where it hangs."""
    os.environ["GRPO_KERNELS_STRATEGY"] = strategy
    for size in SIZES[sizes]:
        for dtype in (torch.float32, torch.bfloat16) if strategy == "rows" else (torch.bfloat16,):
            print(f"{size} {dtype}:", end=" ", flush=True)
            print(compare(backend, strategy, size, dtype, place), flush=True)


def compare(backend: str, strategy: str, size: tuple[int, int, int], dtype: torch.dtype, place: str) -> str:
    """Log-probabilities and gradients against float64, twice for the same bits; AssertionError where they are wrong."""
    from grpo_kernels import GRPOConfig
    from grpo_kernels.backends import get_backend
    from grpo_kernels.reference import reference_grpo_loss

    rows, width, vocab = size
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 1, width, generator=g).to(dtype)
    weight = (torch.randn(vocab, width, generator=g) * width**-0.5).to(dtype)
    ids = torch.randint(vocab, (rows, 1), generator=g)
    advantages = torch.randn(rows, generator=g)
    leaves = [x.to(place) for x in (hidden, weight)]
    if strategy not in get_backend(backend).strategies(*leaves):
        return "not served"
    with torch.no_grad():
        logp = (hidden[:, 0].double() @ weight.double().T).log_softmax(-1).gather(-1, ids)
    old = (logp - torch.tensor(LOG_RATIOS)[torch.arange(rows) % len(LOG_RATIOS), None]).float()
    config = GRPOConfig(epsilon_high=0.3)

    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    loss = reference_grpo_loss(*exact, ids, advantages.double(), old_logps=old.double(), config=config).loss
    expected = torch.autograd.grad(loss, exact)
    first, second = (step(backend, leaves, [x.to(place) for x in (ids, advantages, old)], config) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "two calls gave different bits"
    fused, scored, *gradients = (x.cpu().double() for x in first)
    found = {
        "logps": float((fused - logp).abs().max()),
        "logps alone": float((scored - logp).abs().max()),
        **{name: relative(x, y) for name, x, y in zip(("dhidden", "dweight"), gradients, expected, strict=True)},
    }
    text = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
    limits = {"dhidden": TOLERANCE[dtype], "dweight": TOLERANCE[dtype]}
    assert all(error <= limits.get(name, LOGP_TOLERANCE) for name, error in found.items()), text
    return text


def step(backend: str, leaves: list[Tensor], batch: list[Tensor], config: Any) -> tuple[Tensor, ...]:
    from grpo_kernels import fused_grpo_loss, fused_logps

    hidden, weight = (x.clone().requires_grad_() for x in leaves)
    ids, advantages, old = batch
    with torch.no_grad():
        scored, _ = fused_logps(hidden, weight, ids, backend=backend)
    out = fused_grpo_loss(hidden, weight, ids, advantages, old_logps=old, config=config, backend=backend)
    return out.logps, scored, *torch.autograd.grad(out.loss, (hidden, weight))


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm().clamp(min=1e-30))


# --- ceilings -------------------------------------------------------------------------------------------------------


def ceilings() -> None:
    """Most valuable first. Random data: zeros would run faster. Whatever is read is larger than the cache."""
    from grpo_kernels.bench.cases import heads

    copy()
    for head in HEADS:
        width, vocab = heads()[head]["hidden_size"], heads()[head]["vocab_size"]
        for rows in ROWS:
            try:
                for name, call in products(rows, width, vocab, "cuda"):
                    milliseconds = median_milliseconds(call)
                    rate = 2 * rows * width * vocab / milliseconds / 1e9
                    say(what=name, head=head, rows=rows, milliseconds=milliseconds, teraflops=rate)
            except torch.OutOfMemoryError as error:
                say(what="out of memory", head=head, rows=rows, error=str(error)[:200])
            torch.cuda.empty_cache()


def copy() -> None:
    source = torch.randn(COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    milliseconds = median_milliseconds(lambda: target.copy_(source))
    say(what="copy", milliseconds=milliseconds, terabytes_per_second=2 * COPIED / milliseconds / 1e9)


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def products(rows: int, width: int, vocab: int, place: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The three of a step, of `rows` (C) rows of bfloat16, with results in float32 and in 16 bits."""
    single = torch.float32
    h = torch.randn(rows, width, device=place).bfloat16()  # (C, H)
    weight = (torch.randn(vocab, width, device=place) * width**-0.5).bfloat16()  # (V, H)
    dlogits = torch.randn(rows, vocab, device=place, dtype=torch.bfloat16)  # (C, V)
    logits = torch.empty(rows, vocab, device=place)
    yield "h W^T, float32", lambda: torch.mm(h, weight.T, out_dtype=single, out=logits)
    narrow = logits.view(-1).view(torch.bfloat16)[: rows * vocab].view(rows, vocab)
    yield "h W^T", lambda: torch.mm(h, weight.T, out=narrow)
    yield "dlogits W", lambda: torch.mm(dlogits, weight)
    dweight = torch.zeros(vocab, width, device=place)
    yield (
        "dlogits^T h, added in float32",
        lambda: torch.addmm(dweight, dlogits.T, h, out_dtype=single, out=dweight),
    )
    yield "dlogits^T h, float32", lambda: torch.mm(dlogits.T, h, out_dtype=single, out=dweight)
    yield "dlogits^T h", lambda: torch.mm(dlogits.T, h)


def median_milliseconds(call: Callable[[], Tensor]) -> float:
    samples = []
    for number in range(WARM_UP + ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if number >= WARM_UP:
            samples.append(start.elapsed_time(end))
    return statistics.median(samples)


def main(name: str) -> None:
    plain = {"device": device, "product": product, "cuda/load": load, "ceilings": ceilings}
    if name in plain:
        plain[name]()
    else:
        smoke(*name.split("/"))


if __name__ == "__main__":
    main(sys.argv[1])
