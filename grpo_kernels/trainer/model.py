"""The policy: a causal language model whose forward computes the loss, log-probabilities or samples."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from ..config import GRPOConfig
from ..integrations.transformers import fused_forward
from ..logps import fused_logps
from ..loss import GRPOLossOutput, fused_grpo_loss, grpo_loss_from_logps
from . import missing_packages, reason_of
from .arguments import TrainArguments
from .data import check_source
from .decoding import Decoder, decoding_error
from .ranks import whole
from .sampling import generate
from .vllm import check_adapter


class Policy(nn.Module):
    """Everything that needs whole parameters runs inside forward: there the hooks of DDP and FSDP2 act.

    policy("loss", **batch, config=config)       -> GRPOLossOutput
    policy("logps", **batch, temperature=1.0)    -> (B, T) nats
    policy("sample", prompts=ids, ...)           -> list[Sampled], see sampling.generate
    policy("decoding_error")                     -> Decoding of its decoder, see decoding.decoding_error
    """

    def __init__(self, lm: Any, *, eager: bool = False, share_prompts: bool = False):
        super().__init__()
        self.lm = lm
        self.eager = eager
        self.share_prompts = share_prompts
        self.decoder: Decoder | None = None  # see decoding.choose_decoder
        self._no_split_modules = getattr(lm, "_no_split_modules", None)  # accelerate's units of FSDP2

    def forward(self, task: str, **inputs: Any) -> Any:
        if task == "sample":
            return generate(self.lm, decoder=self.decoder, **inputs)
        if task == "decoding_error":
            assert self.decoder is not None
            return decoding_error(self.decoder)
        inputs["share_prompts"] = self.share_prompts
        if task == "loss":
            return fused_forward(self.lm, loss=eager_loss if self.eager else fused_grpo_loss, **inputs)
        return fused_forward(self.lm, loss=eager_logps if self.eager else fused_logps, **inputs)[0]


def eager_logps(
    hidden: Tensor, weight: Tensor, completion_ids: Tensor, *, lm_head_bias: Tensor | None, logit_scale: float,
    logit_softcap: float | None, temperature: float, completion_mask: Tensor | None = None, entropy: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns log-probabilities and entropies (B, T), nats, from all logits at once: what `fused_logps` is compared
    with.

    entropy: whether entropies have a gradient. A mask changes nothing: masked positions are computed too.
    """
    logits = nn.functional.linear(hidden, weight, lm_head_bias).float() * logit_scale
    if logit_softcap is not None:
        logits = torch.tanh(logits / logit_softcap) * logit_softcap
    logps = (logits / temperature).log_softmax(-1)
    with torch.set_grad_enabled(entropy and torch.is_grad_enabled()):
        entropies = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1), entropies


def eager_loss(
    hidden: Tensor, weight: Tensor, completion_ids: Tensor, *, completion_mask: Tensor, lm_head_bias: Tensor | None,
    logit_scale: float, logit_softcap: float | None, config: GRPOConfig, **options: Any,
) -> GRPOLossOutput:  # fmt: skip
    """Returns the loss from all logits, which autograd keeps for the backward: what `fused_grpo_loss` is compared
    with."""
    logps, entropy = eager_logps(
        hidden, weight, completion_ids, lm_head_bias=lm_head_bias, logit_scale=logit_scale,
        logit_softcap=logit_softcap, temperature=float(config.temperature), entropy=config.has_entropy_bonus,
    )  # fmt: skip
    return grpo_loss_from_logps(logps, entropy=entropy, completion_mask=completion_mask, config=config, **options)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_tokenizer(path: str, arguments: TrainArguments, processing_class: Any = None) -> Any:
    """Returns the tokenizer of the model to train, unless one is given."""
    if processing_class is None and not path:
        raise ValueError("processing_class is missing: the model names no place with a tokenizer")
    tokenizer = processing_class
    if tokenizer is None:
        tokenizer = tokenizer_of(path, arguments, name="model_name_or_path")
    for name in ("pad_token", "eos_token"):
        if getattr(tokenizer, name) is None or getattr(tokenizer, f"{name}_id") is None:
            raise ValueError(
                f"the tokenizer of {path} has no {name}; set it (a pad token may be the eos token) and save it there"
            )
    return tokenizer


