"""Truncated sampling: how an engine's rounding changes the kept ids, and how TRL's trainer learns with them.

    python bench/truncated_sampling.py rounding    SmolLM2-135M-Instruct, which `make demo-chat` installs: ten minutes
    python bench/truncated_sampling.py learning    a model of 140,000 parameters learns the times table: ten minutes

Results go to bench/results/truncated; `make figures` draws the second.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import SamplingMask, fused_logps, sampling_support
from grpo_kernels.commands.bench.machine import environment, write
from grpo_kernels.commands.bench.models import make_tokenizer
from grpo_kernels.commands.bench.samples import chat_model, states, stories
from grpo_kernels.commands.bench.trainers import trainer_of
from grpo_kernels.head.truncation import Truncation, truncate
from grpo_kernels.trainer.arguments import TrainArguments
from grpo_kernels.trainer.sampling import generate

RESULTS = Path(__file__).resolve().parent / "results" / "truncated"


# --- an engine that rounds --------------------------------------------------------------------------------------------

RULES = {
    "top_k 20": dict(top_k=20), "top_p 0.9": dict(top_p=0.9), "top_k 50, top_p 0.9": dict(top_k=50, top_p=0.9),
    "min_p 0.05": dict(min_p=0.05),
}  # fmt: skip


@torch.no_grad()
def rounding() -> dict[str, Any]:
    """Returns how far the kept ids and ratios of engines that round are from those of a float32 trainer.

    The engines sample the next token of texts of the model. One rounds only the logits to bfloat16, the other computes
    everything in it.
    """
    lm, tokenizer = chat_model()
    torch.manual_seed(0)
    prompts, texts = stories(lm, tokenizer)
    hidden, weight = states(lm, prompts, texts), lm.get_output_embeddings().weight.clone()
    engines = {"bfloat16 logits": (hidden @ weight.T).bfloat16().float()}
    engines["bfloat16 model"] = (states(lm.bfloat16(), prompts, texts) @ weight.bfloat16().T).float()
    result: dict[str, Any] = {"tokens": len(hidden)}
    for engine, logits in engines.items():
        result[engine] = {name: compared(hidden, weight, logits, rule) for name, rule in RULES.items()}
    return result


def compared(hidden: Tensor, weight: Tensor, logits: Tensor, rule: dict[str, Any]) -> dict[str, Any]:
    """Returns how the kept ids of an engine with logits z (N, V) differ, and the ratios trainer / engine."""
    engine_keeps, trainer_keeps = (truncate(x, Truncation(**rule)) for x in (logits, hidden @ weight.T))
    engine_log_p = logits.masked_fill(~engine_keeps, -torch.inf).log_softmax(1)
    ids = torch.multinomial(engine_log_p.exp(), 1)
    recomputed = sampling_support(hidden, weight, ids[:, 0], **rule)
    engine_mask = SamplingMask(engine_keeps.nonzero()[:, 1].int(), engine_keeps.sum(1))
    comparison: dict[str, Any] = {
        "kept ids": mean(engine_keeps.sum(1)),
        "tokens with other ids": mean((trainer_keeps != engine_keeps).any(1)),
        "sampled ids added": mean(recomputed.added),
    }
    for name, mask in (("all", None), ("engine", engine_mask), ("recomputed", recomputed)):
        logps, _ = fused_logps(hidden, weight, ids[:, 0], sampling_mask=mask)
        ratio_error = (logps - engine_log_p.gather(1, ids)[:, 0]).exp() - 1
        comparison[name] = {
            "mean ratio": 1 + mean(ratio_error), "mean error": mean(ratio_error.abs()),
            "outside [0.9, 1.1]": mean(ratio_error.abs() > 0.1),
        }  # fmt: skip
    return comparison


def mean(x: Tensor) -> float:
    """Returns the mean, computed in float64."""
    return x.double().mean().item()


# --- a run ------------------------------------------------------------------------------------------------------------

VOCAB, TOP_K, STEPS, SEEDS = 256, 20, 150, 3
DIGITS, TIMES, EQUALS, EOS, PAD = range(10), 10, 11, 12, 13
PAIRS = [(a, b) for a in range(2, 10) for b in range(2, 10)]


def learning() -> dict[str, Any]:
    """Returns the logs of TRL's trainer and of ours, for SEEDS seeds each.

    The engine samples with top_k and returns log-probabilities over the ids that it kept, as vLLM does. TRL, by
    default, weighs sequences by the ratio of the trainer's log-probabilities to these.
    """
    return {"runs": {name: [run(name, seed) for seed in range(SEEDS)] for name in ("TRL", "FusedGRPOTrainer")}}


def policy(seed: int) -> Any:
    """Returns a model that knows a little of the task, from 30 steps of supervised training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2,
        max_position_embeddings=16, pad_token_id=PAD, bos_token_id=None, eos_token_id=EOS,
    )  # fmt: skip
    lm = LlamaForCausalLM(config)
    texts = torch.tensor([[a, TIMES, b, EQUALS, *answer(a, b), EOS] for a, b in PAIRS])
    optimizer = torch.optim.AdamW(lm.parameters(), lr=2e-3)
    for _ in range(30):
        lm(texts, labels=texts.masked_fill(torch.arange(7) < 4, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return lm


def answer(a: int, b: int) -> list[int]:
    """Returns the two digits of a product."""
    return [a * b // 10, a * b % 10]


def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Returns the share of right tokens in each completion: two digits and the end."""
    shares = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        correct = [*answer(int(prompt[0]), int(prompt[4])), EOS]
        shares.append(sum(x == y for x, y in zip(ids, correct, strict=False)) / 3)
    return shares


def engine(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Returns prompts, completions and their log-probabilities, as TRL asks of a rollout function."""
    ids = trainer.processing_class(prompts)["input_ids"]
    lm = trainer.accelerator.unwrap_model(trainer.model)
    arguments = TrainArguments(max_completion_length=3, top_k=TOP_K)
    completions = generate(lm, ids, arguments, ends=[EOS], pad_id=PAD)
    logps = [completion.logps.tolist() for completion in completions if completion.logps is not None]
    return {"prompt_ids": ids, "completion_ids": [completion.ids for completion in completions], "logprobs": logps}


def run(name: str, seed: int) -> dict[str, list[float]]:
    """Trains once. Returns what was logged at each step."""
    words = {**{str(i): i for i in DIGITS}, "x": TIMES, "=": EQUALS, "<eos>": EOS, "<pad>": PAD}
    trainer = trainer_of(
        name, policy(seed), make_tokenizer(words), [f"{a} x {b} =" for a, b in PAIRS], reward, engine,
        per_device_train_batch_size=64, num_generations=8, max_steps=STEPS, seed=seed, learning_rate=1e-3,
        lr_scheduler_type="constant", max_completion_length=3, top_k=TOP_K, logging_steps=1, use_cpu=True,
        gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1
    trainer.train()
    logged = ("reward", "sampling/importance_sampling_ratio/mean", "sampling/kept_mass")
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {key: [round(float(entry[key]), 4) for entry in log] for key in logged if key in log[0]}


def main() -> None:
    """Runs the measurement that the command names, and writes its JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rounding", "learning"))
    measurement = parser.parse_args().what
    warnings.filterwarnings("ignore")
    result = rounding() if measurement == "rounding" else learning()
    write(RESULTS / f"{measurement}.json", {"environment": environment(torch.device("cpu")), **result})


if __name__ == "__main__":
    main()
