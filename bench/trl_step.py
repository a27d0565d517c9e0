"""Time and peak memory of one micro-batch of TRL's GRPOTrainer, with and without this package: forward, loss, backward.

    python bench/trl_step.py [--layers 4] [--threads 2] [--repeats 7] [--output build/trl-step.json]

A model of SmolLM2-135M's shapes with few layers, random weights, float32; 8 completions of 128 tokens after prompts of
32. TRL's own trainer, the same with `patch_trl`, and FusedGRPOTrainer take turns. Memory: of a process
of its own, the peak beyond what is resident before the call, with gradients that exist.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.benchmarks.document import write
from grpo_kernels.benchmarks.machine import environment, limit_memory, peak, restart_peak
from grpo_kernels.benchmarks.process import Tell, apart

NAMES = ("TRL", "patch_trl", "FusedGRPOTrainer")
ROWS, PROMPT, LENGTH, VOCAB = 8, 32, 128, 49152
SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "dapo, beta 0.04": {"loss_type": "dapo", "beta": 0.04},
    "top-entropy quantile 0.2": {"loss_type": "dapo", "top_entropy_quantile": 0.2},
}


def make_trainer(name: str, options: dict[str, Any], layers: int) -> Any:
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
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=2048, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if options.get("beta"):  # TRL reads the reference model from a folder
        folder = tempfile.mkdtemp()
        model.save_pretrained(folder)
        model.config._name_or_path = folder
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS, num_generations=ROWS, max_completion_length=LENGTH,
        use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False, **options,
    )  # fmt: skip
    cls = FusedGRPOTrainer if name == "FusedGRPOTrainer" else GRPOTrainer
    trainer = cls(
        model=model, args=args, reward_funcs=lambda **_: [0.0], processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * ROWS}),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def make_batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    ones = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return {
        "prompt_ids": torch.randint(2, VOCAB, (ROWS, PROMPT), generator=g),
        "prompt_mask": ones[:, :PROMPT],
        "completion_ids": torch.randint(2, VOCAB, (ROWS, LENGTH), generator=g),
        "completion_mask": ones,
        "advantages": torch.randn(ROWS, generator=g),
        "old_per_token_logps": -10.8 + 0.1 * torch.randn(ROWS, LENGTH, generator=g),
        "ref_per_token_logps": -10.8 + 0.1 * torch.randn(ROWS, LENGTH, generator=g),
        "num_items_in_batch": torch.tensor(ROWS * LENGTH),
    }


def step(name: str, trainer: Any, batch: dict[str, torch.Tensor]) -> float:
    from grpo_kernels.integrations.trl import patch_trl, unpatch_trl

    (patch_trl if name == "patch_trl" else unpatch_trl)()
    start = time.perf_counter()
    trainer._compute_loss(trainer.model, batch).backward()
    return time.perf_counter() - start


def weigh(name: str, options: dict[str, Any], layers: int, threads: int, tell: Tell) -> int | None:
    """Bytes."""
    limit_memory()
    torch.set_num_threads(threads)
    tell(name)
    trainer, batch = make_trainer(name, options, layers), make_batch()
    small = {key: x[:, :4] if x.dim() == 2 else x for key, x in batch.items()}
    step(name, trainer, small)  # gradients exist from here on, and what libraries load lazily
    before = restart_peak(torch.device("cpu"))
    if before is None:
        return None
    step(name, trainer, batch)
    return peak(torch.device("cpu")) - before


def measure(options: dict[str, Any], layers: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Trainer to its seconds, in the order of the rounds, its share of TRL's time, and its peak memory."""
    trainers, batch = {name: make_trainer(name, options, layers) for name in NAMES}, make_batch()
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for i in range(repeats + 1):
        for name, trainer in trainers.items():
            seconds = step(name, trainer, batch)
            if i:
                times[name].append(seconds)
    trainers.clear()
    return {
        name: {
            "seconds": times[name],
            "of_trl": statistics.median(a / b for a, b in zip(times[name], times["TRL"], strict=True)),
            "peak_bytes": apart(weigh, name, options, layers, torch.get_num_threads()),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    settings = {name: value for name, value in vars(chosen).items() if name != "output"}
    document: dict[str, Any] = {"environment": environment(torch.device("cpu")), "settings": settings, "steps": {}}
    with contextlib.redirect_stderr(sys.stdout), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for title in chosen.settings:
            found = document["steps"][title] = measure(SETTINGS[title], chosen.layers, chosen.repeats)
            print(f"\n**{title}**, {chosen.layers} layers\n\n{table(found)}", flush=True)
            if chosen.output:
                write(chosen.output, document)


if __name__ == "__main__":
    main()
