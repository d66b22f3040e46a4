"""Estimators that compare a row's reward with the rewards of its group; groups can have any size.

Rows without a response token count in no group. A row that is compared with no other has the advantage 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_fn.state import Batch

from .columns import Groups, grouped_scores, outcome, relative_scores, whiten_masked, written


def grpo(batch: Batch, *, norm_adv_by_std: bool = True, epsilon: float = 1e-6) -> Batch:
    """Estimates group-relative advantages (GRPO).

    The advantage of a row is its reward minus the mean of its group, divided by the group's standard deviation
    (unbiased).

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
    return _relative("grpo", batch, epsilon if norm_adv_by_std else None)


def dr_grpo(batch: Batch) -> Batch:
    """Estimates the advantages of Dr. GRPO: ``grpo`` without the division by the standard deviation.

    Dr. GRPO also divides by a constant instead of each row's length: aggregate with ``seq-mean-token-sum-norm``.

    Args:
        batch: needs the per-row field ``group``.

    Example:
        >>> rows = {"token_level_rewards": [[1.0], [0.0]], "response_mask": [[1.0], [1.0]]}
        >>> dr_grpo(Batch.from_rows([[1], [2]], rows, {"group": [0, 0]}))["advantages"].tolist()
        [0.5, -0.5]

    Source: Liu et al. 2025 (arXiv 2503.20783).
    """
    return _relative("dr_grpo", batch, None)


