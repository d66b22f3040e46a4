"""Curves of runs: read from their metrics, drawn as SVG for a page or with matplotlib as a PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from verl_fn.runs.folder import read_metrics

# One colour a run, on light and on dark ground: apart from each other for colour-blind eyes too. Further runs take
# them again with a dashed line.
COLORS = (
    ("#037ffd", "#9fd0ff"),
    ("#e5610d", "#e0581c"),
    ("#099674", "#3ae6a0"),
    ("#661373", "#cc3ae8"),
    ("#553a04", "#fcce1b"),
    ("#2a2a28", "#8a8a8a"),
)

# Title, metric or the beginning of several, and the scale: linear, share (from 0 to 1) or log where it fits.
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

WIDTH, HEIGHT = 344, 184
_BOTTOM, _RIGHT = 22, 12
_FEW = 40  # curves with no more points than this on the width of a chart get dots and are not smoothed
_PIXELS = 300  # a longer curve is thinned to the extremes of as many stretches
_LARGEST = 1e300  # what is beyond cannot be drawn and counts as infinite
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@attrs.frozen(eq=False)
class Curve:
    """One metric of one run.

    Attributes:
        steps: where it was logged.
        values: what was logged; nan where that was no finite number.
    """

    steps: np.ndarray
    values: np.ndarray

    @property
    def gaps(self) -> int:
        return int(np.isnan(self.values).sum())


@attrs.frozen
class Axis:
    """The vertical axis: its ends, its ticks with their texts, and the power of ten that these leave out."""

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]
    factor: str

    @classmethod
    def of(cls, values: np.ndarray, scale: str) -> Axis:
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
        """0 at the lower end, 1 at the upper."""
        if self.log:
            return np.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def smooth(self, values: np.ndarray, width: int) -> np.ndarray:
        """The mean of the ``width`` points around each one, the geometric mean on a log axis."""
        return np.exp(smooth(np.log(values), width)) if self.log else smooth(values, width)


@attrs.frozen
class Chart:
    """One metric of several runs; ``curves`` maps a run's number to its curve."""

    title: str
    metric: str
    scale: str
    curves: Mapping[int, Curve]

    @property
    def axis(self) -> Axis:
        """The vertical axis that all curves fit."""
        values = np.concatenate([c.values for c in self.curves.values()])
        return Axis.of(values[~np.isnan(values)], self.scale)

    def is_plain(self, c: Curve, steps: tuple[float, float]) -> bool:
        """Whether ``c`` is drawn as logged, with dots: evaluations, and points far apart on an axis of ``steps``."""
        if self.metric.startswith("val-") or len(c.steps) < 2:
            return True
        return bool((c.steps[-1] - c.steps[0]) * _FEW >= (steps[1] - steps[0]) * (len(c.steps) - 1))


def curve(rows: Sequence[Mapping[str, Any]], metric: str) -> Curve:
    """What ``rows`` say of one metric; rows without it are left out.

    >>> curve([{"step": 1, "loss": 0.5}, {"step": 2}, {"step": 3, "loss": None}], "loss").values.tolist()
    [0.5, nan]
    """
    found = [(row["step"], math.nan if row[metric] is None else row[metric]) for row in rows if metric in row]
    steps, values = np.array(found, dtype=float).reshape(-1, 2).T
    return Curve(steps, np.where(np.abs(values) < _LARGEST, values, np.nan))


