"""Aggregation modes as data: the weight of every token's loss, written before a batch is split."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "seq",
)


def aggregate(
    batch: Batch,
    mode: str = "token-mean",
    *,
    loss_scale_factor: float | None = None,
    group: str | None = None,
) -> Batch:
    """Write ``loss_weight`` so that ``(loss_weight * per_token).sum()`` is the loss of the whole batch.

    Call it on the whole update batch; micro-batches and ranks then add up by plain summation. Definitions
    agree with verl's ``agg_loss``, N being the tokens and B the rows with ``response_mask`` set:

    ============================  =======================================
    mode                          weight of a token in a row of n tokens
    ============================  =======================================
    ``token-mean``                1 / N
    ``token-sum``                 1
    ``seq-mean-token-sum``        1 / B
    ``seq-mean-token-sum-norm``   1 / (B * loss_scale_factor)
    ``seq-mean-token-mean``       1 / (B * n)
    ``seq``                       1 / B on the row's last token, else 0
    ============================  =======================================

    Args:
        batch: needs ``response_mask``.
        mode: one of the table.
        loss_scale_factor: the constant of ``seq-mean-token-sum-norm``, such as the longest response allowed
            (Dr. GRPO's horizon).
        group: with ``seq``, a per-row field; the weight is 1 / (number of groups), for preference pairs.

    Raises:
        ValueError: an unknown mode, or no token to learn from.

    >>> batch = Batch.from_rows([[1, 2], [3]], {"response_mask": [[1.0, 1.0], [1.0]]})
    >>> aggregate(batch, "seq-mean-token-mean")["loss_weight"].tolist()
    [0.25, 0.25, 0.5]
    """
    mask = batch["response_mask"].float()
    lengths = batch.sum_rows(mask)
    rows, tokens = int((lengths > 0).sum()), mask.sum()
    if rows == 0:
        raise ValueError("no token of this batch has response_mask set, so there is nothing to learn from")
    if mode == "token-mean":
        weight = mask / tokens
    elif mode == "token-sum":
        weight = mask
    elif mode == "seq-mean-token-sum":
        weight = mask / rows
    elif mode == "seq-mean-token-sum-norm":
        if not loss_scale_factor:
            raise ValueError("seq-mean-token-sum-norm needs loss_scale_factor, such as the longest response allowed")
        weight = mask / (rows * loss_scale_factor)
    elif mode == "seq-mean-token-mean":
        weight = mask / (rows * batch.spread(lengths.clamp(min=1)))
    elif mode == "seq":
        count = rows if group is None else len(batch.per_row[group][lengths > 0].unique())
        weight = last_of_rows(batch, mask) / count
    else:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; it is one of {', '.join(MODES)}")
    return batch.with_tokens(loss_weight=weight)


def last_of_rows(batch: Batch, mask: Tensor) -> Tensor:
    """1 on the last token of each row where ``mask`` is set, ``[T]``.

    >>> batch = Batch.from_rows([[1, 2, 3], [4]])
    >>> last_of_rows(batch, torch.tensor([1.0, 1.0, 0.0, 1.0])).tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    index = torch.arange(batch.num_tokens, device=mask.device)
    last = torch.full((len(batch),), -1, device=mask.device).scatter_reduce(
        0, batch.row_ids, torch.where(mask.bool(), index, -1), "amax"
    )
    chosen = torch.zeros_like(mask, dtype=torch.float32)
    chosen[last[last >= 0]] = 1.0
    return chosen
