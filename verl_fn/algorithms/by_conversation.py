"""Conversations of several rows: a conversation counts once, however many rows its chat template makes of it."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from verl_fn.state import Batch, conversations
from verl_fn.steps.aggregate import last_of_rows


def whole_conversations(batch: Batch) -> Batch:
    """Returns a batch with one row for each conversation: its rows behind one another, in the same order of tokens.

    Fields of rows come from the conversation's last row, except for ``prompt_length``, from the first row, and the
    sum of ``near_ties``. Each of the rows has the score; it lies on the last response token;
    what was added to it, such as a KL penalty, stays on its tokens.

    Args:
        batch: has ``token_level_scores`` or ``score`` if it has ``token_level_rewards``.

    Example:
        >>> rows = {"group": [7] * 3, "conversation": [0, 0, 1], "score": [1.0, 1.0, 0.0]}
        >>> tokens = {"response_mask": [[1.0]] * 3, "token_level_scores": [[1.0], [1.0], [0.0]]}
        >>> batch = Batch.from_rows([[1]] * 3, tokens | {"token_level_rewards": [[0.9], [0.8], [0.0]]}, rows)
        >>> whole = whole_conversations(batch)
        >>> whole.lengths.tolist(), [round(r, 1) for r in whole["token_level_rewards"].tolist()]
        ([2, 1], [-0.1, 0.8, 0.0])
    """
    conversation, last = conversations(batch)
    if len(last) == len(batch):
        return batch
    begins = torch.cat([last.new_zeros(1), last[:-1] + 1])
    cu_seqlens = batch.cu_seqlens[torch.cat([begins, last[-1:] + 1])]
    per_row = {name: field[last] for name, field in batch.per_row.items()}
    if "prompt_length" in batch:
        per_row["prompt_length"] = batch["prompt_length"][begins]
    if "near_ties" in batch:
        per_row["near_ties"] = torch.zeros_like(last).index_add(0, conversation, batch["near_ties"].long())
    whole = attrs.evolve(batch, cu_seqlens=cu_seqlens, per_row=per_row, ragged={})
    whole = attrs.evolve(whole, positions=torch.arange(whole.num_tokens) - whole.spread(whole.cu_seqlens[:-1].long()))
    if "token_level_rewards" in batch:
        mask, rewards = batch["response_mask"], batch["token_level_rewards"]
        scores = batch["token_level_scores"] if "token_level_scores" in batch else batch.spread(batch["score"])
        repeated = last_of_rows(batch, mask) != last_of_rows(whole, mask)
        whole = whole.with_tokens(token_level_rewards=torch.where(repeated, rewards - scores, rewards))
    return whole


def by_conversation(batch: Batch, estimate: Callable[[Batch], Batch]) -> Batch:
    """Estimates advantages of whole conversations, and writes them to the response tokens of all their rows.

    Example:
        >>> from verl_fn.steps import dr_grpo
        >>> rows = {"group": [7] * 3, "conversation": [0, 0, 1], "score": [1.0, 1.0, 0.0]}
        >>> scores = [[1.0], [1.0], [0.0]]
        >>> tokens = {"response_mask": [[1.0]] * 3, "token_level_scores": scores, "token_level_rewards": scores}
        >>> by_conversation(Batch.from_rows([[1]] * 3, tokens, rows), dr_grpo)["advantages"].tolist()
        [0.5, 0.5, -0.5]
    """
    estimated = estimate(whole_conversations(batch))
    return batch.with_tokens(**{name: estimated[name] for name in ("advantages", "returns") if name in estimated})
