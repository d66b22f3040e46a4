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
    ("Rollout against trainer, KL", "rollout_corr/k3_kl", "log"),
    ("Tokens a second", "perf/throughput", "linear"),
)

FEW_POINTS = 40  # curves with at most this many points on the width of a chart get dots and are not smoothed
_LARGEST = 1e300  # larger values cannot be drawn and count as infinite
_STRETCHES = 300  # a long curve is reduced to the extremes of so many stretches, about one a pixel


@attrs.frozen(eq=False)
class Curve:
    """One metric of one run.

    Attributes:
        steps: the steps at which it was logged.
        values: the logged values; nan for values that are not finite.
    """

    steps: np.ndarray
    values: np.ndarray

    @property
    def gaps(self) -> int:
        """Returns how many values are not finite."""
        return int(np.isnan(self.values).sum())

    @property
    def alone(self) -> np.ndarray:
        """Returns which points have no neighbour that is finite, so that no line shows them."""
        known = np.concatenate([[False], ~np.isnan(self.values), [False]])
        return known[1:-1] & ~known[:-2] & ~known[2:]

    def thinned(self) -> Curve:
        """Returns a long curve with only the lowest and the highest point of each stretch; spikes and gaps stay.

        Example:
            >>> Curve(np.arange(9000.0), np.sin(np.arange(9000.0))).thinned().steps.size < 1500
            True
        """
        if len(self.values) <= 4 * _STRETCHES:
            return self
        kept = {0, len(self.values) - 1}
        for stretch in np.array_split(np.arange(len(self.values)), _STRETCHES):
            gap = np.isnan(self.values[stretch])
            kept |= {int(k) for k in stretch[gap][:1]}
            if len(known := stretch[~gap]):
                kept |= {int(known[pick(self.values[known])]) for pick in (np.argmin, np.argmax)}
        order = sorted(kept)
        return Curve(self.steps[order], self.values[order])


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
    def limits(self) -> tuple[float, float] | None:
        """Returns the ends of the vertical axis if they are given: for shares 0 and 1."""
        values = self._values()
        shares = self.scale == "share" and len(values) and values.min() >= 0 and values.max() <= 1
        return (0.0, 1.0) if shares else None

    @property
    def log(self) -> bool:
        """Returns whether the vertical axis is logarithmic."""
        values = self._values()
        return bool(self.scale == "log" and len(values) and 0 < values.min() * 100 < values.max())

    @property
    def same(self) -> list[list[int]]:
        """Returns the runs by equal curves."""
        groups: dict[tuple[bytes, bytes], list[int]] = {}
        for run, c in self.curves.items():
            groups.setdefault((c.steps.tobytes(), c.values.tobytes()), []).append(run)
        return list(groups.values())

    def smooth(self, curve: Curve, width: int) -> Curve:
        """Returns the mean of the ``width`` points around each one, or their geometric mean on a log axis."""
        values = np.exp(smooth(np.log(curve.values), width)) if self.log else smooth(curve.values, width)
        return Curve(curve.steps, values)

    def _values(self) -> np.ndarray:
        values = np.concatenate([c.values for c in self.curves.values()])
        return values[~np.isnan(values)]

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
