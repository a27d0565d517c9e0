"""Completions: sampled with transformers, saved to and replayed from JSON lines. Token ids are never re-encoded."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .arguments import TrainArguments
from .checkpoint import write_text


class Sampling(NamedTuple):
    """How completions are drawn; temperature 0 is greedy decoding. Lengths in tokens, the end included."""

    max_completion_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or bool(self.min_p))


class Sampled(NamedTuple):
    """ids of a completion, its end included where it has one (ended). logps (T,) float32, nats, under the sampling
    engine; kept: per token the ids that truncated sampling kept, None where it kept all."""

    ids: list[int]
    ended: bool
    logps: Tensor | None
    kept: list[list[int]] | None


@dataclass
class Completion:
    """A row of a rollout. Rows of one prompt are adjacent and have one `group`.

    reward: weighted total, NaN without a verdict; extra: what functions gave to log_extra. steps: rewards of its steps,
    which end with the tokens step_ends.
    advantage: (), or (T,) from rewards of steps. dropped: left out of the loss and its denominators.
    old_logps, ref_logps: (T,) nats, under the policy before the rollout's updates and under the reference policy.
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


def eos_ids(lm: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: those of the model's generation_config and the tokenizer's own."""
    of_model = lm.generation_config.eos_token_id if lm.generation_config is not None else None
    found = set(of_model if isinstance(of_model, (list, tuple)) else [of_model]) | {tokenizer.eos_token_id}
    return sorted(found - {None})


@torch.no_grad()
def generate(
    lm: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    ends: Sequence[int],
    pad_id: int,
    synced: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> list[Sampled]:
    """One completion of each prompt, drawn from torch's global generator, in one padded batch.

    The model's generation_config has no say: its top_k or repetition penalty would sample from another distribution
    than the one that the loss scores.
    """
    ids, mask = left_padded(prompts, pad_id, lm.device)
    recorder = _Recorder(ids.shape[1], keeps_ids=sampling.truncates)
    greedy = sampling.temperature == 0
    config = GenerationConfig(
        max_new_tokens=sampling.max_completion_length, pad_token_id=pad_id, eos_token_id=list(ends), use_cache=True,
        do_sample=not greedy, temperature=None if greedy else 1.0, top_k=None if greedy else 0,
        top_p=None if greedy else 1.0, repetition_penalty=1.0,
    )  # fmt: skip
    found = lm.generate(
        ids, attention_mask=mask, generation_config=config, synced_gpus=synced,
        logits_processor=LogitsProcessorList([*_warpers(sampling), recorder]),
        stopping_criteria=StoppingCriteriaList([_Stop(stop)]),
    )  # fmt: skip
    return recorder.completions(found, set(ends))


def left_padded(rows: Sequence[Sequence[int]], pad_id: int, device: Any) -> tuple[Tensor, Tensor]:
    """(ids, mask), (B, longest) int64, padded on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _warpers(sampling: Sampling) -> list[LogitsProcessor]:
    if sampling.temperature == 0:
        return []
    warpers: list[LogitsProcessor] = []
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


class _Recorder(LogitsProcessor):
    """The last processor: notes the distribution that each token is drawn from."""

    def __init__(self, prompt_length: int, *, keeps_ids: bool):
        self.prompt_length, self.keeps_ids = prompt_length, keeps_ids
        self.logps: list[Tensor] = []  # (B,) of each token
        self.kept: list[list[list[int]]] = []  # [token][row]
        self.distribution: Tensor | None = None  # (B, V), of the token that is drawn next

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._note(input_ids[:, -1:])
        self.distribution = scores.float().log_softmax(-1)
        if self.keeps_ids:
            finite = scores > -math.inf
            ids = finite.nonzero()[:, 1].split(finite.sum(1).tolist())
            self.kept.append([row.tolist() for row in ids])
        return scores

    def _note(self, last: Tensor) -> None:
        if self.distribution is not None:
            self.logps.append(self.distribution.gather(1, last).squeeze(1))
            self.distribution = None

    def completions(self, sequences: Tensor, ends: set[int]) -> list[Sampled]:
        self._note(sequences[:, -1:])
        logps = torch.stack(self.logps, dim=1).cpu()
        found = []
        for i, row in enumerate(sequences[:, self.prompt_length :].tolist()):
            length = next((k + 1 for k, token in enumerate(row) if token in ends), len(row))
            kept = [self.kept[k][i] for k in range(length)] if self.keeps_ids else None
            found.append(Sampled(row[:length], row[length - 1] in ends, logps[i, :length].clone(), kept))
        return found


class _Stop(StoppingCriteria):
    """Ends all rows when the run is to stop."""

    def __init__(self, stop: Callable[[], bool]):
        self.stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.stop(), device=input_ids.device)


# --- saved rollouts ---------------------------------------------------------------------------------------------------


def to_plain(completion: Completion) -> dict[str, Any]:
    """A dictionary of plain values, float32 numbers exactly as they are."""
    values = {f.name: getattr(completion, f.name) for f in dataclasses.fields(completion)}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}


def from_plain(values: dict[str, Any]) -> Completion:
    tensors = ("logps", "advantage", "old_logps", "ref_logps")
    found = dict(values)
    for name in tensors:
        if found.get(name) is not None:
            found[name] = torch.tensor(found[name], dtype=torch.float32)
    return Completion(**found)


def save_rollout(folder: Path, index: int, rollout: Sequence[Completion]) -> None:
    """Write rollout-INDEX.jsonl, one completion a line, atomically. What JSON lacks, such as dates, becomes text."""
    write_text(rollout_path(folder, index), "".join(json.dumps(to_plain(c), default=str) + "\n" for c in rollout))


def rollout_path(folder: Path, index: int) -> Path:
    return folder / f"rollout-{index:06d}.jsonl"


def load_rollout(folder: Path, index: int) -> list[Completion]:
    """What `save_rollout` wrote; rewards included, advantages and log-probabilities of policies not."""
    path = rollout_path(folder, index)
    if not path.exists():
        raise ValueError(f"replay={folder} has no {path.name}; expected one for every rollout of the run")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            completion = from_plain(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        completion.advantage = completion.old_logps = completion.ref_logps = None
        completion.dropped = False
        found.append(completion)
    return found


def check_rollout(rollout: Sequence[Completion], arguments: TrainArguments, rows: int) -> None:
    """Raise ValueError where a replayed rollout is not `rows` completions in groups of num_generations."""
    size = arguments.num_generations
    if len(rollout) != rows:
        raise ValueError(
            f"replay={arguments.replay}: a rollout has {len(rollout)} completions; the options take {rows}"
        )
    sizes = {len(list(group)) for _, group in itertools.groupby(rollout, key=lambda c: c.group)}
    if sizes != {size}:
        raise ValueError(f"replay={arguments.replay}: groups of {sorted(sizes)} completions; num_generations={size}")
    if arguments.loss == "eager" and any(c.kept is not None for c in rollout):
        raise ValueError(f"replay={arguments.replay} holds truncated samples; loss='eager' is over all ids")
