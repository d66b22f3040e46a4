"""Rewards of whole rows and statistics over groups of rows, for estimators of outcomes."""

from __future__ import annotations

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_fn.state import Batch

from .columns import check_inputs, written


@attrs.frozen(eq=False)
class Groups:
    """The groups of a batch's rows. Only rows with a response token count: the loss sees no others.

    Statistics are given for each row, ``[B]``, and describe its group.

    Attributes:
        of: the index of each row's group.
        counts: whether a row counts.
        compared: whether another row of its group counts too. Rows that have none get no advantage.
        size: the number of rows of a row's group that count.
    """

    of: Int[Tensor, " B"]
    counts: Bool[Tensor, " B"]
    size: Int[Tensor, " B"] = attrs.field(init=False)
    compared: Bool[Tensor, " B"] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "size", self.sum(torch.ones_like(self.of)))
        object.__setattr__(self, "compared", self.counts & (self.size > 1))

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of the values."""
        sums = torch.zeros(len(self.of), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.of, torch.where(self.counts, values, 0))[self.of]

    def max(self, values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns the largest value, and minus infinity in a group without a row that counts."""
        low = torch.full((len(self.of),), -torch.inf, dtype=values.dtype, device=values.device)
        return low.scatter_reduce(0, self.of, torch.where(self.counts, values, -torch.inf), "amax")[self.of]

    def mean(self, values: Float[Tensor, " B"], weights: Tensor | None = None) -> Float[Tensor, " B"]:
        """Returns the mean of the values, weighted if ``weights`` are given; 0 if all weights are 0.

        Example:
            >>> groups = Groups(torch.tensor([0, 0, 1]), torch.tensor([True] * 3))
            >>> groups.mean(torch.tensor([1.0, 4.0, 9.0]), torch.tensor([2.0, 1.0, 1.0])).tolist()
            [2.0, 2.0, 9.0]
        """
        weights = torch.ones_like(values) if weights is None else weights
        total = self.sum(weights)
        # Distances from the largest value, so that the mean of equal values is exactly that value for all weights.
        top = torch.where(total > 0, self.max(values), 0.0)
        return top + self.sum(weights * (values - top)) / torch.where(total > 0, total, 1.0)

    def deviation(self, values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns the unbiased standard deviation of the values; 0 in a group of one."""
        spread = (values - self.mean(values)).square()
        return (self.sum(spread) / (self.size - 1).clamp(min=1)).sqrt()


def grouped_scores(function: str, batch: Batch, *fields: str) -> tuple[Float[Tensor, " B"], Groups]:
    """Returns each row's total reward and the groups, after the checks of ``check_inputs``.

    Rewards are summed in float64, so that the mean of equal rewards is exactly that reward.
    """
    check_inputs(function, batch, *fields)
    rewards = torch.where(batch["response_mask"].bool(), batch["token_level_rewards"].double(), 0.0)
    return batch.sum_rows(rewards), groups_of(batch)


def groups_of(batch: Batch) -> Groups:
    """Returns the groups that the per-row field ``group`` names."""
    _, of = batch["group"].unique(return_inverse=True)
    return Groups(of, batch.sum_rows(batch["response_mask"].bool().long()) > 0)


def relative_scores(scores: Float[Tensor, " B"], groups: Groups, epsilon: float | None = None) -> Tensor:
    """Returns each row's score minus the mean of its group, and 0 for a row that is compared with no other, ``[B]``.

    Args:
        scores: one per row.
        groups: the rows' groups.
        epsilon: if it is given, the result is divided by the standard deviation of the group plus this number.
    """
    centred = torch.where(groups.compared, scores - groups.mean(scores), 0.0)
    return centred if epsilon is None else centred / (groups.deviation(scores) + epsilon)


def outcome(function: str, batch: Batch, row_advantages: Float[Tensor, " B"]) -> Batch:
    """Writes each row's advantage to all of its response tokens, as advantages and as returns."""
    spread = batch.spread(row_advantages)
    return written(function, batch, spread, spread)
