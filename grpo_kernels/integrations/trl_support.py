"""Truncated sampling in TRL's GRPOTrainer: which options truncate, and the ids that were kept, once per rollout."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import check_count, check_number
from ..head.truncation import Truncation
from ..logps import check_truncation, fused_logps, support_under
from ..sampling_mask import SamplingMask
from .lm_head import HeadInputs

_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
# Options of vLLM's SamplingParams and transformers' GenerationConfig that change logits before truncation, or truncate
# by other rules, with the value that does nothing beside None.
_REFUSED: dict[str, object] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "repetition_penalty", "typical_p"), 1.0),
    **dict.fromkeys(("do_sample", "num_beams"), 1),  # True is 1
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens"), 0),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "bad_words_ids", "begin_suppress_tokens", "suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "top_h")),
    **dict.fromkeys(("logit_bias", "sequence_bias", "structured_outputs", "watermarking_config")),
}
_LEAST_TEMPERATURE = 0.01  # of vLLM, which samples at this one instead of lower ones
_TOP_K_OF_TRANSFORMERS = 50  # where neither the trainer nor the model has one
_IDS, _COUNTS = "support_ids", "support_counts"


def truncation_of(trainer: Any) -> Truncation | None:
    """Returns the rule by which the sampler of a GRPOTrainer truncates; None where it keeps all ids.

    Raises ValueError for options with which the kept ids do not follow from the model.
    """
    args, settings = trainer.args, dict[str, Any]()
    if trainer.use_vllm:
        settings = {name: getattr(args, name) for name in (*_OFF, "temperature", "repetition_penalty")}
        settings |= {"structured_outputs": args.vllm_structured_outputs_regex, **(args.generation_kwargs or {})}
        settings["temperature"] = max(check_number("temperature", settings["temperature"]), _LEAST_TEMPERATURE)
        unset = _OFF
    else:  # transformers takes from the model's own configuration what is None, then from its defaults
        settings = trainer.model.generation_config.to_dict()
        settings |= {name: x for name, x in trainer.generation_kwargs.items() if x is not None}
        unset = {**_OFF, "top_k": _TOP_K_OF_TRANSFORMERS}
    top_k, top_p, min_p = (default if settings[name] is None else settings[name] for name, default in unset.items())
    top_k = max(check_count("top_k", top_k, least=-1), 0)  # -1 of vLLM: all
    rule = check_truncation(top_k, top_p, min_p, min_p_last=not trainer.use_vllm)
    if not rule.truncates(trainer.model.config.get_text_config().vocab_size):
        return None
    changes = {name: settings[name] for name, off in _REFUSED.items() if settings.get(name) not in (None, off)}
    if settings["temperature"] != trainer.temperature:
        changes["temperature"] = settings["temperature"]
    for name, value in changes.items():
        raise ValueError(
            f"{name}={value!r} of the sampler, with top_k={top_k}, top_p={top_p}, min_p={min_p}: the ids that it keeps "
            "do not follow from the model's logits; leave one of them out, or set truncated_support=False for TRL's "
            "loss over all ids"
        )
    return rule


class RolloutSupport:
    """The ids kept for the tokens of a rollout, whose rows come in the same parts for each model that is scored. The
    first is the policy that sampled: the ids are recomputed then, unless the engine gave them."""

    def __init__(self, trainer: Any, completions: Sequence[Sequence[int]], engine: Sequence[Any] | None) -> None:
        """engine: the `sampling_mask` of a rollout_func, per completion and token the ids that the engine kept."""
        lengths = [*map(len, completions)]
        self.rule, self.count, self.row = trainer._truncation, len(lengths), 0
        self.length = max(lengths) + -max(lengths) % (trainer.pad_to_multiple_of or 1)
        self.engine = None if engine is None else _mask_of(engine, lengths, self.length)
        self.parts: deque[SamplingMask] = deque()

    def __call__(self, head: HeadInputs, labels: Tensor, mask: Tensor, options: Mapping[str, Any]) -> SamplingMask:
        """Returns the kept ids of the next rows' labels (b, P + T - 1), of which mask leaves those of completions."""
        if self.row == self.count:
            self.parts.rotate(-1)
            return self.parts[-1]
        hidden, weight, bias = head
        if self.engine is None:
            transform = options["temperature"], options["logit_scale"], options["logit_softcap"]
            inputs = hidden, weight, bias
            support = support_under(self.rule, inputs, labels, mask, transform, options["logits_dtype"])
        else:
            part = self.engine[self.row : self.row + len(labels)].to(labels.device)
            support = SamplingMask(part.ids, pad(part.counts, (labels.size(1) - self.length, 0)))
            score = partial(fused_logps, hidden, weight, labels, completion_mask=mask, lm_head_bias=bias, **options)
            support = replace(support, mass=(score()[0] - score(sampling_mask=support)[0]).exp())
        self.row += len(labels)
        self.parts.append(support)
        return support

    def of_completions(self) -> SamplingMask:
        """Returns the kept ids of all rows, (B, T), with their mass."""
        fields: Any = zip(*(vars(part).values() for part in self.parts), strict=True)
        ids, *others = [[] if x[0] is None else [torch.cat(x)] for x in fields]
        return SamplingMask(*ids, *(x[:, -self.length :] for each in others for x in each))


def _mask_of(engine: Any, lengths: list[int], length: int) -> SamplingMask:
    """Returns the `sampling_mask` of a rollout_func for completions of these lengths."""
    name, expected = "sampling_mask of rollout_func", f"expected {lengths}, a list of ids for each of completion_ids"
    if not hasattr(engine, "__len__"):
        raise TypeError(f"{name} is a {type(engine).__name__}; {expected}")
    sizes = [len(x) if hasattr(x, "__len__") else type(x).__name__ for x in engine]
    if sizes != lengths:
        raise ValueError(f"{name} is of {sizes} tokens; {expected}")
    try:
        return SamplingMask.from_lists(engine, length=length)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def by_rows(support: SamplingMask) -> dict[str, Any]:
    """Returns what TRL shuffles and splits by rows: a list of each row's ids, of any number, and the counts (B, T)."""
    return {_IDS: [*support.ids.split(support.counts.sum(1).tolist())], _COUNTS: support.counts}


def of_rows(inputs: Mapping[str, Any]) -> SamplingMask | None:
    """Returns the sampling mask of such rows; None where nothing was truncated."""
    return SamplingMask(torch.cat(inputs[_IDS]), inputs[_COUNTS]) if _IDS in inputs else None
