"""Of real_vllm.py, in a process of its own: TRL's trainer with vLLM's engine for CPUs beside it, before any update."""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from trl.generation import vllm_generation

from grpo_kernels.integrations.trl import FusedGRPOTrainer


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    # TRL gives the engine no type, which takes bfloat16 then.
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32", enforce_eager=True, block_size=32)
    args = GRPOConfig(
        output_dir=folder, use_vllm=True, vllm_mode="colocate", use_cpu=True, bf16=False, report_to="none", top_k=8,
        top_p=0.9, vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1e3,
        per_device_train_batch_size=32, num_generations=8, max_completion_length=12, vllm_max_model_length=64,
    )  # fmt: skip
    trainer = FusedGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder), processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [0.0] * 32, train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 8}),
        args=args,
    )  # fmt: skip
    trainer._last_loaded_step = 0  # the engine has the folder's weights; TRL's way to move others is for GPUs
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": f"{i // 8}+1="} for i in range(32)])
    mask = batch["completion_mask"].bool()
    with torch.no_grad():
        whole, *_ = trainer._run(trainer.model, batch)  # of the whole vocabulary, as TRL has them
    found = {"fused": batch["importance_sampling_ratio"], "trl": (whole - batch["sampling_per_token_logps"]).exp()}
    log = {"tokens": int(mask.sum()), "kept_mass": trainer._metrics["train"]["sampling/kept_mass"][0]}
    for name, ratio in found.items():
        far = ((ratio[mask] - 1).abs() > 0.01).double().mean()
        log |= {f"{name} mean": ratio[mask].mean().item(), f"{name} outside": far.item()}
    print(json.dumps(log))


if __name__ == "__main__":
    main(*sys.argv[1:])