def tokenizer_of(path: str, a: TrainArguments, *, name: str) -> Any:
    """Returns the tokenizer of `path`, or of its base where that is an adapter without one. name: of the option."""
    bare = Path(path, "adapter_config.json").exists() and not Path(path, "tokenizer_config.json").exists()
    source = base_of(path, name=name) if bare else path
    return _from_pretrained(AutoTokenizer, path, source, name=name, trust_remote_code=a.trust_remote_code)


def base_of(path: str, *, name: str = "model_name_or_path") -> str | None:
    """Returns the model that an adapter belongs to, by a folder or a name on the hub; None for a model without an
    adapter.

    A folder is absolute: the files of a run name it, to be found from any directory.
    """
    if find_adapter_config_file(path) is None:
        return None
    if missing := missing_packages({"peft": "peft"}):
        raise ValueError(f"{name}={path} is an adapter, which {missing}")
    from peft import PeftConfig

    base = str(_from_pretrained(PeftConfig, path, path, name=name).base_model_name_or_path)
    check_source(f"{name}={path}: base_model_name_or_path", base)
    return _absolute(base)


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path


def load_model(path: str, arguments: TrainArguments, checkpoint: Path | None = None, model: Any = None) -> Any:
    """Returns the model to train: the given one, that of `path` or, where there is one, of a checkpoint: under
    --use-peft its adapter alone. An adapter, as `path` or given, is trained on."""
    a, base = arguments, None if model is not None else base_of(path)
    if base is not None and not a.use_peft:
        raise ValueError(
            f"model_name_or_path={path} is an adapter to {base}; expected use_peft=True, which trains it on, "
            "or the model that merge_and_unload() makes of both"
        )
    adapter = str(checkpoint) if checkpoint is not None and a.use_peft else None if base is None else path
    if checkpoint is not None and not a.use_peft:
        lm = _load(str(checkpoint), str(checkpoint.resolve()), a)
    else:
        lm = model if model is not None else _load(path, base or _absolute(path), a)
    continues = base is not None or is_peft_model(lm)
    if is_peft_model(lm) and adapter is not None:
        lm.load_adapter(adapter, lm.active_adapters[0], is_trainable=True)
    elif adapter is not None:
        lm = _load_adapter(lm, adapter, is_trainable=True)
        lm.peft_config["default"].base_model_name_or_path = base or lm.name_or_path
    elif a.use_peft and not is_peft_model(lm):
        lm = _with_adapter(lm, a)
    if a.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if a.use_peft:
            lm.enable_input_require_grads()
    if a.use_peft:
        _check_adapter(lm, a, continues=continues)
    if not any(parameter.requires_grad for parameter in lm.parameters()):
        expected = "expected requires_grad=True, of an adapter PeftModel.from_pretrained(..., is_trainable=True)"
        raise ValueError(f"model_name_or_path={path}: none of its parameters is trained; {expected}")
    _without_dropout(lm)
    return lm


def load_frozen(path: str, arguments: TrainArguments, *, name: str = "model_name_or_path") -> Any:
    """Returns a model that is not trained, its adapter included."""
    base = base_of(path, name=name)
    lm = _load(path, base or path, arguments, name=name)
    if base is not None:
        lm = _load_adapter(lm, path, is_trainable=False)
    lm.requires_grad_(False).eval()
    _without_dropout(lm)
    return lm


def save_model(lm: Any, folder: Path, state: dict[str, Tensor]) -> None:
    """Writes a model in transformers' format, or its active adapter in PEFT's, from whole tensors."""
    if not is_peft_model(lm):
        lm.save_pretrained(folder, state_dict=state)
        return
    lm.save_pretrained(folder, state_dict=state, selected_adapters=lm.active_adapters)
    for path in list((folder / lm.active_adapters[0]).glob("*")):  # where PEFT writes all but the one named "default"
        path.replace(folder / path.name)


def _load(path: str, source: str, a: TrainArguments, *, name: str = "model_name_or_path") -> Any:
    lm, loading_info = _from_pretrained(
        AutoModelForCausalLM, path, source, name=name, trust_remote_code=a.trust_remote_code,
        dtype=getattr(torch, a.dtype), output_loading_info=True,
    )  # fmt: skip
    if getattr(lm, "_hf_peft_config_loaded", False):
        raise ValueError(f"{name}={path}: the base model {source} is an adapter too; expected a whole model")
    if missing := sorted(loading_info["missing_keys"]):
        raise ValueError(
            f"{name}={path}: its files lack {len(missing)} tensors of a {type(lm).__name__}, {missing[0]} among them, "
            "which would be random numbers"
        )
    return lm


