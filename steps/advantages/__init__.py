"""Advantage estimators: ``(batch, options) -> batch`` with ``advantages`` and ``returns``.

All of them read ``token_level_rewards`` and ``response_mask``. Tokens inside a response whose ``response_mask`` is 0,
such as tool output, are skipped by recursions; their advantage and return are 0. Rewards on them are ignored, with a
warning.
"""
