"""Advantage estimators: functions from batch to batch."""

from .group import gae, grpo, reinforce_plus_plus, rloo, whiten_masked

__all__ = ["gae", "grpo", "reinforce_plus_plus", "rloo", "whiten_masked"]
