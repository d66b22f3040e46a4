"""A penalty on responses that come near the length limit (DAPO)."""

from __future__ import annotations

from verl_fn.state import Batch, conversations

from .aggregate import last_of_rows


def penalize_overlong(batch: Batch, max_tokens: int, buffer: int, factor: float = 1.0) -> Batch:
    """Subtracts a penalty from the rewards of responses that are nearly as long as allowed.

    The penalty is 0 up to ``max_tokens - buffer`` response tokens, and rises linearly from there to ``factor`` at
    ``max_tokens``. It lies on the last response token. ``score``, the result of the reward, stays as it is. The rows
    of a conversation are one response, and each of them gets its penalty, as each has its score.

    Args:
        batch: has ``response_mask``, ``token_level_scores`` and ``token_level_rewards``.
        max_tokens: the longest response allowed.
        buffer: the number of tokens over which the penalty rises.
        factor: the largest penalty.

    Returns:
        The batch with both token fields changed and the penalty of each row, at most 0, as ``reward/overlong``.

    Raises:
        ValueError: the buffer has no token, or more than ``max_tokens``.

    Example:
        >>> rows = {name: [[0.0, 0.0, 1.0], [1.0]] for name in ("token_level_scores", "token_level_rewards")}
        >>> batch = Batch.from_rows([[5, 6, 7], [5]], rows | {"response_mask": [[1.0, 1.0, 1.0], [1.0]]})
        >>> penalize_overlong(batch, max_tokens=4, buffer=2)["token_level_rewards"].tolist()
        [0.0, 0.0, 0.5, 1.0]

    Source: Yu et al. 2025 (arXiv 2503.14476), equation 13.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(
            f"the buffer has {buffer} tokens; it must have at least 1, and at most max_tokens = {max_tokens}"
        )
    mask = (batch["response_mask"] != 0).to(batch["token_level_rewards"].dtype)
    conversation, last = conversations(batch)
    lengths = mask.new_zeros(len(last)).index_add(0, conversation, batch.sum_rows(mask))[conversation]
    excess = lengths - (max_tokens - buffer)
    penalty = -factor * (excess / buffer).clamp(0.0, 1.0)
    on_last = batch.spread(penalty) * last_of_rows(batch, batch["response_mask"])
    changed = {name: batch[name] + on_last for name in ("token_level_scores", "token_level_rewards")}
    return batch.with_tokens(**changed).with_rows(**{"reward/overlong": penalty})
