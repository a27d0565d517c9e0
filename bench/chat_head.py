"""What sparse gradients cost, and what they and sums over chunks round, on a chat model's head and its own samples.

    OMP_NUM_THREADS=2 python bench/chat_head.py [--rounds 7] [--output build/chat-head]

SmolLM2-135M-Instruct (`make demo-chat` installs it) completes eight questions at T = 0.7 and T = 1. Errors are
relative, in the Euclidean norm, against float64 from the same inputs.

sparse.json     a step with config.sparse_backward = theta, in turns with the exact step and the three bare products;
                and in float64 the gradient of the logits rounded to bfloat16, or without the entries below theta
dweight.json    the shares of 1 to 32 chunks added up in bfloat16 as a GPU's library does, each sum rounded once; one
                float32 sum, rounded at the end; eager PyTorch with bfloat16 logits
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
from grpo_kernels.benchmarks.implementations import IMPLEMENTATIONS
from grpo_kernels.benchmarks.implementations.ours import make_step
from grpo_kernels.benchmarks.inputs import Inputs
from grpo_kernels.benchmarks.machine import environment, write
from grpo_kernels.benchmarks.measure import interleave, peak_of_call
from grpo_kernels.benchmarks.process import OnProgress, run_in_subprocess
from grpo_kernels.benchmarks.reference import errors, reference, relative_error
from grpo_kernels.trainer.demo import smollm2

QUESTIONS = (
    "Tell me a short story about a fox.", "How does a bicycle stay upright?", "Why is the sky blue?",
    "Give me a recipe with rice and beans.", "What is a prime number?", "Describe a day in the life of a nurse.",
    "How do I learn to swim?", "Write a poem about rain.",
)  # fmt: skip
THETAS = tuple(2.0**-k for k in (8, 10, 12, 14, 16))
CHUNKS = 1, 2, 4, 8, 16, 32
CPU = torch.device("cpu")
MODELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of a gradient of logits and the scales of its rows
    "rounded to bfloat16": lambda v, scale: v.to(torch.bfloat16).double(),
    **{f"cut below 2^-{k}": lambda v, scale, k=k: v * (v.abs() >= 2.0**-k * scale) for k in (12, 14)},
}


def sample(temperature: float) -> Inputs:
    """Returns tokens that the model samples, each as a completion of its own, and its hidden states before them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(smollm2())
    tokenizer, lm = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(0)
    hidden, ids = [], []
    for text in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        options = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
        rows = lm.generate(**prompt, **options, num_return_sequences=4, max_new_tokens=64)
        begin = prompt["input_ids"].shape[1]
        completion, is_end = rows[:, begin:], rows[:, begin:] == tokenizer.eos_token_id
        sampled = is_end.cumsum(1) - is_end.int() == 0  # up to the first end
        with torch.no_grad():
            hidden.append(lm.model(rows).last_hidden_state[:, begin - 1 : -1][sampled])
        ids.append(completion[sampled])
    advantages = torch.randn(sum(map(len, ids)), generator=torch.Generator().manual_seed(0))
    return on_policy(torch.cat(hidden), lm.lm_head.weight / temperature, torch.cat(ids), advantages)


def on_policy(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor) -> Inputs:
    """Returns a batch of completions of a token each, without a KL term."""
    ones, zeros = torch.ones_like(ids)[:, None], torch.zeros_like(advantages)[:, None]
    leaves = (x.detach().clone().requires_grad_() for x in (hidden[:, None], weight))
    return Inputs(*leaves, ids[:, None], ones, None, zeros, advantages, beta=0.0)


def in_dtype(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (inputs.hidden, inputs.weight))
    return replace(inputs, hidden=hidden, weight=weight)


# --- sparse gradients -------------------------------------------------------------------------------------------------


