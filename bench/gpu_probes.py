"""What `gpu_report.py` runs on the device, a process each: `python bench/gpu_probes.py NAME ITEM...`.

device                            what torch sees, and versions, as JSON
first product cuda/load           one matrix product of torch's; an image of the CUDA kernels loaded, and one launched
smoke/BACKEND/STRATEGY SIZE...    this library against its reference in float64, at those sizes (130x64x1000)
events/WHAT HEAD...               gpu_events.py: each kernel, or the bare products, in GB/s or TFLOP/s
headline/NAMES HEAD...            gpu_headline.py: steps beside the three bare products, interleaved
sweep/NAMES HEAD...               the same over rows per chunk
kept/NAMES HEAD...                steps with sampling masks of 32, 8 and 512 ids
profile HEAD, kernels             gpu_profile.py: one step by torch.profiler; each kernel once, for ncu
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import gpu_device
import gpu_tiles
import torch
from torch import Tensor

from grpo_kernels.backends.strategy import VARIABLE

PACKAGES = (
    *("torch", "triton", "numpy", "pytest", "pytest-xdist", "pybind11", "ninja", "setuptools", "transformers", "trl"),
    *("liger-kernel", "verl", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl"),
)
# Relative errors of gradients that no rounding explains; of log-probabilities, in nats.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
LOGP_TOLERANCE = 1e-3
# Of the rows of dweight that belong to no sampled id. Those that do carry nearly all of the norm: beside them it would
# not show if every other gradient of a logit were wrong.
ELSEWHERE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
LOG_RATIOS = (0.1, -0.1, 0.45, -0.45)  # of row after row: no rounding takes one over a bound of the clip range
# What has to have been called, or the strategy was not what ran.
CALLED = {"rows": "single_pass", "linear": "linear_logp", "anchored": "anchored"}


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


def product() -> dict[str, Any]:
    a, b = (torch.randn(1024, 1024, device=gpu_device.PLACE, dtype=torch.bfloat16) for _ in range(2))
    error = relative((a @ b).double(), a.double() @ b.double())
    assert error < 1e-2, f"relative error {error:.1e}"
    return {"error_of_product": error}


def load() -> dict[str, Any]:
    """Load an image, launch the smallest kernel on 16 elements, and look at every one."""
    from grpo_kernels.backends import why_not

    reason = why_not("cuda", torch.device(gpu_device.PLACE, 0))
    assert not reason, reason
    from grpo_kernels.backends import get_backend

    backend = get_backend("cuda")
    x = torch.arange(16.0, device=gpu_device.PLACE)
    backend.scale(x, torch.tensor(0.5, device=gpu_device.PLACE))
    gpu_device.synchronize()
    expected = torch.arange(16.0) / 2
    assert torch.equal(x.cpu(), expected), f"scale by 0.5 gave {x.tolist()}"
    module = getattr(backend, "module", None)
    return {} if module is None else {
        "module": getattr(module, "__file__", None) and os.path.relpath(module.__file__),
        "built_for_cuda": module.built_for_cuda(),
        "architectures": module.built_architectures(),
    }  # fmt: skip


FIRST = {"product": product, "cuda/load": load}


def smoke(backend: str, strategy: str, size: str) -> dict[str, Any]:
    """One size in its types. Where numbers are wrong, what is wrong about them."""
    found, wrong = {}, []
    for dtype in (torch.float32, torch.bfloat16) if strategy == "rows" else (torch.bfloat16,):
        name = str(dtype).removeprefix("torch.")
        gpu_device.at(name)
        try:
            found[name] = compare(backend, strategy, gpu_tiles.parse(size), dtype)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
            from gpu_decode import explain

            gpu_device.at(f"{name}, looking for what is wrong")
            gpu_device.say(wrong=explain(backend, strategy, gpu_tiles.parse(size), dtype), dtype=name)
    assert not wrong, "; ".join(wrong)
    return {"errors": found}


def compare(backend: str, strategy: str, size: tuple[int, int, int], dtype: torch.dtype) -> str:
    """Log-probabilities and gradients against torch's in float64 on the same device, twice for the same bits.

    AssertionError where they are wrong.
    """
    from grpo_kernels import GRPOConfig
    from grpo_kernels.backends import get_backend
    from grpo_kernels.benchmarks.witness import backends_of, witness
    from grpo_kernels.reference import reference_grpo_loss

    place = gpu_device.PLACE
    rows, width, vocab = size
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 1, width, generator=g).to(place, dtype)
    weight = (torch.randn(vocab, width, generator=g) * width**-0.5).to(place, dtype)
    ids = torch.randint(vocab, (rows, 1), generator=g).to(place)
    advantages = torch.randn(rows, generator=g).to(place)
    leaves = [hidden, weight]
    if strategy not in get_backend(backend).strategies(*leaves):
        return "not served"
    with torch.no_grad():
        logp = (hidden[:, 0].double() @ weight.double().T).log_softmax(-1).gather(-1, ids)
    log_ratios = torch.tensor(LOG_RATIOS, device=place)[torch.arange(rows, device=place) % len(LOG_RATIOS), None]
    old = (logp - log_ratios).float()
    config = GRPOConfig(epsilon_high=0.3)

    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    loss = reference_grpo_loss(*exact, ids, advantages.double(), old_logps=old.double(), config=config).loss
    expected = torch.autograd.grad(loss, exact)
    batch = [ids, advantages, old]
    with witness() as ran:
        first, second = (step(backend, strategy, leaves, batch, config) for _ in range(2))
    assert backends_of(ran) == [backend] and f"{backend}.{CALLED[strategy]}" in ran, f"what ran was {dict(ran)}"
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "two calls gave different bits"
    fused, scored, *gradients = (x.double() for x in first)
    found = {
        "logps": float((fused - logp).abs().max()),
        "logps alone": float((scored - logp).abs().max()),
        **{name: relative(x, y) for name, x, y in zip(("dhidden", "dweight"), gradients, expected, strict=True)},
    }
    unsampled = torch.ones(vocab, dtype=torch.bool, device=place).index_fill_(0, ids[:, 0], False)
    if unsampled.any():
        found["dweight elsewhere"] = relative(gradients[1][unsampled], expected[1][unsampled])
    text = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
    limits = {"dhidden": TOLERANCE[dtype], "dweight": TOLERANCE[dtype], "dweight elsewhere": ELSEWHERE[dtype]}
    assert all(error <= limits.get(name, LOGP_TOLERANCE) for name, error in found.items()), text
    return text


def step(backend: str, strategy: str, leaves: list[Tensor], batch: list[Tensor], config: Any) -> tuple[Tensor, ...]:
    from grpo_kernels import fused_grpo_loss, fused_logps

    hidden, weight = (x.clone().requires_grad_() for x in leaves)
    ids, advantages, old = batch
    # Scoring alone is "linear" under both names: what is broken there is not the fault of "anchored".
    os.environ[VARIABLE] = "rows" if strategy == "anchored" else strategy
    with torch.no_grad():
        scored, _ = fused_logps(hidden, weight, ids, backend=backend)
    os.environ[VARIABLE] = strategy
    out = fused_grpo_loss(hidden, weight, ids, advantages, old_logps=old, config=config, backend=backend)
    return out.logps, scored, *torch.autograd.grad(out.loss, (hidden, weight))


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm().clamp(min=1e-30))


def main(name: str, items: Iterable[str]) -> int:
    import gpu_events
    import gpu_headline
    import gpu_profile

    kind, _, which = name.partition("/")
    if kind == "device":
        device()
        return 0
    runs: dict[str, Callable[[str], dict[str, Any] | None]] = {
        "first": lambda item: FIRST[item](),
        "smoke": lambda item: smoke(*which.split("/"), item),
        "events": lambda item: gpu_events.run(which, item),
        "headline": lambda item: gpu_headline.headline(which.split(","), item),
        "sweep": lambda item: gpu_headline.sweep(which.split(","), item),
        "kept": lambda item: gpu_headline.kept(which.split(","), item),
        "profile": gpu_profile.profile,
        "kernels": gpu_profile.kernels,
    }
    return gpu_device.each(items, runs[kind])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
