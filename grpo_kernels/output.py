"""GRPOLossOutput: what a loss call returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import metrics
from .config import GRPOConfig
from .contract import Sums
from .inputs import LossInputs


@dataclass(frozen=True, eq=False, repr=False)  # a dataclass, because DDP and FSDP search its fields for the loss
class GRPOLossOutput:
    """What a loss call returns; everything but `loss` is detached.

    loss: scalar, differentiable. logps, entropy: shape of completion_ids, float32 (float64 from float64), nats; 0 where
        masked or not scored. advantages: as used, in the shape that they were given in, (S,) from rewards. None of them
        shares the memory of an input; `advantages` is copied whenever it is asked for.

    These are tensors, computed at first access from the sums that the kernels return:

    metrics: name -> scalar; with an entropy bonus there is policy_loss, the loss without it. metric_sums: name ->
        (sum, count), to be added over ranks and micro-batches.
    sequences: name -> (S,): loss (the sequence's share: the shares add up to `loss`), tokens, and the mean of each
        metric over the sequence's tokens (0 for a sequence without tokens).
    groups: name -> (num_groups,), when groups are given: loss (the group's share), kl, clip_ratio, tokens, and from
        rewards reward_mean and reward_std. Groups of group_ids are in ascending order of their id.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor | None
    _config: GRPOConfig
    _inputs: LossInputs
    _numbers: Tensor  # of Sums
    _named: dict[str, Any] = field(init=False, default_factory=dict)  # functools.cached_property has a lock

    def __repr__(self) -> str:
        return f"GRPOLossOutput(loss={self.loss}, logps of {tuple(self.logps.shape)})"

    @property
    def _sums(self) -> Sums:
        return self._inputs.sums(self._numbers)

    @property
    def advantages(self) -> Tensor:
        advantages = self._inputs.tokens.advantages.detach().clone()
        return advantages if self._inputs.reward_statistics is None else advantages.view(-1)

    @property
    def metrics(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._once("metrics", self._name_metrics)
        return found

    def _name_metrics(self) -> dict[str, Tensor]:
        found = metrics.means(self._sums, **self._collected)
        if self._config.has_entropy_bonus:
            found["policy_loss"] = metrics.policy_loss(self._sums, self._config, self._inputs.tokens)
        if self._inputs.reward_statistics is not None:
            found["equal_reward_groups"] = self._equal_reward_groups.mean()
        for name, (total, count) in metrics.mask_sums_and_counts(self._sums).items():
            found[name] = total / count.clamp(min=1)
        return found

    @property
    def metric_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        found: dict[str, tuple[Tensor, Tensor]] = self._once("metric_sums", self._name_metric_sums)
        return found

    def _name_metric_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        found = metrics.sums_and_counts(self._sums.totals, **self._collected)
        found |= metrics.mask_sums_and_counts(self._sums)
        if self._inputs.reward_statistics is not None:
            equal = self._equal_reward_groups
            found["equal_reward_groups"] = equal.sum(), equal.new_full((), self._inputs.num_groups)
        return found

    @property
    def sequences(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._once("sequences", self._name_sequences)
        return found

    def _name_sequences(self) -> dict[str, Tensor]:
        return metrics.sequence_table(self._sums.sequences, **self._collected)

    @property
    def groups(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._once("groups", self._name_groups)
        return found

    def _name_groups(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self._inputs.num_groups:
            found = metrics.group_table(self._config, self._sums.groups, has_kl=self._collected["has_kl"])
        if self._inputs.reward_statistics is not None:
            mean, std = self._inputs.reward_statistics
            found["reward_mean"], found["reward_std"] = mean.clone(), std.clone()
        return found

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._named:
            with torch.inference_mode(False):  # what is kept outlives the mode of the first caller
                self._named[name] = make()
        return self._named[name]

    @property
    def _collected(self) -> dict[str, Any]:
        tokens = self._inputs.tokens
        return {
            "config": self._config,
            "has_kl": tokens.ref_logps is not None and self._config.kl_estimator != "none",
            "has_rollout": tokens.rollout_logps is not None,
            "has_weights": tokens.rollout_weights is not None,
        }

    @property
    def _equal_reward_groups(self) -> Tensor:
        """(num_groups,) 1 where all rewards are equal, so that the group has no gradient."""
        if self._inputs.reward_statistics is None:
            raise AttributeError("no rewards were given")
        _, std = self._inputs.reward_statistics
        return (std == 0).to(self._sums.totals.dtype)
