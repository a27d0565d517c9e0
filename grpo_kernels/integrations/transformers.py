"""Losses of a causal language model of transformers, without its logits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks.arguments import check_config, checks_values
from ..checks.plain import check_plain, check_shape, is_dtensor
from ..config import DEFAULT_CONFIG, GRPOConfig, check_flag
from ..loss import fused_grpo_loss
from . import LogitTransform, logit_transform
from .lm_head import HeadInputs, lm_head_inputs

try:
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
except ImportError as error:
    raise ImportError("grpo_kernels.integrations.transformers needs transformers: pip install transformers") from error

PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)  # of a cache: others write into states


def fused_forward(
    model: nn.Module,
    *,
    input_ids: Tensor,
    completion_ids: Tensor,
    attention_mask: Tensor | None = None,
    completion_mask: Tensor | None = None,
    model_inputs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] = fused_grpo_loss,
    share_prompts: bool = False,
    **options: Any,
) -> Any:
    """Returns what `loss(...)` returns of a batch of completions under a causal language model.

    The hidden states of the T scored positions, weight and bias of the lm_head, logit scale and softcap are taken from
    the model. It runs without its lm_head.

    Args:
        model: a causal language model of transformers, or PEFT's model around one (adapters in the body, and
            adapters of the lm_head that `lm_head_inputs` takes).
        input_ids: (B, L) int64, prompts followed by completions; the prompts may be padded on the left, the completions
            on the right. completion_ids: (B, T) with T < L, the last T columns of input_ids.
        attention_mask: (B, L), 0 at padding. The position of a token counts from its row's first token, as in
            `generate`, for text models whose forward takes position_ids.
        completion_mask: (B, T), 0 at tokens that are not scored; None: the last T columns of attention_mask.
        model_inputs: other arguments of the model's forward, such as position_ids or pixel_values; none that this
            function or the lm_head has, and no adapter_names.
        loss: `fused_grpo_loss`, or a function that takes (hidden, weight, completion_ids, *, completion_mask,
            lm_head_bias, logit_scale, logit_softcap, **options), as `fused_logps` and `fused_policy_loss` do.
        share_prompts: rows that follow each other with equal prompts run through the model as one row, and only their
            completions apart, after the keys and values of the prompt: the same log-probabilities and gradients up to
            rounding, for a part of the time and memory where prompts are long or num_generations is large. For models
            whose cache holds only keys and values; without gradient checkpointing and model_inputs.
        options: further arguments of `loss`: advantages=, old_logps=, config= ...

            out = fused_forward(model, input_ids=ids, attention_mask=mask, completion_ids=ids[:, -T:],
                                advantages=advantages, old_logps=old_logps, config=GRPOConfig.preset("dapo"))
            out.loss.backward()

    Under DistributedDataParallel, FSDP and DeepSpeed call it inside the forward of the module that they wrap, and
    return the loss tensor, so that their hooks run: the parameters are whole there, and their gradients are averaged.

    The first call with a class of models also runs the model itself, on one row or, with model_inputs, on the batch,
    and compares its logits.

    Raises ValueError or TypeError, by name: a model whose logits are not understood (see `logit_transform`,
    `lm_head_inputs`) or differ from its own; a logit_scale or logit_softcap that contradicts the model's; tensors that
    do not fit; share_prompts with what it does not go with.
    """
    check_flag("share_prompts", share_prompts)
    parts = unwrap_causal_lm(model)
    inputs = forward_inputs(parts, input_ids, attention_mask, completion_ids, model_inputs)
    if share_prompts and model_inputs:
        raise ValueError(f"share_prompts=True with model_inputs of {', '.join(model_inputs)}; expected one of the two")
    length = completion_ids.shape[1]
    if completion_mask is None and attention_mask is not None:
        completion_mask = attention_mask[:, -length:]
    # What of a caller's own inputs belongs to a row is not known: patches of images, positions (3, B, L).
    _check_once(parts, inputs if model_inputs else {name: tensor[:1] for name, tensor in inputs.items()})
    if share_prompts:
        hidden = _hidden_after_shared_prompts(parts, inputs, length)
    else:
        hidden = parts.body(**inputs, use_cache=False).last_hidden_state[:, -length - 1 : -1]
    head = lm_head_inputs(parts.lm_head, hidden)
    if loss is fused_grpo_loss:
        options["config"] = _with_transform(options.get("config"), parts.transform)
    else:
        for name, value in (("logit_scale", parts.transform.scale), ("logit_softcap", parts.transform.softcap)):
            if options.setdefault(name, value) != value:
                raise ValueError(f"{name}={options[name]}; the {type(parts.model).__name__} has {value}: leave it out")
    return loss(
        head.hidden, head.weight, completion_ids, completion_mask=completion_mask, lm_head_bias=head.bias, **options
    )


def _hidden_after_shared_prompts(parts: CausalLM, inputs: dict[str, Tensor], length: int) -> Tensor:
    """Returns hidden states (B, T, H) of the scored positions; see share_prompts of `fused_forward`.

    The last position of a prompt scores the first token; the other tokens are scored after the prompt's keys and
    values, which their gradients flow through.
    """
    prompt = {name: tensor[:, :-length] for name, tensor in inputs.items()}
    is_new = torch.ones(len(inputs["input_ids"]), dtype=torch.bool, device=inputs["input_ids"].device)
    is_new[1:] = torch.stack([(tensor[1:] != tensor[:-1]).any(1) for tensor in prompt.values()]).any(0)
    rows = is_new.cumsum(0) - 1  # the prompt of each row
    output = parts.body(**{name: tensor[is_new] for name, tensor in prompt.items()}, use_cache=True)
    cache = cache_of(output)
    layers = getattr(cache, "layers", None) or [cache]
    if cache is None or not all(type(layer) in PLAIN_LAYERS for layer in layers):
        why = "keeps no cache" if cache is None else f"keeps a cache of {type(layers[0]).__name__}"
        raise ValueError(
            f"share_prompts=True: the {type(parts.model).__name__} {why}; expected one of keys and values only, "
            "without gradient checkpointing"
        )
    first = output.last_hidden_state[:, -1:].index_select(0, rows)
    if length == 1:
        return first
    cache.reorder_cache(rows)
    others = {name: tensor[:, -length:-1] for name, tensor in inputs.items()}
    if "attention_mask" in inputs:
        others["attention_mask"] = inputs["attention_mask"][:, :-1]
    rest = parts.body(**others, **{cache_argument(parts.body): cache}, use_cache=True).last_hidden_state
    return torch.cat([first, rest], dim=1)


class CausalLM(NamedTuple):
    """model: without PEFT's wrapper; body: the model without its lm_head, whose last_hidden_state the lm_head takes."""

    model: Any
    body: Any
    lm_head: nn.Module
    transform: LogitTransform


