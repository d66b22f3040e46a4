"""The laws of an advantage estimator: ``check_advantage``."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from verl_fn.state import Batch, Key
from verl_fn.state.batch import CORE

from .builders import scrambled, tiny_batch
from .violation import LawViolation, repeatable, require, require_close, require_equal

WRITTEN = ("advantages", "returns")
UNEQUAL = "a number of rows that is taken to be the same for all groups"


def check_advantage(
    estimator: Callable[[Batch], Batch],
    batch: Batch | None = None,
    *,
    tolerance: float = 1e-5,
    key: Key | None = None,
) -> None:
    """Checks an estimator against the laws. An estimator gets the whole batch, so splits are not checked.

    * Signature: ``advantages`` and ``returns``, one number a token in the dtype of the rewards; finite; all other
      fields as they were.
    * Purity: twice the same, and its input as it was.
    * Rows: another order of rows gives the same in that order, and so do other ids of the groups. Groups may have any
      number of rows: with some rows dropped, as when problems are filtered, the signature still holds.
    * Zero: both are 0 where ``response_mask`` is 0, whatever the fields hold there; without rewards and values
      there is no advantage.

    Args:
        estimator: batch -> batch; options are bound with a lambda or ``functools.partial``.
        batch: by default ``tiny_batch()``; add the fields that it lacks with ``tiny_batch().with_tokens(...)``.
        tolerance: how far orders of rows may differ, relative to the largest value.
        key: other keys give other orders.

    Raises:
        LawViolation: a law is broken.

    Example:
        >>> from verl_fn.steps import gae, grpo
        >>> check_advantage(grpo)
        >>> check_advantage(lambda batch: gae(batch, gamma=0.99, lam=0.95))
        >>> check_advantage(lambda batch: batch.with_tokens(advantages=batch["values"], returns=batch["values"] + 1))
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Zero: where response_mask is 0, returns reaches 1. Usual cause: ...
    """
    batch = tiny_batch() if batch is None else batch
    batch = batch.without(*WRITTEN)
    key = key or Key.from_seed(0)
    try:
        whole = repeatable("Purity", "the estimator", lambda: _result(estimator, batch), batch=batch)
    except RuntimeError as error:
        raise LawViolation("Rows", f"the estimator raises: {error}", UNEQUAL) from error
    for name, t in whole.items():
        top = float(torch.where(batch["response_mask"] == 0, t, 0.0).abs().max())
        require(top == 0.0, "Zero", f"where response_mask is 0, {name} reaches {top:.3g}", "a missing mask")
    _rows(estimator, batch, whole, key, tolerance)
    _dropped(estimator, batch)
    require_close(
        "Zero",
        "other numbers where response_mask is 0: the result",
        whole,
        _result(estimator, scrambled(batch, key)),
        "a sum or a mean over rows that does not weigh with response_mask",
        tolerance=tolerance,
    )
    sources = [name for name in ("token_level_rewards", "token_level_scores", "values") if name in batch]
    still = batch.with_tokens(**{name: torch.zeros_like(batch[name]) for name in sources})
    top = float(_result(estimator, still)["advantages"].abs().max())
    require(top == 0.0, "Zero", f"with neither rewards nor values an advantage is {top:.3g}", "a constant added")


def _result(estimator: Callable[[Batch], Batch], batch: Batch) -> dict[str, Tensor]:
    """Returns the fields that the estimator writes.

    Raises:
        LawViolation: the fields do not match the signature.
    """
    with warnings.catch_warnings():
        # The batches have numbers in all tokens, to show that those with response_mask 0 do not matter.
        warnings.filterwarnings("ignore", "rewards on tokens with response_mask 0")
        new = estimator(batch)
    require(
        isinstance(new, Batch), "Signature", f"the estimator returns a {type(new).__name__}", "a batch was expected"
    )
    rewards = batch["token_level_rewards"]
    for name in WRITTEN:
        require(name in new, "Signature", f"the batch lacks {name}", "with_tokens names another field")
        t = new[name]
        require(
            t.shape == rewards.shape and t.dtype == rewards.dtype,
            "Signature",
            f"{name} is {t.dtype}{tuple(t.shape)} where the rewards are {rewards.dtype}{tuple(rewards.shape)}",
            "a value for each row that was not spread, or a cast",
        )
        require(
            bool(t.isfinite().all()),
            "Signature",
            f"{name} is not finite",
            "rows or groups of one, or without response",
        )
    names = [*CORE, *batch.per_token, *batch.per_row]
    unchanged = {name: new[name] for name in names if name in new}
    require_equal(
        "Signature", "another field", {name: batch[name] for name in names}, unchanged, "a field overwritten"
    )
    return {name: new[name] for name in WRITTEN}


def _dropped(estimator: Callable[[Batch], Batch], batch: Batch) -> None:
    """Checks the estimator without each row in turn."""
    for row in range(len(batch) if len(batch) > 1 else 0):
        try:
            _result(estimator, batch.take(torch.arange(len(batch)) != row))
        except RuntimeError as error:
            raise LawViolation("Rows", f"without row {row} the estimator raises: {error}", UNEQUAL) from error


def _rows(
    estimator: Callable[[Batch], Batch], batch: Batch, whole: dict[str, Tensor], key: Key, tolerance: float
) -> None:
    order = torch.arange(len(batch))
    orders = {
        "random order": torch.randperm(len(batch), generator=key.generator()),
        "opposite order": order.flip(0),
        "rotated order": order.roll(1),
    }
    for name, rows in orders.items():
        moved = _result(estimator, batch.take(rows))
        expected = {n: batch.with_tokens(**whole).take(rows)[n] for n in WRITTEN}
        require_close(
            "Rows",
            f"with the rows in {name}, the result",
            expected,
            moved,
            "groups taken from neighbouring rows, or something that depends on the first or last row",
            tolerance=tolerance,
        )
    if "group" in batch.per_row:
        renamed = batch.with_rows(group=1000 - 3 * batch["group"])
        require_close(
            "Rows",
            "with other ids of the groups, the result",
            whole,
            _result(estimator, renamed),
            "ids used as numbers",
            tolerance=tolerance,
        )
