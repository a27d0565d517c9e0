"""Time and peak memory of one micro-batch of TRL's GRPOTrainer, with and without this package: forward, loss, backward.

    python bench/trl_step.py [--device cuda] [--repeats 7] [--output build/trl-step.json]

A Llama with random weights and 8 completions: on a CPU four layers of SmolLM2-135M and completions of 128 tokens in
float32, on a GPU all layers of Qwen2.5-0.5B and 4,096 tokens in bfloat16, with gradient checkpointing, TRL's default.
TRL's own trainer, the same with `patch_trl`, and FusedGRPOTrainer take turns. Memory: the peak of a call beyond what is
held before it, with gradients that exist; on a CPU resident memory, in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from grpo_kernels.benchmarks.machine import environment, limit_memory, peak, restart_peak, synchronize, write
from grpo_kernels.benchmarks.process import OnProgress, run_in_subprocess
from grpo_kernels.benchmarks.show import table

NAMES = ("TRL", "patch_trl", "FusedGRPOTrainer")
ROWS = 8
SMOLLM2 = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
QWEN2 = dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2)
SETTINGS: dict[str, dict[str, Any]] = {"dapo": {}, "top-entropy quantile 0.2": {"top_entropy_quantile": 0.2}}


class Shape(NamedTuple):
    """Completions of `length` tokens after prompts of `prompt`, a model of `layers` layers."""

    device: str
    layers: int
    prompt: int
    length: int
    threads: int = 2


MODELS = {"cpu": SMOLLM2, "cuda": QWEN2}
SHAPES = {"cpu": Shape("cpu", 4, 32, 128), "cuda": Shape("cuda", 24, 256, 4096)}


def make_trainer(name: str, options: dict[str, Any], shape: Shape) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    on_gpu = shape.device == "cuda"
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    config = LlamaConfig(
        **MODELS[shape.device], num_hidden_layers=shape.layers, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=1, max_position_embeddings=shape.prompt + shape.length,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(shape.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if on_gpu else torch.float32)
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=ROWS, num_generations=ROWS, bf16=False,
        max_completion_length=shape.length, use_cpu=not on_gpu, report_to="none", gradient_checkpointing=on_gpu,
        loss_type="dapo", **options,
    )  # fmt: skip
    trainer = (FusedGRPOTrainer if name == "FusedGRPOTrainer" else GRPOTrainer)(
        model=model, args=args, reward_funcs=lambda **_: [0.0],
        train_dataset=Dataset.from_dict({"prompt": ["x"] * ROWS}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.to(shape.device).train()
    if on_gpu:  # which train() would do
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainer


def make_batch(shape: Shape) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    vocab, size = MODELS[shape.device]["vocab_size"], (ROWS, shape.length)
    near = -torch.tensor(float(vocab)).log()  # what random weights give
    batch = {
        "prompt_ids": torch.randint(2, vocab, (ROWS, shape.prompt), generator=g),
        "prompt_mask": torch.ones(ROWS, shape.prompt, dtype=torch.long),
        "completion_ids": torch.randint(2, vocab, size, generator=g),
        "completion_mask": torch.ones(size, dtype=torch.long),
        "advantages": torch.randn(ROWS, generator=g),
        "old_per_token_logps": near + 0.1 * torch.randn(size, generator=g),
        "num_items_in_batch": torch.tensor(ROWS * shape.length),
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
    """Bytes of a step that has run before; None where the system does not say."""
    device = batch["advantages"].device
    before = restart_peak(device)
    step(name, trainer, batch)
    return None if before is None else peak(device) - before


def measure_first_peak(name: str, options: dict[str, Any], shape: Shape, on_progress: OnProgress) -> int | None:
    """Bytes of the first long step of a process: on a CPU what others have freed is still resident."""
    limit_memory()
    torch.set_num_threads(shape.threads)
    on_progress(name)
    trainer, batch = make_trainer(name, options, shape), make_batch(shape)
    small = {key: x[:, :4] if x.dim() == 2 else x for key, x in batch.items()}
    step(name, trainer, small)  # gradients exist from here on, and what libraries load lazily
    return measure_peak_memory(name, trainer, batch)


def measure(options: dict[str, Any], shape: Shape, repeats: int) -> dict[str, dict[str, Any]]:
    """Trainer to its seconds, in the order of the rounds, its share of TRL's time, and its peak memory."""
    trainers, batch = {name: make_trainer(name, options, shape) for name in NAMES}, make_batch(shape)
    rounds = [{name: step(name, trainers[name], batch) for name in NAMES} for _ in range(repeats + 1)][1:]
    found: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        ratios = [times[name] / times["TRL"] for times in rounds]
        found[name] = {"seconds": [times[name] for times in rounds], "of_trl": statistics.median(ratios)}
        if shape.device == "cuda":
            found[name]["peak_bytes"] = measure_peak_memory(name, trainers[name], batch)
    if shape.device == "cpu":
        trainers.clear()
        for name in NAMES:
            found[name]["peak_bytes"] = run_in_subprocess(measure_first_peak, name, options, shape)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    shape = SHAPES[chosen.device]._replace(threads=chosen.threads)
    torch.set_num_threads(shape.threads)
    warnings.simplefilter("ignore")
    steps: dict[str, Any] = {}
    for title in chosen.settings:
        found = steps[title] = measure(SETTINGS[title], shape, chosen.repeats)
        rows, whole = [], found["TRL"]["peak_bytes"]
        for name, one in found.items():
            memory = [f"{one['peak_bytes'] / 2**20:.0f} MiB", f"{one['peak_bytes'] / whole:.2f}"] if whole else ["", ""]
            rows.append([name, f"{statistics.median(one['seconds']):.2f} s", f"{one['of_trl']:.2f}", *memory])
        print(f"\n{title}\n\n{table(('trainer', 'time', 'of TRL', 'memory', 'of TRL'), rows)}", flush=True)
        if chosen.output:
            settings = shape._asdict() | {"repeats": chosen.repeats}
            here = environment(torch.device(shape.device))
            write(chosen.output, {"environment": here, "settings": settings, "steps": steps})


if __name__ == "__main__":
    main()