def charts(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[Chart]:
    """The charts that the metrics of ``runs`` can fill, in the order of ``CHARTS``."""
    logged = sorted({metric for rows in runs for row in rows for metric in row})
    made = []
    for title, name, scale in CHARTS:
        for metric in (m for m in logged if m == name or (name.endswith("/") and m.startswith(name))):
            curves = {i: c for i, rows in enumerate(runs) if len((c := curve(rows, metric)).steps)}
            reward = scale == "share" and "/acc/" not in metric
            made.append(Chart("Held-out reward" if reward else title, metric, "linear" if reward else scale, curves))
    return made


def window(runs: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    """How many points a smoothed curve averages over: about a twentieth of the longest run, 1 for short ones."""
    longest = max(len(rows) for rows in runs)
    return 1 if longest <= _FEW else min(longest // 20, 100) // 2 * 2 + 1


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of the ``width`` points around each one, fewer at the ends; gaps stay gaps.

    >>> smooth(np.array([0.0, 2.0, 4.0, np.nan, 8.0]), 3).tolist()
    [1.0, 2.0, 3.0, nan, 8.0]
    """
    known, half = ~np.isnan(values), width // 2
    kernel, n = np.ones(width), len(values)
    total = np.convolve(np.where(known, values, 0.0), kernel)[half : half + n]
    count = np.convolve(known.astype(float), kernel)[half : half + n]
    return np.where(known, total / np.maximum(count, 1.0), np.nan)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between ``low`` and ``high``, about ``most`` of them at most.

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


def svg(chart: Chart, labels: Sequence[str], steps: tuple[float, float], width: int) -> str:
    """The chart as SVG in the classes of report.css: raw curves faint, their means over ``width`` points strong."""
    axis = chart.axis
    left = max(34.0, 9 + 6.4 * max(len(text) for _, text in axis.ticks))
    top, bottom = 18 if axis.factor else 8, HEIGHT - _BOTTOM
    first, last = steps if steps[0] < steps[1] else (steps[0] - 1, steps[0] + 1)

    def x(step: Any) -> Any:
        return left + (step - first) / (last - first) * (WIDTH - _RIGHT - left)

    def y(value: Any) -> Any:
        return bottom - axis.place(value) * (bottom - top)

    parts = []
    for value, text in axis.ticks:
        parts.append(
            f'<line class="rule" x1="{left:.0f}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(f'<text class="end" x="{left - 5:.0f}" y="{y(value) + 3.8:.1f}">{text}</text>')
    if axis.factor:
        parts.append(f'<text x="{left - 5:.0f}" y="10">{axis.factor}</text>')
    for step in (t for t in ticks(*steps, most=4) if t == int(t)):
        parts.append(f'<text class="middle" x="{x(step):.1f}" y="{HEIGHT - 7}">{step:,.0f}</text>')
    for i, c in chart.curves.items():
        if not chart.is_plain(c, steps):
            parts.extend(_strokes(x(c.steps), y(c.values), f'class="{line_class(i)} raw"', dots=False))
    for i, c in chart.curves.items():
        values = c.values if chart.is_plain(c, steps) else axis.smooth(c.values, width)
        parts.extend(_strokes(x(c.steps), y(values), f'class="{line_class(i)}"', dots=chart.is_plain(c, steps)))
    said = "; ".join(f"{labels[i]}: last {_last(c)}" for i, c in chart.curves.items())
    about = escape(f"{chart.title}, {chart.metric}, over steps. {said}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">{"".join(parts)}</svg>'


def bars(groups: Mapping[str, Mapping[int, float]]) -> str:
    """Horizontal bars as SVG: a group a name, in it a bar a run, with seconds at their ends."""
    left = 12 + 6.4 * max(len(name) for name in groups)
    longest = max(value for group in groups.values() for value in group.values()) or 1.0
    parts, top = [], 2.0
    for name, group in groups.items():
        middle = top + 6.5 * len(group) + 3.8
        parts.append(f'<text class="end" x="{left - 6:.0f}" y="{middle:.1f}">{escape(name)}</text>')
        for i, value in group.items():
            long = max(1.0, value / longest * (WIDTH - left - 58))
            parts.append(
                f'<rect class="{line_class(i)}" x="{left:.0f}" y="{top + 2:.1f}" width="{long:.1f}" height="9"/>'
            )
            parts.append(f'<text x="{left + long + 5:.1f}" y="{top + 10.3:.1f}">{value:.3g} s</text>')
            top += 13
        top += 6
    return f'<svg viewBox="0 0 {WIDTH} {top:.0f}" role="img" aria-label="Seconds by phase">{"".join(parts)}</svg>'


def line_class(run: int) -> str:
    """The CSS classes of a run's number: its colour, and dashed from the second round of colours on.

    >>> line_class(1), line_class(7)
    ('run1', 'run1 dashed')
    """
    return f"run{run % len(COLORS)}" + (" dashed" if run >= len(COLORS) else "")


def png(
    drawn: Sequence[Chart], labels: Sequence[str], out: str | Path, *, steps: tuple[float, float], width: int
) -> Path:
    """The charts as one figure in the file ``out``, two in a row, with one legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    down, columns = max(1, math.ceil(len(drawn) / 2)), min(3, len(labels))
    figure = Figure(
        figsize=(9.6, 2.7 * down + 0.25 * math.ceil(len(labels) / columns)), dpi=120, layout="constrained"
    )
    FigureCanvasAgg(figure)
    looks: list[dict[str, Any]] = [
        {"color": COLORS[i % len(COLORS)][0], "ls": "-" if i < len(COLORS) else "--"} for i in range(len(labels))
    ]
    for n, chart in enumerate(drawn):
        axes, axis = figure.add_subplot(down, 2, n + 1), chart.axis
        for i, c in chart.curves.items():
            if chart.is_plain(c, steps):
                axes.plot(c.steps, c.values, lw=1.7, marker="o", ms=3.5, **looks[i])
            else:
                axes.plot(c.steps, c.values, lw=0.8, alpha=0.3, **looks[i])
                axes.plot(c.steps, axis.smooth(c.values, width), lw=1.7, **looks[i])
        axes.set_yscale("log" if axis.log else "linear")
        if not axis.log:
            room = (axis.high - axis.low) * 0.02
            axes.set_ylim(axis.low - room, axis.high + room)
        axes.set_title(f"{chart.title} ({chart.metric})", fontsize=9, loc="left", parse_math=False)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], lw=2.5, **look) for look in looks]
    legend = figure.legend(handles, list(labels), loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.savefig(out)
    return Path(out)


def reward_curves(
    folders: Sequence[str | Path], out: str | Path, *, title: str = "", labels: Sequence[str] = ()
) -> Path:
    """Training reward and held-out exact match of runs, one colour a run, into the file ``out``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    names = labels or [Path(folder).name for folder in folders]
    for i, (folder, name) in enumerate(zip(folders, names, strict=True)):
        rows, color = read_metrics(folder), f"C{i}"
        reward = [(r["step"], r["critic/score/mean"]) for r in rows if r.get("critic/score/mean") is not None]
        axes.plot(*zip(*reward, strict=True), color=color, lw=1, alpha=0.5, label=f"{name}: training reward")
        held = [(r["step"], v) for r in rows for k, v in r.items() if k.startswith("val-core/") and "/acc/" in k]
        axes.plot(
            *zip(*held, strict=True), color=color, lw=1.8, marker="o", ms=4, label=f"{name}: held-out exact match"
        )
    axes.set(xlabel="step", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, loc="lower right", frameon=False)
    figure.savefig(out)
    pyplot.close(figure)
    return Path(out)


def _strokes(xs: np.ndarray, ys: np.ndarray, look: str, *, dots: bool) -> Iterator[str]:
    """A path for each stretch without gaps, and dots for points that no path shows."""
    known = np.flatnonzero(~np.isnan(ys))
    for stretch in np.split(known, np.flatnonzero(np.diff(known) > 1) + 1):
        kept = _thin(stretch, ys, len(ys))
        if len(kept) > 1:
            yield f'<path {look} d="M{"L".join(f"{xs[k]:.1f},{ys[k]:.1f}" for k in kept)}"/>'
        if dots or len(kept) == 1:
            yield from (f'<circle {look} cx="{xs[k]:.1f}" cy="{ys[k]:.1f}" r="2.4"/>' for k in kept)


def _thin(stretch: np.ndarray, ys: np.ndarray, total: int) -> Sequence[int]:
    """The lowest and highest point of as many parts as pixels, so that spikes stay."""
    if total <= 2 * _PIXELS or len(stretch) < 3:
        return [int(k) for k in stretch]
    parts = np.array_split(stretch, max(1, len(stretch) * _PIXELS // total))
    ends = {int(part[pick(ys[part])]) for part in parts for pick in (np.argmin, np.argmax)}
    return sorted(ends | {int(stretch[0]), int(stretch[-1])})


def _last(c: Curve) -> str:
    known = c.values[~np.isnan(c.values)]
    return f"{known[-1]:.4g}" if len(known) else "none"
