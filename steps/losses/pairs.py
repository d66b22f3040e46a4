"""Pairs of a preferred row and another row, and sums over the tokens of each row's response."""

from __future__ import annotations

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.state import Batch, Weighted


@attrs.frozen(eq=False)
class Pairs:
    """The pairs of a batch, with the rows of a pair in any order.

    Attributes:
        sign: 1 for the preferred row of a pair, -1 for the other.
        index: the place of each row's pair among the pairs.
        count: the number of pairs.
    """

    sign: Float[Tensor, " B"]
    index: Int[Tensor, " B"]
    count: int

    @classmethod
    def of(cls, batch: Batch, pair: str, chosen: str, dtype: torch.dtype) -> Pairs:
        """Finds the pairs of a batch.

        Args:
            batch: has both fields.
            pair: the per-row field of integers that is the same for the two rows of a pair.
            chosen: the per-row field that is 1 for the preferred row and 0 for the other.
            dtype: of ``sign``.

        Raises:
            ValueError: a pair does not have exactly one preferred row and one other row.

        Example:
            >>> batch = Batch.from_rows([[1], [2]], per_row={"pair": [7, 7], "chosen": [0.0, 1.0]})
            >>> pairs = Pairs.of(batch, "pair", "chosen", torch.float32)
            >>> pairs.margin(torch.tensor([1.0, 3.0])).tolist()
            [2.0, 2.0]
        """
        ids, index, counts = batch[pair].unique(return_inverse=True, return_counts=True)
        sign = 2.0 * batch[chosen].to(dtype) - 1.0
        balance = sign.new_zeros(len(ids)).index_add(0, index, sign)
        wrong = (counts != 2) | (balance != 0)
        if bool(wrong.any()):
            raise ValueError(
                f"{pair} {ids[wrong][:5].tolist()} of this batch do not have two rows, one with {chosen} 1 and one "
                "with 0; group rows by pair before the batch is made"
            )
        return cls(sign, index, len(ids))

    def margin(self, values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns, for both rows of a pair, the value of the preferred row less the value of the other."""
        return self._of_pairs(self.sign * values)

    def total(self, values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns, for both rows of a pair, the sum of their values."""
        return self._of_pairs(values)

    def preferred(self, values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns, for both rows of a pair, the value of the preferred row."""
        return self._of_pairs(torch.where(self.sign > 0, values, 0.0))

    def mean(self, batch: Batch, values: Float[Tensor, " B"], sign: float) -> Weighted:
        """Makes the metric for the mean over the preferred rows (``sign`` 1) or over the others (-1)."""
        return Weighted.of(values, (batch["row_weight"] != 0) & (self.sign == sign))

    def _of_pairs(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count).index_add(0, self.index, values)[self.index]


def row_log_probs(batch: Batch, log_probs: Float[Tensor, " T"]) -> Float[Tensor, " B"]:
    """Returns the log-probability of each row's response, in nats: the sum over tokens with ``response_mask``.

    Example:
        >>> batch = Batch.from_rows([[1, 2, 3]], {"response_mask": [[0.0, 1.0, 1.0]]})
        >>> row_log_probs(batch, torch.tensor([9.0, -1.0, -0.5])).tolist()
        [-1.5]
    """
    return batch.sum_rows(torch.where(batch["response_mask"] != 0, log_probs, 0.0))


def row_mean_log_probs(batch: Batch, log_probs: Float[Tensor, " T"]) -> Float[Tensor, " B"]:
    """Returns the mean log-probability of the tokens of each row's response, in nats; 0 for a row without one."""
    lengths = batch.sum_rows((batch["response_mask"] != 0).to(log_probs.dtype))
    return row_log_probs(batch, log_probs) / lengths.clamp(min=1.0)
