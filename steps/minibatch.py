"""Minibatches of a batch, and the scan that makes an update from each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
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
    batch: Batch, rows: int | Fraction, *, epochs: int = 1, shuffle: Key | None = None, together: str | None = None
) -> Iterator[Batch]:
    """Yields the update batches of several passes over a batch.

    Args:
        batch: the batch to split.
        rows: the number of rows of an update batch; the last one of a pass has the rest. With a fraction, the number
            differs by at most one, as for an update of 4 of 6 prompts that have 10 rows together:
            ``Fraction(10 * 4, 6)``.
        epochs: the number of passes.
        shuffle: a key that orders the rows differently in every pass; None keeps their order.
        together: a per-row field of integers; rows with the same value stay in one update batch, and ``rows`` is an
            upper limit. Pass ``loss.together``.

    Raises:
        ValueError: a group has more than ``rows`` rows, the batch lacks the field, or an update batch has no row.

    Example:
        >>> [len(b) for b in minibatches(Batch.from_rows([[1], [2], [3]]), 2, epochs=2)]
        [2, 1, 2, 1]
    """
    total, count = len(batch), math.ceil(Fraction(len(batch)) / rows)
    bounds = [min(total, math.ceil(rows * i)) for i in range(count + 1)]
    if any(start >= end for start, end in itertools.pairwise(bounds)):
        raise ValueError(f"{total} rows cannot make {count} minibatches; raise algorithm.ppo_mini_batch_size")
    for epoch in range(epochs):
        order = torch.arange(total)
        if shuffle is not None:
            order = torch.randperm(total, generator=shuffle.fold_in(epoch).generator())
        if together is not None:
            yield from split_by_count(batch.take(order), int(rows), together)
        else:
            yield from (batch.take(order[start:end]) for start, end in itertools.pairwise(bounds))
