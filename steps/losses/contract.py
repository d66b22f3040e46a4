"""Losses: pure functions of a model's outputs and a batch, added up like numbers.

A loss is a sum of terms. A term is of one level: a ``token`` term gives one value a token, ``[T]``, and is weighted by
the batch's ``loss_weight``; a ``row`` term gives one value a row, ``[B]``, and is weighted by ``row_weight``. A backend
differentiates ``total_loss``, the plain sum of weight times value. A loss therefore knows nothing of averages,
micro-batches or ranks, and any two losses add:

    loss = ppo_clip(clip_ratio_high=0.28) + 0.001 * kl_to_reference("low_var_kl") - 0.01 * entropy()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch, Metrics, Sum, TokenOutputs, Weighted, metrics

Level: TypeAlias = Literal["token", "row"]
LossFn: TypeAlias = Callable[[TokenOutputs, Batch], tuple[Float[Tensor, " N"], Metrics]]

WEIGHTS: dict[str, str] = {"token": "loss_weight", "row": "row_weight"}
WRITERS: dict[str, str] = {"token": "steps.aggregate", "row": "steps.aggregate_rows"}


@attrs.frozen(eq=False)
class Term:
    """One function of a loss.

    Attributes:
        fn: gives the values and metrics.
        needs: names of the model's outputs that it reads: ``logprobs``, ``entropy``, ``values``, ``row_values``.
        level: ``token`` for values ``[T]``, ``row`` for values ``[B]``.
        together: a per-row field; rows that have one value of it are never split apart.
        factor: what its values are multiplied by.
    """

    fn: LossFn
    needs: frozenset[str]
    level: Level = "token"
    together: str | None = None
    factor: float = 1.0

    def __attrs_post_init__(self) -> None:
        if self.level not in WEIGHTS:
            raise ValueError(f"level is {self.level!r}; it must be {' or '.join(WEIGHTS)}")

    def values(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        """The values times the factor, and the metrics, which the factor leaves alone."""
        values, metrics = self.fn(outputs, batch)
        return values if self.factor == 1.0 else self.factor * values, metrics


@attrs.frozen(eq=False)
class Loss:
    """A sum of terms; ``loss`` makes one of a function.

    Attributes:
        terms: what is added up.

    Raises:
        ValueError: two terms keep rows together by different fields.
    """

    terms: tuple[Term, ...]

    def __attrs_post_init__(self) -> None:
        fields = {term.together for term in self.terms} - {None}
        if len(fields) > 1:
            raise ValueError(
                f"losses that keep rows together by different fields ({', '.join(sorted(map(str, fields)))}) do not "
                "add; give both the same per-row field"
            )

    @property
    def needs(self) -> frozenset[str]:
        """The model's outputs that any term reads."""
        return frozenset().union(*(term.needs for term in self.terms))

    @property
    def levels(self) -> frozenset[str]:
        """The levels of the terms: ``token``, ``row`` or both."""
        return frozenset(term.level for term in self.terms)

    @property
    def together(self) -> str | None:
        """The per-row field whose equal values stay in one micro-batch, if any term declares one."""
        return next((term.together for term in self.terms if term.together is not None), None)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Float[Tensor, " N"], Metrics]:
        """Returns the values and the metrics of a loss whose terms are of one level.

        Raises:
            ValueError: the loss has terms of both levels, whose values do not add before they are weighted.
        """
        if len(self.levels) > 1:
            raise ValueError("this loss has terms of both levels, token and row; compute it with steps.total_loss")
        parts = [term.values(outputs, batch) for term in self.terms]
        total = parts[0][0]
        for values, _ in parts[1:]:
            total = total + values
        return total, metrics.merge(*(found for _, found in parts))

    def __add__(self, other: Loss) -> Loss:
        return Loss((*self.terms, *other.terms))

    def __mul__(self, factor: float) -> Loss:
        return Loss(tuple(attrs.evolve(term, factor=factor * term.factor) for term in self.terms))

    __rmul__ = __mul__

    def __sub__(self, other: Loss) -> Loss:
        return self + -1.0 * other


