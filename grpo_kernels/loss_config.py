"""The options of GRPOConfig as plain data, which every floor may read, and what each may be. GRPOConfig checks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch

from .argument import ABOVE_0, AT_LEAST_0, FINITE, FLOATS, LARGEST, NUMBERS, ONE, PER_SEQUENCE, Argument
from .names import AdvantageBaseline, AdvantageScale, Divergence


@dataclass(frozen=True)
class LossConfig:
    """What a loss is computed with. GRPOConfig says what each option means, and gives those at None their defaults."""

    surrogate: str = "clip"
    importance_sampling_level: str | None = None
    kl_estimator: str = "k3"
    aggregation: str = "num_items"
    beta: Annotated[float, AT_LEAST_0] = 0.0
    epsilon_low: Annotated[float | None, AT_LEAST_0] = None
    epsilon_high: Annotated[float | None, AT_LEAST_0] = None
    delta: Annotated[float | None, ABOVE_0] = None
    dual_clip: Annotated[float | None, Argument(above=1.0)] = None
    dppo_kl_tau: Annotated[float | None, AT_LEAST_0] = None
    ratio_cap: Annotated[float | None, ABOVE_0] = None
    a2po_beta: Annotated[float | None, ABOVE_0] = None
    log_ratio_clamp: Annotated[float | None, ABOVE_0] = None
    kl_clamp: Annotated[float | tuple[float | None, float | None] | None, ABOVE_0] = None
    use_bias_correction_kl: bool = False
    kl_score_term: bool = False
    distill_coef: Annotated[float, AT_LEAST_0] = 0.0
    divergence: Divergence | None = None
    divergence_beta: Annotated[float | None, Argument(above=0.0, below=1.0)] = None  # at its ends: KL divergences
    temperature: Annotated[float | torch.Tensor, Argument((*PER_SEQUENCE, ()), FLOATS, above=0.0, high=LARGEST)] = 1.0
    logit_scale: Annotated[float, ABOVE_0] = 1.0
    logit_softcap: Annotated[float | None, ABOVE_0] = None
    entropy_coef: Annotated[float | torch.Tensor, Argument(ONE, NUMBERS, low=0.0, high=FINITE)] = 0.0
    entropy_aggregation: str | None = None
    entropy_kept_only: bool = False
    entropy_threshold: Annotated[float | torch.Tensor | None, Argument(ONE, NUMBERS, allows_nan=True)] = None
    off_policy_mask_threshold: Annotated[float | None, AT_LEAST_0] = None
    max_completion_length: int | None = None
    sapo_temperature_pos: Annotated[float | None, ABOVE_0] = None
    sapo_temperature_neg: Annotated[float | None, ABOVE_0] = None
    vespo_k_pos: float | None = None
    vespo_k_neg: float | None = None
    vespo_lambda_pos: Annotated[float | None, ABOVE_0] = None
    vespo_lambda_neg: Annotated[float | None, ABOVE_0] = None
    advantage_scale: AdvantageScale = "group"
    advantage_baseline: AdvantageBaseline = "mean"
    advantage_ddof: Annotated[int, Argument(low=0, high=1)] = 1
    advantage_eps: Annotated[float, AT_LEAST_0] = 1e-4
    score_inactive: bool = True
    logits_dtype: torch.dtype | None = None
    chunk_rows: int | None = None
    dweight_sum: Literal["weight", "float32"] = "weight"
    static_shapes: bool = False
    sparse_backward: Annotated[float | None, Argument(above=0.0, below=1.0)] = None
    # Everything but the tensors, as text: what a custom operator receives, and a constant to torch.compile. GRPOConfig
    # has checked it, and it is not checked again.
    key: str = field(init=False, repr=False, compare=False, default="")
    # What follows from the options and from which inputs a call has, by these. No field, and not pickled.
    derived: ClassVar[dict[Any, Any]]

    @property
    def has_entropy_bonus(self) -> bool:
        """Says whether the loss has an entropy bonus; a tensor counts as one: its value is not read."""
        return isinstance(self.entropy_coef, torch.Tensor) or self.entropy_coef != 0.0

    @property
    def kl_clamps(self) -> tuple[float | None, float | None]:
        """Returns (bound on |ref_logp - logp|, bound on |KL|)."""
        if not isinstance(self.kl_clamp, tuple):
            return None, self.kl_clamp
        if len(self.kl_clamp) != 2:
            raise ValueError(f"kl_clamp={self.kl_clamp!r}; expected a number or a pair (bound on d, bound on KL)")
        return self.kl_clamp
