"""From completions to the arguments of the loss: advantages, masks, denominators, padding."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..config import GRPOConfig
from ..corrections import rejection_mask, rollout_weights
from ..rewards import group_advantages, process_advantages
from ..sampling_mask import SamplingMask
from . import RunError
from .arguments import TrainArguments
from .rollout import Completion, padded


def step_ends(ids: Sequence[int], tokenizer: Any, delimiter: str) -> list[int]:
    """Returns the index of the last token of each step of the text that rewards get. A delimiter ends a step, with the
    token that completes it; the last step ends with the completion.

    "a\\nbc\\nd" in tokens "a", "\\n", "bc", "\\nd"  ->  [1, 3, 3]
    """
    parts = tokenizer.decode(ids, skip_special_tokens=True).split(delimiter)
    parts = parts[: -1 if parts[-1] else -2]
    if not parts:
        return [len(ids) - 1]
    known = complete_characters(ids, tokenizer)
    lasts = accumulate(len(part) + len(delimiter) for part in parts)
    return [*(min(bisect_left(known, last), len(ids) - 1) for last in lasts), len(ids) - 1]


def complete_characters(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Returns how many characters of the decoded text are there with each token. One that lacks some of its bytes is
    not.

    Decoders join tokens to characters and strip a first blank. So a token is decoded behind a whole piece of the text
    before it; behind all of it, the time would be quadratic.
    """
    counts, first, read, before, known = [0], 0, 0, 0, 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[first:count], skip_special_tokens=True)
        length = len(text.rstrip("\ufffd"))
        counts.append(max(counts[-1], known + length - before))
        if before < length == len(text) or count - read == 8:  # bytes that are no character
            known, first, read = counts[-1], read, count
            before = len(tokenizer.decode(ids[first:read], skip_special_tokens=True).rstrip("\ufffd"))
    return counts[1:]


def assign_advantages(rollout: Sequence[Completion], config: GRPOConfig, num_generations: int) -> None:
    """Sets `advantage` of each completion: () from its reward, or (T,) from the rewards of its steps.

    A completion without a verdict is out of its group's mean and standard deviation, and has advantage 0.
    """
    options: dict[str, Any] = {
        "num_generations": num_generations, "scale": config.advantage_scale, "baseline": config.advantage_baseline,
        "ddof": config.advantage_ddof, "eps": config.advantage_eps,
    }  # fmt: skip
    if all(c.steps is None for c in rollout):
        rewards = torch.tensor([c.reward for c in rollout], dtype=torch.float32)
        if config.advantage_baseline == "length_weighted":
            options["lengths"] = torch.tensor([len(c.ids) for c in rollout])
        for c, advantage in zip(rollout, group_advantages(rewards, **options), strict=True):
            c.advantage = advantage
        return
    for c in rollout:
        if len(c.steps or ()) != len(c.step_ends or ()):
            raise RunError(
                f"a reward function returned {len(c.steps or ())} rewards for a completion of {len(c.step_ends or ())} "
                "steps; expected one reward for each step (see step_delimiter)"
            )
    rewards = _right_padded([torch.tensor(c.steps or (), dtype=torch.float32) for c in rollout], math.nan, "cpu")
    ends = _right_padded([torch.tensor(c.step_ends or (), dtype=torch.int64) for c in rollout], 0, "cpu")
    length = max(len(c.ids) for c in rollout)
    advantages = process_advantages(rewards, ends, length, **options)
    for c, advantage in zip(rollout, advantages, strict=True):
        c.advantage = advantage.new_zeros(len(c.ids)) if math.isnan(c.reward) else advantage[: len(c.ids)].clone()


def groups_of(rows: Sequence[Completion], num_generations: int) -> list[list[Completion]]:
    return [list(rows[i : i + num_generations]) for i in range(0, len(rows), num_generations)]


def without_gradient(group: Sequence[Completion]) -> bool:
    """Says whether all advantages of a group are 0: equal rewards, or none."""
    return all(not c.advantage.any() for c in group if c.advantage is not None)


def is_scored(c: Completion, arguments: TrainArguments) -> bool:
    """Says whether the tokens of a completion are in the loss."""
    return not c.dropped and (c.ended or not arguments.mask_truncated_completions)


