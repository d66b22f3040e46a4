"""Losses for preferences between rows."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs

from .contract import Loss, loss, row_mean, weighted_sum


def bradley_terry(pair: str = "pair", chosen: str = "chosen") -> Loss:
    """Returns the loss of a reward model: minus the log-likelihood that the preferred row of each pair wins.

    It is a row loss and reads ``row_values``. Both rows of a pair get the loss of the pair, so with the weights of
    ``aggregate_rows(batch, "group-mean", group="pair")`` the total is the mean over pairs.

    Args:
        pair: the per-row field of integers that is the same for the two rows of a pair.
        chosen: the per-row field that is 1 for the preferred row and 0 for the other.

    Raises:
        ValueError: when it is computed, if a pair does not have exactly one preferred row and one other row.

    Example:
        >>> fields = {"pair": [7, 7], "chosen": [1.0, 0.0], "row_weight": [0.5, 0.5]}
        >>> batch = Batch.from_rows([[1], [2]], per_row=fields)
        >>> outputs = TokenOutputs({"row_values": torch.tensor([2.0, 0.0])})
        >>> [round(value, 4) for value in bradley_terry()(outputs, batch)[0].tolist()]
        [0.1269, 0.1269]

    Source: Bradley & Terry 1952; Ouyang et al. 2022 (arXiv 2203.02155), equation 1.
    """

    @loss(needs=["row_values"], level="row", together=pair)
    def bradley_terry(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        ids, pairs, counts = batch[pair].unique(return_inverse=True, return_counts=True)
        sign = 2.0 * batch[chosen].to(outputs.row_values.dtype) - 1.0
        balance = torch.zeros(len(ids), dtype=sign.dtype, device=sign.device).index_add(0, pairs, sign)
        if bool(((counts != 2) | (balance != 0)).any()):
            wrong = ids[(counts != 2) | (balance != 0)][:5].tolist()
            raise ValueError(
                f"{pair} {wrong} of this batch do not have two rows, one with {chosen} 1 and one with 0; group rows "
                "by pair before the batch is made"
            )
        margins = torch.zeros_like(balance).index_add(0, pairs, sign * outputs.row_values)
        margin = margins[pairs]
        values = torch.nn.functional.softplus(-margin)
        return values, {
            "reward_model/loss": weighted_sum(batch, values, "row"),
            "reward_model/accuracy": row_mean(batch, margin > 0),
            "reward_model/margin": row_mean(batch, margin),
        }

    return bradley_terry
