"""Learning-rate schedules: functions of the number of updates applied so far, with readable settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import attrs

Schedule: TypeAlias = Callable[[int], float]


@attrs.frozen
class Constant:
    """A constant learning rate after a warm-up; ``constant`` makes it."""

    lr: float
    warmup_steps: int = 0

    def __call__(self, count: int) -> float:
        return self.lr * _warmup(count, self.warmup_steps)


@attrs.frozen
class Linear:
    """A linear decay after a warm-up; ``linear`` makes it."""

    lr: float
    total_steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0

    def __call__(self, count: int) -> float:
        rest = 1.0 - _progress(count, self.total_steps, self.warmup_steps)
        return self.lr * _warmup(count, self.warmup_steps) * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * rest)


@attrs.frozen
class Cosine:
    """A cosine decay after a warm-up; ``cosine`` makes it."""

    lr: float
    total_steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0

    def __call__(self, count: int) -> float:
        rest = 0.5 * (1.0 + math.cos(math.pi * _progress(count, self.total_steps, self.warmup_steps)))
        return self.lr * _warmup(count, self.warmup_steps) * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * rest)


def constant(lr: float, warmup_steps: int = 0) -> Constant:
    """Makes a constant schedule with an optional warm-up. A plain number is the same schedule without a warm-up.

    Args:
        lr: the learning rate.
        warmup_steps: the number of updates in which the learning rate grows linearly from 0.

    Example:
        >>> [constant(1.0, warmup_steps=2)(i) for i in range(4)]
        [0.0, 0.5, 1.0, 1.0]
        >>> constant(0.1) == as_schedule(0.1)
        True
    """
    return Constant(lr, warmup_steps)


def linear(lr: float, total_steps: int, warmup_steps: int = 0, min_lr_ratio: float = 0.0) -> Linear:
    """Makes a schedule that decays linearly.

    Args:
        lr: the learning rate after the warm-up.
        total_steps: the update at which the decay ends.
        warmup_steps: the number of updates in which the learning rate grows linearly from 0.
        min_lr_ratio: the learning rate at the end, as a fraction of ``lr``.

    Example:
        >>> [linear(1.0, 4)(i) for i in (0, 1, 4, 9)]
        [1.0, 0.75, 0.0, 0.0]
    """
    return Linear(lr, total_steps, warmup_steps, min_lr_ratio)


def cosine(lr: float, total_steps: int, warmup_steps: int = 0, min_lr_ratio: float = 0.0) -> Cosine:
    """Makes a schedule that decays like the first half of a cosine.

    Args:
        lr: the learning rate after the warm-up.
        total_steps: the update at which the decay ends.
        warmup_steps: the number of updates in which the learning rate grows linearly from 0.
        min_lr_ratio: the learning rate at the end, as a fraction of ``lr``.

    Example:
        >>> [round(cosine(1.0, 4)(i), 3) for i in (0, 2, 4)]
        [1.0, 0.5, 0.0]

    Source: Loshchilov & Hutter 2017 (arXiv 1608.03983).
    """
    return Cosine(lr, total_steps, warmup_steps, min_lr_ratio)


def as_schedule(schedule: Schedule | float) -> Schedule:
    """Converts a number to a constant schedule; a schedule stays as it is."""
    return schedule if callable(schedule) else Constant(float(schedule))


def _warmup(count: int, warmup_steps: int) -> float:
    return min(1.0, count / warmup_steps) if warmup_steps > 0 else 1.0


def _progress(count: int, total_steps: int, warmup_steps: int) -> float:
    """Returns the fraction of the decay that is done, from 0 at the end of the warm-up to 1."""
    return min(1.0, max(0, count - warmup_steps) / max(1, total_steps - warmup_steps))
