"""The order in which a stream takes problems of several sources with weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_fn.state import Key

BLOCK = 4096  # problems of the stream whose sources are drawn together


def turns(key: Key, start: int, count: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Returns the source of problems ``start`` to ``start + count`` of a stream, and their numbers within it.

    Each problem's source is drawn by the weights. So the stream is a function of the key, and its problems of one
    source are numbered without a gap, wherever it is entered.

    Args:
        key: names the stream.
        start: the first problem.
        count: how many.
        weights: of the sources, above 0.

    Example:
        >>> key = Key.from_seed(0)
        >>> turns(key, 0, 4, [1.0, 1.0])
        [(1, 0), (0, 0), (0, 1), (1, 1)]
        >>> turns(key, 5000, 3, [1.0, 1.0]) == turns(key, 0, 5003, [1.0, 1.0])[5000:]
        True
    """
    shares, numbers = torch.tensor(weights, dtype=torch.float64), torch.zeros(len(weights), dtype=torch.int64)
    first, rest = divmod(start, BLOCK)
    for block in range(first):
        numbers += _drawn(key, block, shares).bincount(minlength=len(weights))
    drawn = torch.cat([_drawn(key, block, shares) for block in range(first, (start + count) // BLOCK + 1)])
    of_stream = []
    counters = numbers.tolist()
    for place, source in enumerate(drawn[: rest + count].tolist()):
        if place >= rest:
            of_stream.append((source, counters[source]))
        counters[source] += 1
    return of_stream


def _drawn(key: Key, block: int, shares: Tensor) -> Tensor:
    return torch.multinomial(shares, BLOCK, replacement=True, generator=key.fold_in(block).generator())
