"""A reward model as the reward of reinforcement learning: its score of a whole response."""

from __future__ import annotations

from typing import Any

from verl_fn.state import Batch, TokenOutputs
from verl_fn.steps.aggregate import last_of_rows

from .workers import Clock, Workers

ROLE = "reward_model"


def score_by_model(batch: Batch, state: Any, w: Workers, clock: Clock) -> Batch:
    """Writes the scores of a reward model into a batch that was not scored yet.

    It is a part of ``learn``: the ranks that train would wait for samples that a later step has asked for.

    Args:
        batch: the rows.
        state: the reward model's training state.
        w: the workers, with a trainer of the role ``reward_model``.
        clock: measures the time of ``reward``.
    """
    outputs = clock.run("reward", w.trainers[ROLE].forward, state.params, batch, ("row_values",))
    return with_model_score(batch, outputs)


def with_model_score(batch: Batch, outputs: TokenOutputs) -> Batch:
    """Writes ``score`` and, on the last token of each response, ``token_level_scores`` and ``token_level_rewards``.

    Args:
        batch: rows with ``response_mask``.
        outputs: the reward model's ``row_values``.

    Example:
        >>> import torch
        >>> batch = Batch.from_rows([[5, 6, 2]], {"response_mask": [[0.0, 1.0, 1.0]]})
        >>> with_model_score(batch, TokenOutputs({"row_values": torch.tensor([0.5])}))["token_level_scores"].tolist()
        [0.0, 0.0, 0.5]
    """
    on_last = batch.spread(outputs.row_values) * last_of_rows(batch, batch["response_mask"])
    return batch.with_rows(score=outputs.row_values).with_tokens(
        token_level_scores=on_last, token_level_rewards=on_last
    )
