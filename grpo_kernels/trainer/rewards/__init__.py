"""Rewards: scoring.py adds up what functions give, functions.py finds and calls them, answers.py has the built-in ones,
reading.py finds and compares answers."""

from .scoring import RewardBatch, Rewards

__all__ = ["RewardBatch", "Rewards"]
