"""What adding up the shares of chunks in bfloat16 rounds of the weight's gradient, on a chat model's own samples.

    python bench/dweight_sum.py [--output bench/results/dweight/cpu.json]

SmolLM2-135M-Instruct (`make demo-chat` installs it) completes eight questions at T = 0.7 and T = 1. The gradient of the
logits, rounded to bfloat16, times the hidden states is added up over 1 to 32 chunks in bfloat16, as a GPU's library
does: the product of a chunk and the sum so far are added in float32 and rounded once. Errors are relative, in the
Euclidean norm, against float64. Beside them: one float32 sum that is rounded at the end, and eager PyTorch with
bfloat16 logits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sparse import CPU, TEMPERATURES, in_dtype, sample

from grpo_kernels.benchmarks.implementations import IMPLEMENTATIONS
from grpo_kernels.benchmarks.inputs import Inputs
from grpo_kernels.benchmarks.machine import environment, write
from grpo_kernels.benchmarks.reference import reference, relative_error
from grpo_kernels.benchmarks.show import table

CHUNKS = 1, 2, 4, 8, 16, 32


def sums(dlogits: torch.Tensor, hidden: torch.Tensor, chunks: int, dtype: torch.dtype) -> torch.Tensor:
    """dlogits^T hidden (V, H) of a sum in `dtype`, rounded to bfloat16 in the end."""
    total = torch.zeros(dlogits.shape[1], hidden.shape[1], dtype=dtype)
    for part, h in zip(dlogits.chunk(chunks), hidden.chunk(chunks), strict=True):
        total = torch.addmm(total.float(), part.float().T, h.float()).to(dtype)
    return total.bfloat16()


def measure(inputs: Inputs) -> dict[str, Any]:
    """Errors of dweight by the number of chunks, of a float32 sum, and of eager PyTorch."""
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(dlogits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        parts.append((rows, dlogits.bfloat16()))
        return dlogits

    right = reference(inputs, "step", "grpo", keep).dweight
    rows, dlogits = (torch.cat(x) for x in zip(*parts, strict=True))
    hidden = inputs.flat_hidden.detach()[rows]
    found = {str(n): relative_error(sums(dlogits, hidden, n, torch.bfloat16), right) for n in CHUNKS}
    found["float32"] = relative_error(sums(dlogits, hidden, 8, torch.float32), right)
    eager = IMPLEMENTATIONS["eager"].make_step(inputs, "step")(inputs)
    return found | {"eager": relative_error(eager.dweight, right)}


def show(document: dict[str, Any]) -> str:
    """Markdown: a row for each way to add up, and its error over that of one rounding."""
    batches = [batch["errors"] for batch in document["batches"]]
    titles = [
        f"{what} {batch['temperature']}" for batch in document["batches"] for what in ("error, T", "of one chunk's, T")
    ]
    rows = [
        (name, *(cell for errors in batches for cell in (f"{errors[name]:.2e}", f"{errors[name] / errors['1']:.2f}")))
        for name in batches[0]
    ]
    return table(("chunks", *titles), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/dweight-sum.json"))
    chosen = parser.parse_args()
    document: dict[str, Any] = {"environment": environment(CPU), "batches": []}
    for temperature in TEMPERATURES:
        inputs = in_dtype(sample(temperature), torch.bfloat16)
        document["batches"].append({"temperature": temperature, "tokens": len(inputs.ids), "errors": measure(inputs)})
    write(chosen.output, document)
    print(show(document))


if __name__ == "__main__":
    main()
