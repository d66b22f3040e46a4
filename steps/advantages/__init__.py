"""Advantage estimators: ``(batch, options) -> batch`` with ``advantages`` and ``returns``.

All read ``token_level_rewards`` and ``response_mask``. Tokens with ``response_mask`` 0 inside a response
(tool output) are carried through: recursions jump over them, and their advantage and return are 0.
"""

from .columns import whiten_masked
from .gae import gae
from .group import grpo, rloo
from .reinforce import reinforce_plus_plus

__all__ = ["gae", "grpo", "reinforce_plus_plus", "rloo", "whiten_masked"]
