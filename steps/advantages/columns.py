"""What all estimators share: checks of what they read and write, whitening, and response tokens as a table."""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.errors import UserError
from verl_fn.state import Batch


class AdvantageError(UserError, ValueError):
    """Raised for a batch from which no finite advantages can be estimated; the message names the rows."""


def whiten_masked(values: Float[Tensor, " T"], mask: Tensor) -> Float[Tensor, " T"]:
    """Shifts and scales the values where ``mask`` is set to mean 0 and variance 1 (unbiased); the others become 0.

    Mean and variance are computed in float64, and equal values become exactly 0. The result depends on the whole
    batch, so whiten before the batch is split.

    Args:
        values: one value per token.
        mask: which values to whiten. If it is set for fewer than two, the result is 0 everywhere.

    Raises:
        AdvantageError: a value where ``mask`` is set is nan or infinite.

    Example:
        >>> whiten_masked(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])
    """
    values, mask = real(values), mask.bool()
    chosen = values[mask].double()
    if not bool(chosen.isfinite().all()):
        places = (mask & ~values.isfinite()).nonzero().flatten().tolist()
        raise AdvantageError(f"whiten_masked: the values of tokens {short_list(places)} are nan or infinite")
    white = torch.zeros_like(values)
    if len(chosen) > 1:
        # Distances from one of the values, so that the mean of equal values is exactly that value.
        distance = chosen - chosen[0]
        centred = distance - distance.mean()
        variance = centred.square().sum() / (len(chosen) - 1)
        white[mask] = (centred * torch.rsqrt(variance + 1e-8)).to(values.dtype)
    return white


def real(values: Tensor) -> Tensor:
    """Returns the values as floating-point numbers, since estimates from integers are not integers.

    Example:
        >>> real(torch.tensor([1, 2])).dtype, real(torch.zeros(1, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return values if values.is_floating_point() else values.float()


def check_inputs(function: str, batch: Batch, *fields: str) -> None:
    """Checks what an estimator reads at response tokens, and of rows that have one: ``fields`` and the rewards.

    A reward on a token with ``response_mask`` 0, as when a tool's output ends a response, is ignored with a warning.

    Args:
        function: the estimator's name, for the error.
        batch: the batch.
        fields: per-token or per-row fields besides ``token_level_rewards``.

    Raises:
        AdvantageError: a value is nan or infinite; it would spread over the group or the batch.
    """
    mask = batch["response_mask"].bool()
    for field in ("token_level_rewards", *fields):
        bad = ~batch[field].isfinite()
        bad = mask & (batch.spread(bad) if field in batch.per_row else bad)
        if bool(bad.any()):
            advice = (
                "let the reward function return a number for each response, or name other rewards in reward_keys"
                if field.startswith("reward/")
                else "find what wrote it: a reward, a critic, or log-probabilities, as in a KL penalty that is part "
                "of the rewards"
            )
            raise AdvantageError(f"{function}: {field} is nan or infinite in {rows_with(batch, bad)}; {advice}")
    if bool(batch["token_level_rewards"][~mask].any()):
        warnings.warn(
            "rewards on tokens with response_mask 0 are ignored; write a row's reward on its last token with "
            "response_mask 1 (verl_fn.steps.aggregate.last_of_rows)",
            stacklevel=3,
        )


def written(function: str, batch: Batch, advantages: Tensor, returns: Tensor) -> Batch:
    """Writes advantages and returns of response tokens in the dtype of the rewards, and 0 to the other tokens.

    Raises:
        AdvantageError: they are finite in float64 but not in that dtype.
    """
    mask, dtype = batch["response_mask"].bool(), real(batch["token_level_rewards"]).dtype
    fields = {
        name: torch.where(mask, values, 0.0).to(dtype)
        for name, values in (("advantages", advantages), ("returns", returns))
    }
    for name, values in fields.items():
        bad = ~values.isfinite()
        if bool(bad.any()):
            raise AdvantageError(f"{function}: {name} overflow {dtype} in {rows_with(batch, bad)}; scale the rewards")
    return batch.with_tokens(**fields)


def rows_with(batch: Batch, tokens: Tensor) -> str:
    """Names the rows in which a mask of tokens is set.

    Example:
        >>> rows_with(Batch.from_rows([[1], [2, 3]]), torch.tensor([False, True, True]))
        'row 1 of 2'
    """
    rows = batch.row_ids[tokens].unique().tolist()
    return f"row{'s' * (len(rows) > 1)} {short_list(rows)} of {len(batch)}"


def short_list(numbers: list[int]) -> str:
    """Joins the first five of the numbers.

    Example:
        >>> short_list([4, 7]), short_list(list(range(9)))
        ('4, 7', '0, 1, 2, 3, 4 and 4 more')
    """
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more


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
