"""Time and peak memory of one micro-batch of TRL's GRPOTrainer, with and without this package: forward, loss, backward.

    OMP_NUM_THREADS=2 python bench/trl_step.py [--device cuda] [--repeats 7] [--output build/trl-step.json]

A Llama with random weights and 8 completions: on a CPU four layers of SmolLM2-135M and completions of 128 tokens in
float32, on a GPU all layers of Qwen2.5-0.5B and 4,096 tokens in bfloat16, with gradient checkpointing, TRL's default.
TRL's own trainer, the same with `patch_trl`, and FusedGRPOTrainer take turns. Memory: the peak of a call beyond what is
held before it, with gradients that exist, in a process of its own; on a CPU resident memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from grpo_kernels.commands.bench.command import memory_text, table
from grpo_kernels.commands.bench.machine import environment, limit_memory, write
from grpo_kernels.commands.bench.measure import interleave
from grpo_kernels.commands.bench.process import OnProgress, run_in_subprocess
from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
from grpo_kernels.trainer.memory import peak, restart_peak

NAMES = ("TRL", "patch_trl", "FusedGRPOTrainer")
ROWS = 8
SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
MODELS = {
    "cpu": dict(zip(SIZES, (49152, 576, 1536, 9, 3), strict=True), num_hidden_layers=4),
    "cuda": dict(zip(SIZES, (151936, 896, 4864, 14, 2), strict=True), num_hidden_layers=24),
}
LENGTHS = {"cpu": (32, 128), "cuda": (256, 4096)}  # of prompts and completions


def trainer_of(
    name: str, model: Any, words: dict[str, int], prompts: list[str], reward: Any, rollout: Any = None, **options: Any
) -> Any:
    """Returns TRL's trainer, or "FusedGRPOTrainer", of a model whose tokens are words."""
    tokenizer = Tokenizer(models.WordLevel({**words, "<pad>": model.config.pad_token_id}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return (FusedGRPOTrainer if name == "FusedGRPOTrainer" else GRPOTrainer)(
        model=model, args=GRPOConfig(output_dir=tempfile.mkdtemp(), report_to="none", bf16=False, **options),
        reward_funcs=reward, rollout_func=rollout, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
    )  # fmt: skip


def make_trainer(name: str, device: str) -> Any:
    on_gpu, (prompt, length) = device == "cuda", LENGTHS[device]
    ids = dict(pad_token_id=0, eos_token_id=1, max_position_embeddings=prompt + length)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**MODELS[device], **ids, tie_word_embeddings=True))
    trainer = trainer_of(
        name, model.to(torch.bfloat16 if on_gpu else torch.float32), {"<eos>": 1}, ["x"] * ROWS, lambda **_: [0.0],
        per_device_train_batch_size=ROWS, num_generations=ROWS, max_completion_length=length, use_cpu=not on_gpu,
        gradient_checkpointing=on_gpu, loss_type="dapo",
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.to(device).train()
    if on_gpu:  # which train() would do
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainer


def make_batch(device: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    vocab, (prompt, length) = MODELS[device]["vocab_size"], LENGTHS[device]
    near = -torch.tensor(float(vocab)).log()  # what random weights give
    batch = {
        "prompt_ids": torch.randint(2, vocab, (ROWS, prompt), generator=g),
        "prompt_mask": torch.ones(ROWS, prompt, dtype=torch.long),
        "completion_ids": torch.randint(2, vocab, (ROWS, length), generator=g),
        "completion_mask": torch.ones(ROWS, length, dtype=torch.long),
        "advantages": torch.randn(ROWS, generator=g),
        "old_per_token_logps": near + 0.1 * torch.randn(ROWS, length, generator=g),
        "num_items_in_batch": torch.tensor(ROWS * length),
    }
    return {key: x.to(device) for key, x in batch.items()}


def step(name: str, trainer: Any, batch: dict[str, torch.Tensor]) -> None:
    (patch_trl if name == "patch_trl" else unpatch_trl)()
    trainer._compute_loss(trainer.model, batch).backward()


def measure_peak_memory(name: str, device_type: str, on_progress: OnProgress) -> int | None:
    """Returns the bytes of the first long step of a process; None where the system does not say."""
    limit_memory()
    on_progress(name)
    device, trainer, batch = torch.device(device_type), make_trainer(name, device_type), make_batch(device_type)
    # Gradients exist from here on, and what libraries load lazily.
    step(name, trainer, {key: x[:, :4] if x.dim() == 2 else x for key, x in batch.items()})
    before = restart_peak(device)
    step(name, trainer, batch)
    return None if before is None else peak(device) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=MODELS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("build/trl-step.json"))
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device(chosen.device)
    peaks = {name: run_in_subprocess(measure_peak_memory, name, chosen.device) for name in NAMES}
    batch = make_batch(chosen.device)
    steps = {name: partial(step, name, make_trainer(name, chosen.device), batch) for name in NAMES}
    for one in steps.values():
        one()
    times = dict(interleave(steps, chosen.repeats, device))
    found, rows = {}, []
    for name in NAMES:
        of_trl = statistics.median(ours / theirs for ours, theirs in zip(times[name], times["TRL"], strict=True))
        found[name] = {"seconds": times[name], "of_trl": of_trl, "peak_bytes": peaks[name]}
        rows.append((name, f"{statistics.median(times[name]):.2f} s", f"{of_trl:.2f}", memory_text(found[name])))
    print(table(("trainer", "time", "of TRL", "peak MiB"), rows))
    settings = {"device": chosen.device, "repeats": chosen.repeats, **MODELS[chosen.device]}
    write(chosen.output, {"environment": environment(device), "settings": settings, "steps": {"dapo": found}})


if __name__ == "__main__":
    main()
