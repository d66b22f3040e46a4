"""Estimators that compare a row's reward with those of the other rows of its group, which can have any size."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch

from .columns import warn_of_ignored_rewards
from .rows import group_max, group_mean, group_scores, group_sum, outcome


def grpo(batch: Batch, *, norm_adv_by_std: bool = True, epsilon: float = 1e-6) -> Batch:
    """Estimates group-relative advantages (GRPO).

    The advantage of a row is its reward minus the mean of its group, divided by the group's standard deviation
    (unbiased). The advantage of a row that is alone in its group is its reward.

    Args:
        batch: needs the per-row field ``group``.
        norm_adv_by_std: whether to divide by the standard deviation; ``dr_grpo`` does not.
        epsilon: added to the standard deviation.

    Example:
        >>> rows = {"token_level_rewards": [[1.0], [0.0]], "response_mask": [[1.0], [1.0]]}
        >>> batch = Batch.from_rows([[1], [2]], rows, {"group": [0, 0]})
        >>> grpo(batch, norm_adv_by_std=False)["advantages"].tolist()
        [0.5, -0.5]

    Source: Shao et al. 2024 (arXiv 2402.03300).
    """
    warn_of_ignored_rewards(batch)
    scores, groups, count = group_scores(batch)
    return outcome(batch, relative_scores(scores, groups, count, epsilon if norm_adv_by_std else None))


def dr_grpo(batch: Batch) -> Batch:
    """Estimates the advantages of Dr. GRPO: those of ``grpo`` without the division by the standard deviation.

    Dr. GRPO also divides by a constant instead of each row's length: aggregate with ``seq-mean-token-sum-norm``.

    Args:
        batch: needs the per-row field ``group``.

    Example:
        >>> rows = {"token_level_rewards": [[1.0], [0.0]], "response_mask": [[1.0], [1.0]]}
        >>> dr_grpo(Batch.from_rows([[1], [2]], rows, {"group": [0, 0]}))["advantages"].tolist()
        [0.5, -0.5]

    Source: Liu et al. 2025 (arXiv 2503.20783).
    """
    return grpo(batch, norm_adv_by_std=False)


def grpo_passk(batch: Batch, *, norm_adv_by_std: bool = True, epsilon: float = 1e-6) -> Batch:
    """Estimates advantages for the best of a group (pass@k): only the best row has one.

    It is what the group's largest reward would lose without that row, the distance to the second best, divided by the
    group's standard deviation (unbiased). Where two rows are the best, all advantages are 0. The advantage of a row
    that is alone in its group is its reward.

    Args:
        batch: needs the per-row field ``group``.
        norm_adv_by_std: whether to divide by the standard deviation.
        epsilon: added to the standard deviation.

    Example:
        >>> rows = {"token_level_rewards": [[1.0], [0.25], [0.0]], "response_mask": [[1.0]] * 3}
        >>> batch = Batch.from_rows([[1], [2], [3]], rows, {"group": [0, 0, 0]})
        >>> grpo_passk(batch, norm_adv_by_std=False)["advantages"].tolist()
        [0.75, 0.0, 0.0]

    Source: Tang et al. 2025 (arXiv 2503.19595); the division is verl's.
    """
    warn_of_ignored_rewards(batch)
    scores, groups, count = group_scores(batch)
    best = scores == group_max(scores, groups, count)[groups]
    shared = group_sum(best.double(), groups, count) > 1
    second = group_max(torch.where(best, -torch.inf, scores), groups, count)
    gap = torch.where(best & ~shared[groups], scores - second[groups], 0.0)
    if norm_adv_by_std:
        gap = gap / (_deviation(scores, groups, count) + epsilon)
    return outcome(batch, torch.where(count[groups] == 1, scores, gap))


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
    scores, groups, count = group_scores(batch)
    n = count[groups]
    others = (group_mean(scores, groups, count)[groups] * n - scores) / (n - 1).clamp(min=1)
    return outcome(batch, torch.where(n == 1, scores, scores - others))


def opo(batch: Batch) -> Batch:
    """Estimates advantages with the optimal baseline of on-policy RL (OPO): the mean reward weighted by length.

    The advantage of a row is its reward minus the mean of its group, in which a row counts with its number of
    response tokens. The advantage of a row that is alone in its group is its reward.

    Args:
        batch: needs the per-row field ``group``.

    Example:
        >>> rows = {"token_level_rewards": [[0.0, 0.0, 1.0], [0.0]], "response_mask": [[1.0] * 3, [1.0]]}
        >>> opo(Batch.from_rows([[1, 2, 3], [4]], rows, {"group": [0, 0]}))["advantages"].tolist()
        [0.25, 0.25, 0.25, -0.75]

    Source: Hao et al. 2025 (arXiv 2505.23585).
    """
    warn_of_ignored_rewards(batch)
    scores, groups, count = group_scores(batch)
    lengths = batch.sum_rows(batch["response_mask"].double())
    baseline = group_mean(scores, groups, count, lengths)[groups]
    return outcome(batch, torch.where(count[groups] == 1, scores, scores - baseline))


def gpg(batch: Batch, *, f_norm: float = 1.0) -> Batch:
    """Estimates the advantages of group policy gradients (GPG): centred rewards, scaled up for groups without signal.

    The advantage of a row is alpha (reward - mean of its group) / f_norm, with alpha = B / (B - M): of the B rows of
    the batch, M are in groups whose rewards are all equal. These add nothing to the gradient, and alpha restores its
    size. The advantage of a row that is alone in its group is alpha times its reward, divided by ``f_norm``.

    Args:
        batch: needs the per-row field ``group``.
        f_norm: a constant divisor.

    Example:
        >>> rows = {"token_level_rewards": [[1.0], [0.0], [1.0], [1.0]], "response_mask": [[1.0]] * 4}
        >>> gpg(Batch.from_rows([[1], [2], [3], [4]], rows, {"group": [0, 0, 1, 1]}))["advantages"].tolist()
        [1.0, -1.0, 0.0, 0.0]

    Source: Chu et al. 2025 (arXiv 2504.02546).
    """
    warn_of_ignored_rewards(batch)
    scores, groups, count = group_scores(batch)
    centred = relative_scores(scores, groups, count)
    informative = group_max(centred.abs(), groups, count)[groups] > 0
    alpha = len(batch) / informative.sum().clamp(min=1)
    return outcome(batch, alpha * centred / f_norm)


def relative_scores(scores: Tensor, groups: Tensor, count: Tensor, epsilon: float | None = None) -> Tensor:
    """Returns each row's score minus the mean of its group, and the score of a row that is alone, ``[B]``.

    Args:
        epsilon: if it is given, the result is divided by the standard deviation of the group plus this number.
    """
    centred = torch.where(count[groups] == 1, scores, scores - group_mean(scores, groups, count)[groups])
    return centred if epsilon is None else centred / (_deviation(scores, groups, count) + epsilon)


def _deviation(scores: Tensor, groups: Tensor, count: Tensor) -> Tensor:
    """Returns the unbiased standard deviation of each row's group, and 1 for a row that is alone, ``[B]``."""
    spread = (scores - group_mean(scores, groups, count)[groups]).square()
    variance = group_mean(spread, groups, count) * count / (count - 1).clamp(min=1)
    return torch.where(count[groups] == 1, 1.0, variance[groups].sqrt())
