"""Charts of runs, drawn with matplotlib from their metrics as SVG or PNG; and the evaluations of several models."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from verl_fn.errors import printable
from verl_fn.runs.checkpoints import step_of
from verl_fn.state import END_REASONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
# The colours of labels and rules on a light page. The SVG has report.css's variables in their place.
SOFT, RULE = "#59636e", "#d9dee4"
_VARIABLES = {SOFT: "var(--soft)", RULE: "var(--rule)"} | {c[0]: f"var(--run{i})" for i, c in enumerate(COLORS)}
_WIDTH, _HEIGHT, _FONT = 344, 184, 11  # of a chart on the page, in its own units
_DASH = 5.0
SHARE = (0.0, 1.0)  # the ends of an axis of shares
Reports = Mapping[str, Mapping[str, float]]
"""The metrics of each model, by its label."""

_NAME = re.compile(r"val-(?:core|aux)/(?P<source>.+)/(?P<value>[^/]+)/(?P<kind>\w+@\d+)(?:/mean)?", re.DOTALL)

# Each chart's title, its metric (or the common start of several), and its scale: linear, share (from 0 to 1), or log,
# which is used only where values span enough powers of ten.
WHOLE = "actor/loss"  # the sum of the actor's losses; drawn if a run has it without a loss of the policy
CHARTS = (
    ("Held-out accuracy", "val-core/", "share"),
    ("Training reward", "critic/score/mean", "linear"),
    ("Policy loss", "actor/pg_loss", "linear"),
    ("Loss of the actor", WHOLE, "linear"),
    ("Loss", "train/loss", "linear"),
    ("Gradient norm", "train/grad_norm", "log"),
    ("Gradient norm, actor", "actor/grad_norm", "log"),
    ("Entropy", "actor/entropy", "linear"),
    ("KL of the update", "actor/ppo_kl", "log"),
    ("Response length", "response_length/mean", "linear"),
    ("Responses cut off", "response_length/clip_ratio", "linear"),
    ("Accuracy in training", "training/acc", "linear"),
    ("Replies of a conversation", "env/turns/mean", "linear"),
    ("Conversations by their end", "env/ended/", "linear"),
    ("Groups whose rewards differ", "train/groups_kept", "linear"),
    ("Clipped share of tokens", "actor/pg_clipfrac", "linear"),
    ("KL penalty in the reward", "actor/reward_kl_penalty", "log"),
    ("KL loss", "actor/kl_loss", "log"),
    ("Gradient norm, critic", "critic/grad_norm", "log"),
    ("Explained variance of values", "critic/vf_explained_var", "linear"),
    ("Tokens a second", "perf/throughput", "linear"),
)
# Drawn last, after the user's own metrics.
OF_ENGINE = (
    ("Rollout against trainer, probability", "training/rollout_probs_diff_max", "log"),
    ("Rollout against trainer, KL", "rollout_corr/k3_kl", "log"),
)

# Names of the project's own metrics (docs/metrics.md); metrics of other names come from the user's functions.
BUILT_IN = re.compile(
    r"step|(?:critic|env|perf|prompt_length|rejection|response|response_length|reward_model|rewards|rollout"
    r"|rollout_corr|timing_per_token_ms|timing_s|train|training|val|val-aux|val-core)/.+"
    r"|actor/(?:entropy|entropy_loss|grad_norm|kl_cov_frac|kl_loss|loss|lr|pg_clipfrac|pg_clipfrac_lower|pg_loss"
    r"|ppo_kl|reward_kl_penalty|reward_kl_penalty_coeff|update_skipped|top_entropy_frac)"
    r"|distill/(?:forward_kl|loss|reverse_kl|teacher_mass)|dpo/loss|kto/reference_point"
    r"|orpo/(?:log_odds_ratio|nll)|reward/(?:overlong|judge_unreadable)/mean|.+/count"
)
# Metrics that are 0 by nature in some runs: with one update a step all ratios are 1, and an answer may have no limit.
ZERO = (
    "actor/ppo_kl", "actor/pg_clipfrac", "response_length/clip_ratio",
    *(f"env/ended/{reason}" for reason in END_REASONS),
)  # fmt: skip
MOST_OWN = 24  # charts of the user's metrics; the page's table has all of them
_FEWEST = 8  # curves of fewer points than this are not smoothed, however long the other runs are
FEW_POINTS = 40  # curves with at most this many points on the width of a chart get dots and are not smoothed
_LARGEST = 1e300  # larger values cannot be drawn and count as infinite
_STRETCHES = 300  # a long curve is reduced to the extremes of so many stretches, about one a pixel


@attrs.frozen(eq=False)
class Curve:
    """One metric of one run.

    Attributes:
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
        scale: ``linear``, ``share`` or ``log``.
        curves: the curve of each run, by the run's number.
    """

    title: str
    metric: str
    scale: str
    curves: Mapping[int, Curve]

    @property
    def limits(self) -> tuple[float, float] | None:
        """Returns the ends of the vertical axis if they are given: for shares 0 and 1, or a part of it around them.

        The part is at least a tenth, so that the noise of a few answers does not fill the chart.
        """
        values = self._values()
        if self.scale != "share" or not len(values) or values.min() < 0 or values.max() > 1:
            return None
        least, most = float(values.min()), float(values.max())
        part = max(0.1, 2 * (most - least))
        if least == most or part >= 0.5:
            return SHARE
        start = min(max((least + most - part) / 2, 0.0), 1.0 - part)
        return (start, start + part)

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

        Evaluations are, and so are curves of few points, or whose points lie far apart on an axis from ``steps[0]``
        to ``steps[1]``.
        """
        if self.metric.startswith("val-") or len(curve.steps) < _FEWEST:
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


