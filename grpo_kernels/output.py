"""GRPOLossOutput: what a loss call returns; its metrics from a backend's sums, without a host synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .objective.metrics import Batch, Measured


@dataclass(frozen=True, eq=False, repr=False)  # a dataclass, because DDP and FSDP search its fields for the loss
class GRPOLossOutput:
    """What a loss call returns; everything but `loss` is detached.

    loss: scalar, differentiable. logps, entropy: shape of completion_ids, float32 (float64 from float64), nats; 0 where
        masked or not scored. divergence: likewise, to the teacher's distribution; None without a teacher.
        advantages: as used, in the shape that they were given in, (S,) from rewards. None of them
        shares the memory of an input; `advantages` is copied whenever it is asked for.

    These are tensors, computed at first access:

    metrics: name -> scalar; with an entropy bonus there is policy_loss, the loss without it. metric_sums: name ->
        (sum, count), to be added over ranks and micro-batches. Both read old_logps, rollout_logps and rollout_weights
        of the call when they are first asked for.
    sequences: name -> (S,): loss (the sequence's share: the shares add up to `loss`), tokens, and the mean of each
        metric over the sequence's tokens (0 for a sequence without tokens).
    groups: name -> (num_groups,), when groups are given: loss (the group's share), kl, clip_ratio, tokens, and from
        rewards reward_mean and reward_std. Groups of group_ids are in ascending order of their id.
    """

    loss: Tensor
    logps: Tensor
    entropy: Tensor | None
    _batch: Batch
    _found: Tensor  # what metrics are computed from
    _others: Tensor
    divergence: Tensor | None = None
    _computed: dict[str, Any] = field(init=False, default_factory=dict)  # functools.cached_property has a lock

    def __repr__(self) -> str:
        return f"GRPOLossOutput(loss={self.loss}, logps of {tuple(self.logps.shape)})"

    @property
    def advantages(self) -> Tensor:
        advantages = self._batch.tokens.advantages.detach().clone()
        return advantages if self._batch.reward_statistics is None else advantages.view(-1)

    @property
    def metrics(self) -> dict[str, Tensor]:
        return self._once("metrics", lambda measured: measured.metrics(self.loss))

    @property
    def metric_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self._once("metric_sums", Measured.metric_sums)

    @property
    def sequences(self) -> dict[str, Tensor]:
        return self._once("sequences", Measured.of_sequences)

    @property
    def groups(self) -> dict[str, Tensor]:
        return self._once("groups", Measured.of_groups)

    def _once(self, name: str, compute: Callable[[Measured], Any]) -> Any:
        if name not in self._computed:
            with torch.no_grad(), torch.inference_mode(False):  # the results outlive the mode of the first caller
                if "measured" not in self._computed:
                    self._computed["measured"] = Measured(self._batch, self._found, self._others)
                self._computed[name] = compute(self._computed["measured"])
        return self._computed[name]
