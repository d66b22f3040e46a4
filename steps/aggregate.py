"""A batch before it is split: weights of the losses of tokens or rows, as data; minibatches, and their scan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import TypeVar

import torch
from torch import Tensor

from verl_fn.errors import ArgumentError, place_of
from verl_fn.state import Batch, Key, read_only, split_by_count

NORM = "seq-mean-token-sum-norm"
# The weights of tokens by their mask, the lengths of their rows, the number of rows and the constant of ``NORM``.
MODES: dict[str, Callable[[Tensor, Tensor, int, float], Tensor]] = {
    "token-mean": lambda mask, lengths, rows, scale: mask / mask.sum(),
    "token-sum": lambda mask, lengths, rows, scale: mask,
    "seq-mean-token-sum": lambda mask, lengths, rows, scale: mask / rows,
    NORM: lambda mask, lengths, rows, scale: mask / (rows * scale),
    "seq-mean-token-mean": lambda mask, lengths, rows, scale: mask / (rows * lengths),
}
ROW_MODES = ("row-mean", "row-sum", "group-mean")
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def aggregate(
    batch: Batch, mode: str | Callable[[Batch], Tensor] = "token-mean", *, loss_scale_factor: float | None = None
) -> Batch:
    """Writes ``loss_weight`` such that ``(loss_weight * per_token).sum()`` is the loss of the whole batch.

    Call it on the whole update batch; the losses of micro-batches and ranks then add up. In the table, N is the
    number of tokens with ``response_mask`` set, and B is the number of rows that have such a token.

    ============================  =======================================
    mode                          weight of a token in a row of n tokens
    ============================  =======================================
    ``token-mean``                1 / N
    ``token-sum``                 1
    ``seq-mean-token-sum``        1 / B
    ``seq-mean-token-sum-norm``   1 / (B * loss_scale_factor)
    ``seq-mean-token-mean``       1 / (B * n)
    ============================  =======================================

    Args:
        batch: needs ``response_mask``.
        mode: a mode of the table, or a function that returns a weight for each token, 0 without ``response_mask``.
        loss_scale_factor: the constant of ``seq-mean-token-sum-norm``, such as the maximal response length.

    Raises:
        ValueError: the mode is unknown, no token has ``response_mask`` set, or ``loss_scale_factor`` is missing.
        ArgumentError: a function returns something else.

    Example:
        >>> batch = Batch.from_rows([[1, 2], [3]], {"response_mask": [[1.0, 1.0], [1.0]]})
        >>> aggregate(batch, "seq-mean-token-mean")["loss_weight"].tolist()
        [0.25, 0.25, 0.5]
        >>> aggregate(batch, lambda batch: batch["response_mask"] / 4)["loss_weight"].tolist()
        [0.25, 0.25, 0.25]

    Source: verl's ``agg_loss`` has the same modes.
    """
    mask = batch["response_mask"].float()
    lengths = batch.sum_rows(mask)
    rows = int((lengths > 0).sum())
    if rows == 0:
        raise ValueError("no token of this batch has response_mask set, so there is nothing to learn from")
    if callable(mode):
        return batch.with_tokens(loss_weight=_own_weight(batch, mode))
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; it is one of {', '.join(MODES)}")
    if mode == NORM and not loss_scale_factor:
        raise ValueError(f"{NORM} needs loss_scale_factor, such as the maximal response length")
    weight = MODES[mode](mask, batch.spread(lengths.clamp(min=1)), rows, loss_scale_factor or 1.0)
    return batch.with_tokens(loss_weight=weight)


def _own_weight(batch: Batch, mode: Callable[[Batch], Tensor]) -> Tensor:
    with read_only(f"{place_of(mode)}, a function of loss_agg_mode,", ArgumentError, batch):
        weight = mode(batch)
    expected = f"it must return a tensor with a finite weight for each of the {batch.num_tokens} tokens"
    if not isinstance(weight, Tensor) or weight.shape != (batch.num_tokens,):
        found = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ArgumentError(f"{place_of(mode)}, a function of loss_agg_mode, returns {found}; {expected}")
    if not bool(weight.isfinite().all()):
        raise ArgumentError(f"{place_of(mode)}, a function of loss_agg_mode, returns inf or nan; {expected}")
    return weight.float()


def aggregate_rows(batch: Batch, mode: str = "row-mean", *, group: str | None = None) -> Batch:
    """Writes ``row_weight`` such that ``(row_weight * values).sum()`` is a row loss of the whole batch.

    Call it on the whole update batch; the losses of micro-batches and ranks then add up. Rows without a token that
    has ``response_mask`` set get weight 0; if the batch has no ``response_mask``, all rows count. In the table, B is
    the number of rows that count.

    ==============  ====================================================================
    mode            weight of a row
    ==============  ====================================================================
    ``row-mean``    1 / B
    ``row-sum``     1
    ``group-mean``  1 / (number of groups * rows in its group): the mean over groups of their means
    ==============  ====================================================================

    Args:
        batch: the whole update batch.
        mode: a mode of the table.
        group: for ``group-mean``, the per-row field that names the groups, such as ``pair``.

    Raises:
        ValueError: the mode is unknown, ``group`` is missing or not a field of the batch, or no row counts.

    Example:
        >>> batch = Batch.from_rows([[1], [2], [3]], per_row={"pair": [4, 4, 9]})
        >>> aggregate_rows(batch, "group-mean", group="pair")["row_weight"].tolist()
        [0.25, 0.25, 0.5]
    """
    live = torch.ones(len(batch), device=batch.tokens.device)
    if "response_mask" in batch:
        live = (batch.sum_rows(batch["response_mask"].float()) > 0).float()
    count = live.sum()
    if not bool(count > 0):
        raise ValueError("no row of this batch has response_mask set, so there is nothing to learn from")
    if mode == "row-mean":
        weight = live / count
    elif mode == "row-sum":
        weight = live
    elif mode == "group-mean":
        if group is None or group not in batch.per_row:
            raise ValueError(f"group-mean needs group, a per-row field of this batch: {sorted(batch.per_row)}")
        _, ids = batch[group].unique(return_inverse=True)
        sizes = live.new_zeros(int(ids.max()) + 1).index_add(0, ids, live)
        weight = live / ((sizes > 0).sum() * sizes[ids].clamp(min=1))
    else:
        raise ValueError(f"unknown mode {mode!r}; it is one of {', '.join(ROW_MODES)}")
    return batch.with_rows(row_weight=weight)


def last_of_rows(batch: Batch, mask: Tensor) -> Tensor:
    """1 on the last token of each row where ``mask`` is set, ``[T]``.

    Example:
        >>> batch = Batch.from_rows([[1, 2, 3], [4]])
        >>> last_of_rows(batch, torch.tensor([1.0, 1.0, 0.0, 1.0])).tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    index = torch.arange(batch.num_tokens, device=mask.device)
    last = batch.reduce_rows(torch.where(mask.bool(), index, -1), "amax")
    chosen = torch.zeros_like(mask, dtype=torch.float32)
    chosen[last[last >= 0]] = 1.0
    return chosen


