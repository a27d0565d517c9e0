"""Sampling by transformers: one padded batch, token by token, from the distribution that the loss scores.

transformers' continuous batching (5.23) is not used: it does not return the ids that truncated sampling kept, it runs
the model in a thread, where neither an interrupt nor FSDP2's hooks reach it, and unless they are set, the sizes of its
batches, and so the bits, depend on the memory that is free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process

from ..integrations.transformers import cache_argument, cache_of, position_ids, takes, unwrap_causal_lm
from . import RunError
from .arguments import TrainArguments
from .rollout import Sampled, left_padded

MAX_SHARE_LEFT = 0.75  # of a batch when rows that have ended leave it: each time the cache is copied


def eos_ids(lm: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: those of the model's generation_config and the tokenizer's own.

    Raises ValueError for one that the model has no embedding for.
    """
    config, found = lm.generation_config, set[int]()
    size, of_model = lm.get_input_embeddings().weight.shape[0], config and config.eos_token_id
    for name, ids in (("generation_config of the model", of_model), ("tokenizer", tokenizer.eos_token_id)):
        for id in ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]:
            if not (isinstance(id, int) and 0 <= id < size):
                raise ValueError(
                    f"eos_token_id of the {name} is {id!r}; expected an id from 0 to {size - 1}, the model's embeddings"
                )
            found.add(id)
    return sorted(found)


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
    cached: bool = True,
) -> list[Sampled]:
    """One completion of each prompt, drawn from torch's global generator, in one padded batch.

    A prompt that stands several times in a row runs through the model once, and completions that have ended leave the
    batch. synced: every rank calls the model as often as the others, as FSDP2's collectives need. cached: whether to
    use the model's cache, where it keeps one.
    """
    decode, draw = _Decoder(lm, cached), _Draw(arguments, greedy)
    distinct = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
    rows = torch.arange(len(distinct)).repeat_interleave(torch.tensor([count for _, count in distinct]))
    logits = decode.start(*left_padded([prompt for prompt, _ in distinct], pad_id, lm.device))
    logits = decode.select(logits, rows.to(lm.device))
    sampled: list[_Tokens] = [_Tokens() for _ in prompts]
    batch = list(range(len(prompts)))  # the completion of each row
    for length in range(1, arguments.max_completion_length + 1):
        ids, logps, kept = draw(logits)
        drawn = torch.stack([ids.double(), logps.double()], dim=1).tolist()  # both are exact; a GPU is waited for once
        if any(math.isnan(logp) for _, logp in drawn):
            raise RunError("the policy's logits are NaN: its weights or activations have overflowed (learning_rate?)")
        for k, (i, (id, logp)) in enumerate(zip(batch, drawn, strict=True)):
            sampled[i].add(int(id), logp, kept[k] if kept else [], ends)
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

    Positions are those that the loss scores with. A model that is used without a cache, or keeps none, gets the whole
    sequences each time.
    """

    def __init__(self, lm: Any, cached: bool) -> None:
        self.lm, self.parts, self.cached = lm, unwrap_causal_lm(lm), cached
        self.cache: Any = None
        self.options: dict[str, Any] = {"logits_to_keep": 1} if takes(self.parts.model, "logits_to_keep") else {}

    def start(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits (B, V) float32 of the first tokens after prompts (B, P), padded on the left."""
        self.ids, self.mask = ids, mask
        return self._call()

    def next(self, ids: Tensor) -> Tensor:
        """Logits of the tokens after `ids` (B,)."""
        self.ids = torch.cat([self.ids, ids[:, None]], dim=1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        return self._call()

    def select(self, values: Tensor, rows: Tensor) -> Tensor:
        """values[rows]; these rows, some of them several times, are the batch from now on."""
        self.ids, self.mask = self.ids[rows], self.mask[rows]
        if self.cache is not None:
            self.cache.reorder_cache(rows)
        return values[rows]

    def _call(self) -> Tensor:
        ids, mask = self.ids, self.mask
        if self.cache is not None:
            ids = ids[:, -1:]
            self.options[cache_argument(self.parts.model)] = self.cache
            if not any(hasattr(layer, "keys") for layer in self.cache.layers):
                mask = mask[:, -1:]  # a model with states alone, such as Mamba, takes a mask of the tokens that it gets
        positions = position_ids(self.parts, self.mask)
        if positions is not None:
            self.options["position_ids"] = positions[:, -ids.shape[1] :]
        found = self.lm(input_ids=ids, attention_mask=mask, use_cache=self.cached, **self.options)
        self.cache = cache_of(found) if self.cached else None
        return found.logits[:, -1].float()


# --- whether a model can be sampled so --------------------------------------------------------------------------------

PROMPT_LENGTHS, STEPS = (1, 6, 3), 2  # of the check: few positions, since a model may have few
MARGIN = 8  # of 70 sound models none is off by 2.5 times what one rounding of its embeddings does; a lost state is by 9


class Decoding(NamedTuple):
    """How far the decoder is from the model. error: of log-probabilities, as a multiple of what rounding may do; above
    1 the decoder is wrong. nats: the largest mean error of a token."""

    error: float
    nats: float


@torch.no_grad()
def decoding_error(lm: Any, *, cached: bool) -> Decoding:
    """Compare decoding, of a padded batch whose rows are selected, with a forward of whole rows without padding before
    them. Infinite where the model keeps no cache, or one that cannot be used so.

    An error counts by the probabilities of the model, relative to the spread of a token's log-probabilities. What
    rounding may do is measured: a router that sends tokens to other experts makes much of it, in 16 bits. The error has
    to be found in half of the rows.
    """
    random, device = torch.Generator().manual_seed(0), lm.device
    size = lm.get_input_embeddings().weight.shape[0]
    prompts = [torch.randint(size, (length,), generator=random).tolist() for length in PROMPT_LENGTHS]
    twice = torch.arange(len(prompts)).repeat_interleave(2)
    more = torch.randint(size, (len(twice), STEPS), generator=random)
    whole = [prompts[i] + tokens for i, tokens in zip(twice.tolist(), more.tolist(), strict=True)]
    own, first = _own_logps(lm, whole), torch.tensor(PROMPT_LENGTHS)[twice] - 1
    with _rounded(lm.get_input_embeddings(), lm, random):
        rounded = _own_logps(lm, whole)
    decode, rows, errors = _Decoder(lm, cached), torch.arange(len(twice)), []
    try:
        logits = decode.select(decode.start(*left_padded(prompts, 0, device)), twice.to(device))
        for step in range(STEPS + 1):
            at = rows.to(device), (first[rows] + step).to(device)
            found = _errors(_logps(logits), own[at])
            errors.append(torch.stack([*found, _errors(rounded[at], own[at])[0]]))
            if step == 1:  # a part of the rows, in another order
                kept = torch.tensor([4, 1, 2])
                rows = rows[kept]
                decode.select(logits, kept.to(device))
            if step < STEPS:
                logits = decode.next(more[rows, step].to(device))
    except torch.OutOfMemoryError:  # which says nothing about the cache
        raise
    except Exception:  # of many types: no cache among the results or arguments, or one whose rows cannot be selected
        if not cached:
            raise
        return Decoding(math.inf, math.inf)
    if cached and decode.cache is None:
        return Decoding(math.inf, math.inf)
    error, nats, rounding = torch.stack(errors).amax(0).tolist()
    return Decoding(error / (MARGIN * rounding or 1.0), nats)


def _errors(logps: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Median over rows of the mean error of log-probabilities (B, V): relative to their spread, and in nats."""
    nats = (expected.exp() * (logps - expected).abs()).sum(-1)
    return (nats / expected.std(-1)).median(), nats.median()


def _own_logps(lm: Any, rows: Sequence[list[int]]) -> Tensor:
    """Log-probabilities (B, longest, V) of rows that are padded on the right, which changes no token before it."""
    ids, mask = (tensor.flip(1) for tensor in left_padded([row[::-1] for row in rows], 0, lm.device))
    positions = position_ids(unwrap_causal_lm(lm), mask)
    options = {} if positions is None else {"position_ids": positions}
    return _logps(lm(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits)


def _logps(logits: Tensor) -> Tensor:
    """float32; bounded, so that ids which a model rules out do not count."""
    return logits.float().log_softmax(-1).clamp(min=-30)


@contextmanager
def _rounded(embeddings: torch.nn.Module, lm: Any, random: torch.Generator) -> Iterator[None]:
    """Within it the embeddings of tokens are changed by a unit of rounding, up or down; of float32 by one of TF32."""
    kind = lm.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else lm.dtype
    unit = max(torch.finfo(dtype).eps, 2**-10)

    def change(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        sign = 2 * torch.randint(2, output.shape, generator=random) - 1
        return output * (1 + unit * sign.to(output.device)).to(output.dtype)

    hook = embeddings.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


# --- drawing ----------------------------------------------------------------------------------------------------------


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
        )
        self.warpers = [] if self.greedy else [warper(value) for warper, value, off in options if value != off]
        self.keeps_ids = a.truncates and not self.greedy

    def __call__(self, scores: Any) -> tuple[Tensor, Tensor, list[list[int]] | None]:
        """(ids (B,), their log-probabilities (B,) in nats, the ids that truncated sampling kept) of logits (B, V)."""
        for warper in self.warpers:
            scores = warper(None, scores)
        logps = scores.log_softmax(-1)
        drawn = logps.argmax(-1, keepdim=True) if self.greedy else _drawn(logps.exp())
        kept = None
        if self.keeps_ids:
            finite = scores > -math.inf
            kept = [row.tolist() for row in finite.nonzero()[:, 1].split(finite.sum(1).tolist())]
        return drawn.squeeze(1), logps.gather(1, drawn).squeeze(1), kept


def _drawn(probabilities: Tensor) -> Tensor:
    """An id (B, 1) from each row of probabilities (B, V)."""
    if probabilities.device.type != "cpu":
        # Of a row all are NaN or none, which the log-probability says; here it would end all work on the GPU.
        return torch.multinomial(probabilities.nan_to_num(1.0), 1)
    # multinomial takes V random numbers for a row, on a CPU for as long as a small model takes for its logits.
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    place = torch.rand(len(sums), 1, dtype=torch.float64) * sums[:, -1:]
    return torch.searchsorted(sums, place, right=True).clamp_(max=sums.shape[1] - 1)
