"""Whether log-probabilities follow from the model's own logits, and if not, which usual mistake they look like."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ..checks.plain import check_plain, check_shape
from ..logps import fused_logps
from .lm_head import lm_head_inputs
from .transformers import (
    CausalLM,
    forward_inputs,
    fused_forward,
    head_logits,
    own_logits,
    position_ids,
    unwrap_causal_lm,
)

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
    that is forgotten or inverted, a softcap or bias that is forgotten, the base weight of an lm_head with adapters,
    another temperature, whose value is fitted, a forward without the attention_mask of prompts that are padded on the
    left. While dropout is on, nothing can be compared, and the message says so. Raises what `fused_forward` raises.
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
    dropout = _active_dropout(model)
    if dropout:
        what = f"the model is in training mode and {dropout} is on: each forward draws another one; call model.eval()"
        return Alignment(False, math.nan, f"not compared: {what} first, for the log-probabilities too")
    scored = mask.bool()
    if not bool(scored.any()):
        raise ValueError("batch has no scored token; expected a completion_mask or attention_mask with some")
    if logps is None:
        with torch.no_grad():
            tensors = {name: batch[name] for name in _MODEL_INPUTS if name in batch}
            logps, _ = fused_forward(model, **tensors, model_inputs=others, loss=fused_logps, temperature=temperature)
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
    distances = {
        mistake: distance(_logps(other, ids, temperature))
        for mistake, other in _mistakes(parts, hidden, before_norm, logits, span)
    }
    note_of_padding, other_inputs = "", _with_other_mask(parts, inputs)
    if other_inputs is not None:
        other = _logps(own_logits(parts, other_inputs, keep=0)[0][:, span], ids, temperature)
        distances["a forward without an attention_mask, of prompts that are padded on the left"] = distance(other)
        if attention_mask is None:
            note_of_padding = "; input_ids begins with config.pad_token_id, and batch has no attention_mask"
    best = min(distances, key=distances.__getitem__)
    rounding = 4 * torch.finfo(logits.dtype).eps * max(1.0, float(right[scored].abs().mean()))
    if error > rounding:
        fitted = _fit_temperature(lambda t: distance(_logps(logits[:, span], ids, t)))
        distance_of_fit = distance(_logps(logits[:, span], ids, fitted))
        if distance_of_fit + rounding / 64 < 0.25 * distances[best]:
            kind = "a forgotten" if abs(fitted - 1) < 0.01 and temperature != 1.0 else "another"
            best = f"{kind} temperature: they are at {fitted:.3g}, where the check was told {temperature:g}"
            distances[best] = distance_of_fit
    explains = distances[best] < 0.25 * error
    if error <= rounding and not (explains and error > rounding / 64):
        message = f"aligned: the log-probabilities differ by {error:.2g} nats on average"
        return Alignment(True, error, message + note_of_padding)
    what = f"it looks like {best}" if explains else "it looks like none of the usual mistakes"
    message = f"not aligned: the log-probabilities differ by {error:.3g} nats on average; {what}"
    return Alignment(False, error, message + note_of_padding)


def _logps(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Returns log-probabilities (B, T), from float32 logits of one sequence at a time."""
    rows = [
        (z.float() / temperature).log_softmax(-1).gather(-1, i) for z, i in zip(logits, ids[..., None], strict=True)
    ]
    return torch.stack(rows).squeeze(-1)


def _fit_temperature(distance: Callable[[float], float]) -> float:
    """Returns the temperature in [1/32, 32] with the least distance: the best of a grid over its logarithm, refined by
    golden sections."""

    def error(log2: float) -> float:
        return distance(2.0**log2)

    grid = [i / 2 for i in range(-10, 11)]
    centre = min(grid, key=error)
    low, high, ratio = centre - 0.5, centre + 0.5, (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    error_left, error_right = error(left), error(right)
    for _ in range(24):  # to 1e-5 of its logarithm
        if error_left <= error_right:
            high, right, error_right = right, left, error_left
            left = high - ratio * (high - low)
            error_left = error(left)
        else:
            low, left, error_left = left, right, error_right
            right = low + ratio * (high - low)
            error_right = error(right)
    return float(2 ** ((low + high) / 2))


def _active_dropout(model: nn.Module) -> str:
    """Returns what draws at random in the forward: a module of dropout, or a probability that attention reads."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        if "dropout" in type(module).__name__.lower() and getattr(module, "p", False):
            return f"{name} (p={module.p:g})"
        for option in ("attention_dropout", "dropout", "dropout_prob", "activation_dropout"):
            p = getattr(module, option, 0.0)
            if isinstance(p, float) and p > 0.0:
                return f"{name}.{option} ({p:g})"
    return ""


def _with_other_mask(parts: CausalLM, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of a forward that leaves out the mask of padding on the left, or where there is no mask,
    that has it. None where no prompt begins with padding."""
    mask, ids, pad = (
        inputs.get("attention_mask"),
        inputs["input_ids"],
        getattr(parts.model.config, "pad_token_id", None),
    )
    others = {name: x for name, x in inputs.items() if name not in ("attention_mask", "position_ids")}
    if mask is not None:
        return None if bool(mask[:, 0].all()) else others
    if pad is None or pad == getattr(parts.model.config, "bos_token_id", None):  # which may begin any prompt
        return None
    mask = ((ids != pad).cumsum(1) > 0).to(ids.dtype)
    if bool(mask[:, 0].all()) or not bool(mask.any(1).all()):
        return None
    positions = position_ids(parts, mask)
    return others | {"attention_mask": mask} | ({} if positions is None else {"position_ids": positions})


def _mistakes(
    parts: CausalLM, hidden: Tensor, before_norm: Tensor | None, logits: Tensor, span: slice
) -> Iterator[tuple[str, Tensor]]:
    """Yields (mistake, logits of the scored positions with it), as far as this model allows it."""
    (scale, softcap), lm_head = parts.transform, parts.lm_head
    shifted = "hidden states one position {}: row t must be the one before completion_ids[:, t]"
    yield shifted.format("late"), logits[:, span.start + 1 :]
    if -span.start < logits.shape[1]:
        yield shifted.format("early"), logits[:, span.start - 1 : span.stop - 1]

    right = lm_head_inputs(lm_head, hidden[:, span])
    if before_norm is not None:
        head = lm_head_inputs(lm_head, before_norm[:, span])
        yield "hidden states before the final norm of the model", head_logits(head, scale, softcap)
    for other in dict.fromkeys(((1.0, softcap), (1 / scale, softcap), (scale, None), (1.0, None))):
        forgotten = [f"logit_scale of {scale:.6g}"] if other[0] != scale else []
        forgotten += [f"logit_softcap of {softcap:.6g}"] if other[1] != softcap else []
        is_inverted = other[0] not in (scale, 1.0)
        inverted = f"an inverted logit_scale, {1 / scale:.6g} for {scale:.6g}"
        if forgotten:
            mistake = inverted if is_inverted else "a forgotten " + " and ".join(forgotten)
            yield mistake, head_logits(right, *other)
    if right.bias is not None:
        yield "a forgotten lm_head_bias", head_logits(right._replace(bias=None), scale, softcap)
    base = getattr(lm_head, "base_layer", getattr(lm_head, "original_module", None))
    if base is not None:
        head = lm_head_inputs(base, hidden[:, span])
        yield "the base weight of an lm_head with adapters", head_logits(head, scale, softcap)


def _is_same_memory(x: Any, y: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == y.shape and x.data_ptr() == y.data_ptr()
