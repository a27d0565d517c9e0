"""Entries for trainers and models. Each module imports its peer package at its own import, never `grpo_kernels`."""

from ..logit_transform import LogitTransform, logit_transform

__all__ = ["LogitTransform", "logit_transform"]
