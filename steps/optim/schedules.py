"""Learning-rate schedules: functions of the number of updates applied so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

Schedule: TypeAlias = Callable[[int], float]


def constant(lr: float, warmup_steps: int = 0) -> Schedule:
    """``lr`` throughout, after a linear warm-up from 0.

    >>> [constant(1.0, warmup_steps=2)(i) for i in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    return lambda count: lr * _warmup(count, warmup_steps)


def linear(lr: float, total_steps: int, warmup_steps: int = 0, min_lr_ratio: float = 0.0) -> Schedule:
    """Straight from ``lr`` down to ``min_lr_ratio * lr`` at ``total_steps``.

    >>> [linear(1.0, 4)(i) for i in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """

    def schedule(count: int) -> float:
        rest = 1.0 - _progress(count, total_steps, warmup_steps)
        return lr * _warmup(count, warmup_steps) * (min_lr_ratio + (1.0 - min_lr_ratio) * rest)

    return schedule


def cosine(lr: float, total_steps: int, warmup_steps: int = 0, min_lr_ratio: float = 0.0) -> Schedule:
    """Half a cosine from ``lr`` down to ``min_lr_ratio * lr`` (Loshchilov & Hutter 2017, arXiv 1608.03983).

    >>> [round(cosine(1.0, 4)(i), 3) for i in (0, 2, 4)]
    [1.0, 0.5, 0.0]
    """

    def schedule(count: int) -> float:
        rest = 0.5 * (1.0 + math.cos(math.pi * _progress(count, total_steps, warmup_steps)))
        return lr * _warmup(count, warmup_steps) * (min_lr_ratio + (1.0 - min_lr_ratio) * rest)

    return schedule


def _warmup(count: int, warmup_steps: int) -> float:
    return min(1.0, count / warmup_steps) if warmup_steps > 0 else 1.0


def _progress(count: int, total_steps: int, warmup_steps: int) -> float:
    """How far past the warm-up, from 0 to 1."""
    return min(1.0, max(0, count - warmup_steps) / max(1, total_steps - warmup_steps))
