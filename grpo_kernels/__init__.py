"""Fused GRPO losses from hidden states: exact, in one chunk of logits. See the README, or `help(fused_grpo_loss)`."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch can do without it, and so can this package
    import torch

from .config import GRPOConfig, available_presets
from .corrections import rejection_mask, rollout_weights
from .distillation import DistillationOutput, fused_distillation_loss, fused_divergence
from .kernels import available_backends
from .logps import fused_logps, fused_top_k, sampling_support
from .loss import GRPOLossOutput, fused_grpo_loss, grpo_loss_from_logits, grpo_loss_from_logps
from .policy import PolicyChunk, fused_policy_loss
from .rewards import combine_advantages, entropy_quantile, group_advantages, process_advantages
from .sampling_mask import SamplingMask
from .teacher import Teacher, TopKTeacher

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """Returns the public names, without the modules that hold them."""
    return [*__all__, "__version__"]


__all__ = [
    "DistillationOutput",
    "GRPOConfig",
    "GRPOLossOutput",
    "PolicyChunk",
    "SamplingMask",
    "Teacher",
    "TopKTeacher",
    "available_backends",
    "available_presets",
    "combine_advantages",
    "entropy_quantile",
    "fused_distillation_loss",
    "fused_divergence",
    "fused_grpo_loss",
    "fused_logps",
    "fused_policy_loss",
    "fused_top_k",
    "group_advantages",
    "grpo_loss_from_logits",
    "grpo_loss_from_logps",
    "process_advantages",
    "rejection_mask",
    "rollout_weights",
    "sampling_support",
]
