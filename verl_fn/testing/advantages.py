"""The laws of an advantage estimator: ``check_advantage``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from verl_fn.state import Batch, Key, Ragged
from verl_fn.state.batch import CORE
from verl_fn.steps.aggregate import last_of_rows

from .builders import reads, scrambled, tiny_batch, with_longer_prompts
from .violation import LawViolation, repeatable, require, require_close, require_equal, require_full_precision

WRITTEN = ("advantages", "returns")
# Fields that are written after the estimator, for the loss.
LATER = ("loss_weight", "row_weight", "cov_selected")
SCORES = ("score", "acc", "env_score", "env_acc")
EQUAL_REWARDS = (0.7, 1000.1, 1e6 + 0.1, -3.3, 1 / 3, 1e-8, 1e29)
# Law, description, another batch, the places of the first batch's tokens in it, and the usual cause of a difference.
Variant: TypeAlias = tuple[str, str, Batch, Tensor, str]
UNEQUAL = "a number of rows that is taken to be the same for all groups"


def check_advantage(
    estimator: Callable[[Batch], Batch],
    batch: Batch | None = None,
    *,
    equal_rewards: bool = True,
    zero_rewards: bool | None = None,
    tolerance: float = 1e-5,
    key: Key | None = None,
) -> None:
    """Checks an estimator against the laws. An estimator gets the whole batch, so splits are not checked.

    * Signature: ``advantages``, and ``returns`` if there are any, one number per token in the dtype of the rewards;
      finite, without a graph; all other fields as they were.
    * Purity: twice the same, input as it was.
    * Rows: other orders of rows and other ids of groups give the same. Groups may have any number of rows: with some
      rows dropped the signature still holds. Rows without a response token change nothing for the others.
    * Zero: both are 0 where ``response_mask`` is 0, whatever the fields hold there (nan and infinities too), and
      longer prompts change nothing. Without rewards and values there is no advantage. Equal rewards in a group give
      advantages of exactly 0, for an estimator that reads ``group``.
    * Precision: no operation has a result in bfloat16 or float16.

    A wrong formula obeys these; ``compare_advantage`` compares with one that you write.

    Args:
        estimator: batch -> batch; options are bound with a lambda or ``functools.partial``.
        batch: by default one with every field that an estimator finds in a run, in some algorithm. If yours reads a
            reward of your own, give ``tiny_batch().with_rows(**{"reward/mine": [...]})``, one number for each row.
        equal_rewards: whether equal rewards in a group must give advantages of 0, if ``group`` is read.
        zero_rewards: whether rewards and values of 0 must, by default as ``equal_rewards``. Turn it off for penalties
            of length and for baselines that are not made of rewards; equal rewards are then not tried either.
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
    batch = estimator_batch() if batch is None else batch.without(*WRITTEN)
    key = key or Key.from_seed(0)
    try:
        whole = repeatable("Purity", "the estimator", lambda: _result(estimator, batch), batch=batch)
    except RuntimeError as error:
        raise LawViolation("Rows", f"the estimator raises: {error}", UNEQUAL) from error
    _masked(batch, whole)
    for variant in _variants(batch, key):
        _same(estimator, whole, variant, tolerance)
    _dropped(estimator, batch)
    if zero_rewards if zero_rewards is not None else equal_rewards:
        _without_rewards(estimator, batch)
    if equal_rewards and zero_rewards is not False and reads("group", batch, estimator):
        _equal_rewards(estimator, batch)
    _same(estimator, whole, _with_silent_rows(batch), tolerance)
    require_full_precision("the estimator", lambda: estimator(batch))


def estimator_batch() -> Batch:
    """Returns a ``tiny_batch`` with the fields of a run's batch when its estimator is called, and no others."""
    return tiny_batch().without(*WRITTEN, *LATER)


def _masked(batch: Batch, whole: dict[str, Tensor]) -> None:
    _require_finite(whole, "")
    for name, t in whole.items():
        top = float(torch.where(batch["response_mask"] == 0, t, 0.0).abs().max())
        require(top == 0.0, "Zero", f"where response_mask is 0, {name} reaches {top:.3g}", "a missing mask")


def _same(estimator: Callable[[Batch], Batch], whole: dict[str, Tensor], variant: Variant, tolerance: float) -> None:
    law, what, other, places, cause = variant
    result = {name: t[places] for name, t in _result(estimator, other).items()}
    require_close(law, f"{what} the result", whole, result, cause, tolerance=tolerance)


def _with_silent_rows(batch: Batch) -> Variant:
    """Returns the batch with a second row for each, in the same group, of other rewards, without a response token."""
    both, rows = batch.take(torch.arange(2 * len(batch)) % len(batch)), torch.arange(2 * len(batch))
    own = torch.arange(both.num_tokens) < batch.num_tokens
    both = both.with_tokens(response_mask=torch.where(own, both["response_mask"], 0.0))
    # Equal rewards would leave every mean as it is.
    others = {name: t + torch.where(rows < len(batch), 0, 1 + rows).to(t) for name, t in _scores_of(both)}
    both = both.with_rows(**others)
    cause = "rows without a response token that are counted in a group or in the batch"
    return "Rows", "beside rows without a response token,", both, own, cause


