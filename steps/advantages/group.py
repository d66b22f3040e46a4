"""Advantage estimators: ``(batch, options) -> batch`` with ``advantages`` and ``returns``.

All read ``token_level_rewards`` and ``response_mask``. Tokens with ``response_mask`` 0 inside a response
(tool output) are carried through: recursions jump over them, and their advantage and return are 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch


def gae(batch: Batch, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> Batch:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438). Needs ``values``.

    Returns are advantages plus values, taken before whitening.

    >>> rows = {"token_level_rewards": [[0.0, 1.0]], "values": [[0.5, 0.5]], "response_mask": [[1.0, 1.0]]}
    >>> gae(Batch.from_rows([[1, 2]], rows), whiten=False)["advantages"].tolist()
    [0.5, 0.5]
    """
    mask = batch["response_mask"].bool()
    values = _columns(batch, batch["values"])
    rewards = _columns(batch, batch["token_level_rewards"])
    advantages = torch.zeros_like(values)
    running = next_value = torch.zeros(len(values), dtype=values.dtype, device=values.device)
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = delta + gamma * lam * running
        next_value = values[:, t]
        advantages[:, t] = running
    flat = _uncolumn(batch, advantages)
    returns = torch.where(mask, flat + batch["values"], 0.0)
    return batch.with_tokens(advantages=whiten_masked(flat, mask) if whiten else flat, returns=returns)


def grpo(batch: Batch, *, norm_adv_by_std: bool = True, epsilon: float = 1e-6) -> Batch:
    """Group-relative advantage (Shao et al. 2024, arXiv 2402.03300). Needs the per-row field ``group``.

    A row's reward less its group's mean, over the group's standard deviation (unbiased) unless
    ``norm_adv_by_std`` is off (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783). A group of one keeps its reward.

    >>> rows = {"token_level_rewards": [[1.0], [0.0]], "response_mask": [[1.0], [1.0]]}
    >>> batch = Batch.from_rows([[1], [2]], rows, {"group": [0, 0]})
    >>> grpo(batch, norm_adv_by_std=False)["advantages"].tolist()
    [0.5, -0.5]
    """
    scores, groups, count = _group_scores(batch)
    alone = count[groups] == 1
    mean = _group_mean(scores, groups, count)
    variance = _group_mean((scores - mean[groups]).square(), groups, count) * count / (count - 1).clamp(min=1)
    centred = torch.where(alone, scores, scores - mean[groups])
    if norm_adv_by_std:
        centred = centred / (torch.where(alone, 1.0, variance[groups].sqrt()) + epsilon)
    return _outcome(batch, centred)


def rloo(batch: Batch) -> Batch:
    """Leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740). Needs the per-row field ``group``.

    A row's reward less the mean of the others in its group; a group of one keeps its reward.

    >>> rows = {"token_level_rewards": [[1.0], [0.0], [0.0]], "response_mask": [[1.0]] * 3}
    >>> rloo(Batch.from_rows([[1], [2], [3]], rows, {"group": [0, 0, 0]}))["advantages"].tolist()
    [1.0, -0.5, -0.5]
    """
    scores, groups, count = _group_scores(batch)
    n = count[groups]
    others = (_group_mean(scores, groups, count)[groups] * n - scores) / (n - 1).clamp(min=1)
    return _outcome(batch, torch.where(n == 1, scores, scores - others))


def reinforce_plus_plus(batch: Batch, *, gamma: float = 1.0) -> Batch:
    """Discounted returns, whitened over the whole batch (Hu 2025, arXiv 2501.03262).

    >>> rows = {"token_level_rewards": [[0.0, 1.0]], "response_mask": [[1.0, 1.0]]}
    >>> reinforce_plus_plus(Batch.from_rows([[1, 2]], rows), gamma=0.5)["returns"].tolist()
    [0.5, 1.0]
    """
    rewards = _columns(batch, batch["token_level_rewards"])
    returns = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards), dtype=rewards.dtype, device=rewards.device)
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
    flat = _uncolumn(batch, returns)
    return batch.with_tokens(advantages=whiten_masked(flat, batch["response_mask"].bool()), returns=flat)


def whiten_masked(values: Float[Tensor, " T"], mask: Tensor) -> Float[Tensor, " T"]:
    """Shift and scale to mean 0 and variance 1 (unbiased) where ``mask`` is set; 0 elsewhere.

    A function of the whole batch: call it before the batch is split.

    >>> [round(x, 4) for x in whiten_masked(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()]
    [-0.7071, 0.7071, 0.0]
    """
    chosen = values[mask.bool()]
    if len(chosen) < 2:
        return torch.zeros_like(values)
    return torch.where(mask.bool(), (values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8), 0.0)


def _columns(batch: Batch, values: Tensor) -> Tensor:
    """Masked tokens of each row, right-aligned in ``[B, longest]``: recursions from the end start together."""
    row, column, width = _places(batch)
    table = torch.zeros(len(batch), width, dtype=values.dtype, device=values.device)
    table[row, column] = values[batch["response_mask"].bool()]
    return table


def _uncolumn(batch: Batch, table: Tensor) -> Tensor:
    row, column, _ = _places(batch)
    flat = torch.zeros(batch.num_tokens, dtype=table.dtype, device=table.device)
    flat[batch["response_mask"].bool()] = table[row, column]
    return flat


def _places(batch: Batch) -> tuple[Tensor, Tensor, int]:
    mask = batch["response_mask"].bool()
    counts = batch.sum_rows(mask.long())
    width = int(counts.max())
    row = batch.row_ids[mask]
    nth = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    return row, width - counts[row] + nth, width


def _group_scores(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's total reward, its group's number, and each group's size."""
    scores = batch.sum_rows(torch.where(batch["response_mask"].bool(), batch["token_level_rewards"], 0.0))
    _, groups, count = batch["group"].unique(return_inverse=True, return_counts=True)
    return scores, groups, count


def _group_mean(values: Tensor, groups: Tensor, count: Tensor) -> Tensor:
    return torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, groups, values) / count


def _outcome(batch: Batch, row_advantages: Tensor) -> Batch:
    """Every response token gets its row's advantage."""
    spread = torch.where(batch["response_mask"].bool(), batch.spread(row_advantages), 0.0)
    return batch.with_tokens(advantages=spread, returns=spread)
