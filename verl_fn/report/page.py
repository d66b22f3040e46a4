"""One page about one or several runs: curves, held-out answers and what their configs differ in.

The page is a single HTML file without scripts that asks for nothing from anywhere, so it can be mailed or archived.
"""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs

from verl_fn import __version__
from verl_fn.config import flat
from verl_fn.config.loading import default_table
from verl_fn.errors import UserError
from verl_fn.report import plots
from verl_fn.runs.evaluate import accuracy
from verl_fn.runs.folder import read_lines, read_metrics

SHOWN = 32  # prompts in the table of held-out answers
_IN_PNG = 6  # charts in the PNG
_NOTHING = "–"  # noqa: RUF001
_VISIBLE = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}  # control characters as pictures of themselves
_ESTIMATORS = {"ppo": "gae", "grpo": "grpo"}


class ReportError(UserError, ValueError):
    """Runs that no report can be made of; the message names the folder."""


@attrs.frozen
class Evaluated:
    """What one run's folder says.

    Attributes:
        label: its name on the page.
        folder: where it lies.
        toml: its config as it was written.
        config: the config's values by dotted key, with the defaults of keys that the file does not have.
        rows: its metrics, a row a step.
        answers: its held-out answers by step, then by prompt.
    """

    label: str
    folder: Path
    toml: str
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    answers: Mapping[int, Mapping[tuple[str, str], Mapping[str, Any]]]


def report(runs: Sequence[str | Path], out: str | Path, *, labels: Sequence[str] = ()) -> Path:
    """Write the page ``out`` about ``runs``, and their main charts as a PNG beside it.

    Args:
        runs: folders of runs, finished or going on.
        out: the HTML file; the PNG has the same name.
        labels: the runs' names on the page; by default their folders' names, with more of the path where these
            are the same.

    Raises:
        ReportError: a folder is no run or has no metrics yet, two runs have the same name, or ``out`` is no
            ``.html`` file.

    >>> report(["no/such/run"], "report.html")
    Traceback (most recent call last):
    verl_fn.report.page.ReportError: no/such/run is no run: it has no config.toml
    """
    folders, out = [Path(run) for run in runs], Path(out)
    if not folders:
        raise ReportError("there is no run to report on; name at least one folder")
    if out.suffix != ".html":
        raise ReportError(f"{out} does not end in .html")
    if labels and len(labels) != len(folders):
        raise ReportError(f"there are {len(labels)} labels for {len(folders)} runs; give one a run")
    found = [_read(folder, label) for folder, label in zip(folders, labels or names(folders), strict=True)]
    for run in found:
        if sum(run.label == other.label for other in found) > 1:
            raise ReportError(f"two runs are called {run.label}; name each folder once, and each with its own label")

    rows = [run.rows for run in found]
    drawn, width = plots.charts(rows), plots.window(rows)
    logged = [row["step"] for run in found for row in run.rows]
    steps = (min(logged), max(logged))
    if labels:
        command = f"report({[str(f) for f in folders]}, {str(out)!r}, labels={list(labels)})"
    else:
        command = shlex.join(["verl-fn", "report", *map(str, folders), "--out", str(out)])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_page(found, _charts(found, drawn, steps, width), command), encoding="utf-8", errors="replace")
    plots.png(drawn[:_IN_PNG], [run.label for run in found], out.with_suffix(".png"), steps=steps, width=width)
    return out


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest end of each path that no other folder shares.

    >>> names([Path("/a/x/seed1"), Path("/a/y/seed1"), Path("/a/seed2")])
    ['x/seed1', 'y/seed1', 'seed2']
    """
    paths = [folder.resolve().parts for folder in folders]
    found = []
    for path in paths:
        lengths = range(1, len(path) + 1)
        alone = (n for n in lengths if sum(other[-n:] == path[-n:] for other in paths) == 1)
        found.append(str(Path(*path[-next(alone, len(path)) :])))
    return found


def _read(folder: Path, label: str) -> Evaluated:
    file = folder / "config.toml"
    if not file.is_file():
        raise ReportError(f"{folder} is no run: it has no config.toml")
    try:
        text = file.read_text(encoding="utf-8")
        table = tomllib.loads(text)
        config = flat(default_table(table)) | flat(table)
    except ValueError as error:
        raise ReportError(f"{file} is not TOML: {error}") from error
    rows = read_metrics(folder)
    if not rows:
        raise ReportError(f"{folder} has no metrics yet; wait for its first step")
    answers: dict[int, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for number, line in enumerate(read_lines(folder / "generations.jsonl"), start=1):
        try:
            answers.setdefault(line["step"], {})[line["data_source"], line["prompt"]] = line
        except KeyError as error:
            raise ReportError(f"{folder / 'generations.jsonl'}, line {number}, has no {error}") from error
    return Evaluated(label, folder, text, config, rows, answers)


def _page(runs: Sequence[Evaluated], curves: str, command: str) -> str:
    title = _text(", ".join(run.label for run in runs))
    sections = (
        _summary(runs), curves, _samples(runs), _differences(runs), _configs(runs),
        _footer(runs, command),
    )  # fmt: skip
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{Path(__file__).with_name("report.css").read_text(encoding="utf-8")}{_colors()}</style>
</head>
<body>
<h1>{title}</h1>
{"".join(sections)}</body>
</html>
"""


