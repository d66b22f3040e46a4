"""Estimators that need neither a critic nor groups."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

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

    Source: Hu et al. 2025 (arXiv 2501.03262).
    """
    warn_of_ignored_rewards(batch)
    returns = rewards_to_go(batch, gamma)
    return batch.with_tokens(advantages=whiten_masked(returns, batch["response_mask"].bool()), returns=returns)


def remax(batch: Batch) -> Batch:
    """Estimates advantages with the reward of the greedy response as baseline (ReMax).

    The return of a token is the sum of the rewards from it to the end of its row, and its advantage is the return
    minus the row's baseline.

    Args:
        batch: needs the per-row field ``reward_baselines``, the reward of the greedy response to the row's prompt.

    Example:
        >>> rows = {"token_level_rewards": [[0.0, 1.0]], "response_mask": [[1.0, 1.0]]}
        >>> remax(Batch.from_rows([[1, 2]], rows, {"reward_baselines": [0.25]}))["advantages"].tolist()
        [0.75, 0.75]

    Source: Li et al. 2023 (arXiv 2310.10505).
    """
    warn_of_ignored_rewards(batch)
    returns = rewards_to_go(batch)
    baselines = batch.spread(batch["reward_baselines"].to(returns.dtype))
    advantages = torch.where(batch["response_mask"].bool(), returns - baselines, 0.0)
    return batch.with_tokens(advantages=advantages, returns=returns)


def rewards_to_go(batch: Batch, gamma: float = 1.0) -> Float[Tensor, " T"]:
    """Returns the discounted sum of the rewards from each response token to the end of its row, and 0 elsewhere."""
    rewards = columns(batch, real(batch["token_level_rewards"]))
    returns = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards), dtype=rewards.dtype, device=rewards.device)
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
    return uncolumn(batch, returns)
