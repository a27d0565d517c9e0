"""Rewards: finding the functions, calling them, adding up what they give; those that are built in; the sandbox."""

from .programs import Code
from .sandbox import Limits, Outcome, Sandbox, SandboxFailure, SandboxUnavailable
from .scoring import BUILT_IN, Failure, RewardBatch, Rewards

__all__ = [
    "BUILT_IN",
    "Code",
    "Failure",
    "Limits",
    "Outcome",
    "RewardBatch",
    "Rewards",
    "Sandbox",
    "SandboxFailure",
    "SandboxUnavailable",
]
