"""The optimal token baseline: rows of a group are compared at each step, weighted by the variance of their gradients.

With W the sum of w = 1 - 2 pi + sum of pi^2 over the response tokens up to step t of a row, where pi is the
probability of a token and the sum runs over the vocabulary, and with R the rewards from step t to the row's end:

    B_t = sum of W_t R_t / sum of W_t, over the rows of the group that have a response token at step t
    A_t = R_t - B_t

w is the squared norm of the gradient of the token's log-probability with respect to the logits, so W stands for the
variance that a row's gradient has gathered so far.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.state import Batch

from .columns import Groups, grouped_scores, written
from .token_returns import rewards_to_go


def optimal_token_baseline(
    batch: Batch, *, handle_zero_tail: bool = True, rollout_is_weights: bool = False, epsilon: float = 1e-8
) -> Batch:
    """Estimates advantages with the optimal token baseline (OTB); a step is a position in the response.

    Tokens between response tokens, such as a tool's output, are steps too. A row that is compared with no other has
    the advantage 0.

    Args:
        batch: needs ``old_log_probs``, ``sum_pi_squared`` (an output of the model: the sum over the vocabulary of
            squared probabilities, of the policy that drew the token) and the per-row field ``group``.
        handle_zero_tail: whether the baseline is 0 where the longest row of a group has no other beside it; else
            these tokens are compared with themselves, and their advantage is about 0. With it, equal rewards do
            not give advantages of 0 there.
        rollout_is_weights: whether w is multiplied by the square of ``rollout_is_weights``, a field of
            ``correct_advantages``.
        epsilon: added to the sum of W.

    Example:
        >>> rows = {"token_level_rewards": [[1.0], [0.0]], "response_mask": [[1.0]] * 2,
        ...         "old_log_probs": [[-0.7], [-0.7]], "sum_pi_squared": [[0.5], [0.5]]}
        >>> batch = Batch.from_rows([[1], [2]], rows, {"group": [0, 0]})
        >>> [round(a, 4) for a in optimal_token_baseline(batch)["advantages"].tolist()]
        [0.5, -0.5]

    Source: Li et al. 2026 (arXiv 2602.07078).
    """
    mask = batch["response_mask"].bool()
    # The response starts at its first token that the model drew; no field says where the prompt ends.
    far = torch.where(mask, batch.positions, batch.num_tokens)
    start = torch.full((len(batch),), batch.num_tokens, device=far.device).scatter_reduce(
        0, batch.row_ids, far, "amin"
    )
    steps = batch.positions - batch.spread(start)
    return _estimate("optimal_token_baseline", batch, steps, handle_zero_tail, rollout_is_weights, epsilon)


def tir_optimal_token_baseline(
    batch: Batch, *, handle_zero_tail: bool = True, rollout_is_weights: bool = False, epsilon: float = 1e-8
) -> Batch:
    """Estimates advantages with the optimal token baseline for responses with tools; a step is a response token.

    It is ``optimal_token_baseline`` where the n-th response tokens of the rows are compared, whatever tools put
    between them.

    Args:
        batch: as for ``optimal_token_baseline``, like the other arguments.
        handle_zero_tail: whether the baseline is 0 where only the longest row goes on.
        rollout_is_weights: whether w is multiplied by the square of the field ``rollout_is_weights``.
        epsilon: added to the sum of W.

    Example:
        >>> rows = {"token_level_rewards": [[0.0, 0.0, 1.0], [0.0, 0.0]], "old_log_probs": [[-0.7] * 3, [-0.7] * 2],
        ...         "response_mask": [[1.0, 0.0, 1.0], [1.0] * 2], "sum_pi_squared": [[0.5] * 3, [0.5] * 2]}
        >>> batch = Batch.from_rows([[1, 2, 3], [4, 5]], rows, {"group": [0, 0]})
        >>> [round(a, 4) for a in tir_optimal_token_baseline(batch)["advantages"].tolist()]
        [0.5, 0.0, 0.5, -0.5, -0.5]

    Source: Li et al. 2026 (arXiv 2602.07078).
    """
    steps = _sum_so_far(batch, batch["response_mask"].long()) - 1
    return _estimate("tir_optimal_token_baseline", batch, steps, handle_zero_tail, rollout_is_weights, epsilon)


def _estimate(
    function: str, batch: Batch, steps: Int[Tensor, " T"], handle_zero_tail: bool, weighted: bool, epsilon: float
) -> Batch:
    read = ("old_log_probs", "sum_pi_squared", *["rollout_is_weights"] * weighted)
    scores, groups = grouped_scores(function, batch, *read)
    mask = batch["response_mask"].bool()
    returns = rewards_to_go(batch)
    variance = _sum_so_far(batch, _token_variance(batch, weighted))[mask]

    # Returns are taken relative to one number per group, so that equal rewards give exactly 0.
    group_of = batch.spread(groups.of)[mask]
    gap = (returns - batch.spread(groups.mean(scores)))[mask]
    width = int(torch.where(mask, steps, 0).max()) + 1
    cell = group_of * width + steps[mask]

    def total(values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        sums = torch.zeros(len(batch) * width, dtype=values.dtype, device=values.device)
        return sums.index_add(0, cell, values)[cell]

    advantages = torch.zeros_like(returns)
    advantages[mask] = gap - total(variance * gap) / (total(variance) + epsilon)
    if handle_zero_tail:
        advantages = torch.where(_tail(batch, steps, groups), returns, advantages)
    return written(function, batch, torch.where(batch.spread(groups.compared), advantages, 0.0), returns)


def _token_variance(batch: Batch, weighted: bool) -> Float[Tensor, " T"]:
    """Returns w of each response token in float64, and 0 elsewhere."""
    w = 1.0 - 2.0 * batch["old_log_probs"].double().exp() + batch["sum_pi_squared"].double()
    if weighted:
        w = w * batch["rollout_is_weights"].double().square()
    return torch.where(batch["response_mask"].bool(), w, 0.0)


def _tail(batch: Batch, steps: Tensor, groups: Groups) -> Tensor:
    """Returns a mask of the tokens of each group's longest row that lie beyond the end of all its other rows."""
    ends = torch.where(batch["response_mask"].bool(), steps + 1, 0)
    length = torch.zeros(len(batch), dtype=ends.dtype, device=ends.device).scatter_reduce(
        0, batch.row_ids, ends, "amax"
    )
    length = length.double()
    longest = length == groups.max(length)
    only = longest & (groups.sum(longest.long()) == 1)
    second = groups.max(torch.where(longest, -1.0, length))
    return batch.spread(only) & (steps >= batch.spread(second))


def _sum_so_far(batch: Batch, values: Tensor) -> Tensor:
    """Returns, for each token, the sum of its row's values up to it, ``[T]``."""
    sums = values.cumsum(0)
    first = batch.cu_seqlens[:-1].long()
    return sums - batch.spread(sums[first] - values[first])
