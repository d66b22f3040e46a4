"""Evaluations of several models on the same problems: one table and one plot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from verl_fn.report.plots import figure_of, line_style
from verl_fn.runs.checkpoints import step_of
from verl_fn.runs.screen import printable

Reports = Mapping[str, Mapping[str, float]]
"""The metrics of each model, by its label."""

_NAME = re.compile(r"val-(?:core|aux)/(?P<source>.+)/(?P<value>[^/]+)/(?P<kind>\w+@\d+)(?:/mean)?", re.DOTALL)


@attrs.frozen
class _Panel:
    """The metrics of one data source: for each short name the value of each model, None where it has none."""

    source: str
    values: Mapping[str, list[float | None]]


def table(reports: Reports) -> str:
    """Returns a table for each data source, with a line for each model and a column for each metric.

    Example:
        >>> print(table({"a": {"val-core/sums/acc/mean@2": 0.5}, "b": {"val-core/sums/acc/mean@2": 1.0}}))
        sums
          model  acc/mean@2
          a          0.5000
          b          1.0000
    """
    wide = max(len("model"), *map(len, reports))
    lines = []
    for panel in _panels(reports):
        widths = [max(len(name), 6) for name in panel.values]
        head = "  ".join(f"{name:>{width}}" for name, width in zip(panel.values, widths, strict=True))
        lines += [panel.source, f"  {'model':<{wide}}  {head}"]
        for i, label in enumerate(reports):
            cells = ("-" if column[i] is None else f"{column[i]:.4f}" for column in panel.values.values())
            row = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            lines.append(f"  {label:<{wide}}  {row}")
    return "\n".join(lines)


def plot(reports: Reports, out: str | Path) -> Path:
    """Draws the metrics over the models into ``out``, one panel for each data source.

    Checkpoints of one run, whose labels are ``step_N`` in one folder, lie at their steps; other models lie side by
    side.
    """
    panels = _panels(reports)
    steps = [step_of(Path(label)) for label in reports]
    one_run = len({Path(label).parent for label in reports}) == 1
    by_step = one_run and None not in steps and len(set(steps)) == len(steps)
    places = [float(step or 0) if by_step else float(i) for i, step in enumerate(steps)]
    order = sorted(range(len(places)), key=places.__getitem__)
    figure = figure_of(6.4, 3.4 * len(panels))
    for n, panel in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, n + 1)
        for i, (name, values) in enumerate(panel.values.items()):
            points = [(places[j], value) for j in order if (value := values[j]) is not None]
            axes.plot(*zip(*points, strict=True), lw=1.6, marker="o", ms=4, label=name, **line_style(i))
        axes.set_title(printable(panel.source), fontsize=9, loc="left", parse_math=False)
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


def _panels(reports: Reports) -> list[_Panel]:
    """Returns the metrics by data source, in the reports' order; metrics of another form come last."""
    panels: dict[str, dict[str, list[float | None]]] = {}
    for name in dict.fromkeys(name for report in reports.values() for name in report):
        match = _NAME.fullmatch(name)
        source, short = (match["source"], f"{match['value']}/{match['kind']}") if match else ("", name)
        panels.setdefault(source, {})[short] = [report.get(name) for report in reports.values()]
    return [_Panel(source or "further metrics", panels[source]) for source in sorted(panels, key=lambda s: s == "")]
