"""Estimators that need neither a critic nor groups."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch

from .columns import check_inputs, columns, uncolumn, whiten_masked, written


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
    check_inputs("reinforce_plus_plus", batch)
    returns = rewards_to_go(batch, gamma)
    return written("reinforce_plus_plus", batch, whiten_masked(returns, batch["response_mask"]), returns)


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
    check_inputs("remax", batch, "reward_baselines")
    returns = rewards_to_go(batch)
    return written("remax", batch, returns - batch.spread(batch["reward_baselines"].double()), returns)


def rewards_to_go(batch: Batch, gamma: float = 1.0) -> Float[Tensor, " T"]:
    """Returns the discounted sum of the rewards from each response token to the end of its row, and 0 elsewhere.

    It is computed and returned in float64.
    """
    rewards = columns(batch, batch["token_level_rewards"].double())
    returns = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards), dtype=rewards.dtype, device=rewards.device)
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
    return uncolumn(batch, returns)
