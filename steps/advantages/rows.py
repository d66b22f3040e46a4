"""Rewards of whole rows and statistics over groups of rows, for estimators of outcomes."""

from __future__ import annotations

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_fn.state import Batch, conversations
from verl_fn.steps.aggregate import last_of_rows

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