def unwrap_causal_lm(model: Any) -> CausalLM:
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        for name, config in model.peft_config.items():
            adds_prompt = getattr(config, "is_prompt_learning", False)
            if adds_prompt or getattr(config, "alora_invocation_tokens", None) is not None:
                why = "adds a prompt" if adds_prompt else "acts from its invocation tokens on (aLoRA)"
                raise TypeError(f"model has the adapter {name!r}, which {why}; expected LoRA or no adapter")
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        wrapped = hasattr(model, "module")
        hint = ": pass model.module, inside a forward that DistributedDataParallel wraps" if wrapped else ""
        raise TypeError(f"model is a {type(model).__name__}; expected a causal language model of transformers{hint}")
    lm_head, body = model.get_output_embeddings(), body_of(model)
    for name, parameter in lm_head.named_parameters():
        if is_dtensor(parameter):
            raise TypeError(
                f"lm_head.{name} is a DTensor; expected fused_forward to run inside the forward of the module that "
                "fully_shard was given, where parameters are whole"
            )
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            "config.output_router_logits=True; expected False: the auxiliary loss of the experts is not added"
        )
    return CausalLM(model, body, lm_head, logit_transform(model.config))


def body_of(model: Any) -> Any:
    """Returns the module that the model's forward calls before its lm_head."""
    body = model.base_model
    if body is model:  # Llama 4's text model: base_model_prefix names an attribute that it lacks
        body = getattr(model, "model", model)
    if body is model or model.get_output_embeddings() is None:
        raise TypeError(
            f"model is a {type(model).__name__}; expected a causal language model, with a body and an lm_head that "
            "takes its hidden states"
        )
    return getattr(body, "decoder", body)  # OPT's forward calls the decoder within its base model


# Arguments of this function, of the lm_head, and of PEFT's own forward, none of which reaches the body.
_NOT_INPUTS = {
    *("input_ids", "attention_mask", "inputs_embeds", "use_cache", "return_dict"),
    *("labels", "logits_to_keep", "adapter_names"),
}


def forward_inputs(
    parts: CausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    completion_ids: Tensor,
    others: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns the arguments of the body's forward."""
    for name, ids in (("input_ids", input_ids), ("completion_ids", completion_ids)):
        check_plain(name, ids)
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} is {ids.dtype}; expected integers")
    if others is not None and not isinstance(others, Mapping):
        raise TypeError(
            f"model_inputs is a {type(others).__name__}; expected a dict of arguments of the model's forward"
        )
    if taken := sorted(_NOT_INPUTS & (others or {}).keys()):
        raise ValueError(f"model_inputs has {taken[0]!r}, which would replace what this computes or have no effect")
    whole, part = tuple(input_ids.shape), tuple(completion_ids.shape)
    if not (len(whole) == len(part) == 2 and whole[0] == part[0] > 0 and 0 < part[1] < whole[1]):
        raise ValueError(
            f"input_ids has shape {whole} and completion_ids {part}; expected (B, L) and (B, T), prompts followed by "
            "completions, with B > 0 and 0 < T < L"
        )
    if attention_mask is not None:
        check_plain("attention_mask", attention_mask)
        check_shape("attention_mask", attention_mask, attention_mask.shape == input_ids.shape, whole)
    if checks_values(input_ids.device):
        differs = input_ids[:, -part[1] :] != completion_ids
        if attention_mask is not None:
            differs &= attention_mask[:, -part[1] :].bool()
        if bool(differs.any()):
            where = differs.nonzero()[0].tolist()
            raise ValueError(f"completion_ids{where} differs from input_ids; expected its last columns")
    inputs: dict[str, Any] = {"input_ids": input_ids, **(others or {})}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
        positions = position_ids(parts, attention_mask)
        if positions is not None:
            inputs.setdefault("position_ids", positions)
    return inputs


