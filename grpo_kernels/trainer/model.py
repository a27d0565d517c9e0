"""The policy: a causal language model whose forward computes the loss, log-probabilities or samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ..config import GRPOConfig
from ..integrations.transformers import fused_forward
from ..logps import fused_logps
from ..loss import fused_grpo_loss, grpo_loss_from_logps
from ..output import GRPOLossOutput
from ..teacher import Teacher
from .arguments import TrainArguments
from .data import check_hub, check_path
from .sampling import decoding_error, generate


class Policy(nn.Module):
    """Everything that needs whole parameters runs inside forward: there the hooks of DDP and FSDP2 act.

    policy("loss", **batch, config=config)       -> GRPOLossOutput
    policy("logps", **batch, temperature=1.0)    -> (B, T) nats
    policy("sample", prompts=ids, ...)           -> list[Sampled], see sampling.generate
    policy("decoding_error", cached=True)        -> Decoding, see sampling.decoding_error
    """

    def __init__(self, lm: Any, *, eager: bool = False, share_prompts: bool = False):
        super().__init__()
        self.lm = lm
        self.eager = eager
        self.share_prompts = share_prompts
        self._no_split_modules = getattr(lm, "_no_split_modules", None)  # accelerate's units of FSDP2

    def forward(self, task: str, **inputs: Any) -> Any:
        if task == "sample":
            return generate(self.lm, **inputs)
        if task == "decoding_error":
            return decoding_error(self.lm, **inputs)
        inputs["share_prompts"] = self.share_prompts
        if task == "loss":
            return fused_forward(self.lm, loss=eager_loss if self.eager else fused_grpo_loss, **inputs)
        return fused_forward(self.lm, loss=eager_logps if self.eager else fused_logps, **inputs)[0]


def eager_logps(
    hidden: Tensor, weight: Tensor, completion_ids: Tensor, *, lm_head_bias: Tensor | None, logit_scale: float,
    logit_softcap: float | None, temperature: float, completion_mask: Tensor | None = None, entropy: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities and entropies (B, T), nats, from all logits at once: what `fused_logps` is compared with.

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
    """The loss from all logits, which autograd keeps for the backward: what `fused_grpo_loss` is compared with."""
    logps, entropy = eager_logps(
        hidden, weight, completion_ids, lm_head_bias=lm_head_bias, logit_scale=logit_scale,
        logit_softcap=logit_softcap, temperature=float(config.temperature), entropy=config.has_entropy_bonus,
    )  # fmt: skip
    return grpo_loss_from_logps(logps, entropy=entropy, completion_mask=completion_mask, config=config, **options)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_tokenizer(path: str, arguments: TrainArguments, given: Any = None) -> Any:
    """The tokenizer of `path`, unless one is given."""
    if given is None and not path:
        raise ValueError("processing_class is missing: the model names no place with a tokenizer")
    check_path("model_name_or_path", path)
    tokenizer = (
        given
        if given is not None
        else _from_pretrained(AutoTokenizer, path, path, trust_remote_code=arguments.trust_remote_code)
    )
    for name in ("pad_token", "eos_token"):
        if getattr(tokenizer, name) is None or getattr(tokenizer, f"{name}_id") is None:
            raise ValueError(
                f"the tokenizer of {path} has no {name}; set it (a pad token may be the eos token) and save it there"
            )
    return tokenizer


def load_model(path: str, arguments: TrainArguments, checkpoint: Path | None = None, given: Any = None) -> Any:
    """The given model, that of `path` or, where there is one, of a checkpoint: under --use-peft its adapter alone."""
    lm = given
    if given is None or (checkpoint is not None and not arguments.use_peft):
        source = path if checkpoint is None or arguments.use_peft else checkpoint
        if Path(source).exists():
            source = Path(source).resolve()  # an adapter keeps it as its base, to be found from any directory
        _check_adapter(source)
        lm, found = _from_pretrained(
            AutoModelForCausalLM, path, source, trust_remote_code=arguments.trust_remote_code,
            dtype=getattr(torch, arguments.dtype), output_loading_info=True,
        )  # fmt: skip
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"model_name_or_path={path}: its files lack {len(missing)} tensors of a {type(lm).__name__}, "
                f"{missing[0]} among them, which would be random numbers"
            )
    if arguments.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if arguments.use_peft:
            lm.enable_input_require_grads()
    if arguments.use_peft:
        lm = _with_adapter(lm, arguments, checkpoint)
    _without_dropout(lm)
    return lm


def _check_adapter(folder: str | Path) -> None:
    """Raise ValueError where the folder is an adapter whose base model is not there."""
    try:
        base = json.loads((Path(folder) / "adapter_config.json").read_text())["base_model_name_or_path"]
        check_path("base_model_name_or_path", base)
    except FileNotFoundError:  # no adapter
        return
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}/adapter_config.json names no base model that can be loaded: {error}") from None


def _from_pretrained(
    kind: Any, path: str, source: str | Path, *, name: str = "model_name_or_path", **options: Any
) -> Any:
    check_hub(name, str(source))
    transformers_logging.disable_progress_bar()  # of loading and saving: one per file
    try:
        return kind.from_pretrained(source, **options)
    except Exception as error:  # of many types: no such model, one of an unknown type, a damaged file, a model's own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{name}={path}: {reason}") from error


def _with_adapter(lm: Any, arguments: TrainArguments, adapter: Path | None) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter is not None:
        return PeftModel.from_pretrained(lm, adapter, is_trainable=True)
    config = LoraConfig(
        r=arguments.lora_r, lora_alpha=arguments.lora_alpha, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=arguments.lora_target_modules or "all-linear",
    )  # fmt: skip
    torch.manual_seed(arguments.seed)
    try:
        return get_peft_model(lm, config)
    except ValueError as error:
        raise ValueError(f"lora_target_modules={arguments.lora_target_modules}: {error}") from error


def _without_dropout(lm: nn.Module) -> None:
    """With dropout the policy that is scored is not the policy that sampled: ratios are not 1 before the first step."""
    for module in lm.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, (nn.Dropout, nn.AlphaDropout)):
            module.p = 0.0


# --- teacher ----------------------------------------------------------------------------------------------------------


class TeacherModel:
    """A frozen model whose distribution over the vocabulary the policy is drawn to; whole in every process."""

    def __init__(self, path: str, arguments: TrainArguments, tokenizer: Any, device: torch.device) -> None:
        options = dict(trust_remote_code=arguments.trust_remote_code)
        name = "teacher_model_name_or_path"
        self.lm = _from_pretrained(
            AutoModelForCausalLM, path, path, name=name, dtype=getattr(torch, arguments.dtype), **options
        )
        own = _from_pretrained(AutoTokenizer, path, path, name=name, **options).get_vocab()
        if differing := [word for word, i in tokenizer.get_vocab().items() if own.get(word) != i]:
            raise ValueError(
                f"{name}={path}: its tokenizer gives {differing[0]!r} the id {own.get(differing[0])}, the model's "
                f"{tokenizer.get_vocab()[differing[0]]}; expected a teacher with the same ids"
            )
        self.lm.requires_grad_(False).eval().to(device)
        _without_dropout(self.lm)

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any], vocab_size: int) -> Teacher:
        """For the completions of model_inputs; rows of its weight beyond `vocab_size`, which are padding, are left
        out."""

        def head(
            hidden: Tensor, weight: Tensor, ids: Tensor, *, lm_head_bias: Tensor | None, **transform: Any
        ) -> Teacher:
            transform.pop("completion_mask")
            bias = None if lm_head_bias is None else lm_head_bias.detach()[:vocab_size]
            return Teacher(hidden, weight.detach()[:vocab_size], bias, **transform)

        names = "input_ids", "attention_mask", "completion_ids", "completion_mask"
        teacher: Teacher = fused_forward(self.lm, loss=head, **{name: inputs[name] for name in names})
        return teacher


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
        """Within it the policy has the reference's parameters, exchanged one by one; no second model is held."""
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
        """reference = (1 - share) * reference + share * policy."""
        for parameter, copy in self.pairs.values():
            copy.lerp_(parameter.detach(), share)

    def state_dict(self) -> dict[str, Tensor]:
        """Whole tensors on the CPU; under FSDP2 every rank has to call it."""
        whole = {n: copy.full_tensor() if isinstance(copy, DTensor) else copy for n, (_, copy) in self.pairs.items()}
        return {name: tensor.cpu().contiguous() for name, tensor in whole.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, (_, copy) in self.pairs.items():
            value = state[name].to(copy.device)
            if isinstance(copy, DTensor):
                value = distribute_tensor(value, copy.device_mesh, copy.placements)
            copy.copy_(value)
