"""Generalised advantage estimation."""

from __future__ import annotations

import torch

from verl_fn.state import Batch

from .columns import check_inputs, columns, uncolumn, whiten_masked, written


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
