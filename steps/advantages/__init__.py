"""Advantage estimators: ``(batch, options) -> batch`` with ``advantages`` and ``returns``.

All of them read ``token_level_rewards`` and ``response_mask``. Tokens inside a response whose ``response_mask`` is 0,
such as tool output, are skipped by recursions; their advantage and return are 0. Rewards on them are ignored, with a
warning.
"""

from .columns import penalize_overlong, whiten_masked
from .group import dr_grpo, gdpo, gpg, grpo, grpo_passk, opo, reinforce_plus_plus_baseline, rloo
from .token_returns import gae, optimal_token_baseline, reinforce_plus_plus, remax, tir_optimal_token_baseline

__all__ = [
    "dr_grpo",
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "optimal_token_baseline",
    "penalize_overlong",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "tir_optimal_token_baseline",
    "whiten_masked",
]
