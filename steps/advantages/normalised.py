"""Group estimators whose advantages are whitened over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_fn.state import Batch

from .columns import whiten_masked, written
from .rows import Groups, grouped_scores, relative_scores

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
