"""Completions, sampled by transformers (sampling.py) or vLLM (vllm.py). Token ids are never re-encoded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .arguments import TrainArguments
from .ranks import Ranks, Signals
from .rewards.answers import reply


class Sampled(NamedTuple):
    """ids of a completion, its end included where it has one (ended). logps (T,) float32, nats, under the sampling
    engine; kept: per token the ids that truncated sampling kept, None where it kept all."""

    ids: list[int]
    ended: bool
    logps: Tensor | None
    kept: list[list[int]] | None


@dataclass
class Completion:
    """A row of a rollout. Rows of one prompt are adjacent and have one `group` and `teacher`, an index.

    reward: weighted total, NaN without a verdict; extra: what functions gave to log_extra. steps: rewards of its steps,
    which end with the tokens step_ends.
    advantage: (), or (T,) from rewards of steps. dropped: left out of the loss and its denominators.
    old_logps, ref_logps: (T,) nats, under the policy before the rollout's updates and under the reference policy.
    weight: () or (T,), what corrects for the sampling engine; rejected: (T,) bool, tokens that leave the mask for it.
    """

    group: int
    prompt: Any
    prompt_ids: list[int]
    columns: dict[str, Any]
    ids: list[int]
    ended: bool
    logps: Tensor | None = None
    kept: list[list[int]] | None = None
    reward: float = math.nan
    rewards: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    steps: list[float] | None = None
    step_ends: list[int] | None = None
    advantage: Tensor | None = None
    dropped: bool = False
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    weight: Tensor | None = None
    rejected: Tensor | None = None
    teacher: int = 0


def padded(rows: Sequence[Sequence[int]], pad_id: int, device: Any, *, left: bool) -> tuple[Tensor, Tensor]:
    """Returns (ids, mask), (B, longest) int64, padded on one side. A tensor per row would take ten times as long."""
    longest = max(map(len, rows))

    def filled(row: Sequence[int], value: int) -> list[int]:
        missing = [value] * (longest - len(row))
        return [*missing, *row] if left else [*row, *missing]

    ids, mask = [filled(row, pad_id) for row in rows], [filled([1] * len(row), 0) for row in rows]
    return torch.tensor(ids, dtype=torch.int64).to(device), torch.tensor(mask, dtype=torch.int64).to(device)


@torch.no_grad()
def infer(policy: nn.Module, task: str, **inputs: Any) -> Any:
    """Runs a task of the policy without gradients. FSDP2 keeps the last parameters whole after it, which would hide
    later changes."""
    result = policy(task, **inputs)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return result


@dataclass
class Sampler:
    """Samples from the policy as it is, by vLLM where there is an engine; every rank has prompts of its own.

    ends: ids that end a completion; progress: is told the number of completions so far, and of all.
    """

    policy: nn.Module
    tokenizer: Any
    arguments: TrainArguments
    ends: list[int]
    ranks: Ranks
    signals: Signals
    progress: Callable[[int, int], None]
    vllm: Any = None

    def sample(
        self, prompts: Sequence[list[int]], *, stream: str, greedy: bool = False, step: int = 0
    ) -> list[Sampled]:
        """Returns one completion per prompt. stream: what the random numbers are made from, beside the rank; step: the
        optimizer step that the policy comes from."""
        set_seed(random.Random(f"{stream} {self.ranks.index}").getrandbits(32))
        wrapped: Any = getattr(self.policy, "module", self.policy)  # within DDP
        if self.vllm is not None:
            return self.vllm.sample(wrapped.lm, prompts, self.arguments, greedy=greedy, step=step, ends=self.ends)
        self.policy.eval()
        size, sampled = self.arguments.rows_per_rollout(1), []
        for first in range(0, len(prompts), size):
            self.progress(first, len(prompts))
            with self.signals.at_once():
                sampled += infer(
                    self.policy, "sample", prompts=prompts[first : first + size], arguments=self.arguments,
                    greedy=greedy, ends=self.ends, pad_id=self.tokenizer.pad_token_id,
                    synced=isinstance(self.policy, FSDPModule),
                )  # fmt: skip
            self.signals.check()
        wrapped.decoder.free_for_updates()
        return sampled

    def text(self, prompt: Any, ids: Sequence[int]) -> Any:
        """Returns a completion as reward functions get it."""
        return reply(prompt, self.tokenizer.decode(ids, skip_special_tokens=True))

    def for_evaluation(
        self, prompts: list[list[int]], *, greedy: bool, seed: int, step: int = 0
    ) -> list[tuple[list[int], str]]:
        """Returns ids and texts for all prompts: all ranks sample a share, and get all."""
        size = -(-len(prompts) // self.ranks.count) * self.ranks.count
        local = self.ranks.share([*prompts, *prompts[:1] * (size - len(prompts))])
        sampled = self.sample(local, stream=f"evaluation {seed}", greedy=greedy, step=step)
        return [(ids, self.text("", ids)) for ids in self.ranks.gather([s.ids for s in sampled])[: len(prompts)]]
