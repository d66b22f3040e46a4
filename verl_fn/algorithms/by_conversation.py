"""Estimators of groups for conversations of several rows: a conversation counts once, however many rows it has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from verl_fn.state import Batch, conversations
from verl_fn.steps.aggregate import last_of_rows


def by_conversation(batch: Batch, estimate: Callable[[Batch], Batch]) -> Batch:
    """Estimates one advantage for each conversation, and writes it to all response tokens of all its rows.

    The reward of a conversation is its score, which each of its rows has, plus what was added to the rewards of its
    rows, such as a KL penalty.

    Args:
        batch: has ``score`` where conversations have several rows.
        estimate: gives all response tokens of a row the same advantage.

    Example:
        >>> from verl_fn.steps import dr_grpo
        >>> rows = {"group": [7] * 3, "conversation": [0, 0, 1], "score": [1.0, 1.0, 0.0]}
        >>> tokens = {"response_mask": [[1.0]] * 3, "token_level_rewards": [[1.0], [1.0], [0.0]]}
        >>> by_conversation(Batch.from_rows([[1]] * 3, tokens, rows), dr_grpo)["advantages"].tolist()
        [0.5, 0.5, -0.5]
    """
    conversation, last = conversations(batch)
    if len(last) == len(batch):
        return estimate(batch)
    drawn = batch["response_mask"].bool()
    added = batch.sum_rows(torch.where(drawn, batch["token_level_rewards"], 0.0)) - batch["score"]
    total = torch.zeros(len(last), dtype=added.dtype).index_add(0, conversation, added)
    rows = batch.take(last)
    ends = last_of_rows(rows, rows["response_mask"])
    rewards = rows["token_level_rewards"] + rows.spread(total - added[last]) * ends
    advantages = rows.sum_rows(estimate(rows.with_tokens(token_level_rewards=rewards))["advantages"] * ends)
    spread = torch.where(drawn, batch.spread(advantages[conversation]), 0.0)
    return batch.with_tokens(advantages=spread, returns=spread)
