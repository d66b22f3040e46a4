"""Rewards of whole rows and statistics over groups of rows, which estimators of outcomes share."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.state import Batch

from .columns import real


def group_scores(batch: Batch) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"], Int[Tensor, " G"]]:
    """Returns each row's total reward, the index of its group, and the size of each group.

    Rewards are summed in float64, so that the mean of equal rewards is exactly that reward.
    """
    rewards = batch["token_level_rewards"].double()
    scores = batch.sum_rows(torch.where(batch["response_mask"].bool(), rewards, 0.0))
    _, groups, count = batch["group"].unique(return_inverse=True, return_counts=True)
    return scores, groups, count


def group_sum(values: Float[Tensor, " B"], groups: Int[Tensor, " B"], count: Int[Tensor, " G"]) -> Tensor:
    """Returns the sum of the values of each group, ``[G]``."""
    return torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, groups, values)


def group_max(values: Float[Tensor, " B"], groups: Int[Tensor, " B"], count: Int[Tensor, " G"]) -> Tensor:
    """Returns the largest value of each group, ``[G]``."""
    low = torch.full((len(count),), -torch.inf, dtype=values.dtype, device=values.device)
    return low.scatter_reduce(0, groups, values, "amax")


def group_mean(
    values: Float[Tensor, " B"], groups: Int[Tensor, " B"], count: Int[Tensor, " G"], weights: Tensor | None = None
) -> Float[Tensor, " G"]:
    """Returns the mean of the values of each group, weighted if ``weights`` are given; 0 if all weights are 0.

    Example:
        >>> groups, count = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
        >>> group_mean(torch.tensor([1.0, 4.0, 9.0]), groups, count, torch.tensor([2.0, 1.0, 1.0])).tolist()
        [2.0, 9.0]
    """
    weights = torch.ones_like(values) if weights is None else weights
    # Distances from the largest value, so that the mean of equal values is exactly that value for all weights.
    top = group_max(values, groups, count)
    total = group_sum(weights, groups, count)
    below = group_sum(weights * (values - top[groups]), groups, count) / torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, top + below, 0.0)


def outcome(batch: Batch, row_advantages: Float[Tensor, " B"]) -> Batch:
    """Writes each row's advantage to all of its response tokens, as advantages and as returns."""
    spread = batch.spread(row_advantages).to(real(batch["token_level_rewards"]).dtype)
    spread = torch.where(batch["response_mask"].bool(), spread, 0.0)
    return batch.with_tokens(advantages=spread, returns=spread)
