"""Time and peak memory of one micro-batch of TRL's GRPOTrainer, with and without this package: forward, loss, backward.

    python bench/trl_step.py [--device cpu] [--model smollm2-135m] [--layers 4] [--length 128] [--dtype float32] ...

A model of real shapes with random weights, and 8 completions: on a CPU few layers of SmolLM2-135M and short completions
in float32, on a GPU all layers of Qwen2.5-0.5B and completions of 4,096 tokens in bfloat16, with the gradient
checkpointing that TRL has by default. TRL's own trainer, the same with `patch_trl`, and FusedGRPOTrainer take turns.
Memory: the peak of a call beyond what is held before it, with gradients that exist; on a CPU resident memory, in a
process of its own, on a GPU what torch's allocator counts.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.benchmarks.cases import DTYPES
from grpo_kernels.benchmarks.machine import environment, limit_memory, peak, restart_peak, synchronize, write
from grpo_kernels.benchmarks.process import OnProgress, run_in_subprocess

NAMES = ("TRL", "patch_trl", "FusedGRPOTrainer")
MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3,
    ),
    "qwen2.5-0.5b": dict(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2,
    ),
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "dapo, beta 0.04": {"loss_type": "dapo", "beta": 0.04},
    "top-entropy quantile 0.2": {"loss_type": "dapo", "top_entropy_quantile": 0.2},
}


@dataclass(frozen=True)
class Shape:
    """What every trainer gets: `rows` completions of `length` tokens after prompts of `prompt` tokens."""

    device: str
    model: str
    layers: int
    rows: int
    prompt: int
    length: int
    dtype: str
    checkpointing: bool


DEFAULTS = {
    "cpu": Shape("cpu", "smollm2-135m", 4, 8, 32, 128, "float32", checkpointing=False),
    "cuda": Shape("cuda", "qwen2.5-0.5b", 24, 8, 256, 4096, "bfloat16", checkpointing=True),
}


def make_trainer(name: str, options: dict[str, Any], shape: Shape) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        **MODELS[shape.model] | {"num_hidden_layers": shape.layers}, tie_word_embeddings=True,
        max_position_embeddings=shape.prompt + shape.length, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(shape.device):
        model = LlamaForCausalLM(config).to(getattr(torch, shape.dtype))
    if options.get("beta"):  # TRL reads the reference model from a folder
        folder = tempfile.mkdtemp()
        model.save_pretrained(folder)
        model.config._name_or_path = folder
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=shape.rows, num_generations=shape.rows, max_completion_length=shape.length,
        use_cpu=shape.device == "cpu", bf16=False, report_to="none", gradient_checkpointing=shape.checkpointing,
        **options,
    )  # fmt: skip
    cls = FusedGRPOTrainer if name == "FusedGRPOTrainer" else GRPOTrainer
    trainer = cls(
        model=model, args=args, reward_funcs=lambda **_: [0.0], processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * shape.rows}),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.to(shape.device).train()
    if shape.checkpointing:  # which train() would do
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainer


def make_batch(shape: Shape) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    rows, length, vocab = shape.rows, shape.length, MODELS[shape.model]["vocab_size"]
    near = -torch.tensor(float(vocab)).log()  # what random weights give
    batch = {
        "prompt_ids": torch.randint(2, vocab, (rows, shape.prompt), generator=g),
        "prompt_mask": torch.ones(rows, shape.prompt, dtype=torch.long),
        "completion_ids": torch.randint(2, vocab, (rows, length), generator=g),
        "completion_mask": torch.ones(rows, length, dtype=torch.long),
        "advantages": torch.randn(rows, generator=g),
        "old_per_token_logps": near + 0.1 * torch.randn(rows, length, generator=g),
        "ref_per_token_logps": near + 0.1 * torch.randn(rows, length, generator=g),
        "num_items_in_batch": torch.tensor(rows * length),
    }
    return {key: x.to(shape.device) for key, x in batch.items()}


def step(name: str, trainer: Any, batch: dict[str, torch.Tensor]) -> float:
    from grpo_kernels.integrations.trl import patch_trl, unpatch_trl

    (patch_trl if name == "patch_trl" else unpatch_trl)()
    synchronize(batch["advantages"].device)
    start = time.perf_counter()
    trainer._compute_loss(trainer.model, batch).backward()
    synchronize(batch["advantages"].device)
    return time.perf_counter() - start


def measure_peak_memory(name: str, trainer: Any, batch: dict[str, torch.Tensor]) -> int | None:
    """Bytes of a step that has run before."""
    device = batch["advantages"].device
    before = restart_peak(device)
    if before is None:
        return None
    step(name, trainer, batch)
    return peak(device) - before


def _measure_peak_memory(
    name: str, options: dict[str, Any], shape: Shape, threads: int, on_progress: OnProgress
) -> int | None:
    """Bytes of the first long step of a process: on a CPU what others have freed is still resident."""
    limit_memory()
    torch.set_num_threads(threads)
    on_progress(name)
    trainer, batch = make_trainer(name, options, shape), make_batch(shape)
    small = {key: x[:, :4] if x.dim() == 2 else x for key, x in batch.items()}
    step(name, trainer, small)  # gradients exist from here on, and what libraries load lazily
    return measure_peak_memory(name, trainer, batch)


def measure(options: dict[str, Any], shape: Shape, repeats: int) -> dict[str, dict[str, Any]]:
    """Trainer to its seconds, in the order of the rounds, its share of TRL's time, and its peak memory."""
    trainers, batch = {name: make_trainer(name, options, shape) for name in NAMES}, make_batch(shape)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for i in range(repeats + 1):
        for name, trainer in trainers.items():
            seconds = step(name, trainer, batch)
            if i:
                times[name].append(seconds)
    if shape.device == "cuda":
        memory = {name: measure_peak_memory(name, trainer, batch) for name, trainer in trainers.items()}
    else:
        trainers.clear()
        memory = {
            name: run_in_subprocess(_measure_peak_memory, name, options, shape, torch.get_num_threads())
            for name in NAMES
        }
    return {
        name: {
            "seconds": times[name],
            "of_trl": statistics.median(a / b for a, b in zip(times[name], times["TRL"], strict=True)),
            "peak_bytes": memory[name],
        }
        for name in NAMES
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = ["| trainer | time | of TRL's | memory | of TRL's |", "|---|---|---|---|---|"]
    for name, numbers in found.items():
        own, whole = numbers["peak_bytes"], found["TRL"]["peak_bytes"]
        memory = f"{own / 2**20:.0f} MiB | {own / whole:.2f}" if own and whole else " | "
        lines.append(f"| {name} | {statistics.median(numbers['seconds']):.2f} s | {numbers['of_trl']:.2f} | {memory} |")
    return "\n".join(lines)


def chosen_shape(chosen: argparse.Namespace) -> Shape:
    """The device's default, changed by what was given."""
    default = asdict(DEFAULTS[chosen.device])
    return Shape(
        **{name: value if getattr(chosen, name) is None else getattr(chosen, name) for name, value in default.items()}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=DEFAULTS)
    parser.add_argument("--model", choices=MODELS)
    for name in ("layers", "rows", "prompt", "length"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    shape = chosen_shape(chosen)
    settings = asdict(shape) | {"threads": chosen.threads, "repeats": chosen.repeats, "settings": chosen.settings}
    document: dict[str, Any] = {
        "environment": environment(torch.device(shape.device)),
        "settings": settings,
        "steps": {},
    }
    with contextlib.redirect_stderr(sys.stdout), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for title in chosen.settings:
            found = document["steps"][title] = measure(SETTINGS[title], shape, chosen.repeats)
            print(f"\n**{title}**, {shape.layers} layers of {shape.model}, {shape.dtype}\n\n{table(found)}", flush=True)
            if chosen.output:
                write(chosen.output, document)


if __name__ == "__main__":
    main()
