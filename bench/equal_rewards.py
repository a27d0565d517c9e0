"""Groups whose rewards are all equal: with beta = 0 their tokens have no gradient, and their products can be left out.

Three runs of one batch: rewards that differ in every group; equal rewards in every other group, with every token scored
for log-probabilities and metrics; the same without scoring those that have no gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from inputs import EPSILON, Inputs, make_inputs
from peers import Result, gradients
from reference import errors, is_wrong, off_policy, reference
from rounds import interleave, summary
from shapes import Shape
from torch import Tensor

from grpo_kernels import GRPOConfig, fused_grpo_loss

LENGTH = 64  # tokens per sequence
GENERATIONS = 4  # sequences per group


def measure(shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int) -> dict[str, Any]:
    """Times of the three runs, and the ratios of the last two to the first."""
    inputs = off_policy(
        make_inputs(shape, dtype, device, length=min(LENGTH, shape.tokens // (2 * GENERATIONS)), beta=0.0)
    )
    rewards = torch.rand(inputs.ids.shape[0], generator=torch.Generator().manual_seed(2)).to(device)
    equal = rewards.clone()
    equal.view(-1, GENERATIONS)[::2] = 0.5
    runs = {
        "dense": (rewards, True),
        "half_scored": (equal, True),
        "half_unscored": (equal, False),
    }
    steps = {name: _step(inputs, given, score_inactive) for name, (given, score_inactive) in runs.items()}
    checked = {}
    for given, names in ((rewards, ["dense"]), (equal, ["half_scored", "half_unscored"])):
        right = reference(dataclasses.replace(inputs, advantages=_advantages(given)))
        for name in names:
            loss, dhidden, dweight = steps[name]()
            assert loss is not None
            checked[name] = errors(right, loss, dhidden, dweight)
    report: dict[str, Any] = {"tokens_per_sequence": inputs.ids.shape[1], "generations": GENERATIONS, "errors": checked}
    wrong = [name for name, found in checked.items() if is_wrong(found, dtype)]
    if wrong:
        return report | {"error": f"wrong result: {', '.join(wrong)}"}
    times = {name: summary(found) for name, found in interleave(steps, rounds, device).items()}
    ratios = {name: times[name]["median"] / times["dense"]["median"] for name in times if name != "dense"}
    return report | {"seconds": times, "ratio_to_dense": ratios}


def _step(inputs: Inputs, rewards: Tensor, score_inactive: bool) -> Callable[[], Result]:
    config = GRPOConfig(
        aggregation="seq_mean", epsilon_low=EPSILON, epsilon_high=EPSILON, score_inactive=score_inactive
    )

    def step() -> Result:
        output = fused_grpo_loss(
            inputs.hidden,
            inputs.weight,
            inputs.ids,
            completion_mask=inputs.mask,
            old_logps=inputs.old_logps,
            rewards=rewards,
            num_generations=GENERATIONS,
            config=config,
        )
        return gradients(output.loss, inputs)

    return step


def _advantages(rewards: Tensor) -> Tensor:
    """(reward - mean) / (standard deviation + 1e-4) of its group."""
    groups = rewards.view(-1, GENERATIONS).double()
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1).float()