def loss(
    needs: Iterable[str] = ("logprobs",), *, level: Level = "token", together: str | None = None
) -> Callable[[LossFn], Loss]:
    """Turns a function into a ``Loss``.

    Args:
        needs: names of the model's outputs that the function reads.
        level: ``token`` if it gives one value a token, ``row`` if it gives one value a row.
        together: a per-row field of integers; rows that have one value of it are always in one micro-batch.

    Example:
        >>> @loss(needs=["logprobs"])
        ... def reinforce(outputs, batch):
        ...     return -batch["advantages"] * outputs.logprobs, {}
        >>> @loss(needs=["row_values"], level="row", together="pair")
        ... def reward_spread(outputs, batch):
        ...     return -outputs.row_values.square(), {}
        >>> both = reinforce + 0.1 * reward_spread
        >>> sorted(both.needs), sorted(both.levels), both.together
        (['logprobs', 'row_values'], ['row', 'token'], 'pair')
    """
    return lambda fn: Loss((Term(fn, frozenset(needs), level, together),))


def total_loss(loss: Loss, outputs: TokenOutputs, batch: Batch) -> tuple[Float[Tensor, ""], Metrics]:
    """Returns what a backend differentiates, the sum over terms of weight times value, and the metrics.

    Tokens and rows of weight zero don't count, even where their values are not finite.

    Raises:
        ValueError: a term does not give one value a token, or a row, or the batch has no weights for it.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"loss_weight": [[0.0, 0.5]]})
        >>> minus = loss(needs=["logprobs"])(lambda outputs, batch: (-outputs.logprobs, {}))
        >>> total_loss(minus, TokenOutputs({"logprobs": torch.tensor([float("nan"), -4.0])}), batch)[0].item()
        2.0
    """
    check_weights(loss, batch)
    sums: dict[str, Tensor] = {}
    reported: list[Metrics] = []
    for term in loss.terms:
        values, found = term.values(outputs, batch)
        # Terms of one level are added before they are weighted, as one loss that computes all of them would.
        _check_shape(values, batch, term.level)
        sums[term.level] = sums[term.level] + values if term.level in sums else values
        reported.append(found)
    totals = [_weighted(batch, values, level) for level, values in sums.items()]
    return sum(totals[1:], totals[0]), metrics.merge(*reported)


def check_weights(loss: Loss, batch: Batch) -> None:
    """Checks that the batch has the weights of the loss's levels and the field that keeps rows together.

    Raises:
        ValueError: it lacks one; the message says which function writes it.

    Example:
        >>> check_weights(loss()(lambda outputs, batch: (outputs.logprobs, {})), Batch.from_rows([[1]]))
        Traceback (most recent call last):
        ValueError: the batch has no loss_weight; call steps.aggregate on the whole update batch first
    """
    for level in sorted(loss.levels):
        if WEIGHTS[level] not in batch:
            raise ValueError(
                f"the batch has no {WEIGHTS[level]}; call {WRITERS[level]} on the whole update batch first"
            )
    if loss.together is not None and loss.together not in batch.per_row:
        raise ValueError(
            f"the loss keeps rows with one {loss.together!r} together, and the batch has no per-row field of that "
            f"name; it has {sorted(batch.per_row)}"
        )


def token_mean(batch: Batch, values: Tensor) -> Weighted:
    """Returns the metric "mean of ``values`` over response tokens", the same for every split.

    Example:
        >>> token_mean(Batch.from_rows([[1, 2]], {"response_mask": [[0.0, 1.0]]}), torch.tensor([9.0, 2.0])).value
        2.0
    """
    return Weighted.of(values, batch["response_mask"])


def row_mean(batch: Batch, values: Tensor) -> Weighted:
    """Returns the metric "mean of ``values`` over the rows that have a weight", the same for every split.

    Example:
        >>> batch = Batch.from_rows([[1], [2]], per_row={"row_weight": [0.0, 0.5]})
        >>> row_mean(batch, torch.tensor([9.0, 2.0])).value
        2.0
    """
    return Weighted.of(values, batch["row_weight"] != 0)


def weighted_sum(batch: Batch, values: Tensor, level: Level = "token") -> Sum:
    """Returns the metric "this term of the loss", aggregated as the loss is."""
    return Sum(_weighted(batch, values.detach().double(), level))


def _weighted(batch: Batch, values: Tensor, level: Level | str) -> Tensor:
    weight = batch[WEIGHTS[level]]
    # Selected twice: a value that is not finite reaches neither the sum nor, times zero, its gradient.
    live = weight != 0
    return torch.where(live, weight * torch.where(live, values, 0.0), 0.0).sum()


def _check_shape(values: Tensor, batch: Batch, level: Level) -> None:
    count, unit = (batch.num_tokens, "token") if level == "token" else (len(batch), "row")
    if values.shape != (count,):
        raise ValueError(
            f"the loss has the shape {tuple(values.shape)} where the batch has {count} {unit}s; a {unit} loss is one "
            f"value a {unit}, and sums and means are made by {WEIGHTS[level]}"
        )
