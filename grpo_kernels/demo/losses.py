"""One GRPO loss, two ways: the library's, and the eager reference, from the same arguments."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ..advantages import group_advantages
from ..config import GRPOConfig
from ..logps import fused_logps
from ..loss import fused_grpo_loss
from ..reference import reference_grpo_loss, reference_logps


class StepLoss(NamedTuple):
    """loss (), differentiable; logps (B, T), detached; metrics as `fused_grpo_loss` names them."""

    loss: Tensor
    logps: Tensor
    metrics: dict[str, Tensor]


class LossWay(Protocol):
    """What the training loop needs of a loss."""

    def logps(self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """(B, T) log-probabilities, to be called under no_grad."""

    def loss(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, rewards: Tensor, num_generations: int,
        old_logps: Tensor | None, ref_logps: Tensor, config: GRPOConfig,
    ) -> StepLoss:  # fmt: skip
        """The loss of one batch of completions; groups are `num_generations` adjacent rows."""


class Fused:
    """The library: no (N, V) logits."""

    def logps(self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return fused_logps(hidden, weight, ids, completion_mask=mask)[0]

    def loss(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, rewards: Tensor, num_generations: int,
        old_logps: Tensor | None, ref_logps: Tensor, config: GRPOConfig,
    ) -> StepLoss:  # fmt: skip
        out = fused_grpo_loss(
            hidden,
            weight,
            ids,
            completion_mask=mask,
            old_logps=old_logps,
            ref_logps=ref_logps,
            rewards=rewards,
            num_generations=num_generations,
            config=config,
        )
        return StepLoss(out.loss, out.logps, out.metrics)


class Reference:
    """Plain PyTorch and autograd over all the logits."""

    def logps(self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return reference_logps(hidden @ weight.mT, ids)[0].masked_fill(~mask, 0.0)

    def loss(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, rewards: Tensor, num_generations: int,
        old_logps: Tensor | None, ref_logps: Tensor, config: GRPOConfig,
    ) -> StepLoss:  # fmt: skip
        advantages = group_advantages(
            rewards,
            num_generations=num_generations,
            scale=config.advantage_scale,
            baseline=config.advantage_baseline,
            ddof=config.advantage_ddof,
            eps=config.advantage_eps,
        )
        out = reference_grpo_loss(
            hidden,
            weight,
            ids,
            advantages,
            completion_mask=mask,
            old_logps=old_logps,
            ref_logps=ref_logps,
            config=config,
        )
        return StepLoss(out.loss, out.logps.detach(), out.metrics)


LOSSES: dict[str, LossWay] = {"fused": Fused(), "reference": Reference()}
