"""Completions, sampled by transformers or vLLM (vllm.py). Token ids are never re-encoded.

transformers' continuous batching (5.23) is not used: it does not return the ids that truncated sampling kept, it runs
the model in a thread, where neither an interrupt nor FSDP2's hooks reach it, and unless they are set, the sizes of its
batches, and so the bits, depend on the memory that is free.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.generation import logits_process

from ..integrations.transformers import position_ids, takes, unwrap_causal_lm
from . import RunError
from .arguments import TrainArguments
from .ranks import Ranks, Signals
from .rewards.answers import reply

MAX_SHARE_LEFT = 0.75  # of a batch when rows that have ended leave it: each time the cache is copied


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
    arguments: TrainArguments,
    *,
    ends: Sequence[int],
    pad_id: int,
    greedy: bool = False,
    synced: bool = False,
) -> list[Sampled]:
    """One completion of each prompt, drawn from torch's global generator, in one padded batch.

    A prompt that stands several times in a row runs through the model once, and completions that have ended leave the
    batch. synced: every rank calls the model as often as the others, as FSDP2's collectives need.
    """
    decode, draw = _Decoder(lm), _Draw(arguments, greedy)
    distinct = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
    rows = torch.arange(len(distinct)).repeat_interleave(torch.tensor([count for _, count in distinct]))
    logits = decode.start(*left_padded([prompt for prompt, _ in distinct], pad_id, lm.device))
    logits = decode.select(logits, rows.to(lm.device))
    sampled: list[_Tokens] = [_Tokens() for _ in prompts]
    batch = list(range(len(prompts)))  # the completion of each row
    for length in range(1, arguments.max_completion_length + 1):
        ids, logps, kept = draw(logits)
        for k, (i, id, logp) in enumerate(zip(batch, ids.tolist(), logps.tolist(), strict=True)):
            sampled[i].add(id, logp, kept[k] if kept else [], ends)
        going = [k for k, i in enumerate(batch) if not sampled[i].ended]
        if length == arguments.max_completion_length or not _on_any_rank(bool(going), synced, lm.device):
            break
        if len(going) <= MAX_SHARE_LEFT * len(batch):
            going = going or [0]  # for the other ranks' sake
            batch = [batch[k] for k in going]
            ids = decode.select(ids, torch.tensor(going, device=lm.device))
        logits = decode.next(ids)
    return [
        Sampled(s.ids, s.ended, torch.tensor(s.logps, dtype=torch.float32), s.kept if draw.keeps_ids else None)
        for s in sampled
    ]


@dataclass
class _Tokens:
    """A completion on its way; tokens after its end are not added."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    ended: bool = False

    def add(self, id: int, logp: float, kept: list[int], ends: Sequence[int]) -> None:
        if not self.ended:
            self.ids.append(id)
            self.logps.append(logp)
            self.kept.append(kept)
            self.ended = id in ends


def _on_any_rank(flag: bool, synced: bool, device: Any) -> bool:
    if not synced:
        return flag
    found = torch.tensor(flag, device=device, dtype=torch.int32)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return bool(found)


