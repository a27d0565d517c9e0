"""Training: a short supervised warm-up to a poor but not hopeless policy, then GRPO."""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from ..config import GRPOConfig
from .losses import LossWay
from .model import completion_hidden, generate, lm_head_weight
from .settings import DemoSettings
from .task import Problem, completion_mask, encode_answers, encode_prompts, reward

Record: TypeAlias = dict[str, float]


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, problems: Sequence[Problem]) -> float:
    """Share of problems that greedy decoding solves."""
    ids = generate(model, encode_prompts(problems).to(model.device), greedy=True)
    return reward(ids, problems).mean().item()


def warm_up(model: LlamaForCausalLM, problems: Sequence[Problem], settings: DemoSettings) -> int:
    """Next-token training on demonstrations, of which a share `careful_share` is right and the others forget to carry.

    The model learns both ways and prefers the wrong one: greedy decoding solves what needs no carry, 3 problems in
    10, and samples hold right and wrong answers, which is what GRPO learns from. Ends when the smoothed loss reaches
    `warmup_loss`, since when the model understands the task varies from seed to seed; returns the number of steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.warmup_lr, betas=(0.9, 0.99), weight_decay=0.0)
    batches = _batches(problems, settings.warmup_batch, settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    smoothed = None
    bar = tqdm(range(1, settings.max_warmup_steps + 1), desc="warm-up", disable=settings.quiet)
    for step in bar:
        batch = next(batches)
        careful = (torch.rand(len(batch), generator=generator) < settings.careful_share).tolist()
        answers = [p.answer if c else p.careless_answer for p, c in zip(batch, careful, strict=True)]
        prompts, ids = encode_prompts(batch).to(model.device), encode_answers(answers).to(model.device)
        mask = completion_mask(ids)
        logits = completion_hidden(model, prompts, ids)[mask] @ lm_head_weight(model).mT
        loss = torch.nn.functional.cross_entropy(logits, ids[mask])
        _update(model, optimizer, loss)
        smoothed = loss.item() if smoothed is None else 0.9 * smoothed + 0.1 * loss.item()
        bar.set_postfix(loss=f"{smoothed:.3f}")
        if smoothed < settings.warmup_loss:
            bar.close()
            return step
    return settings.max_warmup_steps


def train_grpo(
    model: LlamaForCausalLM,
    problems: Sequence[Problem],
    way: LossWay,
    config: GRPOConfig,
    settings: DemoSettings,
    log: Path,
) -> list[Record]:
    """GRPO on `problems`; one record per step, returned and written to `log` as JSON lines.

    A step samples `num_generations` completions of each of `num_prompts` problems and takes `num_iterations` gradient
    steps on them. Rewards are means over the completions; loss, KL, entropy (nats per token) and clip ratio (share of
    tokens) are means over the gradient steps; completion_length is in tokens, the end included; seconds since the
    start.
    """
    reference_policy = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    # Adam's first steps move every weight by the full rate, whatever the gradient: they start small.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / settings.lr_warmup_steps))
    batches = _batches(problems, settings.num_prompts, settings.seed + 1)
    records: list[Record] = []
    smoothed, start = None, time.perf_counter()
    bar = tqdm(range(1, settings.steps + 1), desc=f"GRPO ({settings.loss})", disable=settings.quiet)
    with log.open("w") as file:
        for step in bar:
            # Every step has its own stream of random numbers: two runs with nearly equal weights draw equal samples.
            torch.manual_seed(settings.seed + step)
            batch = [p for p in next(batches) for _ in range(settings.num_generations)]
            record = _grpo_step(model, reference_policy, optimizer, batch, way, config, settings)
            schedule.step()
            smoothed = record["reward"] if smoothed is None else 0.9 * smoothed + 0.1 * record["reward"]
            record = {"step": step, "reward_smoothed": smoothed, **record, "seconds": time.perf_counter() - start}
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            bar.set_postfix(
                reward=f"{smoothed:.2f}", kl=f"{record['kl']:.3f}", clip_ratio=f"{record['clip_ratio']:.3f}"
            )
    return records


def _grpo_step(
    model: LlamaForCausalLM,
    reference_policy: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Problem],
    way: LossWay,
    config: GRPOConfig,
    settings: DemoSettings,
) -> Record:
    """Sample, score, and update `num_iterations` times."""
    prompts = encode_prompts(batch).to(model.device)  # (B, P)
    ids = generate(model, prompts)  # (B, T)
    mask = completion_mask(ids)
    rewards = reward(ids, batch)  # (B,)
    with torch.no_grad():
        hidden = completion_hidden(reference_policy, prompts, ids)
        ref_logps = way.logps(hidden, lm_head_weight(reference_policy), ids, mask)

    old_logps = None
    losses, metrics = [], []
    for _ in range(settings.num_iterations):
        out = way.loss(
            completion_hidden(model, prompts, ids),
            lm_head_weight(model),
            ids,
            mask,
            rewards.to(model.device),
            settings.num_generations,
            old_logps,
            ref_logps,
            config,
        )
        if old_logps is None:
            # The first pass still is the policy that sampled: its ratio is 1, and its log-probabilities are the old
            # ones of the passes that follow. No extra forward pass is needed for them.
            old_logps = out.logps
        _update(model, optimizer, out.loss)
        losses.append(out.loss.detach())
        metrics.append(out.metrics)
    return {
        "reward": rewards.mean().item(),
        "loss": torch.stack(losses).mean().item(),
        "kl": _mean(metrics, "kl"),
        "entropy": _mean(metrics, "entropy"),
        "clip_ratio": _mean(metrics, "cispo_clip_ratio" if config.surrogate == "cispo" else "clip_ratio/region"),
        "completion_length": mask.sum(1).float().mean().item(),
    }


def _update(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _mean(metrics: Sequence[dict[str, Tensor]], name: str) -> float:
    """Mean of a metric over the gradient steps; 0 where the surrogate has no such thing (SAPO does not clip)."""
    return torch.stack([m[name] for m in metrics]).mean().item() if name in metrics[0] else 0.0


def _batches(problems: Sequence[Problem], size: int, seed: int) -> Iterator[list[Problem]]:
    """Endless batches of distinct problems; every epoch is a new order, cut to whole batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in itertools.count():
        order = torch.randperm(len(problems), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield [problems[i] for i in order[start : start + size]]
