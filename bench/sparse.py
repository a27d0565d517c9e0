"""What sparse gradients cost and how exact they are, on the head of a chat model and tokens that it sampled.

    OMP_NUM_THREADS=2 python bench/sparse.py [--output bench/results/sparse/cpu.json] [--rounds 7]

SmolLM2-135M-Instruct (`make demo-chat` installs it) completes eight questions at T = 0.7 and T = 1. The step (forward
and backward of the DAPO loss) with config.sparse_backward = theta takes turns with the exact step and with the three
bare products. Errors are relative, in the Euclidean norm, against float64 from the same inputs. Beside them stand those
of a model: gradients with the entries below theta times a row's scale cut away, or with all rounded to bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import GRPOConfig, fused_grpo_loss, fused_logps, grpo_loss_from_logps
from grpo_kernels.benchmarks.machine import environment, peak, restart_peak, write
from grpo_kernels.benchmarks.measure import interleave
from grpo_kernels.benchmarks.process import OnProgress, run_in_subprocess
from grpo_kernels.benchmarks.reference import relative_error
from grpo_kernels.benchmarks.show import table
from grpo_kernels.integrations.transformers import fused_forward
from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.batch import model_inputs
from grpo_kernels.trainer.model import load_model, load_tokenizer
from grpo_kernels.trainer.rollout import Completion
from grpo_kernels.trainer.sampling import eos_ids, generate
from grpo_kernels.trainer.smollm2 import smollm2

QUESTIONS = (
    "Tell me a short story about a fox.", "How does a bicycle stay upright?", "Why is the sky blue?",
    "Give me a recipe with rice and beans.", "What is a prime number?", "Describe a day in the life of a nurse.",
    "How do I learn to swim?", "Write a poem about rain.",
)  # fmt: skip
GENERATIONS, LENGTH = 4, 64
TEMPERATURES = (0.7, 1.0)
THETAS = (2.0**-8, 2.0**-10, 2.0**-12, 2.0**-14, 2.0**-16)
DTYPES = (torch.float32, torch.bfloat16)
PIECE = 256  # rows of logits at a time


class Batch(NamedTuple):
    hidden: Tensor  # (B, T, H) float32
    weight: Tensor  # (V, H)
    ids: Tensor
    mask: Tensor
    advantages: Tensor
    temperature: float

    def to(self, dtype: torch.dtype) -> Batch:
        return self._replace(hidden=self.hidden.to(dtype), weight=self.weight.to(dtype))


def sample(temperature: float) -> Batch:
    """Tokens that the model samples, and its hidden states before them."""
    path, arguments = str(smollm2()), TrainArguments(max_completion_length=LENGTH, temperature=temperature)
    tokenizer, lm = load_tokenizer(path, arguments), load_model(path, arguments).eval()
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in QUESTIONS
        for _ in range(GENERATIONS)
    ]
    torch.manual_seed(0)
    found = generate(lm, prompts, arguments, ends=eos_ids(lm, tokenizer), pad_id=tokenizer.pad_token_id)
    rows = [Completion(0, "", prompt, {}, *s[:2]) for prompt, s in zip(prompts, found, strict=True)]
    inputs = model_inputs(rows, arguments, tokenizer.pad_token_id, "cpu")
    with torch.no_grad():
        hidden, weight = fused_forward(lm, **inputs, loss=lambda hidden, weight, *_, **__: (hidden, weight))
    advantages = torch.randn(len(rows), generator=torch.Generator().manual_seed(0))
    return Batch(
        hidden.clone(), weight.detach(), inputs["completion_ids"], inputs["completion_mask"], advantages, temperature
    )


def loss_config(batch: Batch, theta: float | None = None) -> GRPOConfig:
    return GRPOConfig.preset("dapo", temperature=batch.temperature, sparse_backward=theta)


def step(batch: Batch, theta: float | None = None) -> tuple[Tensor, Tensor, Any]:
    """(dhidden, dweight, metrics)."""
    hidden, weight = (x.detach().requires_grad_() for x in (batch.hidden, batch.weight))
    out = fused_grpo_loss(
        hidden, weight, batch.ids, batch.advantages, completion_mask=batch.mask, config=loss_config(batch, theta)
    )
    out.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return hidden.grad, weight.grad, out.metrics


def products(batch: Batch) -> Callable[[], None]:
    """The three bare products, in pieces of rows."""
    hidden = batch.hidden[batch.mask]
    dweight = torch.zeros_like(batch.weight)

    def run() -> None:
        for rows in hidden.split(PIECE):
            logits = rows @ batch.weight.T
            logits @ batch.weight
            torch.addmm(dweight, logits.T, rows, out=dweight)

    return run


def entries(batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Per piece of scored rows, in float64: their hidden states, d loss / d logits, scales (rows,), the largest that an
    entry's absolute value can be."""
    exact = batch.to(torch.float64)
    with torch.no_grad():
        logps, _ = fused_logps(
            exact.hidden, exact.weight, batch.ids, completion_mask=batch.mask, temperature=batch.temperature
        )
    logps.requires_grad_()
    grpo_loss_from_logps(logps, batch.advantages, completion_mask=batch.mask, config=loss_config(batch)).loss.backward()
    assert logps.grad is not None
    for hidden, ids, g in zip(
        *(x[batch.mask].split(PIECE) for x in (exact.hidden, batch.ids, logps.grad)), strict=True
    ):
        p = (hidden @ exact.weight.T / batch.temperature).softmax(-1)
        dlogits = -p * (g / batch.temperature)[:, None]
        dlogits[range(len(ids)), ids] += g / batch.temperature
        yield hidden, dlogits, (g / batch.temperature).abs()