def grpo_passk(batch: Batch, *, norm_adv_by_std: bool = True, epsilon: float = 1e-6) -> Batch:
    """Estimates advantages for the best of a group (pass@k): only the best row has one.

    It is what the group's largest reward would lose without that row, the distance to the second best, divided by the
    group's standard deviation (unbiased). If two rows are the best, all advantages are 0.

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
    scores, groups = grouped_scores("grpo_passk", batch)
    best = scores == groups.max(scores)
    second = groups.max(torch.where(best, -torch.inf, scores))
    only = groups.compared & best & (groups.sum(best.long()) == 1)
    gap = torch.where(only, scores - second, 0.0)
    return outcome("grpo_passk", batch, gap / (groups.deviation(scores) + epsilon) if norm_adv_by_std else gap)


def rloo(batch: Batch) -> Batch:
    """Estimates advantages with a leave-one-out baseline (RLOO).

    The advantage of a row is its reward minus the mean reward of the other rows of its group.

    Args:
        batch: needs the per-row field ``group``.

    Example:
        >>> rows = {"token_level_rewards": [[1.0], [0.0], [0.0]], "response_mask": [[1.0]] * 3}
        >>> rloo(Batch.from_rows([[1], [2], [3]], rows, {"group": [0, 0, 0]}))["advantages"].tolist()
        [1.0, -0.5, -0.5]

    Source: Ahmadian et al. 2024 (arXiv 2402.14740).
    """
    scores, groups = grouped_scores("rloo", batch)
    # The distance from the mean of the others is that from the mean of all, times n / (n - 1).
    size = groups.size.double()
    return outcome("rloo", batch, relative_scores(scores, groups) * size / (size - 1.0).clamp(min=1.0))


def opo(batch: Batch) -> Batch:
    """Estimates advantages with the optimal baseline of on-policy RL (OPO): the mean reward weighted by length.

    The advantage of a row is its reward minus the mean of its group, in which a row counts with its number of
    response tokens.

    Args:
        batch: needs the per-row field ``group``.

    Example:
        >>> rows = {"token_level_rewards": [[0.0, 0.0, 1.0], [0.0]], "response_mask": [[1.0] * 3, [1.0]]}
        >>> opo(Batch.from_rows([[1, 2, 3], [4]], rows, {"group": [0, 0]}))["advantages"].tolist()
        [0.25, 0.25, 0.25, -0.75]

    Source: Hao et al. 2025 (arXiv 2505.23585).
    """
    scores, groups = grouped_scores("opo", batch)
    baseline = groups.mean(scores, batch.sum_rows(batch["response_mask"].double()))
    return outcome("opo", batch, scores - baseline)


def gpg(batch: Batch, *, f_norm: float = 1.0) -> Batch:
    """Estimates the advantages of group policy gradients (GPG): centred rewards, scaled up for groups without signal.

    The advantage of a row is alpha (reward - mean of its group) / f_norm, with alpha = B / (B - M): of the B rows of
    the batch, M are in groups whose rewards are all equal. These add nothing to the gradient, and alpha restores its
    size.

    Args:
        batch: needs the per-row field ``group``.
        f_norm: a constant divisor.

    Example:
        >>> rows = {"token_level_rewards": [[1.0], [0.0], [1.0], [1.0]], "response_mask": [[1.0]] * 4}
        >>> gpg(Batch.from_rows([[1], [2], [3], [4]], rows, {"group": [0, 0, 1, 1]}))["advantages"].tolist()
        [1.0, -1.0, 0.0, 0.0]

    Source: Chu et al. 2025 (arXiv 2504.02546).
    """
    scores, groups = grouped_scores("gpg", batch)
    centred = relative_scores(scores, groups)
    informative = groups.counts & (groups.max(centred.abs()) > 0)
    alpha = int(groups.counts.sum()) / max(int(informative.sum()), 1)
    return outcome("gpg", batch, alpha * centred / f_norm)


def _relative(function: str, batch: Batch, epsilon: float | None) -> Batch:
    scores, groups = grouped_scores(function, batch)
    return outcome(function, batch, relative_scores(scores, groups, epsilon))


COMPONENT = "reward/"


def reinforce_plus_plus_baseline(batch: Batch) -> Batch:
    """Estimates advantages as rewards minus the mean of their group, whitened over the tokens of the batch.

    A row that is compared with no other takes no part in the whitening, and has the advantage 0.

    Args:
        batch: needs the per-row field ``group``.

    Example:
        >>> rows = {"token_level_rewards": [[2.0], [0.0]], "response_mask": [[1.0], [1.0]]}
        >>> advantages = reinforce_plus_plus_baseline(Batch.from_rows([[1], [2]], rows, {"group": [0, 0]}))
        >>> [round(a, 4) for a in advantages["advantages"].tolist()]
        [0.7071, -0.7071]

    Source: Hu et al. 2025 (arXiv 2501.03262).
    """
    scores, groups = grouped_scores("reinforce_plus_plus_baseline", batch)
    return _whitened("reinforce_plus_plus_baseline", batch, groups, relative_scores(scores, groups))


def gdpo(
    batch: Batch,
    *,
    reward_keys: Sequence[str] | None = None,
    reward_weights: Sequence[float] | None = None,
    norm_adv_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Batch:
    """Estimates advantages from several rewards, each compared within its group before they are added (GDPO).

    Each reward k gives a GRPO advantage A_k of its own, so that a reward with a large spread does not hide the
    others. Their weighted sum is whitened over the tokens of the batch. A row that is compared with no other takes
    no part in it, and has the advantage 0.

    Args:
        batch: needs the per-row fields ``group`` and, for each key, ``reward/KEY``.
        reward_keys: the rewards to use; by default all per-row fields ``reward/...`` of the batch, ordered by name.
        reward_weights: one weight for each key; by default 1.
        norm_adv_by_std: whether each A_k is divided by the group's standard deviation.
        epsilon: added to the standard deviation.

    Raises:
        ValueError: the batch or a row lacks one of the rewards, or there is not one weight for each key.

    Example:
        >>> rows = {"token_level_rewards": [[9.0], [0.0]], "response_mask": [[1.0], [1.0]]}
        >>> fields = {"group": [0, 0], "reward/style": [0.0, 1.0], "reward/truth": [9.0, 0.0]}
        >>> batch = gdpo(Batch.from_rows([[1], [2]], rows, fields), reward_weights=[3.0, 1.0])
        >>> [round(a, 4) for a in batch["advantages"].tolist()]
        [-0.7071, 0.7071]

    Source: Liu et al. 2026 (arXiv 2601.05242).
    """
    known = sorted(name.removeprefix(COMPONENT) for name in batch.per_row if name.startswith(COMPONENT))
    keys = known if reward_keys is None else list(reward_keys)
    missing = [key for key in keys if key not in known]
    if missing or not keys:
        raise ValueError(
            f"gdpo needs the rewards {missing or 'of several functions'} as per-row fields reward/NAME; this batch "
            f"has {known}. Name them in reward_keys, and have the reward return them"
        )
    weights = [1.0] * len(keys) if reward_weights is None else list(reward_weights)
    if len(weights) != len(keys):
        raise ValueError(f"{len(weights)} reward_weights for {len(keys)} reward_keys {keys}; give one for each")
    _, groups = grouped_scores("gdpo", batch, *(COMPONENT + key for key in keys))
    total = torch.zeros(len(batch), dtype=torch.float64, device=groups.of.device)
    for key, weight in zip(keys, weights, strict=True):
        scores = torch.where(groups.counts, batch[COMPONENT + key].double(), 0.0)
        total += weight * relative_scores(scores, groups, epsilon if norm_adv_by_std else None)
    return _whitened("gdpo", batch, groups, total)


def _whitened(function: str, batch: Batch, groups: Groups, row_advantages: Tensor) -> Batch:
    """Spreads advantages of rows over their tokens and whitens them in float64."""
    compared = batch["response_mask"].bool() & batch.spread(groups.compared)
    white = whiten_masked(batch.spread(row_advantages), compared)
    return written(function, batch, white, white)
