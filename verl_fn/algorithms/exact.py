"""Steps in which the engine's log-probs must equal the trainer's in every bit: their checks, and the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl_fn.backends.protocol import Ref
from verl_fn.errors import UserError
from verl_fn.state import Batch, Metrics, TokenOutputs
from verl_fn.steps.correction import engine_log_probs

from .workers import Workers

DIFFERING, LARGEST = "rollout/tokens_differing", "rollout/log_prob_diff_max"


class NotExact(UserError, RuntimeError):
    """With ``rollout.exact = "strict"``, log-probs of trainer and engine differ."""


def with_engine_log_probs(batch: Batch) -> Batch:
    """Writes the engine's log-probs as ``old_log_probs``, 0 where ``response_mask`` is 0.

    Example:
        >>> fields = {"response_mask": [[0.0, 1.0]], "rollout_log_probs": [[-3.0, -1.0]]}
        >>> with_engine_log_probs(Batch.from_rows([[1, 2]], fields))["old_log_probs"].tolist()
        [0.0, -1.0]
    """
    mask = batch["response_mask"] != 0
    return batch.with_tokens(old_log_probs=torch.where(mask, engine_log_probs(batch), 0.0))


def require_equal(state: Any, batch: Batch, measured: Metrics, w: Workers) -> None:
    """Raises an error if log-probs differ.

    Args:
        state: of the actor, with the weights that have drawn the tokens.
        batch: the rows.
        measured: the metrics of ``exact_gap``.
        w: the workers.

    Raises:
        NotExact: they differ; the message names the first module of the model whose results do.
    """
    count = int(measured[DIFFERING].value)
    if count:
        sampled = int((batch["response_mask"] != 0).sum())
        raise NotExact(
            f"rollout.exact is strict, and the log-probs of {count} of {sampled} tokens differ, by up to "
            f"{measured[LARGEST].value:.3g} nats: {_place(state, batch, w)}. Set rollout.exact=audit to go on and "
            "count them; verl-fn bench exact FOLDER compares the two on a model's folder"
        )


def check_of_updates(w: Workers) -> Callable[[Any, Batch, Ref[Metrics]], None] | None:
    """Returns the check of ``experience.update``; None without ``strict``."""
    if w.exact != "strict":
        return None
    return lambda state, batch, measured: require_equal(state, batch, w.get(measured), w)


def _place(state: Any, batch: Batch, w: Workers) -> str:
    """Returns where trainer and engine part, in the first row that differs."""
    from verl_fn.backends.hf.exact import first_parting

    trainer: Any = w.trainers["actor"]
    of_trainer, of_engine = getattr(trainer, "activations", None), getattr(w.rollout, "activations", None)
    outputs: TokenOutputs = w.get(trainer.forward(state.params, batch, ("logprobs",)))
    differs = (outputs.logprobs != engine_log_probs(batch)) & (batch["response_mask"] != 0)
    if not bool(differs.any()):
        return "a forward pass after it gives the engine's, so the trainer does not repeat its results"
    row = int(batch.row_ids[differs][0])
    if of_trainer is None or of_engine is None:
        return f"the first one in row {row}"
    one = batch.take([row])
    parting = first_parting(of_trainer(state.params, one), of_engine(one))
    if parting is None:
        return f"the first one in row {row}, and by itself it is equal: a kernel depends on the other rows of a call"
    return (
        f"they part in {parting.name}, for {parting.tokens} of {parting.compared} tokens of row {row}, by up to "
        f"{parting.largest:.3g}"
    )
