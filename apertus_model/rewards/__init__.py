"""Rewards of completions. `apertus_model.rewards.registry` opens one from its spec."""

from apertus_model.rewards.base import Reward, RewardError, Scored
from apertus_model.rewards.registry import open_reward

__all__ = ["Reward", "RewardError", "Scored", "open_reward"]