def _summary(runs: Sequence[Evaluated]) -> str:
    head = (
        "run", "algorithm", "data", "steps", "time a step", "tokens a second", "held-out, last", "held-out, best",
        "training reward",
    )  # fmt: skip
    rows = []
    for i, run in enumerate(runs):
        c = run.config
        name = c["algorithm.name"]
        estimator = c.get("algorithm.adv_estimator", _ESTIMATORS.get(name, ""))
        data = ", ".join(Path(file).name for file in c["data.train_files"]) or c["data.task"]
        held = [(value, row["step"]) for row in run.rows if (value := accuracy(_known(row))) is not None]
        best = max(held, key=lambda pair: (pair[0], -pair[1]), default=None)
        cells = [
            f'<th scope="row">{_swatch(i)}{_text(run.label)}</th>',
            f"<td>{_text(name)}{f' ({_text(estimator)})' if estimator not in ('', name) else ''}</td>",
            f"<td>{_text(data)}</td>",
            _number(f"{run.rows[-1]['step']:,}", f"of {c['trainer.total_training_steps']:,}"),
            _number(_median(run.rows, "timing_s/step", "{:.3g} s")),
            _number(_median(run.rows, "perf/throughput", "{:,.0f}")),
            _number(f"{held[-1][0]:.3f}", f"step {held[-1][1]:,}") if held else _number(_NOTHING),
            _number(f"{best[0]:.3f}", f"step {best[1]:,}") if best else _number(_NOTHING),
            _number(_latest(run.rows, "critic/score/mean")),
        ]
        rows.append("".join(cells))
    return _table(head, rows, "summary", "Summary") + '<p class="soft">Times and tokens are medians over steps.</p>\n'


def _charts(runs: Sequence[Evaluated], drawn: Sequence[plots.Chart], steps: tuple[float, float], width: int) -> str:
    labels = [run.label for run in runs]
    cards = []
    for chart in drawn:
        notes = [
            f"{f'{_text(labels[i])}: ' if len(runs) > 1 else ''}{c.gaps} "
            f"{'value is' if c.gaps == 1 else 'values are'} not finite, shown as gaps"
            for i, c in chart.curves.items()
            if c.gaps
        ]
        if chart.axis.log:
            notes.insert(0, "log scale, geometric mean" if width > 1 else "log scale")
        drawing = plots.svg(chart, labels, steps, width)
        cards.append(_card(chart.title, chart.metric, drawing, "; ".join(notes)))
    phases = _phases(runs)
    if phases:
        cards.append(_card("Time by phase", "timing_s/*", plots.bars(phases), "median over the steps that have it"))
    legend = "".join(f"<li>{_swatch(i)}{_text(label)}</li>" for i, label in enumerate(labels))
    how = f" Faint: as logged. Strong: the mean of the {width} points around." if width > 1 else ""
    return (
        f'<h2>Curves</h2>\n<ul class="legend">{legend}</ul>\n<p class="soft">Over training steps.{how}</p>\n'
        f'<div class="cards">\n{"".join(cards)}</div>\n'
    )