def _variants(batch: Batch, key: Key) -> Iterator[Variant]:
    """Yields batches that must give the same as ``batch``."""
    here, rows = torch.arange(batch.num_tokens), torch.arange(len(batch))
    cause = "groups taken from neighbouring rows, or something that depends on the first or last row"
    orders = {"random": torch.randperm(len(batch), generator=key.generator()), "opposite": rows.flip(0)}
    for name, order in {**orders, "rotated": rows.roll(1)}.items():
        places = batch.with_tokens(here=here).take(order)["here"].argsort()
        yield "Rows", f"with the rows in {name} order,", batch.take(order), places, cause
    if "group" in batch.per_row:
        renamed = batch.with_rows(group=1000 - 3 * batch["group"])
        yield "Rows", "with other ids of the groups,", renamed, here, "ids used as numbers"
    cause = (
        "a sum or a mean over rows that does not weigh with response_mask, or x * response_mask where x may not be "
        "finite; torch.where(mask, x, 0) drops it"
    )
    for what, other in scrambled(batch, key).items():
        yield "Zero", f"{what} where response_mask is 0:", other, here, cause
    longer, old = with_longer_prompts(batch, key)
    cause = "batch.lengths or positions also count the prompt; count response_mask"
    yield "Zero", "with longer prompts,", longer, old, cause


def _scores_of(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yields the rewards that rows have as a whole."""
    yield from ((name, t) for name, t in batch.per_row.items() if name in SCORES or name.startswith("reward/"))


def _with_rewards(batch: Batch, rewards: Tensor) -> Batch:
    """Returns the batch with these rewards of its rows, on their last response tokens, and with baselines of 0."""
    last = last_of_rows(batch, batch["response_mask"])
    fields = {
        name: (batch.spread(rewards) * last).to(batch[name])
        for name in ("token_level_rewards", "token_level_scores")
        if name in batch
    }
    if "values" in batch:
        fields["values"] = torch.zeros_like(batch["values"])
    rows = {name: rewards.to(t) for name, t in _scores_of(batch)}
    if "reward_baselines" in batch:
        rows["reward_baselines"] = torch.zeros_like(batch["reward_baselines"])
    return batch.with_tokens(**fields).with_rows(**rows)


def _without_rewards(estimator: Callable[[Batch], Batch], batch: Batch) -> None:
    cause = "a constant added; if it is meant (a penalty of length, a baseline), pass zero_rewards=False"
    still = _with_rewards(batch, torch.zeros(len(batch)))
    _require_none(estimator, still, "with neither rewards nor values", cause)


def _equal_rewards(estimator: Callable[[Batch], Batch], batch: Batch) -> None:
    """Checks groups of three and of seven, whose sizes float32 divides by with rounding, for rewards of all sizes."""
    (answered,) = batch.sum_rows(batch["response_mask"].float()).nonzero(as_tuple=True)
    grouped = batch.take(answered.repeat(10)[:10]).with_rows(group=[7] * 3 + [4] * 7)
    cause = (
        "a mean or a standard deviation in float32, whose rounding is divided by itself; compute them in float64 "
        "(if advantages are meant to be made of more than rewards, pass equal_rewards=False)"
    )
    for reward in EQUAL_REWARDS:
        alike = _with_rewards(grouped, torch.full((10,), reward))
        _require_none(estimator, alike, f"if all rewards of a group are {reward:g},", cause)


def _require_none(estimator: Callable[[Batch], Batch], batch: Batch, when: str, cause: str) -> None:
    top = float(_result(estimator, batch)["advantages"].abs().max())
    require(top == 0.0, "Zero", f"{when} an advantage is {top:.3g}", cause)


def _result(estimator: Callable[[Batch], Batch], batch: Batch) -> dict[str, Tensor]:
    """Returns the fields that the estimator writes.

    Raises:
        LawViolation: the fields do not match the signature.
    """
    with warnings.catch_warnings():
        # The batches have numbers in all tokens, to show that numbers with response_mask 0 do not matter.
        warnings.filterwarnings("ignore", "rewards on tokens with response_mask 0")
        new = estimator(batch)
    require(
        isinstance(new, Batch), "Signature", f"the estimator returns a {type(new).__name__}", "a batch was expected"
    )
    rewards = batch["token_level_rewards"]
    require("advantages" in new, "Signature", "the batch lacks advantages", "with_tokens names another field")
    written = {name: new[name] for name in WRITTEN if name in new}
    for name, t in written.items():
        require(
            t.shape == rewards.shape and t.dtype == rewards.dtype,
            "Signature",
            f"{name} is {t.dtype}{tuple(t.shape)}, but the rewards are {rewards.dtype}{tuple(rewards.shape)}",
            "a value for each row that was not spread, or a cast",
        )
        require(not t.requires_grad, "Signature", f"{name} requires a gradient", "a missing detach() or no_grad()")
    others = _fields(batch)
    unchanged = {name: field for name, field in _fields(new).items() if name in others}
    require_equal("Signature", "another field", others, unchanged, "a field overwritten")
    return written


def _fields(batch: Batch) -> dict[str, Tensor | Ragged]:
    return {**{name: batch[name] for name in CORE}, **batch.per_token, **batch.per_row, **batch.ragged}


def _require_finite(result: dict[str, Tensor], when: str) -> None:
    cause = "rows or groups of one, or without response"
    for name, t in result.items():
        require(bool(t.isfinite().all()), "Signature", f"{name} is not finite{when}", cause)


def _dropped(estimator: Callable[[Batch], Batch], batch: Batch) -> None:
    """Checks the estimator without each row in turn."""
    for row in range(len(batch) if len(batch) > 1 else 0):
        try:
            fewer = _result(estimator, batch.take(torch.arange(len(batch)) != row))
        except RuntimeError as error:
            raise LawViolation("Rows", f"without row {row} the estimator raises: {error}", UNEQUAL) from error
        _require_finite(fewer, f" without row {row}")
