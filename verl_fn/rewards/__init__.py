"""From responses to scores."""

from .reward import Answer, Reward, RewardError
from .rules import by_rules, rule_for

__all__ = ["Answer", "Reward", "RewardError", "by_rules", "rule_for"]
