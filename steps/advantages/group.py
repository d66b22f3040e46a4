"""Estimators that compare a row with the other rows of its group. Groups can have any number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch

from .columns import real, warn_of_ignored_rewards


def grpo(batch: Batch, *, norm_adv_by_std: bool = True, epsilon: float = 1e-6) -> Batch:
    """Estimates group-relative advantages (GRPO).

    The advantage of a row is its reward minus the mean of its group, divided by the group's standard deviation
    (unbiased). The advantage of a row that is alone in its group is its reward.

    Args:
        batch: needs the per-row field ``group``.
        norm_adv_by_std: whether to divide by the standard deviation; Dr. GRPO does not.
        epsilon: added to the standard deviation.

    Example:
        >>> rows = {"token_level_rewards": [[1.0], [0.0]], "response_mask": [[1.0], [1.0]]}
        >>> batch = Batch.from_rows([[1], [2]], rows, {"group": [0, 0]})
        >>> grpo(batch, norm_adv_by_std=False)["advantages"].tolist()
        [0.5, -0.5]

    Source: Shao et al. 2024 (arXiv 2402.03300); Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783).
    """
    warn_of_ignored_rewards(batch)
    scores, groups, count = _group_scores(batch)
    alone = count[groups] == 1
    mean = _group_mean(scores, groups, count)
    variance = _group_mean((scores - mean[groups]).square(), groups, count) * count / (count - 1).clamp(min=1)
    centred = torch.where(alone, scores, scores - mean[groups])
    if norm_adv_by_std:
        centred = centred / (torch.where(alone, 1.0, variance[groups].sqrt()) + epsilon)
    return _outcome(batch, centred)


def rloo(batch: Batch) -> Batch:
    """Estimates advantages with a leave-one-out baseline (RLOO).

    The advantage of a row is its reward minus the mean reward of the other rows of its group. The advantage of a row
    that is alone in its group is its reward.

    Args:
        batch: needs the per-row field ``group``.

    Example:
        >>> rows = {"token_level_rewards": [[1.0], [0.0], [0.0]], "response_mask": [[1.0]] * 3}
        >>> rloo(Batch.from_rows([[1], [2], [3]], rows, {"group": [0, 0, 0]}))["advantages"].tolist()
        [1.0, -0.5, -0.5]

    Source: Ahmadian et al. 2024 (arXiv 2402.14740).
    """
    warn_of_ignored_rewards(batch)
    scores, groups, count = _group_scores(batch)
    n = count[groups]
    others = (_group_mean(scores, groups, count)[groups] * n - scores) / (n - 1).clamp(min=1)
    return _outcome(batch, torch.where(n == 1, scores, scores - others))


def _group_scores(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each row's total reward, the index of its group, and the size of each group.

    Rewards are summed in float64, so that the mean of equal rewards is exactly that reward.
    """
    rewards = batch["token_level_rewards"].double()
    scores = batch.sum_rows(torch.where(batch["response_mask"].bool(), rewards, 0.0))
    _, groups, count = batch["group"].unique(return_inverse=True, return_counts=True)
    return scores, groups, count


def _group_mean(values: Tensor, groups: Tensor, count: Tensor) -> Tensor:
    return torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, groups, values) / count


def _outcome(batch: Batch, row_advantages: Tensor) -> Batch:
    """Writes each row's advantage to all of its response tokens, as advantages and as returns."""
    spread = batch.spread(row_advantages).to(real(batch["token_level_rewards"]).dtype)
    spread = torch.where(batch["response_mask"].bool(), spread, 0.0)
    return batch.with_tokens(advantages=spread, returns=spread)
