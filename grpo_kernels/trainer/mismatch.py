"""Whether a sampler samples from the policy: asked at set-up, before a run has cost anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .batch import model_inputs
from .decoding import perturbed
from .rollout import Completion, Sampler, infer

PROMPTS, SAMPLES, TOKENS = 4, 2, 32  # of the check: the shortest prompt, the longest, and some between
FIRST = 4  # tokens of the shortest row, which is scored with the longest one and without
BEFORE_ALL = -1  # the step of the check: the first rollout loads weights again, as that of a run that resumes does
# Times the difference that one unit of rounding makes in the output of each linear layer: of an engine, whose kernels
# are others, and of the policy itself in a batch of another shape.
MARGIN, MARGIN_OF_BATCH = 8, 4
LEAST = 1e-3  # nats per token, a mean difference that harms nothing: the KL is near its square


class Differences(NamedTuple):
    """Mean differences of a token's log-probabilities from the policy's, in nats. engine: of the sampler; rounding: of
    the policy with all layers rounded otherwise; batch: of the policy beside a row of the largest length."""

    engine: float
    rounding: float
    batch: float


def check_sampler(sampler: Sampler, prompts: Sequence[list[int]]) -> None:
    """Compares the log-probabilities that the sampler gives to its own completions with the policy's.

    Raises ValueError where they differ by more than rounding; where the engine has other types than the policy that is
    said. Also raises for a policy that gives a row other log-probabilities beside a longer one. What rounding may do is
    measured, since deep models and routers make much of it. Every rank calls it.
    """
    differences = Differences(*map(fmean, zip(*sampler.ranks.gather([_differences(sampler, prompts)]), strict=True)))
    where = f"nats per token in the mean, where rounding makes {differences.rounding:.2g}"
    if not differences.batch <= max(MARGIN_OF_BATCH * differences.rounding, LEAST):
        raise ValueError(
            f"the log-probabilities of a row change with the length of the longest row of its batch, by "
            f"{differences.batch:.2g} {where}: expected a model whose rows do not depend on each other, with rotary "
            "frequencies of a fixed length"
        )
    if differences.engine <= max(MARGIN * differences.rounding, LEAST):
        return
    engine, other_types = ("vLLM", sampler.vllm.other_types) if sampler.vllm is not None else ("the decoder", [])
    sentence = f"{engine} samples from another distribution than the policy's: log-probabilities of its samples differ"
    sentence += f" by {differences.engine:.2g} {where}"
    if not other_types:
        raise ValueError(f"{sentence}; expected an engine that computes what the model of transformers does")
    if sampler.ranks.index == 0:
        print(f"{sentence}; it has {', '.join(other_types)}", file=sys.stderr)


def _differences(sampler: Sampler, prompts: Sequence[list[int]]) -> Differences:
    wrapped: Any = getattr(sampler.policy, "module", sampler.policy)  # within DDP
    a, lm = sampler.arguments, wrapped.lm
    by_length = sorted(prompts, key=len)
    places = [round(i * (len(by_length) - 1) / (PROMPTS - 1)) for i in range(PROMPTS) for _ in range(SAMPLES)]
    chosen = [by_length[place] for place in places]
    short = replace(sampler, arguments=replace(a, max_completion_length=min(TOKENS, a.max_completion_length)))
    sampled = short.sample(chosen, stream=f"check {a.seed}", step=BEFORE_ALL)
    rows = [Completion(0, "", ids, {}, s.ids, True, s.logps, s.kept) for ids, s in zip(chosen, sampled, strict=True)]
    short_row = replace(rows[0], ids=rows[0].ids[:FIRST], kept=rows[0].kept and rows[0].kept[:FIRST])
    longest = (rows[-1].ids * a.max_completion_length)[: a.max_completion_length]
    kept = [[id] for id in longest] if a.truncates else None
    long = Completion(0, "", chosen[-1], {}, longest, True, kept=kept)

    def score(rows: Sequence[Completion]) -> list[Tensor]:
        inputs = model_inputs(rows, a, sampler.tokenizer.pad_token_id, lm.device)
        logps = infer(sampler.policy, "logps", **inputs, **a.scoring_options()).float().cpu()
        return [row[: len(c.ids)] for row, c in zip(logps, rows, strict=True)]

    policy_logps = score(rows)
    layers = [lm.get_input_embeddings(), *(m for m in lm.modules() if isinstance(m, nn.Linear))]
    with perturbed(layers, lm, torch.Generator().manual_seed(0)):
        otherwise = score(rows)
    engine = [row.logps for row in rows]
    return Differences(
        _mean(engine, policy_logps),
        _mean(otherwise, policy_logps),
        _mean(score([short_row, long])[:1], score([short_row])),
    )


def _mean(logps: Sequence[Any], others: Sequence[Tensor]) -> float:
    return float((torch.cat(list(logps)) - torch.cat(list(others))).abs().mean())


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def fix_rotary(lm: Any, length: int) -> None:
    """Gives rotary embeddings whose frequencies follow the longest row of a batch (dynamic NTK, longrope) those of
    `length` tokens for good, and says so where these are not those of short rows.

    Otherwise a row's log-probabilities depend on the others, and keys in a cache are of other frequencies than later
    ones. vLLM fixes them too.
    """
    fixed = set()
    for module in lm.modules():
        types = getattr(module, "rope_type", None)
        for layer_type, kind in (types if isinstance(types, dict) else {None: types}).items():
            if not (isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")):
                continue
            position = torch.tensor([[length - 1]], device=lm.device)
            module(position.new_zeros(1, 1, 1).float(), position, *(() if layer_type is None else (layer_type,)))
            prefix = "" if layer_type is None else f"{layer_type}_"
            now, short_rows = (getattr(module, f"{prefix}{name}inv_freq") for name in ("", "original_"))
            if not torch.equal(now, short_rows):
                fixed.add(kind)
            if isinstance(types, dict):
                types[layer_type] = "default"  # by which transformers leaves the frequencies as they are
            else:
                module.rope_type = "default"
    if fixed:
        name = type(lm.get_base_model() if hasattr(lm, "get_base_model") else lm).__name__
        print(
            f"{name}: rotary frequencies ({', '.join(sorted(fixed))}) are those of {length:,} tokens for all rows, the "
            "longest of this run, not those of the longest row of each batch",
            file=sys.stderr,
        )
