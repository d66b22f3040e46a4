"""Rewards: scores for responses, by rules or by functions of the user."""

from .reward import Answer, Reward, RewardError, by_rules, rule_for, unscored

__all__ = ["Answer", "Reward", "RewardError", "by_rules", "rule_for", "unscored"]
