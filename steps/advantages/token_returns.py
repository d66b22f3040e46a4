"""Estimators that sum rewards over the later tokens of a row: GAE, REINFORCE++ and ReMax."""

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


def gae(batch: Batch, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> Batch:
    """Estimates advantages by generalised advantage estimation (GAE).

    The returns are the advantages before whitening, plus the values. All is computed in float64.

    Args:
        batch: needs ``values``.
        gamma: the discount factor per token.
        lam: the decay of the sum over temporal differences: 0 uses one of them, 1 the whole rest of the response.
        whiten: whether advantages are whitened over the whole batch.

    Example:
        >>> rows = {"token_level_rewards": [[0.0, 1.0]], "values": [[0.5, 0.5]], "response_mask": [[1.0, 1.0]]}
        >>> gae(Batch.from_rows([[1, 2]], rows), whiten=False)["advantages"].tolist()
        [0.5, 0.5]

    Source: Schulman et al. 2016 (arXiv 1506.02438).
    """
    check_inputs("gae", batch, "values")
    values = columns(batch, batch["values"].double())
    rewards = columns(batch, batch["token_level_rewards"].double())
    advantages = torch.zeros_like(values)
    running = next_value = torch.zeros(len(values), dtype=values.dtype, device=values.device)
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = delta + gamma * lam * running
        next_value = values[:, t]
        advantages[:, t] = running
    flat = uncolumn(batch, advantages)
    white = whiten_masked(flat, batch["response_mask"]) if whiten else flat
    return written("gae", batch, white, flat + batch["values"].double())
