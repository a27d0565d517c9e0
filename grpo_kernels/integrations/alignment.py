"""Whether log-probabilities follow from the model's own logits, and if not, which usual mistake they look like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ..checks.plain import check_plain, check_shape
from ..logps import fused_logps
from .lm_head import lm_head_inputs
from .transformers import CausalLM, forward_inputs, fused_forward, head_logits, own_logits, unwrap_causal_lm

_MODEL_INPUTS = ("input_ids", "attention_mask", "completion_ids", "completion_mask")


class Alignment(NamedTuple):
    """aligned: whether the log-probabilities follow from the model's own logits, up to rounding.
    error: the mean of their absolute differences over the scored tokens, in nats.
    message: one sentence; where they differ, with the mistake that explains it best.
    """

    aligned: bool
    error: float
    message: str


def check_alignment(
    model: nn.Module, batch: Mapping[str, Any], logps: Tensor | None = None, *, temperature: float = 1.0
) -> Alignment:
    """Compares log-probabilities of completions with the model's own logits.

    model: as in `fused_forward`. batch: its input_ids, completion_ids, attention_mask and completion_mask; other
    entries are arguments of the model's forward. A small batch: its logits are computed.
    logps: (B, T), in nats, what your own call of `fused_logps` or `fused_grpo_loss` (its `logps`) returned for this
    batch; None: what `fused_forward` gives. temperature: the one that they were computed with.

        out = fused_grpo_loss(hidden, model.lm_head.weight, completion_ids, ...)
        print(check_alignment(model, batch, out.logps).message)

    Mistakes that it recognises: hidden states shifted by a position, hidden states before the final norm, a logit scale
    that is forgotten or inverted, a softcap, temperature or bias that is forgotten, the base weight of an lm_head with
    adapters. Dropout must be off. Raises what `fused_forward` raises.
    """
    parts = unwrap_causal_lm(model)
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch is a {type(batch).__name__}; expected a dict of the tensors of fused_forward")
    others = {name: value for name, value in batch.items() if name not in _MODEL_INPUTS}
    for name in ("input_ids", "completion_ids"):
        if name not in batch:
            raise ValueError(f"batch has no {name!r}; expected the tensors of fused_forward")
    attention_mask, ids = batch.get("attention_mask"), batch["completion_ids"]
    inputs = forward_inputs(parts, batch["input_ids"], attention_mask, ids, others)
    mask = batch.get("completion_mask")
    if mask is None:
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask[:, -ids.shape[1] :]
    scored = mask.bool()
    if not bool(scored.any()):
        raise ValueError("batch has no scored token; expected a completion_mask or attention_mask with some")
    if logps is None:
        with torch.no_grad():
            given = {name: batch[name] for name in _MODEL_INPUTS if name in batch}
            logps, _ = fused_forward(model, **given, model_inputs=others, loss=fused_logps, temperature=temperature)
    check_plain("logps", logps)
    check_shape("logps", logps, logps.shape == ids.shape, f"{tuple(ids.shape)} like completion_ids")

    norms: list[tuple[Tensor, Any]] = []  # (input, output)

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        if args and "norm" in type(module).__name__.lower():
            norms.append((args[0], output))

    with register_module_forward_hook(note):
        logits, hidden = own_logits(parts, inputs, keep=0)
    before_norm = next((x for x, normed in reversed(norms) if _is_same_memory(normed, hidden)), None)
    span = slice(-ids.shape[1] - 1, -1)
    right = _logps(logits[:, span], ids, temperature)

    def distance(other: Tensor) -> float:
        return float((logps.detach().double() - other.double())[scored].abs().mean())

    error = distance(right)
    found = {
        mistake: distance(_logps(other, ids, divisor))
        for mistake, other, divisor in _mistakes(parts, hidden, before_norm, logits, span, temperature)
    }
    best = min(found, key=found.__getitem__, default="")
    explains = bool(best) and found[best] < 0.25 * error
    rounding = 4 * torch.finfo(logits.dtype).eps * max(1.0, float(right[scored].abs().mean()))
    if error <= rounding and not (explains and error > rounding / 64):
        return Alignment(True, error, f"aligned: the log-probabilities differ by {error:.2g} nats on average")
    what = f"it looks like {best}" if explains else "it looks like none of the usual mistakes"
    return Alignment(False, error, f"not aligned: the log-probabilities differ by {error:.3g} nats on average; {what}")


def _logps(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    logps = (logits.float() / temperature).log_softmax(-1)
    return logps.gather(-1, ids[..., None]).squeeze(-1)


def _mistakes(
    parts: CausalLM, hidden: Tensor, before_norm: Tensor | None, logits: Tensor, span: slice, temperature: float
) -> Iterator[tuple[str, Tensor, float]]:
    """Yields (mistake, logits of the scored positions with it, temperature), as far as this model allows it."""
    (scale, softcap), lm_head = parts.transform, parts.lm_head
    shifted = "hidden states one position {}: row t must be the one before completion_ids[:, t]"
    yield shifted.format("late"), logits[:, span.start + 1 :], temperature
    if -span.start < logits.shape[1]:
        yield shifted.format("early"), logits[:, span.start - 1 : span.stop - 1], temperature
    if temperature != 1.0:
        yield "a forgotten temperature", logits[:, span], 1.0

    right = lm_head_inputs(lm_head, hidden[:, span])
    if before_norm is not None:
        head = lm_head_inputs(lm_head, before_norm[:, span])
        yield "hidden states before the final norm of the model", head_logits(head, scale, softcap), temperature
    for other in dict.fromkeys(((1.0, softcap), (1 / scale, softcap), (scale, None), (1.0, None))):
        forgotten = [f"logit_scale of {scale:.6g}"] if other[0] != scale else []
        forgotten += [f"logit_softcap of {softcap:.6g}"] if other[1] != softcap else []
        is_inverted = other[0] not in (scale, 1.0)
        inverted = f"an inverted logit_scale, {1 / scale:.6g} for {scale:.6g}"
        if forgotten:
            mistake = inverted if is_inverted else "a forgotten " + " and ".join(forgotten)
            yield mistake, head_logits(right, *other), temperature
    if right.bias is not None:
        yield "a forgotten lm_head_bias", head_logits(right._replace(bias=None), scale, softcap), temperature
    base = getattr(lm_head, "base_layer", getattr(lm_head, "original_module", None))
    if base is not None:
        head = lm_head_inputs(base, hidden[:, span])
        yield "the base weight of an lm_head with adapters", head_logits(head, scale, softcap), temperature


def _is_same_memory(x: Any, y: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == y.shape and x.data_ptr() == y.data_ptr()
