"""Rewards: scoring.py calls functions, in a process of worker.py where they have limits, and adds up their numbers.

answers.py has the built-in ones; process.py is the process that worker.py talks to.
"""

from .scoring import RewardBatch, Rewards

__all__ = ["RewardBatch", "Rewards"]