def both_errors(found: Sequence[Any], right: Sequence[Any]) -> dict[str, float]:
    return {name: relative_error(found[i], right[i]) for i, name in enumerate(("dhidden", "dweight"))}


def errors(batch: Batch) -> list[dict[str, Any]]:
    """Errors of the package with sparse gradients and without, and of the model."""
    right = step(batch.to(torch.float64))
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        given = batch.to(dtype)
        # Rounding the inputs is no error of the step.
        own = right if dtype == torch.float32 else step(given.to(torch.float64))
        for theta in (None, *THETAS):
            found = step(given, theta)
            numbers = {name: found[2][f"sparse/{name}"].item() for name in ("kept", "dense")} if theta else {}
            rows.append({"dtype": str(dtype), "theta": theta, **numbers, "errors": both_errors(found, own)})
    modelled: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "rounded to bfloat16": lambda v, scale: v.to(torch.bfloat16).double(),
        **{f"cut below 2^-{k}": lambda v, scale, k=k: v * (v.abs() >= 2.0**-k * scale) for k in (12, 14)},
    }
    for name, change in modelled.items():
        dhidden, dweight = torch.zeros_like(right[0]), torch.zeros_like(right[1])
        parts, kept = [], 0
        for hidden, v, scale in entries(batch):
            changed = change(v, scale[:, None])
            kept += int((changed != 0).sum())
            parts.append(changed @ batch.weight.double())
            dweight.addmm_(changed.T, hidden)
        dhidden[batch.mask] = torch.cat(parts)
        rows.append(
            {"model": name, "kept": kept / int(batch.mask.sum()), "errors": both_errors((dhidden, dweight), right)}
        )
    return rows


def measure_peak_memory(path: str, dtype: torch.dtype, theta: float | None, on_progress: OnProgress) -> int | None:
    """Bytes of a step beyond its inputs and gradients."""
    batch = torch.load(path, weights_only=False).to(dtype)
    on_progress("loaded")
    tiny = batch._replace(**{name: getattr(batch, name)[:1] for name in ("hidden", "ids", "mask", "advantages")})
    tiny = tiny._replace(weight=batch.weight[:1024].clone(), ids=tiny.ids.clamp(max=1023))
    step(tiny, theta)
    cpu = torch.device("cpu")
    before = restart_peak(cpu)
    dhidden, dweight, _ = step(batch, theta)
    return None if before is None else peak(cpu) - before - dhidden.nbytes - dweight.nbytes


def measure(batch: Batch, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    given = batch.to(dtype)
    steps: dict[Any, Callable[[], object]] = {"products": products(given), None: lambda: step(given)}
    for theta in THETAS:
        steps[theta] = lambda theta=theta: step(given, theta)
    for run in steps.values():
        run()
    times = interleave(steps, rounds, torch.device("cpu"), time.time() + 3600.0, lambda name: None)
    rows = []
    with TemporaryDirectory() as folder:
        path = f"{folder}/batch.pt"
        torch.save(batch, path)
        for theta in (None, *THETAS):
            median = times[theta]["median"]
            rows.append({
                "dtype": str(dtype), "theta": theta, "seconds": times[theta],
                "of_exact": median / times[None]["median"], "of_products": median / times["products"]["median"],
                "peak_bytes": run_in_subprocess(measure_peak_memory, path, dtype, theta),
            })  # fmt: skip
    return rows


def show(found: dict[str, Any]) -> str:
    """Markdown: a row per type and theta."""
    known = {(row.get("dtype"), row.get("theta")): row for row in found["times"]}
    rows = []
    for row in found["errors"]:
        one = row | known.get((row.get("dtype"), row.get("theta")), {}) if "dtype" in row else row
        theta = one.get("model") or ("exact" if one["theta"] is None else f"2^{torch.tensor(one['theta']).log2():.0f}")
        rows.append((
            theta, one.get("dtype", "model in float64").removeprefix("torch."),
            f"{one['kept']:,.0f}" if "kept" in one else "all", f"{one['dense']:.1%}" if "dense" in one else "",
            *(f"{one['errors'][name]:.1e}" for name in ("dhidden", "dweight")),
            *(f"{one[name]:.2f}" if name in one else "" for name in ("of_exact", "of_products")),
            f"{one['peak_bytes'] / 2**20:,.0f}" if one.get("peak_bytes") else "",
        ))  # fmt: skip
    header = "theta", "type", "kept", "by products", "error of dhidden", "of dweight", "time of exact", "of products"
    return table((*header, "peak MiB"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/sparse.json"))
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    document: dict[str, Any] = {"environment": environment(torch.device("cpu")), "batches": []}
    for temperature in TEMPERATURES:
        batch = sample(temperature)
        with torch.no_grad():
            _, entropy = fused_logps(
                batch.hidden, batch.weight, batch.ids, completion_mask=batch.mask, temperature=temperature, entropy=True
            )
        found: dict[str, Any] = {
            "temperature": temperature, "tokens": int(batch.mask.sum()),
            "entropy": entropy[batch.mask].mean().item(), "errors": errors(batch),
            "times": [row for dtype in DTYPES for row in measure(batch, dtype, chosen.rounds)],
        }  # fmt: skip
        document["batches"].append(found)
        write(chosen.output, document)
        print(
            f"T {temperature}, {found['tokens']:,} tokens, {found['entropy']:.2f} nats\n\n{show(found)}\n", flush=True
        )


if __name__ == "__main__":
    main()