def position_ids(parts: CausalLM, attention_mask: Tensor) -> Tensor | None:
    """Returns positions (B, L) that count from a row's first token. None where the model does not take them, or has
    images or audio, whose positions it counts in its own way."""
    if getattr(parts.model.config, "text_config", None) is not None or not takes(parts.body, "position_ids"):
        return None
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def takes(module: nn.Module, name: str) -> bool:
    """Returns whether the forward of a module has an argument of this name."""
    return name in inspect.signature(type(module).forward).parameters


# Names of a cache among the arguments and results of a model: of transformers 5.24, of 5.23, of Mamba.
_CACHES = ("cache", "past_key_values", "cache_params")


def cache_argument(module: nn.Module) -> str:
    """Returns the argument by which the forward of a module takes its cache."""
    return next((name for name in _CACHES if takes(module, name)), "past_key_values")


def cache_of(output: Any) -> Any:
    """Returns the cache in what a model returned; None where it keeps none."""
    return next((value for name, value in vars(output).items() if name in _CACHES), None)


@lru_cache(maxsize=16)
def _with_transform(config: GRPOConfig | None, transform: LogitTransform) -> GRPOConfig:
    config = DEFAULT_CONFIG if config is None else config
    check_config(config)
    for name, configured, expected, default in (
        ("logit_scale", config.logit_scale, transform.scale, 1.0),
        ("logit_softcap", config.logit_softcap, transform.softcap, None),
    ):
        if configured not in (expected, default):
            raise ValueError(f"config.{name}={configured}; the model has {expected}: leave it out")
    if (config.logit_scale, config.logit_softcap) == transform:
        return config
    return replace(config, logit_scale=transform.scale, logit_softcap=transform.softcap)


# --- the model's own logits -------------------------------------------------------------------------------------------

_checked: set[tuple[Any, ...]] = set()


def _check_once(parts: CausalLM, inputs: dict[str, Any]) -> None:
    """Compares with the model's own logits of a few positions, once per class of models, of lm_heads, and transform."""
    key = (type(parts.model), type(parts.lm_head), parts.transform)
    if key in _checked or torch.compiler.is_compiling():
        return
    model_logits, hidden = own_logits(parts, inputs, keep=-(-8 // len(inputs["input_ids"])))
    logits = head_logits(lm_head_inputs(parts.lm_head, hidden[:, -model_logits.shape[1] :]), *parts.transform)
    largest, error = model_logits.abs().amax().item(), math.inf
    if logits.shape == model_logits.shape:
        error = (logits.float() - model_logits.float()).abs().nan_to_num(0.0).amax().item()
    if error > 8 * torch.finfo(logits.dtype).eps * max(largest, 1.0):
        raise ValueError(
            f"model is a {type(parts.model).__name__} whose own logits differ by {error:.3g}, of {largest:.3g}: they "
            f"are not lm_head(last_hidden_state) with logit_scale={parts.transform.scale} and "
            f"logit_softcap={parts.transform.softcap}"
        )
    _checked.add(key)


def own_logits(parts: CausalLM, inputs: dict[str, Any], keep: int) -> tuple[Tensor, Tensor]:
    """Returns the model's logits of the last `keep` positions or of all, and its hidden states, of one forward."""
    outputs: list[Any] = []
    limit = {"logits_to_keep": keep} if takes(parts.model, "logits_to_keep") else {}
    devices = [inputs["input_ids"].device] if inputs["input_ids"].is_cuda else []
    with (
        parts.body.register_forward_hook(lambda module, args, output: outputs.append(output)),
        torch.no_grad(),
        torch.random.fork_rng(devices=devices),  # dropout draws from it
    ):
        logits = parts.model(**inputs, use_cache=False, **limit).logits
    if not outputs:
        name = type(parts.model).__name__
        raise ValueError(f"model is a {name} whose forward does not call its {type(parts.body).__name__}")
    return logits, outputs[-1].last_hidden_state


@torch.no_grad()
def head_logits(head: HeadInputs, scale: float, softcap: float | None) -> Tensor:
    """Returns the logits as `fused_forward` understands them, in the type of the model."""
    logits = nn.functional.linear(*head) * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