def _samples(runs: Sequence[Evaluated]) -> str:
    logged = [run for run in runs if run.answers]
    if not logged:
        return ""
    # Runs that were asked other things are not compared: each kind has its table, and no empty cells.
    groups: dict[frozenset[tuple[str, str]], list[Evaluated]] = {}
    for run in logged:
        groups.setdefault(frozenset(run.answers[max(run.answers)]), []).append(run)
    return "<h2>Held-out answers</h2>\n" + "".join(_sample(group, len(groups) == 1) for group in groups.values())


def _sample(logged: Sequence[Evaluated], alone: bool) -> str:
    """The answers of runs that were asked the same, side by side; ``alone`` if there are no others."""
    common = set.intersection(*(set(run.answers) for run in logged))
    last = {run.label: max(common or run.answers) for run in logged}
    prompts = list(dict.fromkeys(key for run in logged for key in run.answers[last[run.label]]))
    stepless = common and alone
    head = [
        "prompt",
        "expected",
        *(run.label + ("" if stepless else f", step {last[run.label]:,}") for run in logged),
    ]
    rows = []
    for key in prompts[:SHOWN]:
        held = [run.answers[last[run.label]].get(key) for run in logged]
        expected = next(answer["answer"] for answer in held if answer)
        rows.append(f"<td>{_block(key[1])}</td><td>{_block(expected)}</td>" + "".join(map(_answer, held)))
    when = f"At step {max(common):,}" if common else "At each run's last evaluation, as none is common to all"
    cut = f"; the first {SHOWN} of {len(prompts)} prompts" if len(prompts) > SHOWN else ""
    changes = "".join(_change(run, last[run.label], prompts[:SHOWN]) for run in logged)
    whose = "" if alone else _text(", ".join(run.label for run in logged)) + ": "
    table = _table(head, rows, "samples", "Held-out answers")
    return f'<p class="soft">{whose}{when if alone else when[0].lower() + when[1:]}{cut}.</p>\n{table}{changes}'


def _change(run: Evaluated, last: int, prompts: Iterable[tuple[str, str]]) -> str:
    """The first evaluation's answers beside the last one's, folded."""
    first = min(run.answers)
    if first == last:
        return ""
    before, after = run.answers[first], run.answers[last]
    rows = [
        f"<td>{_block(key[1])}</td><td>{_block(before[key]['answer'])}</td>{_answer(before[key])}{_answer(after[key])}"
        for key in prompts
        if key in before and key in after
    ]
    turned = sum(_is_right(after[key]) - _is_right(before[key]) for key in before if key in after)
    what = f"{run.label}: from step {first:,} to step {last:,}, {turned:+} right"
    table = _table(("prompt", "expected", f"step {first:,}", f"step {last:,}"), rows, "samples", what)
    return f"<details><summary>{_text(what)}</summary>\n{table}</details>\n"


def _differences(runs: Sequence[Evaluated]) -> str:
    if len(runs) == 1:
        title, columns = "Config, where it is not the default", [runs[0].config, flat(default_table({}))]
        head = ["key", runs[0].label, "default"]
    else:
        title, columns = "Config, where the runs differ", [run.config for run in runs]
        head = ["key", *(run.label for run in runs)]
    rows = []
    for key in dict.fromkeys(key for column in columns for key in column):
        values = [json.dumps(column[key], ensure_ascii=False) if key in column else _NOTHING for column in columns]
        if len(set(values)) > 1:
            cells = "".join(f"<td><code>{_text(value)}</code></td>" for value in values)
            rows.append(f'<th scope="row"><code>{_text(key)}</code></th>{cells}')
    body = _table(head, rows, "keys", title) if rows else '<p class="soft">No key.</p>\n'
    return f"<h2>{title}</h2>\n{body}"


