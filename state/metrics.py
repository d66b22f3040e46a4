"""Metrics that add up: the sum of the metrics of all parts is the metric of the whole, for every split."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import tree
from .node import Node, node, static

Number: TypeAlias = "float | Tensor"


@node
class Weighted(Node):
    """A weighted mean, as a sum and a weight; they are divided only when ``value`` is read.

    Example:
        >>> (Weighted(3.0, 1.0) + Weighted(1.0, 3.0)).value
        1.0
    """

    sum: Number
    weight: Number

    @classmethod
    def of(cls, values: Tensor, weights: Tensor) -> Weighted:
        """Makes the weighted mean of ``values``; entries of weight zero are ignored, even if they are not finite."""
        w = weights.double()
        return cls(torch.where(w != 0, values.detach().double() * w, 0.0).sum(), w.sum())

    def __add__(self, other: Weighted) -> Weighted:
        return Weighted(self.sum + other.sum, self.weight + other.weight)

    @property
    def value(self) -> float:
        """The mean, or nan if the total weight is zero."""
        weight = float(self.weight)
        return float(self.sum) / weight if weight else math.nan


@node
class Sum(Node):
    """A sum.

    Example:
        >>> (Sum(2) + Sum(3)).value
        5.0
    """

    total: Number

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return float(self.total)


@node
class Max(Node):
    """A maximum.

    Example:
        >>> (Max(2.0) + Max(3.0)).value
        3.0
    """

    top: Number

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Max:
        """Makes the maximum of the values where ``mask`` is set, or minus infinity if it is set nowhere."""
        return cls(torch.where(mask.bool(), values.detach().double(), -math.inf).amax() if len(values) else -math.inf)

    def __add__(self, other: Max) -> Max:
        return Max(torch.maximum(*_doubles(self.top, other.top)))

    @property
    def value(self) -> float:
        return float(self.top)


@node
class Min(Node):
    """A minimum.

    Example:
        >>> (Min(2.0) + Min(3.0)).value
        2.0
    """

    low: Number

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Min:
        """Makes the minimum of the values where ``mask`` is set, or infinity if it is set nowhere."""
        return cls(torch.where(mask.bool(), values.detach().double(), math.inf).amin() if len(values) else math.inf)

    def __add__(self, other: Min) -> Min:
        return Min(torch.minimum(*_doubles(self.low, other.low)))

    @property
    def value(self) -> float:
        return float(self.low)


@node
class Moments(Node):
    """The sums from which a statistic of one or two variables is computed.

    The statistic is a standard deviation (``std``), a correlation (``correlation``) or the fraction of samples that
    are effective (``ess``, for weights ``x``).

    Attributes:
        n: the number of values.
        x: their sum.
        xx: the sum of their squares.
        y: the sum of the second variable.
        yy: the sum of its squares.
        xy: the sum of the products of both.
        stat: the statistic.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> whole = Moments.of(x, torch.ones(4), stat="std")
        >>> parts = Moments.of(x[:1], torch.ones(1), stat="std") + Moments.of(x[1:], torch.ones(3), stat="std")
        >>> round(whole.value, 6) == round(parts.value, 6) == round(float(x.std(correction=0)), 6)
        True
    """

    n: Number
    x: Number
    xx: Number
    y: Number
    yy: Number
    xy: Number
    stat: str = static()

    @classmethod
    def of(cls, x: Tensor, mask: Tensor, y: Tensor | None = None, *, stat: str) -> Moments:
        """Sums ``x``, and ``y`` if it is given, where ``mask`` is set.

        Raises:
            ValueError: ``stat`` is none of ``std``, ``correlation`` and ``ess``.
        """
        if stat not in ("std", "correlation", "ess"):
            raise ValueError(f"Moments.stat is {stat!r}; it must be std, correlation or ess")
        w = mask.double()
        a = torch.where(w != 0, x.detach().double(), 0.0)
        b = torch.where(w != 0, y.detach().double(), 0.0) if y is not None else torch.zeros_like(a)
        products = (w, w * a, w * a * a, w * b, w * b * b, w * a * b)
        n, sum_a, sum_aa, sum_b, sum_bb, sum_ab = (product.sum() for product in products)
        return cls(n, sum_a, sum_aa, sum_b, sum_bb, sum_ab, stat)

    def __add__(self, other: Moments) -> Moments:
        return tree.map(operator.add, self, other)

    @property
    def value(self) -> float:
        """The statistic, or nan if it is not defined."""
        n, x, xx, y, yy, xy = (float(v) for v in tree.leaves(self))
        if n == 0:
            return math.nan
        if self.stat == "ess":
            return x * x / (n * xx) if xx else math.nan
        var_x, var_y = max(xx / n - (x / n) ** 2, 0.0), max(yy / n - (y / n) ** 2, 0.0)
        if self.stat == "std":
            return math.sqrt(var_x)
        scale = math.sqrt(var_x * var_y)
        return (xy / n - x * y / n**2) / scale if scale else math.nan


Metric: TypeAlias = Weighted | Sum | Max | Min | Moments
Metrics: TypeAlias = "dict[str, Metric]"


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """Adds metrics by name.

    Raises:
        ValueError: metrics of one name are of different classes.

    Example:
        >>> merge({"a": Sum(1)}, {"a": Sum(2), "b": Max(1)})["a"].value
        3.0
    """
    total: dict[str, Any] = {}  # A union cannot say that a metric adds only to its own class.
    for part in parts:
        for name, metric in part.items():
            if name in total and type(total[name]) is not type(metric):
                kinds = f"{type(total[name]).__name__} and {type(metric).__name__}"
                raise ValueError(f"the metrics named {name!r} are a {kinds} and do not add; name them differently")
            total[name] = total[name] + metric if name in total else metric
    return total


def to_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Returns the values by name.

    Example:
        >>> to_floats({"loss": Weighted(2.0, 4.0)})
        {'loss': 0.5}
    """
    return {name: metric.value for name, metric in metrics.items()}


def _doubles(*numbers: Number) -> list[Tensor]:
    return [torch.as_tensor(number, dtype=torch.float64) for number in numbers]
