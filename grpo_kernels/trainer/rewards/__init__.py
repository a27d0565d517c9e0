"""Rewards: finding the functions, calling them, adding up what they give; those that are built in; the sandbox."""

from .programs import Code
from .sandbox import Limits, Outcome, Sandbox, SandboxFailure, SandboxUnavailable
from .scoring import Failure, RewardBatch, Rewards

__all__ = [
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
