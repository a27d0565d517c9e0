"""Liger's GRPO loss under its own name: constructor, call and return of liger-kernel 0.8.5.

Import LigerFusedLinearGRPOLoss from here in place of liger_kernel.chunked_loss; Liger itself is not needed.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checks.plain import check_plain
from ..config import GRPOConfig, check_one_of, options_of_loss_type
from ..logps import fused_logps
from ..loss import fused_grpo_loss
from ..objective.sequences import Level


@dataclass(eq=False, repr=False)
class LigerFusedLinearGRPOLoss(nn.Module):
    """loss, metrics = module(hidden, weight, ids, mask, advantages, ...), as Liger's module of this name.

    metrics are ([mean KL if beta != 0], share of clipped tokens). The arguments are Liger's; `compiled` and
    `chunk_size` say how Liger computes, and change nothing here. sparse_backward and logits_dtype, which Liger does not
    have, are as in `grpo_kernels.GRPOConfig`. What differs:

    - "luspo" leaves padding out, and sums the tokens of a sequence where Liger takes their mean times the length. Both
      agree for sequence-level ratios with beta=0 and weights per sequence, which is LUSPO (arXiv:2602.05261).
    - The share of clipped tokens is measured after the clamp by delta, as in TRL, which shows where delta is below
      1 + epsilon_high.
    - advantages may be (B, T); Liger takes only (B,).
    - An argument without effect raises a ValueError: delta with "cispo", "sapo" and "vespo"; reference
      log-probabilities with use_ref_model=False.
    """

    beta: float = 0.04
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int = 1
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: Level = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    _: KW_ONLY
    sparse_backward: float | None = None
    logits_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__init__()  # after the fields, which are no tensors: nn.Module allows it
        self._config()  # an argument that does not fit raises here

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns (loss (), metrics), with gradients to _input (B, T, H), lin_weight (V, H) and bias (V,)."""
        config = self._config()
        check_plain("attention_mask", attention_mask)
        old_logps, ref_per_token_logps, vllm_is_ratio, num_items_in_batch = map(
            _without_graph, (old_per_token_logps, ref_per_token_logps, vllm_is_ratio, num_items_in_batch)
        )
        if ref_per_token_logps is not None and not self.use_ref_model:
            raise ValueError("ref_per_token_logps has no effect with use_ref_model=False; leave one of them out")
        if self.beta != 0.0 and self.use_ref_model and ref_per_token_logps is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    f"beta={self.beta} needs ref_per_token_logps, or ref_input and ref_weight; got neither"
                )
            with torch.no_grad():
                ref_per_token_logps, _ = fused_logps(
                    ref_input, ref_weight, selected_token_ids, completion_mask=attention_mask, lm_head_bias=ref_bias,
                    temperature=self.temperature, logits_dtype=self.logits_dtype,
                )  # fmt: skip
        if self.loss_type == "vespo" and vllm_is_ratio is not None:
            vllm_is_ratio = _shared_evenly(vllm_is_ratio, attention_mask)
        counts_tokens = config.aggregation == "num_items"
        out = fused_grpo_loss(
            _input, lin_weight, selected_token_ids, _without_graph(advantages), completion_mask=attention_mask,
            old_logps=old_logps, ref_logps=ref_per_token_logps if config.beta else None,
            rollout_weights=vllm_is_ratio, lm_head_bias=bias, config=config,
            normalizer=_tokens_per_rank(attention_mask, num_items_in_batch) if counts_tokens else None,
        )  # fmt: skip
        zero = torch.zeros_like(out.loss.detach())
        clip = "cispo_clip_ratio" if self.loss_type == "cispo" else "clip_ratio/region"
        metrics = [out.metrics.get(clip, zero)]
        if self.beta != 0.0:  # without a reference model Liger's KL is that to the model itself
            metrics.insert(0, out.metrics.get("kl", zero))
        return out.loss, tuple(metrics)

    def _config(self) -> GRPOConfig:
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OF_LIGER}
        return _config(**options | {"beta": self.beta if self.use_ref_model else 0.0})


_OF_LIGER = ("compiled", "use_ref_model", "chunk_size")  # fields that GRPOConfig does not have


@lru_cache(maxsize=16)
def _config(loss_type: str, importance_sampling_level: Level, **options: Any) -> GRPOConfig:
    """Returns the configuration of Liger's arguments, as far as the loss type reads them."""
    options["importance_sampling_level"] = importance_sampling_level
    fields_read = options_of_loss_type(loss_type, options)
    check_one_of("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    if importance_sampling_level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        raise ValueError(f"importance_sampling_level='sequence' does not go with loss_type={loss_type!r}")
    if fields_read.get("max_completion_length", 0) is None:
        raise ValueError("max_completion_length is None; loss_type='dr_grpo' needs it")
    return GRPOConfig(**fields_read | {name: options[name] for name in ("delta", "sparse_backward", "logits_dtype")})


def _without_graph(x: Any) -> Any:
    """Returns an input that gets no gradient from Liger, whether it requires one or not."""
    return x.detach() if isinstance(x, Tensor) else x


def _tokens_per_rank(mask: Tensor, num_items_in_batch: Tensor | float | None) -> Tensor:
    """Returns tokens of the whole batch over ranks, at least 1, where a trainer averages gradients over ranks."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items_in_batch is None:
        total = mask.sum(dtype=torch.float32)
        if ranks > 1:
            dist.all_reduce(total)
    else:
        total = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=mask.device)
    return (total / ranks).clamp(min=1.0)


def _shared_evenly(ratio: Tensor, mask: Tensor) -> Tensor:
    """Returns ratios (B, T) whose logarithms over the scored tokens add up to what Liger adds up for VESPO: the
    logarithm of one ratio (B, 1), or the logarithms of all tokens, of padding too."""
    if ratio.shape not in ((len(mask), 1), mask.shape):
        return ratio  # which the loss refuses
    total = ratio.log().clamp(math.log(1e-8), 20.0).sum(1, keepdim=True)
    return (total / mask.sum(1, keepdim=True).clamp(min=1)).exp().expand(mask.shape)
