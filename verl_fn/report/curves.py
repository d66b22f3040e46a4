"""Curves of runs: values and axes of charts, read from metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

# Each chart's title, its metric (or the common start of several), and its scale: linear, share (from 0 to 1), or log,
# which is used only where values span enough powers of ten.
CHARTS = (
    ("Held-out accuracy", "val-core/", "share"),
    ("Training reward", "critic/score/mean", "linear"),
    ("Policy loss", "actor/pg_loss", "linear"),
    ("Loss", "train/loss", "linear"),
    ("KL of the update", "actor/ppo_kl", "log"),
    ("KL penalty in the reward", "actor/reward_kl_penalty", "log"),
    ("KL loss", "actor/kl_loss", "log"),
    ("Entropy", "actor/entropy", "linear"),
    ("Clipped share of tokens", "actor/pg_clipfrac", "linear"),
    ("Gradient norm", "train/grad_norm", "log"),
    ("Gradient norm, actor", "actor/grad_norm", "log"),
    ("Gradient norm, critic", "critic/grad_norm", "log"),
    ("Response length", "response_length/mean", "linear"),
    ("Explained variance of values", "critic/vf_explained_var", "linear"),
    ("Rollout against trainer, probability", "training/rollout_probs_diff_max", "log"),
    ("Tokens a second", "perf/throughput", "linear"),
)

FEW_POINTS = 40  # curves with at most this many points on the width of a chart get dots and are not smoothed
_LARGEST = 1e300  # larger values cannot be drawn and count as infinite
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@attrs.frozen(eq=False)
class Curve:
    """One metric of one run.

    Attributes:
        steps: the steps at which it was logged.
        values: the logged values; nan for those that are not finite.
    """

    steps: np.ndarray
    values: np.ndarray

    @property
    def gaps(self) -> int:
        """Returns how many values are not finite."""
        return int(np.isnan(self.values).sum())


@attrs.frozen
class Axis:
    """The vertical axis of a chart.

    Attributes:
        low, high: its ends.
        log: whether it is logarithmic.
        ticks: the values that have a tick, with their labels.
        factor: the power of ten by which the labels are to be multiplied, as HTML; empty for 1.
    """

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]
    factor: str

    @classmethod
    def of(cls, values: np.ndarray, scale: str) -> Axis:
        """Returns the axis that shows ``values`` on a scale of ``CHARTS``."""
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        if scale == "share" and low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        elif scale == "log" and 0 < low * 100 < high:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            shown = [p for p in powers if p % math.ceil(len(powers) / 6) == 0]
            marks = [(10.0**p, f"10{str(p).translate(_SUPERSCRIPT)}") for p in shown]
            return cls(10.0 ** powers[0], 10.0 ** powers[-1], True, marks, "")
        else:
            pad = (high - low) * 0.06 or abs(high) * 0.1 or 0.5
            low, high = low - pad, high + pad
        power = math.floor(math.log10(max(abs(low), abs(high))))
        power = 0 if -2 <= power < 5 else power
        at = ticks(low / 10.0**power, high / 10.0**power)
        digits = max(0, -math.floor(math.log10(at[1] - at[0]) + 1e-9))
        factor = f"&times;10{str(power).translate(_SUPERSCRIPT)}" if power else ""
        return cls(low, high, False, [(t * 10.0**power, f"{t:,.{digits}f}") for t in at], factor)

    def place(self, value: Any) -> Any:
        """Returns the place of a value on the axis, 0 at the lower end and 1 at the upper."""
        if self.log:
            return np.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def smooth(self, values: np.ndarray, width: int) -> np.ndarray:
        """Returns the mean of the ``width`` points around each one, or their geometric mean on a log axis."""
        return np.exp(smooth(np.log(values), width)) if self.log else smooth(values, width)


@attrs.frozen
class Chart:
    """One metric of several runs.

    Attributes:
        title: the chart's title.
        metric: the metric's name.
        scale: ``linear``, ``share`` or ``log``.
        curves: the curve of each run, by the run's number.
    """

    title: str
    metric: str
    scale: str
    curves: Mapping[int, Curve]

    @property
    def axis(self) -> Axis:
        """Returns the vertical axis for all curves."""
        values = np.concatenate([c.values for c in self.curves.values()])
        return Axis.of(values[~np.isnan(values)], self.scale)

    def is_plain(self, curve: Curve, steps: tuple[float, float]) -> bool:
        """Returns whether a curve is drawn as logged, with dots.

        Evaluations are, and so are curves whose points lie far apart on an axis from ``steps[0]`` to ``steps[1]``.
        """
        if self.metric.startswith("val-") or len(curve.steps) < 2:
            return True
        logged, shown = curve.steps[-1] - curve.steps[0], steps[1] - steps[0]
        return bool(logged * FEW_POINTS >= shown * (len(curve.steps) - 1))


def curve(rows: Sequence[Mapping[str, Any]], metric: str) -> Curve:
    """Returns the curve of one metric; rows without it are left out.

    Example:
        >>> curve([{"step": 1, "loss": 0.5}, {"step": 2}, {"step": 3, "loss": None}], "loss").values.tolist()
        [0.5, nan]
    """
    points = [(row["step"], math.nan if row[metric] is None else row[metric]) for row in rows if metric in row]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return Curve(steps, np.where(np.abs(values) < _LARGEST, values, np.nan))


def charts(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[Chart]:
    """Returns a chart for each metric of ``CHARTS`` that a run logged, in that order."""
    logged = sorted({metric for rows in runs for row in rows for metric in row})
    filled = []
    for title, name, scale in CHARTS:
        for metric in (m for m in logged if m == name or (name.endswith("/") and m.startswith(name))):
            curves = {i: c for i, rows in enumerate(runs) if len((c := curve(rows, metric)).steps)}
            reward = scale == "share" and "/acc/" not in metric
            shown_title, shown_scale = ("Held-out reward", "linear") if reward else (title, scale)
            filled.append(Chart(shown_title, metric, shown_scale, curves))
    return filled


def window(runs: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    """Returns how many points a smoothed curve averages: about a twentieth of the longest run, 1 for short runs."""
    longest = max(len(rows) for rows in runs)
    return 1 if longest <= FEW_POINTS else min(longest // 20, 100) // 2 * 2 + 1


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of the ``width`` points around each one, of fewer at the ends; gaps stay gaps.

    Example:
        >>> smooth(np.array([0.0, 2.0, 4.0, np.nan, 8.0]), 3).tolist()
        [1.0, 2.0, 3.0, nan, 8.0]
    """
    finite, half = ~np.isnan(values), width // 2
    kernel, n = np.ones(width), len(values)
    total = np.convolve(np.where(finite, values, 0.0), kernel)[half : half + n]
    count = np.convolve(finite.astype(float), kernel)[half : half + n]
    return np.where(finite, total / np.maximum(count, 1.0), np.nan)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Returns round numbers between ``low`` and ``high``, at most about ``most`` of them.

    Example:
        >>> ticks(0.0, 1.0), ticks(0, 400, 4)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 100.0, 200.0, 300.0, 400.0])
    """
    if high <= low:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(m * unit for m in (1, 2, 5, 10, 20) if (high - low) / (m * unit) <= most + 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, digits) for k in range(first, last + 1)]
