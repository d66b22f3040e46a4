"""Scans over minibatches: several updates from one batch, as a fold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from verl_fn.state import Batch, Key, split_by_count

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def scan(step: Callable[[Carry, X], tuple[Carry, Y]], carry: Carry, xs: Iterable[X]) -> tuple[Carry, list[Y]]:
    """Fold ``step`` over ``xs`` and keep what it emits, as ``jax.lax.scan``.

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
    """Returns the update batches of ``epochs`` passes, of at most ``rows`` rows each.

    Args:
        shuffle: a key, for another order of rows in every epoch; None keeps the order.
        together: a per-row field of integers; rows with one value of it stay in one minibatch. Pass ``loss.together``.

    Raises:
        ValueError: one group has more than ``rows`` rows, or the batch lacks the field.

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
