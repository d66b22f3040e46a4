"""Masked tokens as a table, rows right-aligned, for recursions that run back from the end; and whitening."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch


def whiten_masked(values: Float[Tensor, " T"], mask: Tensor) -> Float[Tensor, " T"]:
    """Shift and scale to mean 0 and variance 1 (unbiased) where ``mask`` is set; 0 elsewhere.

    A function of the whole batch: call it before the batch is split.

    Example:
        >>> [round(x, 4) for x in whiten_masked(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()]
        [-0.7071, 0.7071, 0.0]
    """
    chosen = values[mask.bool()]
    if len(chosen) < 2:
        return torch.zeros_like(values)
    return torch.where(mask.bool(), (values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8), 0.0)


def columns(batch: Batch, values: Tensor) -> Tensor:
    """Masked tokens of each row, right-aligned in ``[B, longest]``: recursions from the end start together."""
    row, column, width = _places(batch)
    table = torch.zeros(len(batch), width, dtype=values.dtype, device=values.device)
    table[row, column] = values[batch["response_mask"].bool()]
    return table


def uncolumn(batch: Batch, table: Tensor) -> Tensor:
    row, column, _ = _places(batch)
    flat = torch.zeros(batch.num_tokens, dtype=table.dtype, device=table.device)
    flat[batch["response_mask"].bool()] = table[row, column]
    return flat


def _places(batch: Batch) -> tuple[Tensor, Tensor, int]:
    mask = batch["response_mask"].bool()
    counts = batch.sum_rows(mask.long())
    width = int(counts.max())
    row = batch.row_ids[mask]
    nth = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    return row, width - counts[row] + nth, width