def model_errors(name: str, inputs: Inputs) -> dict[str, Any]:
    """Returns errors of gradients of logits that are changed in float64."""
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
    """Returns the bytes of a step beyond its inputs and gradients, after one of a token and 1,024 ids."""
    inputs = in_dtype(torch.load(path, weights_only=False), dtype)
    on_progress("loaded")
    tiny = on_policy(
        inputs.flat_hidden[:1], inputs.weight[:1024], inputs.ids[:1, 0].clamp(max=1023), inputs.advantages[:1]
    )
    make_step(tiny, "step", sparse_backward=theta)(tiny)
    found = peak_of_call(make_step(inputs, "step", sparse_backward=theta), inputs, CPU)
    return found and found["peak_bytes"]


def measure_sparse(inputs: Inputs, rounds: int, path: str) -> list[dict[str, Any]]:
    """Returns a row per type and theta (None: the exact step), and one per model. `path`: a file for the inputs."""
    torch.save(inputs, path)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        given = in_dtype(inputs, dtype)
        steps: dict[Any, Any] = {theta: make_step(given, "step", sparse_backward=theta) for theta in (None, *THETAS)}
        right = reference(given, "step", "grpo")  # rounding the inputs is no error of the step
        wrong = {theta: errors(right, step(given)) for theta, step in steps.items()}
        steps["floor"] = IMPLEMENTATIONS["floor"].make_step(given, "step")
        steps["floor"](given)
        # "ours" and "floor" are timed in every round, since others are divided by them
        times = interleave({name or "ours": partial(step, given) for name, step in steps.items()}, rounds, CPU)
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


# --- sums over chunks -------------------------------------------------------------------------------------------------


def sums(dlogits: Tensor, hidden: Tensor, chunks: int, dtype: torch.dtype) -> Tensor:
    """Returns dlogits^T hidden (V, H) of a sum in `dtype`, rounded to bfloat16 in the end."""
    total = torch.zeros(dlogits.shape[1], hidden.shape[1], dtype=dtype)
    for part, h in zip(dlogits.chunk(chunks), hidden.chunk(chunks), strict=True):
        total = torch.addmm(total.float(), part.float().T, h.float()).to(dtype)
    return total.bfloat16()


def measure_dweight(inputs: Inputs) -> dict[str, float]:
    """Returns errors of dweight by the number of chunks, of a float32 sum, and of eager PyTorch."""
    parts: list[Tensor] = []

    def keep(dlogits: Tensor, rows: Tensor) -> Tensor:
        parts.append(dlogits.bfloat16())
        return dlogits

    right = reference(inputs, "step", "grpo", keep).dweight
    dlogits, hidden = torch.cat(parts), inputs.flat_hidden.detach()
    found = {str(n): sums(dlogits, hidden, n, torch.bfloat16) for n in CHUNKS}
    found["float32"] = sums(dlogits, hidden, 8, torch.float32)
    found["eager"] = IMPLEMENTATIONS["eager"].make_step(inputs, "step")(inputs).dweight
    return {name: relative_error(dweight, right) for name, dweight in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/chat-head"), help="a folder")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    for name in ("sparse", "dweight"):
        document: dict[str, Any] = {"environment": environment(CPU), "batches": []}
        for temperature in (0.7, 1.0):
            inputs = sample(temperature)
            batch: dict[str, Any] = {"temperature": temperature, "tokens": len(inputs.ids)}
            if name == "sparse":
                with torch.no_grad():
                    _, entropy = fused_logps(inputs.hidden, inputs.weight, inputs.ids, entropy=True)
                batch["entropy"] = entropy.mean().item()
                with TemporaryDirectory() as folder:
                    batch["rows"] = measure_sparse(inputs, chosen.rounds, f"{folder}/inputs.pt")
            else:
                batch["errors"] = measure_dweight(in_dtype(inputs, torch.bfloat16))
            document["batches"].append(batch)
            write(chosen.output / f"{name}.json", document)
        print(f"written: {chosen.output / name}.json", flush=True)


if __name__ == "__main__":
    main()