def always_zero(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Returns the metrics of ``ZERO`` that are 0 in all steps of all runs, so that a chart would show nothing.

    Example:
        >>> always_zero([[{"step": 1, "actor/ppo_kl": 0.0}], [{"step": 1, "actor/pg_clipfrac": 0.5}]])
        ['actor/ppo_kl']
    """
    logged = {metric: [row[metric] for rows in runs for row in rows if metric in row] for metric in ZERO}
    return [metric for metric, values in logged.items() if values and all(value == 0.0 for value in values)]


def charts(runs: Sequence[Sequence[Mapping[str, Any]]], asked: Sequence[str] = ()) -> list[Chart]:
    """Returns a chart for each metric that is asked for, then for each logged one of ``CHARTS``, then the user's.

    Metrics that are ``always_zero`` have one only if they are asked for.
    """
    hidden = {*always_zero(runs)} - {*asked}
    logged = sorted({metric for rows in runs for row in rows for metric in row} - hidden)
    own = [metric for metric in logged if not BUILT_IN.fullmatch(metric)][:MOST_OWN]
    has = [[any(name in row for row in rows) for name in (WHOLE, "actor/pg_loss")] for rows in runs]
    if [True, False] not in has:
        logged = [metric for metric in logged if metric != WHOLE]
    known = {
        metric: ("Held-out reward", "linear") if scale == "share" and "/acc/" not in metric else (title, scale)
        for title, name, scale in (*CHARTS, *((_short(metric), metric, "linear") for metric in own), *OF_ENGINE)
        for metric in logged
        if metric == name or (name.endswith("/") and metric.startswith(name))
    }
    drawn = {metric: known.get(metric, (_short(metric), "linear")) for metric in asked} | known
    return [
        Chart(title, metric, scale, {i: c for i, rows in enumerate(runs) if len((c := curve(rows, metric)).steps)})
        for metric, (title, scale) in drawn.items()
    ]


def _short(metric: str) -> str:
    """Returns the title of a user's metric: its name without its family.

    Example:
        >>> _short("actor/my_ratio"), _short("reward/digits/mean")
        ('my_ratio', 'digits')
    """
    parts = metric.removesuffix("/mean").split("/", 1)
    return parts[-1]


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


def svg(chart: Chart, labels: Sequence[str], steps: tuple[float, float], width: int) -> str:
    """Draws a chart as SVG with the colours of report.css: raw curves faint, means over ``width`` points strong.

    Args:
        width: how many points a smoothed curve averages.
    """
    figure = figure_of(_WIDTH / 72, _HEIGHT / 72)
    axes = figure.add_subplot()
    _draw(axes, chart, steps, width, _FONT)
    last_values = "; ".join(f"{labels[i]}: last {_last(c)}" for i, c in chart.curves.items())
    return _inline(figure, chart.metric, f"{chart.title}, {chart.metric}, over steps. {last_values}")


def bars(groups: Mapping[str, Mapping[int, tuple[float, str]]]) -> str:
    """Draws horizontal bars as SVG, with seconds and a remark at their ends.

    Args:
        groups: for each name the seconds and the remark of each run, by the run's number.
    """
    rows = sum(map(len, groups.values()))
    figure = figure_of(_WIDTH / 72, (13 * rows + 7 * len(groups) + 6) / 72)
    axes = figure.add_subplot()
    top, middles = 0.0, []
    for group in groups.values():
        middles.append(top + (len(group) - 1) / 2)
        for i, (seconds, remark) in group.items():
            axes.barh(top, seconds, height=0.7, color=_color(i), alpha=1.0 if i < len(COLORS) else 0.45)
            axes.annotate(f"{seconds:.3g} s{remark}", (seconds, top), (4, 0), textcoords="offset points", va="center",
                          fontsize=_FONT, color=SOFT, annotation_clip=False)  # fmt: skip
            top += 1
        top += 0.5
    axes.set_yticks(middles, labels=list(map(printable, groups)), parse_math=False, fontsize=_FONT, color=SOFT)
    axes.set_xticks([])
    # Half of the width is for the words at the ends of the bars.
    axes.set_xlim(0, (max(seconds for group in groups.values() for seconds, _ in group.values()) or 1.0) * 2.0)
    axes.set_ylim(top - 0.5, -0.75)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return _inline(figure, "bars", "Seconds by phase")


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
    from matplotlib.lines import Line2D

    down, columns = max(1, math.ceil(len(drawn) / 2)), min(3, len(labels))
    figure = figure_of(9.6, 2.7 * down + 0.25 * math.ceil(len(labels) / columns))
    for n, chart in enumerate(drawn):
        axes = figure.add_subplot(down, 2, n + 1)
        _draw(axes, chart, steps, width, 8)
        name = f"{chart.metric}, log scale" if chart.log else chart.metric
        axes.set_title(printable(f"{chart.title} ({name})"), fontsize=9, loc="left", parse_math=False)
        if n >= len(drawn) - 2:
            axes.set_xlabel("step", fontsize=8, color=SOFT)
    handles = [Line2D([], [], lw=2.5, **line_style(i)) for i in range(len(labels))]
    names = list(map(printable, labels))
    legend = figure.legend(handles, names, loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
    for label in legend.get_texts():
        label.set_parse_math(False)
    figure.savefig(out, dpi=120)
    return Path(out)


def figure_of(width: float, height: float) -> Figure:
    """Makes a figure without the state of pyplot, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _draw(axes: Axes, chart: Chart, steps: tuple[float, float], width: int, font: float) -> None:
    """Draws the curves of a chart.

    Args:
        width: how many points a smoothed curve averages.
        font: the size of labels, in points.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    for i, c in chart.curves.items():
        if not chart.is_plain(c, steps):
            raw = c.thinned()
            axes.plot(raw.steps, raw.values, lw=0.9, alpha=0.32, color=_color(i))
    for i, style, size in _styles(chart):
        c, plain = chart.curves[i], chart.is_plain(chart.curves[i], steps)
        shown = c if plain else chart.smooth(c, width).thinned()
        axes.plot(shown.steps, shown.values, lw=1.8, marker="o" if plain else "", ms=size, **style)
        if not plain:
            axes.plot(
                shown.steps[shown.alone], shown.values[shown.alone], ls="", marker="o", ms=size, color=_color(i)
            )
    axes.set_yscale("log" if chart.log else "linear")
    if chart.log:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    if chart.limits is not None:
        start, end = chart.limits
        axes.set_ylim(start - 0.03 * (end - start), end + 0.03 * (end - start))
    pad = (steps[1] - steps[0]) * 0.02 or 1.0
    axes.set_xlim(steps[0] - pad, steps[1] + pad)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.tick_params(which="both", length=0, labelsize=font, labelcolor=SOFT)
    axes.yaxis.get_offset_text().set(fontsize=font, color=SOFT)
    axes.grid(axis="y", color=RULE)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _styles(chart: Chart) -> Iterator[tuple[int, dict[str, Any], float]]:
    """Yields each run with its line style and the size of its dots; of equal curves none hides another.

    The dashes of equal curves take turns, and the dots of earlier ones stand out behind later ones.
    """
    for runs in chart.same:
        for place, i in enumerate(runs):
            style, count = line_style(i), len(runs)
            if count > 1:
                style["ls"] = (_DASH * (count - place), (_DASH, _DASH * (count - 1)))
            yield i, style, 3.6 + 2.4 * (count - 1 - place)


def line_style(run: int) -> dict[str, Any]:
    return {"color": _color(run), "ls": "-" if run < len(COLORS) else "--"}


def _color(run: int) -> str:
    return COLORS[run % len(COLORS)][0]


def _inline(figure: Figure, name: str, description: str) -> str:
    """Returns a figure as an SVG element for the page.

    Args:
        name: makes the ids of this drawing different from other drawings' on the page.
        description: what it shows, for screen readers.
    """
    from matplotlib import rc_context

    out, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    drawing = out.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<style.*?</style>|<metadata.*?</metadata>|<!--.*?-->", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)
    # Two decimals are more than a screen shows, and halve the page.
    drawing = re.sub(r'\bd="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), drawing)
    for color, variable in _VARIABLES.items():
        drawing = drawing.replace(color, variable)
    box = re.search(r'viewBox="[^"]*"', drawing)
    label = escape(printable(description))
    start = f'<svg {box[0] if box else ""} role="img" aria-label="{label}">'
    return re.sub(r"<svg.*?>", lambda _: start, drawing, count=1, flags=re.DOTALL)


def _last(curve: Curve) -> str:
    finite = curve.values[~np.isnan(curve.values)]
    return f"{finite[-1]:.4g}" if len(finite) else "none"


def evaluation_table(reports: Reports) -> str:
    """Returns a table for each data source, with a line for each model and a column for each metric.

    Example:
        >>> print(evaluation_table({"a": {"val-core/sums/acc/mean@2": 0.5}, "b": {"val-core/sums/acc/mean@2": 1.0}}))
        sums
          model  acc/mean@2
          a          0.5000
          b          1.0000
    """
    wide = max(len("model"), *map(len, reports))
    lines = []
    for source, values in _panels(reports).items():
        widths = [max(len(name), 6) for name in values]
        head = "  ".join(f"{name:>{width}}" for name, width in zip(values, widths, strict=True))
        lines += [source, f"  {'model':<{wide}}  {head}"]
        for i, label in enumerate(reports):
            cells = ("-" if column[i] is None else f"{column[i]:.4f}" for column in values.values())
            row = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            lines.append(f"  {label:<{wide}}  {row}")
    return "\n".join(lines)


def evaluation_plot(reports: Reports, out: str | Path) -> Path:
    """Draws the metrics over the models into ``out``, one panel for each data source.

    Checkpoints of one run, whose labels are ``step_N`` in one folder, lie at their steps; other models lie side by
    side.
    """
    panels = _panels(reports)
    steps = [step_of(Path(label)) for label in reports]
    one_run = len({Path(label).parent for label in reports}) == 1
    by_step = one_run and None not in steps
    places = [float(step or 0) if by_step else float(i) for i, step in enumerate(steps)]
    order = sorted(range(len(places)), key=places.__getitem__)
    figure = figure_of(6.4, 3.4 * len(panels))
    for n, (source, metrics) in enumerate(panels.items()):
        axes = figure.add_subplot(len(panels), 1, n + 1)
        for i, (name, values) in enumerate(metrics.items()):
            points = [(places[j], value) for j in order if (value := values[j]) is not None]
            axes.plot(*zip(*points, strict=True), lw=1.6, marker="o", ms=4, label=name, **line_style(i))
        axes.set_title(printable(source), fontsize=9, loc="left", parse_math=False)
        if by_step:
            axes.set_xlabel("step")
        else:
            axes.set_xticks(places, labels=list(map(printable, reports)), parse_math=False, fontsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        for text in axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)).get_texts():
            text.set_parse_math(False)
    figure.savefig(out, dpi=120)
    return Path(out)


def _panels(reports: Reports) -> dict[str, dict[str, list[float | None]]]:
    """Returns the value of each model by data source and short name; metrics of another form come last."""
    panels: dict[str, dict[str, list[float | None]]] = {}
    names = list(dict.fromkeys(name for report in reports.values() for name in report))
    core = {match["source"] for name in names if name.startswith("val-core/") and (match := _NAME.fullmatch(name))}
    for name in names:
        match = _NAME.fullmatch(name)
        source, short = (match["source"], f"{match['value']}/{match['kind']}") if match else ("", name)
        # Of several reward functions, the name of one stands between the source and its number.
        above = max((one for one in core if source not in core and source.startswith(f"{one}/")), key=len, default="")
        if above:
            source, short = above, f"{source.removeprefix(f'{above}/')}/{short}"
        panels.setdefault(source, {})[short] = [report.get(name) for report in reports.values()]
    return {source or "further metrics": panels[source] for source in sorted(panels, key=lambda s: s == "")}