def denominators(rows: Sequence[Completion], config: GRPOConfig, arguments: TrainArguments) -> tuple[float, float]:
    """Returns denominators (of the loss, of the entropy bonus) for all rows of an optimizer step, over all ranks and
    passes.

    Sums over passes and ranks divided by these are the loss of one large batch, whatever the split.
    """
    tokens = sum(len(c.ids) for c in rows if is_scored(c, arguments))
    tokens -= sum(int(c.rejected.sum()) for c in rows if c.rejected is not None)
    sequences = sum(not c.dropped for c in rows)
    if config.aggregation in ("token_mean", "num_items"):
        count = tokens
    else:
        count = sequences * (config.max_completion_length or 1)
    return float(max(count, 1)), float(max(tokens, 1))


def model_inputs(rows: Sequence[Completion], arguments: TrainArguments, pad_id: int, device: Any) -> dict[str, Any]:
    """Returns what log-probabilities need: prompts padded on the left, completions on the right; masks go by
    position."""
    prompts, prompt_mask = padded([c.prompt_ids for c in rows], pad_id, device, left=True)
    ids, present = padded([c.ids for c in rows], pad_id, device, left=False)
    scored = torch.tensor([is_scored(c, arguments) for c in rows], device=device)
    counted = present.bool() & scored[:, None]
    rejected = [c.rejected for c in rows if c.rejected is not None]
    if rejected:  # of all rows or none
        counted &= ~_right_padded(rejected, 0.0, device)
    inputs: dict[str, Any] = {
        "input_ids": torch.cat([prompts, ids], dim=1),
        "attention_mask": torch.cat([prompt_mask, present], dim=1),
        "completion_ids": ids,
        "completion_mask": counted,
    }
    if any(c.kept is not None for c in rows):
        kept: list[Any] = [c.kept if c.kept is not None else [()] * len(c.ids) for c in rows]
        inputs["sampling_mask"] = SamplingMask.from_lists(kept, length=ids.shape[1]).to(device)
    return inputs


def assign_weights(rollout: Sequence[Completion], arguments: TrainArguments, device: Any) -> None:
    """Sets `weight` of each completion of a whole rollout, of which every rank has all. What is rejected gets 0, or
    leaves the mask as `rejected`."""
    a = arguments
    old, sampled = (_joined([getattr(c, name) for c in rollout], device) for name in ("old_logps", "logps"))
    mask = _joined([torch.full((len(c.ids),), float(is_scored(c, a))) for c in rollout], device)
    weights = torch.ones(len(rollout), device=device)
    if a.vllm_importance_sampling_mode != "none":
        level, mode = a.vllm_importance_sampling_mode.split("_")
        weights = rollout_weights(
            old, sampled, mode=mode, level="token" if level == "token" else "sequence_sum", completion_mask=mask,
            cap=a.vllm_importance_sampling_clip_max, low=0.0, batch_normalize=a.rollout_is_batch_normalize,
        )  # fmt: skip
    if a.rollout_rs is not None:
        kept = rejection_mask(old, sampled, a.rollout_rs, completion_mask=mask)
        if not a.rollout_rs_mask:
            weights = weights.view(len(rollout), -1) * kept
        else:
            for c, left_out in zip(rollout, (mask.bool() & ~kept).cpu(), strict=True):
                c.rejected = left_out[: len(c.ids)].clone()
    for c, weight in zip(rollout, weights.cpu(), strict=True):
        c.weight = (weight[: len(c.ids)] if weight.dim() else weight).clone()


def loss_inputs(rows: Sequence[Completion], device: Any) -> dict[str, Any]:
    """Returns what the loss needs beside `model_inputs`."""
    inputs: dict[str, Any] = {}
    for name, source in (
        ("advantages", "advantage"), ("old_logps", "old_logps"), ("ref_logps", "ref_logps"), ("rollout_logps", "logps"),
        ("rollout_weights", "weight"),
    ):  # fmt: skip
        values = [getattr(c, source) for c in rows]
        if all(v is not None for v in values):
            inputs[name] = _joined(values, device)
    return inputs


def _joined(rows: Sequence[Tensor], device: Any) -> Tensor:
    """Returns (B,) of scalars, or (B, T) padded with 0."""
    return _right_padded(rows, 0.0, device) if rows[0].dim() else torch.stack(list(rows)).to(device)


def _right_padded(rows: Sequence[Tensor], value: float, device: Any) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value).to(device)