def _configs(runs: Sequence[Evaluated]) -> str:
    return "".join(
        f"<details><summary>The whole config of {_text(run.label)}</summary>\n"
        f'<div class="scroll" tabindex="0"><pre>{_text(run.toml)}</pre></div></details>\n'
        for run in runs
    )


def _footer(runs: Sequence[Evaluated], command: str) -> str:
    logged = "".join(
        f"<p>{_text(run.label)}: <code>{_text(str(run.folder.resolve()))}</code>, "
        f"last logged {_date((run.folder / 'metrics.jsonl').stat().st_mtime)}</p>\n"
        for run in runs
    )
    with_ = f"verl_fn {__version__}, torch {version('torch')}, Python {platform.python_version()}"
    now = _date(datetime.now(UTC).timestamp())
    return (
        f"<footer>\n<p><code>{_text(command)}</code></p>\n<p>Made {now} with {_text(with_)}</p>\n{logged}</footer>\n"
    )


def _phases(runs: Sequence[Evaluated]) -> dict[str, dict[int, float]]:
    """Median seconds by phase, the longest first, then by run."""
    found: dict[str, dict[int, float]] = {}
    for i, run in enumerate(runs):
        for metric in dict.fromkeys(m for row in run.rows for m in row if m.startswith("timing_s/")):
            known = _values(run.rows, metric)
            if known and metric != "timing_s/step":
                found.setdefault(metric.removeprefix("timing_s/"), {})[i] = statistics.median(known)
    return dict(sorted(found.items(), key=lambda item: -max(item[1].values())))


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {metric: value for metric, value in row.items() if value is not None}


def _values(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    return [row[metric] for row in rows if row.get(metric) is not None]


def _median(rows: Sequence[Mapping[str, Any]], metric: str, form: str) -> str:
    known = _values(rows, metric)
    return form.format(statistics.median(known)) if known else _NOTHING


def _latest(rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    known = _values(rows, metric)
    return f"{known[-1]:.3f}" if known else _NOTHING


def _is_right(answer: Mapping[str, Any]) -> bool:
    return answer["acc"] is not None and answer["acc"] >= 1


def _answer(answer: Mapping[str, Any] | None) -> str:
    if answer is None:
        return f"<td>{_NOTHING}</td>"
    right = (
        '<span class="mark right">✓ right</span>' if _is_right(answer) else '<span class="mark wrong">✗ wrong</span>'
    )
    reward = _NOTHING if answer["score"] is None else f"{answer['score']:.3g}"
    cut = "" if answer["finished"] else ", cut off"
    return f'<td>{_block(answer["response"])}{right} <span class="soft">reward {reward}{cut}</span></td>'


def _block(text: str) -> str:
    return f'<div class="text">{_text(text)}</div>' if text else '<div class="soft">(empty)</div>'


def _text(text: str) -> str:
    """What may stand in an element or in an attribute, whatever the text holds."""
    return escape(str(text).translate(_VISIBLE))


def _number(text: str, note: str = "") -> str:
    return f'<td class="number">{text}{f"<small>{note}</small>" if note else ""}</td>'


def _table(head: Iterable[str], rows: Iterable[str], kind: str, about: str) -> str:
    """A table in a box that scrolls by itself."""
    columns = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(about)}"><table class="{kind}">\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def _card(title: str, metric: str, drawing: str, note: str) -> str:
    caption = f"<figcaption>{note}</figcaption>" if note else ""
    return f'<figure class="card"><h3>{title}</h3><code>{_text(metric)}</code>{drawing}{caption}</figure>\n'


def _swatch(run: int) -> str:
    look = plots.line_class(run)
    return f'<svg class="swatch" viewBox="0 0 22 10" aria-hidden="true"><line class="{look}" x2="22" y1="5" y2="5"/></svg>'


def _colors() -> str:
    """The runs' colours, light and dark, from the one list that the PNG uses too."""
    light, dark = ("".join(f".run{i}{{--run:{c[k]}}}" for i, c in enumerate(plots.COLORS)) for k in (0, 1))
    return f"{light}\n@media (prefers-color-scheme: dark){{{dark}}}\n"


def _date(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M UTC")
