"""Minibatches of a batch, and the scan that makes an update from each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from verl_fn.state import Batch, Key, split_by_count

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def scan(step: Callable[[Carry, X], tuple[Carry, Y]], carry: Carry, xs: Iterable[X]) -> tuple[Carry, list[Y]]:
    """Folds ``step`` over ``xs`` and collects its outputs, like ``jax.lax.scan``.

    Args:
        step: ``(carry, x) -> (carry, output)``.
        carry: the initial carry.
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
    batch: Batch, rows: int, *, epochs: int = 1, shuffle: Key | None = None, together: str | None = None
) -> list[Batch]:
    """Returns the update batches of several passes over a batch.

    Args:
        batch: the batch to split.
        rows: the number of rows that an update batch may have.
        epochs: the number of passes.
        shuffle: a key that orders the rows differently in every pass; None keeps their order.
        together: a per-row field of integers; rows with the same value stay in one update batch. Pass
            ``loss.together``.

    Raises:
        ValueError: a group has more than ``rows`` rows, or the batch lacks the field.

    Example:
        >>> [len(b) for b in minibatches(Batch.from_rows([[1], [2], [3]]), 2, epochs=2)]
        [2, 1, 2, 1]
    """
    batches: list[Batch] = []
    for epoch in range(epochs):
        order = torch.arange(len(batch))
        if shuffle is not None:
            order = torch.randperm(len(batch), generator=shuffle.fold_in(epoch).generator())
        batches.extend(split_by_count(batch.take(order), rows, together))
    return batches
