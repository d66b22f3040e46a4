"""Response tokens as a right-aligned table, for recursions that start at the last token, and whitening."""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch


def whiten_masked(values: Float[Tensor, " T"], mask: Tensor) -> Float[Tensor, " T"]:
    """Shifts and scales the values where ``mask`` is set to mean 0 and variance 1 (unbiased); the others become 0.

    The result depends on the whole batch, so whiten before the batch is split.

    Args:
        values: one value per token.
        mask: which values to whiten. If it is set for fewer than two, the result is 0 everywhere.

    Example:
        >>> whiten_masked(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])
    """
    chosen = values[mask.bool()]
    if len(chosen) < 2:
        return torch.zeros_like(values)
    return torch.where(mask.bool(), (values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8), 0.0)


def real(values: Tensor) -> Tensor:
    """Returns the values as floating-point numbers, since estimates from integers are not integers.

    Example:
        >>> real(torch.tensor([1, 2])).dtype, real(torch.zeros(1, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return values if values.is_floating_point() else values.float()


def warn_of_ignored_rewards(batch: Batch) -> None:
    """Warns if a token with ``response_mask`` 0 has a reward, as where a tool's output ends a response."""
    if bool(batch["token_level_rewards"][batch["response_mask"] == 0].any()):
        warnings.warn(
            "rewards on tokens with response_mask 0 are ignored; write a row's reward on its last token with "
            "response_mask 1 (verl_fn.steps.aggregate.last_of_rows)",
            stacklevel=3,
        )


def columns(batch: Batch, values: Tensor) -> Tensor:
    """Returns the values of each row's response tokens as a right-aligned table, ``[T] -> [B, longest response]``.

    All rows end in the last column, so a recursion from the end is a loop over columns.
    """
    row, column, width = _cells(batch)
    table = torch.zeros(len(batch), width, dtype=values.dtype, device=values.device)
    table[row, column] = values[batch["response_mask"].bool()]
    return table


def uncolumn(batch: Batch, table: Tensor) -> Tensor:
    """Returns the values of a table made by ``columns`` per token, and 0 for tokens that are not in it."""
    row, column, _ = _cells(batch)
    flat = torch.zeros(batch.num_tokens, dtype=table.dtype, device=table.device)
    flat[batch["response_mask"].bool()] = table[row, column]
    return flat


def _cells(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Returns the row and the column of each response token in the table, and the number of columns."""
    mask = batch["response_mask"].bool()
    counts = batch.sum_rows(mask.long())
    width = int(counts.max())
    row = batch.row_ids[mask]
    nth = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    return row, width - counts[row] + nth, width
