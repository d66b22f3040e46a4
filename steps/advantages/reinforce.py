"""Estimators that need neither a critic nor groups."""

from __future__ import annotations

import torch

from verl_fn.state import Batch

from .columns import columns, real, uncolumn, warn_of_ignored_rewards, whiten_masked


def reinforce_plus_plus(batch: Batch, *, gamma: float = 1.0) -> Batch:
    """Estimates advantages as discounted returns, whitened over the whole batch (REINFORCE++).

    Args:
        batch: needs only the fields that all estimators read.
        gamma: the discount factor per token.

    Example:
        >>> rows = {"token_level_rewards": [[0.0, 1.0]], "response_mask": [[1.0, 1.0]]}
        >>> reinforce_plus_plus(Batch.from_rows([[1, 2]], rows), gamma=0.5)["returns"].tolist()
        [0.5, 1.0]

    Source: Hu 2025 (arXiv 2501.03262).
    """
    warn_of_ignored_rewards(batch)
    rewards = columns(batch, real(batch["token_level_rewards"]))
    returns = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards), dtype=rewards.dtype, device=rewards.device)
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
    flat = uncolumn(batch, returns)
    return batch.with_tokens(advantages=whiten_masked(flat, batch["response_mask"].bool()), returns=flat)
