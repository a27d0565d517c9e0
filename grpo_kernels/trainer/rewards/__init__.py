"""Rewards: scoring.py adds up what functions give, worker.py finds and calls them, answers.py has the built-in ones."""

from .scoring import RewardBatch, Rewards

__all__ = ["RewardBatch", "Rewards"]
