"""Sampling by transformers: one padded batch, token by token, from the distribution that the loss scores."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor

from ..head.truncation import Truncation, truncate, truncate_within
from . import RunError
from .arguments import TrainArguments
from .decoding import Decoder
from .rollout import Sampled, padded

WIDTH = 4096  # likeliest ids among which the end of top_p is looked for before anything is read
MAX_SHARE_LEFT = 0.75  # of a batch when rows that have ended leave it: each time the cache is copied


def eos_ids(lm: Any, tokenizer: Any) -> list[int]:
    """Returns every id that ends a completion: those of the model's generation_config and the tokenizer's own.

    Raises ValueError for one that the model has no embedding for.
    """
    config, ends = lm.generation_config, set[int]()
    size, model_ids = lm.get_input_embeddings().weight.shape[0], config and config.eos_token_id
    for name, ids in (("generation_config of the model", model_ids), ("tokenizer", tokenizer.eos_token_id)):
        for id in ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]:
            if not (isinstance(id, int) and 0 <= id < size):
                raise ValueError(f"eos_token_id of the {name} is {id!r}; expected an id from 0 to {size - 1}")
            ends.add(id)
    return sorted(ends)


@torch.no_grad()
def generate(
    lm: Any, prompts: Sequence[Sequence[int]], arguments: TrainArguments, *, ends: Sequence[int], pad_id: int,
    greedy: bool = False, synced: bool = False, decoder: Decoder | None = None,
) -> list[Sampled]:  # fmt: skip
    """Returns one completion of each prompt, drawn from torch's global generator, in one padded batch.

    A prompt that stands several times in a row runs through the model once, and completions that have ended leave the
    batch. synced: every rank calls the model as often as the others, as FSDP2's collectives need. decoder: of
    `lm`; None: one with the model's cache, where it keeps one. Raises RunError where logits are NaN.
    """
    decode = decoder or Decoder(lm)
    distinct = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
    rows = torch.arange(len(distinct)).repeat_interleave(torch.tensor([count for _, count in distinct]))
    logits = decode.start(*padded([prompt for prompt, _ in distinct], pad_id, lm.device, left=True))
    logits = decode.select(logits, rows.to(lm.device))
    sampled: list[list[tuple[int, float]]] = [[] for _ in prompts]  # ids, log-probabilities
    allowed_ids: list[Tensor] = []
    owners: list[tuple[int | None, int]] = []  # of kept ids in turn: their completion, and how many a token has

    def has_ended(completion: int) -> bool:
        return bool(sampled[completion]) and sampled[completion][-1][0] in ends

    batch = list(range(len(prompts)))  # the completion of each row
    for length in range(1, arguments.max_completion_length + 1):
        ids, keep, drawn = _drawn_and_read(logits, arguments, greedy)
        if any(math.isnan(logp) for _, logp, _ in drawn):
            raise RunError("the policy's logits are NaN: its weights or activations have overflowed (learning_rate?)")
        if keep is not None:
            total = int(sum(count for _, _, count in drawn))
            allowed_ids.append(torch.nonzero_static(keep, size=total)[:, 1].int())
        for i, (id, logp, count) in zip(batch, drawn, strict=True):
            owners.append((None if has_ended(i) else i, int(count)))
            if not has_ended(i):
                sampled[i].append((int(id), logp))
        going = [k for k, i in enumerate(batch) if not has_ended(i)]
        if length == arguments.max_completion_length or not _on_any_rank(bool(going), synced, lm.device):
            break
        if len(going) <= MAX_SHARE_LEFT * len(batch):
            going = going or [0]  # for the other ranks' sake
            batch = [batch[k] for k in going]
            ids = decode.select(ids, torch.tensor(going, device=lm.device))
        logits = decode.next(ids)
    kept: dict[int | None, list[list[int]]] = defaultdict(list)
    left = iter(torch.cat(allowed_ids).tolist() if allowed_ids else ())
    for owner, count in owners:
        kept[owner].append(list(islice(left, count)))
    return [
        Sampled([id for id, _ in tokens], has_ended(i),
                torch.tensor([logp for _, logp in tokens], dtype=torch.float32),
                kept[i] if allowed_ids else None)
        for i, tokens in enumerate(sampled)
    ]  # fmt: skip


def _on_any_rank(flag: bool, synced: bool, device: Any) -> bool:
    if not synced:
        return flag
    flags = torch.tensor(flag, device=device, dtype=torch.int32)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return bool(flags)


def _drawn_and_read(
    logits: Tensor, arguments: TrainArguments, greedy: bool
) -> tuple[Tensor, Tensor | None, list[list[float]]]:
    """Returns ids (B,) and kept ids (B, V) of `draw`, and on the host each row's id, log-probability and number of kept
    ids. The host waits once, and more often for a distribution so flat that top_p does not end within WIDTH ids."""
    noise = _noise(logits)
    ids, logps, keep, is_known = draw(logits, arguments, greedy, noise, reads=False)
    while True:
        counts = torch.zeros_like(logps) if keep is None else keep.sum(1)
        # All are exact. The number of kept ids is known then, and they are read at the end.
        *drawn, known = torch.stack([x.double() for x in (ids, logps, counts, is_known)]).tolist()
        if all(known):
            return ids, keep, [list(row) for row in zip(*drawn, strict=True)]
        ids, logps, keep, is_known = draw(logits, arguments, greedy, noise, reads=True)


def draw(
    scores: Any, arguments: TrainArguments, greedy: bool, noise: Tensor, *, reads: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Returns a token of each row of logits (B, V): ids (B,), their log-probabilities (B,) in nats, which ids
    truncated sampling kept, (B, V) bool, and whether that is known, (B,) bool: of all rows if the host may read.

    The model's generation_config has no say: its top_k or repetition penalty would sample from another distribution
    than the one that the loss scores.
    """
    if not greedy and arguments.temperature != 1.0:
        scores = scores / float(arguments.temperature)
    keep, is_known = None, torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    if arguments.truncates and not greedy:
        rule = Truncation(arguments.top_k, arguments.top_p, arguments.min_p)
        if reads:
            keep = truncate(scores, rule, WIDTH)
        else:
            keep, is_known = truncate_within(scores, rule, WIDTH)
        scores = scores.masked_fill(~keep, -math.inf)
    logps = scores.log_softmax(-1)
    drawn = logps.argmax(-1, keepdim=True) if greedy else _drawn(logps.exp(), noise)
    return drawn.squeeze(1), logps.gather(1, drawn).squeeze(1), keep, is_known


def _noise(scores: Tensor) -> Tensor:
    """Returns the random numbers of a draw from rows (B, V): (B, 1) on a CPU, where V for a row take as long as a small
    model takes for its logits, and (B, V) else."""
    if scores.device.type == "cpu":
        return torch.rand(len(scores), 1, dtype=torch.float64)
    return torch.empty_like(scores).exponential_()


def _drawn(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Returns an id (B, 1) from each row of probabilities (B, V)."""
    if probabilities.device.type != "cpu":  # as torch.multinomial, whose checks of the probabilities are ten launches
        return (probabilities / noise).argmax(-1, keepdim=True)  # of NaN the first: the log-probability says it
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(sums, noise * sums[:, -1:], right=True).clamp_(max=sums.shape[1] - 1)
