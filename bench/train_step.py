"""Time and peak memory of an optimizer step of `grpo-kernels train`, with the fused and with the eager loss.

    python bench/train_step.py [--layers 30] [--threads 2] [--repeats 5] [--output build/train-step.json]

A model of SmolLM2-135M's shapes (30 layers; fewer by --layers), random weights, float32; 8 completions of 128 tokens
after prompts of 32, from a replayed rollout: the step alone, without sampling. Both losses take turns in one process.
Memory: of a process of its own, the peak beyond what is resident before the step, with gradients and optimizer state
that exist.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_kernels.benchmarks.machine import environment, limit_memory, peak, restart_peak, write
from grpo_kernels.benchmarks.process import OnProgress, run_in_subprocess
from grpo_kernels.trainer.arguments import parse
from grpo_kernels.trainer.checkpoint import save_rollout
from grpo_kernels.trainer.loop import Trainer
from grpo_kernels.trainer.rollout import Completion
from grpo_kernels.trainer.run import Run

LOSSES = ("fused", "eager")
ROWS, PROMPT, LENGTH, VOCAB = 8, 32, 128, 49152


def make_files(folder: Path, layers: int) -> None:
    """A model, its tokenizer, a data set and a rollout."""
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=2048, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "x": 2}, unk_token="x"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder / "model"
    )
    (folder / "data.jsonl").write_text('{"prompt": "x"}\n')
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCAB, (ROWS, PROMPT + LENGTH), generator=g).tolist()
    rows = [Completion(0, "x", row[:PROMPT], {}, row[PROMPT:], False, reward=float(i % 3)) for i, row in enumerate(ids)]
    save_rollout(folder / "rollouts", 0, rows)


def make_trainer(folder: Path, loss: str) -> Trainer:
    """A trainer that has made its first step."""
    options = {
        "model_name_or_path": folder / "model", "dataset_name": folder / "data.jsonl", "replay": folder / "rollouts",
        "loss": loss, "output_dir": Path(tempfile.mkdtemp(dir=folder)), "loss_type": "dapo",
        "per_device_train_batch_size": ROWS, "num_generations": ROWS, "max_completion_length": LENGTH,
        "num_iterations": 1000, "max_steps": 1000, "use_cpu": True, "disable_tqdm": True,
        "vllm_importance_sampling_correction": False,
    }  # fmt: skip
    trainer = Trainer(Run(parse([f"--{name}={value}" for name, value in options.items()])))
    trainer.made.log.start(0, {})
    trainer.collect()
    trainer.update()
    return trainer


def measure_peak_memory(folder: Path, loss: str, threads: int, on_progress: OnProgress) -> int | None:
    """Bytes."""
    limit_memory()
    torch.set_num_threads(threads)
    on_progress(loss)
    trainer = make_trainer(folder, loss)
    before = restart_peak(torch.device("cpu"))
    if before is None:
        return None
    trainer.update()
    return peak(torch.device("cpu")) - before


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    trainers = {loss: make_trainer(folder, loss) for loss in LOSSES}
    times: dict[str, list[float]] = {loss: [] for loss in LOSSES}
    for _ in range(repeats):
        for loss, trainer in trainers.items():
            start = time.perf_counter()
            trainer.update()
            times[loss].append(time.perf_counter() - start)
    threads = torch.get_num_threads()
    trainers.clear()
    return {
        loss: {
            "seconds": times[loss],
            "tokens_per_second": ROWS * LENGTH / statistics.median(times[loss]),
            "of_eager": statistics.median(a / b for a, b in zip(times[loss], times["eager"], strict=True)),
            "peak_bytes": run_in_subprocess(measure_peak_memory, folder, loss, threads),
        }
        for loss in LOSSES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder), chosen.layers)
        found = measure(Path(folder), chosen.repeats)
    print("| loss | step | tokens per second | of eager's time | peak memory of a step |\n|---|---|---|---|---|")
    for loss, numbers in found.items():
        memory = "" if numbers["peak_bytes"] is None else f"{numbers['peak_bytes'] / 2**20:,.0f} MiB"
        seconds = statistics.median(numbers["seconds"])
        rate = numbers["tokens_per_second"]
        print(f"| {loss} | {seconds:.2f} s | {rate:.0f} | {numbers['of_eager']:.2f} | {memory} |")
    if chosen.output:
        settings = {name: value for name, value in vars(chosen).items() if name != "output"}
        document = {"environment": environment(torch.device("cpu")), "settings": settings, "losses": found}
        write(chosen.output, json.loads(json.dumps(document, default=str)))


if __name__ == "__main__":
    main()
