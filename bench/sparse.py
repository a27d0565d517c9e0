"""What sparse gradients cost and how exact they are, on the head of a chat model and tokens that it sampled.

    OMP_NUM_THREADS=2 python bench/sparse.py [--output bench/results/sparse/cpu.json] [--rounds 7]

SmolLM2-135M-Instruct (`make demo-chat` installs it) completes eight questions at T = 0.7 and T = 1. The step (forward
and backward of the loss, a mean over tokens) with config.sparse_backward = theta takes turns with the exact step and
with the three bare products. Errors are relative, in the Euclidean norm, against float64 from the same inputs. Beside
them stand those of a model: gradients with the entries below theta times a row's scale cut away, or with all rounded to
bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import GRPOConfig, fused_grpo_loss, fused_logps
from grpo_kernels.benchmarks.implementations import IMPLEMENTATIONS, Step
from grpo_kernels.benchmarks.implementations.ours import make_step
from grpo_kernels.benchmarks.inputs import Inputs
from grpo_kernels.benchmarks.machine import environment, write
from grpo_kernels.benchmarks.measure import interleave, peak_of_call
from grpo_kernels.benchmarks.process import OnProgress, run_in_subprocess
from grpo_kernels.benchmarks.reference import errors, reference, relative_error
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
CPU = torch.device("cpu")
MODELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of a gradient of logits and the scales of its rows
    "rounded to bfloat16": lambda v, scale: v.to(torch.bfloat16).double(),
    **{f"cut below 2^-{k}": lambda v, scale, k=k: v * (v.abs() >= 2.0**-k * scale) for k in (12, 14)},
}


def sample(temperature: float) -> Inputs:
    """Tokens that the model samples, each as a completion of its own, and its hidden states before them."""
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
    mask = inputs["completion_mask"]
    advantages = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(0)).expand(mask.shape)
    return on_policy(hidden[mask], weight / temperature, inputs["completion_ids"][mask], advantages[mask])


def on_policy(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor) -> Inputs:
    """A batch of completions of a token each, without a KL term."""
    ones, zeros = torch.ones_like(ids)[:, None], torch.zeros_like(advantages)[:, None]
    leaves = (x.detach().clone().requires_grad_() for x in (hidden[:, None], weight))
    return Inputs(*leaves, ids[:, None], ones, None, zeros, advantages, beta=0.0)


def in_dtype(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (inputs.hidden, inputs.weight))
    return replace(inputs, hidden=hidden, weight=weight)


def model_errors(name: str, inputs: Inputs) -> dict[str, Any]:
    """Of gradients of logits that are changed in float64."""
    kept, scales = 0, inputs.advantages.abs().double()[:, None] / len(inputs.ids)  # the most that an entry can be

    def change(dlogits: Tensor, rows: Tensor) -> Tensor:
        nonlocal kept
        changed = MODELS[name](dlogits, scales[rows])
        kept += int((changed != 0).sum())
        return changed

    right, found = (reference(inputs, "step", "grpo", *given) for given in ((), (change,)))
    wrong = {key: relative_error(getattr(found, key), getattr(right, key)) for key in ("dhidden", "dweight")}
    return {"model": name, "kept": kept / len(inputs.ids), "errors": wrong}


def measure_peak_memory(path: str, dtype: torch.dtype, theta: float | None, on_progress: OnProgress) -> int | None:
    """Bytes of a step beyond its inputs and gradients, after one of a token and 1,024 ids."""
    inputs = in_dtype(torch.load(path, weights_only=False), dtype)
    on_progress("loaded")
    tiny = on_policy(
        inputs.flat_hidden[:1], inputs.weight[:1024], inputs.ids[:1, 0].clamp(max=1023), inputs.advantages[:1]
    )
    make_step(tiny, "step", sparse_backward=theta)(tiny)
    found = peak_of_call(make_step(inputs, "step", sparse_backward=theta), inputs, CPU)
    return found and found["peak_bytes"]


def measure(inputs: Inputs, rounds: int, path: str) -> list[dict[str, Any]]:
    """A row per type and theta, of which None is the exact step, and one per model. `path`: of the inputs' file."""
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        given = in_dtype(inputs, dtype)
        made: dict[Any, Step] = {theta: make_step(given, "step", sparse_backward=theta) for theta in (None, *THETAS)}
        right = reference(given, "step", "grpo")  # rounding the inputs is no error of the step
        wrong = {theta: errors(right, step(given)) for theta, step in made.items()}
        made["floor"] = IMPLEMENTATIONS["floor"].make_step(given, "step")
        made["floor"](given)
        # "ours" and "floor" are timed in every round, since others are divided by them
        times = interleave({name or "ours": partial(step, given) for name, step in made.items()}, rounds, CPU)
        for theta, found in wrong.items():
            config, seconds = GRPOConfig(sparse_backward=theta), times[theta or "ours"]
            of_exact, of_products = (seconds["median"] / times[name]["median"] for name in ("ours", "floor"))
            metrics = fused_grpo_loss(given.hidden, given.weight, given.ids, given.advantages, config=config).metrics
            kept = {name: metrics[f"sparse/{name}"].item() for name in ("kept", "dense")} if theta else {}
            rows.append({
                "dtype": str(dtype), "theta": theta, **kept, "errors": found, "seconds": seconds,
                "of_exact": of_exact, "of_products": of_products,
                "peak_bytes": run_in_subprocess(measure_peak_memory, path, dtype, theta),
            })  # fmt: skip
    return rows + [model_errors(name, inputs) for name in MODELS]


def show(found: dict[str, Any]) -> str:
    """Markdown: a row per type and theta."""
    rows = []
    for one in found["rows"]:
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
    document: dict[str, Any] = {"environment": environment(CPU), "batches": []}
    for temperature in TEMPERATURES:
        inputs = sample(temperature)
        with torch.no_grad():
            _, entropy = fused_logps(inputs.hidden, inputs.weight, inputs.ids, entropy=True)
        found: dict[str, Any] = {
            "temperature": temperature, "tokens": len(inputs.ids), "entropy": entropy.mean().item()
        }  # fmt: skip
        with TemporaryDirectory() as folder:
            torch.save(inputs, f"{folder}/inputs.pt")
            found["rows"] = measure(inputs, chosen.rounds, f"{folder}/inputs.pt")
        document["batches"].append(found)
        write(chosen.output, document)
        print(
            f"T {temperature}, {found['tokens']:,} tokens, {found['entropy']:.2f} nats\n\n{show(found)}\n", flush=True
        )


if __name__ == "__main__":
    main()
