"""Estimators that sum rewards over the later tokens of a row: GAE, REINFORCE++, ReMax and the optimal token baseline.

The optimal token baseline compares the rows of a group at each step, weighted by the variance of their gradients.
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

from .columns import Groups, check_inputs, columns, grouped_scores, uncolumn, whiten_masked, written


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
    start = batch.reduce_rows(torch.where(mask, batch.positions, batch.num_tokens), "amin")
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
    width = int(torch.where(mask, steps, 0).max()) + 1 if len(steps) else 0
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
    length = batch.reduce_rows(ends, "amax").double()
    longest = length == groups.max(length)
    only = longest & (groups.sum(longest.long()) == 1)
    second = groups.max(torch.where(longest, -1.0, length))
    return batch.spread(only) & (steps >= batch.spread(second))


def _sum_so_far(batch: Batch, values: Tensor) -> Tensor:
    """Returns, for each token, the sum of its row's values up to it, ``[T]``."""
    sums = values.cumsum(0)
    first = batch.cu_seqlens[:-1].long()
    return sums - batch.spread(sums[first] - values[first])