class _Decoder:
    """Calls a model token by token, for a batch whose rows can be selected: transformers' `generate` keeps them all.

    Positions are those that the loss scores with.
    """

    def __init__(self, lm: Any) -> None:
        self.lm, self.parts = lm, unwrap_causal_lm(lm)
        self.cache: Any = None
        self.options: dict[str, Any] = {"logits_to_keep": 1} if takes(self.parts.model, "logits_to_keep") else {}

    def start(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits (B, V) float32 of the first tokens after prompts (B, P), padded on the left."""
        self.mask = mask
        return self._call(ids)

    def next(self, ids: Tensor) -> Tensor:
        """Logits of the tokens after `ids` (B,)."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        return self._call(ids[:, None])

    def select(self, values: Tensor, rows: Tensor) -> Tensor:
        """values[rows]; these rows, some of them several times, are the batch from now on."""
        self.mask = self.mask[rows]
        self.cache.reorder_cache(rows)
        return values[rows]

    def _call(self, ids: Tensor) -> Tensor:
        positions = position_ids(self.parts, self.mask)
        if positions is not None:
            self.options["position_ids"] = positions[:, -ids.shape[1] :]
        found = self.lm(
            input_ids=ids, attention_mask=self.mask, past_key_values=self.cache, use_cache=True, **self.options
        )
        self.cache = found.past_key_values
        return found.logits[:, -1].float()


class _Draw:
    """Draws a token of each row, and notes where it comes from.

    The model's generation_config has no say: its top_k or repetition penalty would sample from another distribution
    than the one that the loss scores.
    """

    def __init__(self, arguments: TrainArguments, greedy: bool):
        a, self.greedy = arguments, greedy or arguments.temperature == 0
        options: Any = (
            (logits_process.TemperatureLogitsWarper, float(a.temperature), 1.0),
            (logits_process.TopKLogitsWarper, a.top_k, 0),
            (logits_process.TopPLogitsWarper, a.top_p, 1.0),
            (logits_process.MinPLogitsWarper, a.min_p or 0.0, 0.0),
        )
        self.warpers = [] if self.greedy else [warper(value) for warper, value, off in options if value != off]
        self.keeps_ids = a.truncates and not self.greedy

    def __call__(self, scores: Any) -> tuple[Tensor, Tensor, list[list[int]] | None]:
        """(ids (B,), their log-probabilities (B,) in nats, the ids that truncated sampling kept) of logits (B, V)."""
        for warper in self.warpers:
            scores = warper(None, scores)
        logps = scores.log_softmax(-1)
        # Of a row all are NaN or none. multinomial would raise an error of its own, and on a GPU end all work there.
        if bool(logps[:, 0].isnan().any()):
            raise RunError("the policy's logits are NaN: its weights or activations have overflowed (learning_rate?)")
        drawn = logps.argmax(-1, keepdim=True) if self.greedy else _drawn(logps.exp())
        kept = None
        if self.keeps_ids:
            finite = scores > -math.inf
            kept = [row.tolist() for row in finite.nonzero()[:, 1].split(finite.sum(1).tolist())]
        return drawn.squeeze(1), logps.gather(1, drawn).squeeze(1), kept


def _drawn(probabilities: Tensor) -> Tensor:
    """An id (B, 1) from each row of probabilities (B, V)."""
    if probabilities.device.type != "cpu":
        return torch.multinomial(probabilities, 1)
    # multinomial takes V random numbers for a row, on a CPU for as long as a small model takes for its logits.
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    place = torch.rand(len(sums), 1, dtype=torch.float64) * sums[:, -1:]
    return torch.searchsorted(sums, place, right=True).clamp_(max=sums.shape[1] - 1)


def left_padded(rows: Sequence[Sequence[int]], pad_id: int, device: Any) -> tuple[Tensor, Tensor]:
    """(ids, mask), (B, longest) int64, padded on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


@torch.no_grad()
def infer(policy: nn.Module, task: str, **inputs: Any) -> Any:
    """A task of the policy without gradients. FSDP2 keeps the last parameters whole after it, which would hide later
    changes."""
    found = policy(task, **inputs)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return found


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
        """One completion per prompt. stream: what the random numbers are made from, beside the rank; step: the
        optimizer step that the policy comes from."""
        set_seed(random.Random(f"{stream} {self.ranks.index}").getrandbits(32))
        if self.vllm is not None:
            lm = getattr(self.policy, "module", self.policy).lm  # within DDP
            return self.vllm.sample(lm, prompts, greedy=greedy, step=step, ends=self.ends)
        self.policy.eval()
        size, found = self.arguments.per_device_generation_batch_size or self.arguments.rows_per_rollout(1), []
        for first in range(0, len(prompts), size):
            self.progress(first, len(prompts))
            with self.signals.at_once():
                found += infer(
                    self.policy, "sample", prompts=prompts[first : first + size], arguments=self.arguments,
                    greedy=greedy, ends=self.ends, pad_id=self.tokenizer.pad_token_id,
                    synced=isinstance(self.policy, FSDPModule),
                )  # fmt: skip
            self.signals.check()
        return found

    def text(self, prompt: Any, ids: Sequence[int]) -> Any:
        """A completion as reward functions get it."""
        return reply(prompt, self.tokenizer.decode(ids, skip_special_tokens=True))

    def for_evaluation(
        self, prompts: list[list[int]], *, greedy: bool, seed: int, step: int = 0
    ) -> list[tuple[list[int], str]]:
        """Ids and texts for all prompts: all ranks sample a share, and get all."""
        size = -(-len(prompts) // self.ranks.count) * self.ranks.count
        own = self.ranks.share([*prompts, *prompts[:1] * (size - len(prompts))])
        found = self.sample(own, stream=f"evaluation {seed}", greedy=greedy, step=step)
        return [(ids, self.text("", ids)) for ids in self.ranks.gather([s.ids for s in found])[: len(prompts)]]


# --- saved rollouts ---------------------------------------------------------------------------------------------------


def to_lines(rollout: Sequence[Completion]) -> str:
    """A completion a line; float32 numbers exactly as they are. What JSON lacks, such as dates, becomes text."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else str(value)

    return "".join(json.dumps(vars(c), default=plain) + "\n" for c in rollout)


def from_lines(path: Path) -> list[Completion]:
    """The completions that `to_lines` wrote into a file."""
    found: list[Completion] = []
    try:
        for line in path.read_text().splitlines():
            values = dict(json.loads(line))
            for name in ("logps", "advantage", "old_logps", "ref_logps"):
                if values.get(name) is not None:
                    values[name] = torch.tensor(values[name], dtype=torch.float32)
            found.append(Completion(**values))
    except (ValueError, TypeError) as error:
        raise RunError(f"{path}, line {len(found) + 1}: {error}") from None
    return found


def rollout_path(folder: Path, index: int) -> Path:
    return folder / f"rollout-{index:06d}.jsonl"


def load_rollout(folder: Path, index: int) -> list[Completion]:
    """What --save-rollouts wrote; rewards included, advantages and log-probabilities of policies not."""
    unset: dict[str, Any] = {"advantage": None, "old_logps": None, "ref_logps": None, "dropped": False}
    return [replace(c, **unset) for c in from_lines(rollout_path(folder, index))]


def load_replay(a: TrainArguments, index: int, num_processes: int, vocab_size: int) -> list[Completion]:
    """A rollout of --replay. Raises RunError where it is not what options and model take."""
    path = rollout_path(Path(a.replay or ""), index)
    if not path.is_file():
        raise RunError(f"replay={a.replay}: {path.name} is missing; {a.max_steps} steps take {a.num_rollouts} rollouts")
    rollout, rows = load_rollout(path.parent, index), a.rows_per_rollout(num_processes)
    sizes = sorted({len(list(group)) for _, group in groupby(rollout, key=lambda c: c.group)})

    def are_ids(ids: Any) -> bool:
        return bool(ids) and isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)

    for right, sentence in (
        (len(rollout) == rows, f"{len(rollout)} completions; the options take {rows}"),
        (sizes == [a.num_generations], f"groups of {sizes} completions; num_generations={a.num_generations}"),
        (all(are_ids(c.prompt_ids) and are_ids(c.ids) for c in rollout),
         f"a prompt or a completion that is no list of token ids, 0 to {vocab_size - 1}, at least one"),
        (all(isinstance(c.reward, (int, float)) for c in rollout), "a reward that is no number"),
        (all(x is None or len(x) == len(c.ids) for c in rollout for x in (c.logps, c.kept)),
         "logps or kept ids of another number of tokens than its completion"),
        (not a.corrects or all(c.logps is not None for c in rollout),
         "completions without logps; expected those of the policy that sampled, or "
         "--no-vllm-importance-sampling-correction"),
        (a.loss != "eager" or all(c.kept is None for c in rollout), "truncated samples; loss='eager' is over all ids"),
    ):  # fmt: skip
        if not right:
            raise RunError(f"replay={a.replay}: {path.name} has {sentence}")
    return rollout
