"""Rewards: scoring.py calls functions, in a process of worker.py where they have limits, and adds up their numbers.

Built in are rewards of texts (answers.py) and of programs (programs.py). sandbox.py runs programs, inside.py isolates
them; process.py is the process that worker.py and sandbox.py talk to.
"""

from .programs import Code
from .sandbox import Limits, Outcome, Sandbox, SandboxUnavailable
from .scoring import RewardBatch, Rewards

__all__ = ["Code", "Limits", "Outcome", "RewardBatch", "Rewards", "Sandbox", "SandboxUnavailable"]
