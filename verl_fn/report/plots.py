"""Drawings of charts: SVG for the report page, and PNG with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from verl_fn.report.curves import Chart, Curve, ticks
from verl_fn.runs.folder import read_metrics

# One colour for each run, on a light and on a dark background, chosen so that colour-blind readers can tell them
# apart. Further runs reuse the colours with a dashed line.
COLORS = (
    ("#037ffd", "#9fd0ff"),
    ("#e5610d", "#e0581c"),
    ("#099674", "#3ae6a0"),
    ("#661373", "#cc3ae8"),
    ("#553a04", "#fcce1b"),
    ("#2a2a28", "#8a8a8a"),
)

WIDTH, HEIGHT = 344, 184
_BOTTOM, _RIGHT = 22, 12
_PIXELS = 300  # a longer curve is reduced to the extremes of about so many stretches


def svg(chart: Chart, labels: Sequence[str], steps: tuple[float, float], width: int) -> str:
    """Draws a chart as SVG with the classes of report.css: raw curves faint, means over ``width`` points strong.

    Args:
        chart: the chart.
        labels: the runs' names, by number.
        steps: the ends of the horizontal axis.
        width: how many points a smoothed curve averages.
    """
    axis = chart.axis
    left = max(34.0, 9 + 6.4 * max(len(label) for _, label in axis.ticks))
    top, bottom = 18 if axis.factor else 8, HEIGHT - _BOTTOM
    first, last = steps if steps[0] < steps[1] else (steps[0] - 1, steps[0] + 1)

    def x(step: Any) -> Any:
        return left + (step - first) / (last - first) * (WIDTH - _RIGHT - left)

    def y(value: Any) -> Any:
        return bottom - axis.place(value) * (bottom - top)

    parts = []
    for value, label in axis.ticks:
        parts.append(
            f'<line class="rule" x1="{left:.0f}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(f'<text class="end" x="{left - 5:.0f}" y="{y(value) + 3.8:.1f}">{label}</text>')
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
    last_values = "; ".join(f"{labels[i]}: last {_last(c)}" for i, c in chart.curves.items())
    description = escape(f"{chart.title}, {chart.metric}, over steps. {last_values}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{description}">{"".join(parts)}</svg>'


def bars(groups: Mapping[str, Mapping[int, float]]) -> str:
    """Draws horizontal bars as SVG, with seconds at their ends.

    Args:
        groups: for each name the seconds of each run, by the run's number.
    """
    left = 12 + 6.4 * max(len(name) for name in groups)
    longest = max(value for group in groups.values() for value in group.values()) or 1.0
    parts, top = [], 2.0
    for name, group in groups.items():
        middle = top + 6.5 * len(group) + 3.8
        parts.append(f'<text class="end" x="{left - 6:.0f}" y="{middle:.1f}">{escape(name)}</text>')
        for i, value in group.items():
            length = max(1.0, value / longest * (WIDTH - left - 58))
            parts.append(
                f'<rect class="{line_class(i)}" x="{left:.0f}" y="{top + 2:.1f}" width="{length:.1f}" height="9"/>'
            )
            parts.append(f'<text x="{left + length + 5:.1f}" y="{top + 10.3:.1f}">{value:.3g} s</text>')
            top += 13
        top += 6
    return f'<svg viewBox="0 0 {WIDTH} {top:.0f}" role="img" aria-label="Seconds by phase">{"".join(parts)}</svg>'


def line_class(run: int) -> str:
    """Returns the CSS classes of a run's number: its colour, and ``dashed`` for a colour that is used again.

    Example:
        >>> line_class(1), line_class(7)
        ('run1', 'run1 dashed')
    """
    return f"run{run % len(COLORS)}" + (" dashed" if run >= len(COLORS) else "")


def png(
    drawn: Sequence[Chart], labels: Sequence[str], out: str | Path, *, steps: tuple[float, float], width: int
) -> Path:
    """Draws charts as one figure into the file ``out``, two in a row, with one legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    down, columns = max(1, math.ceil(len(drawn) / 2)), min(3, len(labels))
    figure = Figure(
        figsize=(9.6, 2.7 * down + 0.25 * math.ceil(len(labels) / columns)), dpi=120, layout="constrained"
    )
    FigureCanvasAgg(figure)
    styles: list[dict[str, Any]] = [
        {"color": COLORS[i % len(COLORS)][0], "ls": "-" if i < len(COLORS) else "--"} for i in range(len(labels))
    ]
    for n, chart in enumerate(drawn):
        axes, axis = figure.add_subplot(down, 2, n + 1), chart.axis
        for i, c in chart.curves.items():
            if chart.is_plain(c, steps):
                axes.plot(c.steps, c.values, lw=1.7, marker="o", ms=3.5, **styles[i])
            else:
                axes.plot(c.steps, c.values, lw=0.8, alpha=0.3, **styles[i])
                axes.plot(c.steps, axis.smooth(c.values, width), lw=1.7, **styles[i])
        axes.set_yscale("log" if axis.log else "linear")
        if not axis.log:
            margin = (axis.high - axis.low) * 0.02
            axes.set_ylim(axis.low - margin, axis.high + margin)
        axes.set_title(f"{chart.title} ({chart.metric})", fontsize=9, loc="left", parse_math=False)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], lw=2.5, **style) for style in styles]
    legend = figure.legend(handles, list(labels), loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
    for label in legend.get_texts():
        label.set_parse_math(False)
    figure.savefig(out)
    return Path(out)


def reward_curves(
    folders: Sequence[str | Path], out: str | Path, *, title: str = "", labels: Sequence[str] = ()
) -> Path:
    """Draws training reward and held-out exact match of runs into the file ``out``, one colour for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    names = labels or [Path(folder).name for folder in folders]
    for i, (folder, name) in enumerate(zip(folders, names, strict=True)):
        rows, color = read_metrics(folder), f"C{i}"
        reward = [(r["step"], r["critic/score/mean"]) for r in rows if r.get("critic/score/mean") is not None]
        axes.plot(*zip(*reward, strict=True), color=color, lw=1, alpha=0.5, label=f"{name}: training reward")
        exact = [(r["step"], v) for r in rows for k, v in r.items() if k.startswith("val-core/") and "/acc/" in k]
        label = f"{name}: held-out exact match"
        axes.plot(*zip(*exact, strict=True), color=color, lw=1.8, marker="o", ms=4, label=label)
    axes.set(xlabel="step", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, loc="lower right", frameon=False)
    figure.savefig(out)
    pyplot.close(figure)
    return Path(out)


def _strokes(xs: np.ndarray, ys: np.ndarray, style: str, *, dots: bool) -> Iterator[str]:
    """Yields a path for each stretch without gaps, and dots for points that no path shows."""
    finite = np.flatnonzero(~np.isnan(ys))
    for stretch in np.split(finite, np.flatnonzero(np.diff(finite) > 1) + 1):
        points = _thin(stretch, ys, len(ys))
        if len(points) > 1:
            yield f'<path {style} d="M{"L".join(f"{xs[k]:.1f},{ys[k]:.1f}" for k in points)}"/>'
        if dots or len(points) == 1:
            yield from (f'<circle {style} cx="{xs[k]:.1f}" cy="{ys[k]:.1f}" r="2.4"/>' for k in points)


def _thin(stretch: np.ndarray, ys: np.ndarray, total: int) -> Sequence[int]:
    """Returns the lowest and highest point of each pixel's share of a stretch, so that spikes stay visible."""
    if total <= 2 * _PIXELS or len(stretch) < 3:
        return [int(k) for k in stretch]
    parts = np.array_split(stretch, max(1, len(stretch) * _PIXELS // total))
    ends = {int(part[pick(ys[part])]) for part in parts for pick in (np.argmin, np.argmax)}
    return sorted(ends | {int(stretch[0]), int(stretch[-1])})


def _last(curve: Curve) -> str:
    finite = curve.values[~np.isnan(curve.values)]
    return f"{finite[-1]:.4g}" if len(finite) else "none"
