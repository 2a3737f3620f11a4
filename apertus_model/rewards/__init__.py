"""Rewards: what a completion is worth. See `apertus_model.rewards.registry` for how one is opened by its spec."""

from apertus_model.rewards.base import Reward, RewardError, Scored
from apertus_model.rewards.registry import open_reward

__all__ = ["Reward", "RewardError", "Scored", "open_reward"]