def _from_pretrained(kind: Any, path: str, *source: Any, name: str = "model_name_or_path", **options: Any) -> Any:
    transformers_logging.disable_progress_bar()  # of loading and saving: one per file
    try:
        return kind.from_pretrained(*source, **options)
    except Exception as error:  # of many types: no such model, one of an unknown type, a damaged file, a model's own
        raise ValueError(f"{name}={path}: {reason_of(error)}") from error


# --- adapters ---------------------------------------------------------------------------------------------------------


def is_peft_model(lm: Any) -> bool:
    """Says whether a model is PEFT's around another one. Nobody has one where peft is not imported."""
    return "peft" in sys.modules and isinstance(lm, sys.modules["peft"].PeftModel)


def _load_adapter(lm: Any, adapter: str, *, is_trainable: bool) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():  # PEFT makes random numbers of tensors that the files lack
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return _from_pretrained(PeftModel, adapter, lm, adapter, is_trainable=is_trainable)


def _with_adapter(lm: Any, a: TrainArguments) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=a.lora_r, lora_alpha=a.lora_alpha, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=a.lora_target_modules or "all-linear",
    )  # fmt: skip
    torch.manual_seed(a.seed)
    try:
        return get_peft_model(lm, config)
    except ValueError as error:
        raise ValueError(f"lora_target_modules={a.lora_target_modules}: {error}") from error


def _check_adapter(lm: Any, a: TrainArguments, *, continues: bool) -> None:
    """Raises ValueError where an adapter that is trained on makes options ineffective, or where something is trained
    that its files, or vLLM, would not have."""
    from peft import get_peft_model_state_dict

    for name in ("lora_r", "lora_alpha", "lora_target_modules"):
        if continues and a.is_given(name):
            raise ValueError(f"{name}={getattr(a, name)} has no effect on an adapter that is trained on; leave it out")
    if len(lm.active_adapters) != 1:
        raise ValueError(f"model has the active adapters {lm.active_adapters}; expected one: model.set_adapter(name)")
    # "auto", the default, would ask a hub for the base model.
    files = get_peft_model_state_dict(lm, adapter_name=lm.active_adapters[0], save_embedding_layers=False)
    kept = {tensor.data_ptr() for tensor in files.values()}
    for name, parameter in lm.named_parameters():
        if parameter.requires_grad and parameter.data_ptr() not in kept:
            raise ValueError(f"model trains {name}, which the files of an adapter do not hold; expected it frozen")
    if a.use_vllm:
        check_adapter(lm)


def _without_dropout(lm: nn.Module) -> None:
    """Switches dropout off. With it the policy that is scored is not the policy that sampled: ratios are not 1 before
    the first step."""
    for module in lm.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, (nn.Dropout, nn.AlphaDropout)):
            module.p = 0.0


# --- reference policy -------------------------------------------------------------------------------------------------


class ReferencePolicy:
    """A copy of the trained parameters. What is not trained (the base model under LoRA) both policies share.

    The copies have the placement of the parameters: plain, or this rank's shard under FSDP2.
    """

    def __init__(self, policy: nn.Module):
        self.pairs = {n: (p, p.detach().clone()) for n, p in policy.named_parameters() if p.requires_grad}

    @contextmanager
    @torch.no_grad()
    def active(self) -> Iterator[None]:
        """Gives the policy, within it, the reference's parameters, exchanged one by one; no second model is held."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for parameter, copy in self.pairs.values():
            kept = parameter.detach().clone()
            parameter.data.copy_(copy)
            copy.copy_(kept)

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Sets reference = (1 - share) * reference + share * policy."""
        for parameter, copy in self.pairs.values():
            copy.lerp_(parameter.detach(), share)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns whole tensors on the CPU; under FSDP2 every rank has to call it."""
        return {name: whole(copy).cpu().contiguous() for name, (_, copy) in self.pairs.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, (_, copy) in self.pairs.items():
            value = state[name].to(copy.device)
            if isinstance(copy, DTensor):
                value = distribute_tensor(value, copy.device_mesh, copy.placements)
            copy.copy_(value)