def scan(step: Callable[[Carry, X], tuple[Carry, Y]], carry: Carry, xs: Iterable[X]) -> tuple[Carry, list[Y]]:
    """Folds ``step`` over ``xs`` and collects its outputs, like ``jax.lax.scan``.

    Args:
        step: ``(carry, x) -> (carry, output)``.
        xs: the inputs, one for each call of ``step``.

    Returns:
        The last carry, and the outputs in order.

    Example:
        >>> scan(lambda total, x: (total + x, total), 0, [1, 2, 3])
        (6, [0, 1, 3])
    """
    ys = []
    for x in xs:
        carry, y = step(carry, x)
        ys.append(y)
    return carry, ys


def minibatches(
    batch: Batch, rows: int | Fraction, *, epochs: int = 1, shuffle: Key | None = None, together: str | None = None
) -> Iterator[Batch]:
    """Yields the update batches of several passes over a batch.

    Args:
        rows: the number of rows of an update batch; the last one of a pass has the rest. With a fraction, the number
            differs by at most one, as for an update of 4 of 6 prompts that have 10 rows together:
            ``Fraction(10 * 4, 6)``.
        shuffle: a key that orders the rows differently in every pass; None keeps their order.
        together: a per-row field of integers; rows with the same value stay in one update batch, and ``rows`` is an
            upper limit. Pass ``loss.together``.

    Raises:
        ValueError: a group has more than ``rows`` rows, the batch lacks the field, or ``rows`` is not positive.

    Example:
        >>> [len(b) for b in minibatches(Batch.from_rows([[1], [2], [3]]), 2, epochs=2)]
        [2, 1, 2, 1]
    """
    if rows <= 0:
        raise ValueError(f"an update batch has at least one row, and rows is {rows}")
    total, count = len(batch), math.ceil(Fraction(len(batch)) / rows)
    # With a share below one row, some would be empty.
    bounds = sorted({min(total, math.ceil(rows * i)) for i in range(count + 1)})
    for epoch in range(epochs):
        order = torch.arange(total)
        if shuffle is not None:
            order = torch.randperm(total, generator=shuffle.fold_in(epoch).generator())
        if together is not None:
            yield from split_by_count(batch.take(order), max(1, int(rows)), together)
        else:
            yield from (batch.take(order[start:end]) for start, end in itertools.pairwise(bounds))
