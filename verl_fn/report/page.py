"""One page about one or several runs: curves, held-out answers and the differences between their configs.

The page is a single HTML file without scripts that loads nothing else, so it can be mailed or archived.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shlex
import statistics
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from html import escape, unescape
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import attrs

from verl_fn import __version__
from verl_fn.config import flat, structure
from verl_fn.config.describe import unused
from verl_fn.config.load import default_table
from verl_fn.config.names import OWN_PARTS, is_reference
from verl_fn.data.entries import entry_names
from verl_fn.data.tasks import content_of
from verl_fn.errors import UserError, did_you_mean, printable, raised_as
from verl_fn.pool.worker import short
from verl_fn.report import plots
from verl_fn.report.plots import Chart, charts, window
from verl_fn.runs.evaluate import held_out_value
from verl_fn.runs.folder import FAILURE
from verl_fn.runs.history import CPU, continuations, recorded_inputs, run_meant
from verl_fn.runs.logs import read_answers, read_lines, read_metrics
from verl_fn.runs.progress import cut_off, duration, few_groups, settled, without_advantages, without_gradient

SHOWN = 32  # prompts in the table of held-out answers
LONGEST = 1000  # characters of an expected answer: tests of code may have millions
# Keys in which runs with several seeds differ.
OF_ONE_RUN = ("trainer.seed", "trainer.dir", "trainer.rollout_data_dir", "trainer.experiment_name", "data.date")
OF_EACH = 2  # responses of a problem in the table of training responses
_SUMMARY_COLUMNS = (
    "run", "algorithm", "data", "steps", "time a step", "tokens a second", "held-out, last", "held-out, best",
    "training reward",
)  # fmt: skip
_CHARTS_IN_PNG = 8
_TRAINING = ("prompt", "expected", "response")
Asked = tuple[str, str, str, int]  # data source, prompt, answer, and the number among the problems that share these
MISSING = "–"  # noqa: RUF001  (an en dash, as typography has it for an empty cell)


class ReportError(UserError, ValueError):
    """Raised where no report can be made of a run; the message names the folder."""


@attrs.frozen
class RunRecord:
    """The contents of one run's folder.

    Attributes:
        toml: the config file as it was written.
        config: the config's values by dotted key, with the defaults of keys that the file does not have.
        unused: keys without effect in this run; none are known of a config that this version does not take.
        rows: the metrics, one row for each step.
        answers: the held-out answers by step, then by what was asked.
        inputs: the fingerprints of the user's code, the data, the libraries and the CPU by name.
        failure: how the run ended, if it failed.
    """

    label: str
    folder: Path
    toml: str
    config: Mapping[str, Any]
    unused: Collection[str]
    rows: Sequence[Mapping[str, Any]]
    answers: Mapping[int, Mapping[Asked, Mapping[str, Any]]]
    inputs: Mapping[str, str]
    failure: str = ""


def report(
    runs: Sequence[str | Path], out: str | Path, *, labels: Sequence[str] = (), curves: Sequence[str] = ()
) -> Path:
    """Writes a page about ``runs`` to ``out``, and their main charts to a PNG beside it.

    Args:
        runs: folders of runs, finished or still training.
        out: the HTML file; the PNG has the same name.
        labels: the runs' names on the page; by default their folders' names, with more of the path where these
            are the same.
        curves: metrics whose curves come first, by their names or by patterns such as ``env/*``.

    Raises:
        ReportError: a folder is not a run or has no metrics yet, two runs have the same name, ``out`` does not end
            in ``.html``, or no run logged a metric of ``curves``.

    Example:
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
    records = [_read(folder, label) for folder, label in zip(folders, labels or names(folders), strict=True)]
    for run in records:
        if sum(run.label == other.label for other in records) > 1:
            raise ReportError(f"two runs are called {run.label}; name each folder once, and each with its own label")

    rows = [run.rows for run in records]
    drawn, width = charts(rows, _asked(rows, curves)), window(rows)
    logged_steps = [row["step"] for run in records for row in run.rows]
    steps = (min(logged_steps), max(logged_steps))
    if labels:
        more = f", curves={list(curves)}" if curves else ""
        command = f"report({[str(f) for f in folders]}, {str(out)!r}, labels={list(labels)}{more})"
    else:
        options = ["--out", str(out), *(["--curves", *curves] if curves else [])]
        command = shlex.join(["verl-fn", "report", *map(str, folders), *options])
    out.parent.mkdir(parents=True, exist_ok=True)
    page = _page(records, _charts(records, drawn, steps, width), command)
    out.write_text(page, encoding="utf-8", errors="replace")
    shown = [run.label for run in records]
    plots.png(drawn[:_CHARTS_IN_PNG], shown, out.with_suffix(".png"), steps=steps, width=width)
    return out


def _asked(runs: Sequence[Sequence[Mapping[str, Any]]], patterns: Iterable[str]) -> list[str]:
    """Returns the logged metrics of these names, or that match these patterns, each pattern's in alphabetical order.

    Example:
        >>> _asked([[{"step": 1, "env/turns/mean": 2.0, "env/ended/done": 1.0}]], ["env/*"])
        ['env/ended/done', 'env/turns/mean']
    """
    logged = sorted({metric for rows in runs for row in rows for metric in row} - {"step"})
    found = []
    for pattern in patterns:
        these = [metric for metric in logged if metric == pattern or fnmatchcase(metric, pattern)]
        if not these:
            hint = did_you_mean(pattern, logged)
            raise ReportError(
                f"no run logged {pattern}{hint}; the page of a report without --curves lists all metrics"
            )
        found += these
    return found


def about(page: Path) -> str:
    """Returns the names of the runs that a page is about; an empty string if there is no such page."""
    found = re.search("<title>(.*?)</title>", page.read_text("utf-8", "replace")) if page.is_file() else None
    return unescape(found[1]) if found else ""


def names(folders: Sequence[Path]) -> list[str]:
    """Returns the shortest end of each path that no other folder shares.

    Example:
        >>> names([Path("/a/x/seed1"), Path("/a/y/seed1"), Path("/a/seed2")])
        ['x/seed1', 'y/seed1', 'seed2']
    """
    paths = [folder.resolve().parts for folder in folders]
    short = []
    for path in paths:
        lengths = range(1, len(path) + 1)
        unique = (n for n in lengths if sum(other[-n:] == path[-n:] for other in paths) == 1)
        short.append(str(Path(*path[-next(unique, len(path)) :])))
    return short


def _read(folder: Path, label: str) -> RunRecord:
    file = folder / "config.toml"
    if not file.is_file():
        beside = [str(path.parent) for path in Path().glob("*/*/config.toml") if path.parent.name == folder.name]
        hint = f"; did you mean {beside[0]}?" if beside else run_meant(folder)
        raise ReportError(f"{folder} is no run: it has no config.toml{hint}")
    with raised_as(ReportError, f"{file} is not TOML", ValueError, RecursionError):
        toml = file.read_text(encoding="utf-8")
        table = tomllib.loads(toml)
        values = flat(table)
    config = flat(default_table(table)) | values
    _check_shown(config, file)
    ignored: Collection[str] = ()
    with contextlib.suppress(Exception):  # an algorithm of the user's own is made, and may need what is not here
        ignored = unused(structure(table), config)
    rows = read_metrics(folder)
    ended = folder / FAILURE
    failure = ended.read_text(encoding="utf-8").strip() if ended.is_file() else ""
    if not rows:
        state = f"it {failure}" if failure else "wait for its first step"
        raise ReportError(f"{folder} has no metrics yet; {state}")
    answers: dict[int, dict[Asked, Mapping[str, Any]]] = {}
    seen = Counter[tuple[int, str, str, str]]()
    for line in read_answers(folder):
        line["answer"] = short(str(line["answer"]), LONGEST)
        # Problems may share a prompt: another answer, or the state of an environment, tells them apart.
        step, *problem = asked = line["step"], line["data_source"], line["prompt"], line["answer"]
        answers.setdefault(step, {})[*problem, seen[asked]] = line
        seen[asked] += 1
    return RunRecord(label, folder, toml, config, ignored, rows, answers, recorded_inputs(folder), failure)


def _check_shown(config: Mapping[str, Any], file: Path) -> None:
    """Checks the values that the page formats. Others are shown as they are, also values of older versions."""
    kinds = {"algorithm.name": str, "data.task": str, "data.train_files": list, "trainer.total_training_steps": int}
    for key, kind in kinds.items():
        value = list(config[key]) if isinstance(config[key], tuple) else config[key]
        if not isinstance(value, kind) or (isinstance(value, list) and not all(isinstance(v, str) for v in value)):
            raise ReportError(f"{file}: {key} has a value of another kind, {value!r:.60}")


def _page(runs: Sequence[RunRecord], curves: str, command: str) -> str:
    differences = _differences(runs)
    sections = (
        _summary(runs),
        *([differences] if len(runs) > 1 else []),
        curves,
        _samples(runs),
        _training(runs),
        _metrics(runs),
        *([differences] if len(runs) == 1 else []),
        _configs(runs),
        _footer(runs, command),
    )
    return document(", ".join(run.label for run in runs), "".join(sections))


def document(title: str, body: str) -> str:
    """Returns a whole page; it has no scripts and loads nothing else."""
    title = escaped(title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{Path(__file__).with_name("report.css").read_text(encoding="utf-8")}{colors()}</style>
</head>
<body>
<h1>{title}</h1>
{body}</body>
</html>
"""


def headline(folder: Path, label: str) -> str:
    """Returns a line about a run: its steps, its held-out value and its training reward."""
    run = _read(folder, label)
    parts = [f"step {run.rows[-1]['step']:,} of {run.config['trainer.total_training_steps']:,}"]
    metric, held_out = _held_out(run)
    if held_out:
        best, step = max(held_out, key=lambda pair: (pair[0], -pair[1]))
        when = f"best {best:.3f}, step {step:,}" if _varies(held_out) else "always 0"
        parts.append(f"held-out {metric} {held_out[-1][0]:.3f} ({when})")
    last, best_reward = _last_and_best(run.rows)
    if best_reward:
        parts.append(f"training reward {last} ({best_reward})")
    parts.append(f"{_median(run.rows, 'timing_s/step', '{:.3g}')} s/step")
    return f"{run.label}: {', '.join(parts)}" + (f"; it {run.failure}" if run.failure else "")


def _held_out(run: RunRecord) -> tuple[str, list[tuple[float, int]]]:
    """Returns the held-out metric of a run, ``acc`` or ``reward``, and its values with their steps."""
    metric = "acc" if any(held_out_value(row, "acc") is not None for row in run.rows) else "reward"
    return metric, [(value, row["step"]) for row in run.rows if (value := held_out_value(row, metric)) is not None]


def _varies(held_out: Sequence[tuple[float, int]]) -> bool:
    """Returns whether there is a best value: False if all are 0."""
    return not held_out or any(value for value, _ in held_out)


def _summary(runs: Sequence[RunRecord]) -> str:
    rows = []
    for i, run in enumerate(runs):
        config = run.config
        data = entry_names(config["data.train_files"]) or config["data.task"]
        metric, held_out = _held_out(run)
        best = max(held_out, key=lambda pair: (pair[0], -pair[1]), default=None)
        cells = [
            f'<th scope="row">{_swatch(i)}{escaped(run.label)}</th>',
            f"<td>{escaped(_algorithm(run.config))}</td>",
            f"<td>{escaped(data)}</td>",
            _number_cell(f"{run.rows[-1]['step']:,}", f"of {config['trainer.total_training_steps']:,}"),
            _number_cell(_median(run.rows, "timing_s/step", "{:.3g} s")),
            _number_cell(_median(run.rows, "perf/throughput", "{:,.0f}")),
            _at_step(held_out[-1] if held_out else None, metric),
            _at_step(best, metric) if _varies(held_out) else _number_cell(MISSING, f"{metric} always 0"),
            _number_cell(*_last_and_best(run.rows)),
        ]
        rows.append("".join(cells))
    table = table_of(_SUMMARY_COLUMNS, rows, "summary", "Summary")
    ends = [f"<p>{escaped(said)}</p>\n" for said in _over_seeds(runs)]
    ends += [f"<p>{escaped(f'{run.label}: {said}')}</p>\n" for run in runs for said in remarks(run)]
    return f'{table}<p class="soft">Times and tokens are medians over steps.</p>\n{"".join(ends)}'


def _algorithm(config: Mapping[str, Any]) -> str:
    """Returns the algorithm of a run, with its estimator and the user's own functions that decide what it learns."""
    name, estimator = config["algorithm.name"], config.get("algorithm.adv_estimator", "")
    values = (config.get(f"algorithm.{part}") for part in OWN_PARTS)
    own = [value for value in values if isinstance(value, str) and is_reference(value)]
    parts = dict.fromkeys([estimator, *own] if estimator not in ("", name) else own)
    return f"{name} ({', '.join(map(str, parts))})" if parts else str(name)


def _over_seeds(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yields a sentence for each group of runs that differ in their seeds only: held-out values over the seeds."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in run.config.items() if key not in {*OF_ONE_RUN, *run.unused}}
        settings |= {**run.inputs, CPU: "", "continued": continuations(run.folder)}
        groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    for group in groups.values():
        last = {run.label: (metric, values[-1][0]) for run in group for metric, values in [_held_out(run)] if values}
        metrics, values = {metric for metric, _ in last.values()}, [value for _, value in last.values()]
        if len(values) < 2 or len(metrics) > 1 or len({run.config["trainer.seed"] for run in group}) < len(group):
            continue
        mean, spread = statistics.mean(values), statistics.stdev(values)
        yield (
            f"{', '.join(last)} differ in their seeds only: last held-out {metrics.pop()} {mean:.3f} on average, "
            f"from {min(values):.3f} to {max(values):.3f}, standard deviation {spread:.3f}"
        )


def remarks(run: RunRecord) -> list[str]:
    """Returns sentences about a run's failure and changes, and steps that learned nothing or cut most answers off.

    Such steps are told if they are at least a tenth of all steps; the sentence is about the last one.
    """
    said = [*([f"it {run.failure}"] if run.failure else []), *continuations(run.folder)]
    steps = [row for row in run.rows if row["step"] > 0 and "timing_s/step" in row]
    known = [{name: value for name, value in row.items() if value is not None} for row in steps]
    for what, describe in (
        ("gave no signal", without_advantages),
        ("had too few groups", few_groups),
        ("had a gradient of 0", without_gradient),
        ("cut most answers off", cut_off),
        ("hardly tried other answers", settled),
    ):
        sentences = {row["step"]: sentence for row in known if (sentence := describe(row["step"], row))}
        if sentences and 10 * len(sentences) >= len(steps):
            first, last = min(sentences), max(sentences)
            when = f" (the first is step {first:,}, the last step {last:,})" if last > first else ""
            said.append(f"{len(sentences):,} of {len(steps):,} steps {what}{when}; {sentences[last]}")
    return said


def _at_step(pair: tuple[float, int] | None, metric: str) -> str:
    """Returns a cell with a value, its metric and its step, or with a dash."""
    if pair is None:
        return _number_cell(MISSING)
    return _number_cell(f"{pair[0]:.3f}", f"{metric}, step {pair[1]:,}")


def _charts(runs: Sequence[RunRecord], drawn: Sequence[Chart], steps: tuple[float, float], width: int) -> str:
    labels = [run.label for run in runs]
    cards = []
    for chart in drawn:
        notes = [
            f"{f'{escaped(labels[i])}: ' if len(runs) > 1 else ''}{curve.gaps} "
            f"{'value is' if curve.gaps == 1 else 'values are'} not finite, shown as gaps"
            for i, curve in chart.curves.items()
            if curve.gaps
        ]
        notes += [f"{_listed(runs, same)} have the same curve" for same in chart.same if len(same) > 1]
        if chart.metric.startswith("val-") and all(len(curve.steps) <= 2 for curve in chart.curves.values()):
            notes.append("evaluated at the start and at the end; trainer.test_freq=N also does every N steps")
        if chart.limits not in (None, plots.SHARE):
            notes.append("the axis shows a part of 0 to 1")
        if chart.log:
            notes.insert(0, "log scale, geometric mean" if width > 1 else "log scale")
        drawing = plots.svg(chart, labels, steps, width)
        cards.append(card_of(chart.title, chart.metric, drawing, "; ".join(notes)))
    phases = _phases(runs)
    if phases:
        total = sum(sum(_values(run.rows, name)) for run in runs for name in ("timing_s/step", "timing_s/testing"))
        start = sum(sum(_values(run.rows, "timing_s/start/total")) for run in runs)
        note = f"median over the steps that have it, and the sum; all steps and evaluations took {duration(total)}"
        note += f", and starting {duration(start)}" if start else ""
        note += ", of all runs together" if len(runs) > 1 else ""
        cards.append(card_of("Time by phase", "timing_s/*", plots.bars(phases), note))
    smoothed = any(not chart.is_plain(curve, steps) for chart in drawn for curve in chart.curves.values())
    lines = f" Where there is a faint line, it is as logged, and the strong one a mean over {width} points."
    lines = lines if smoothed and width > 1 else ""
    shown = {chart.metric for chart in drawn}
    zero = (metric for metric in plots.always_zero([run.rows for run in runs]) if metric not in shown)
    left_out = ", ".join(f"<code>{metric}</code>" for metric in zero)
    lines += f" 0 in every step, so not drawn: {left_out}." if left_out else ""
    return (
        f'<h2>Curves</h2>\n{legend_of(labels)}<p class="soft">Over training steps.{lines}</p>\n'
        f'<div class="cards">\n{"".join(cards)}</div>\n'
    )


def _samples(runs: Sequence[RunRecord]) -> str:
    logged = [run for run in runs if run.answers]
    if not logged:
        return ""
    # Only runs that were evaluated on the same prompts share a table, so that no table has empty cells.
    groups: dict[frozenset[Asked], list[RunRecord]] = {}
    for run in logged:
        groups.setdefault(frozenset(run.answers[max(run.answers)]), []).append(run)
    return "<h2>Held-out answers</h2>\n" + "".join(_sample(group, len(groups) == 1) for group in groups.values())


def _sample(logged: Sequence[RunRecord], alone: bool) -> str:
    """Shows the answers of runs with the same prompts side by side; ``alone`` if this is the only such group."""
    common = set.intersection(*(set(run.answers) for run in logged))
    if any(max(run.answers) for run in logged):
        # Answers from before training compare no runs.
        common.discard(0)
    last = {run.label: max(common or run.answers) for run in logged}
    prompts = list(dict.fromkeys(key for run in logged for key in run.answers[last[run.label]]))
    one_step = common and alone
    columns = [run.label + ("" if one_step else f", step {last[run.label]:,}") for run in logged]
    rows = []
    for key in prompts[:SHOWN]:
        answers = [run.answers[last[run.label]].get(key) for run in logged]
        known = next(answer for answer in answers if answer)
        cells = "".join(map(_answer, answers))
        rows.append(f"<td>{_prompt(known)}</td><td>{_block(known['answer'])}</td>{cells}")
    when = f"At step {max(common):,}" if common else "At each run's last evaluation, as they share no later one"
    if common and any(max(run.answers) > max(common) for run in logged):
        when += ", the last evaluation that all of them have"
    cut = f"; the first {SHOWN} of {len(prompts)} prompts" if len(prompts) > SHOWN else ""
    changes = "".join(_change(run, prompts[:SHOWN]) for run in logged)
    whose = "" if alone else escaped(", ".join(run.label for run in logged)) + ": "
    table = table_of(["prompt", "expected", *columns], rows, "samples", "Held-out answers")
    return f'<p class="soft">{whose}{when if alone else when[0].lower() + when[1:]}{cut}.</p>\n{table}{changes}'


def _training(runs: Sequence[RunRecord]) -> str:
    """Shows a few responses of each run's newest training step, if it wrote them (``trainer.rollout_data_dir``)."""
    tables = []
    for run in runs:
        folder = run.config.get("trainer.rollout_data_dir")
        files = Path(folder).glob("*.jsonl") if isinstance(folder, str) else ()
        numbered = {int(file.stem): file for file in files if file.stem.isdecimal()}
        # A run that starts over leaves the files of later steps.
        if steps := {step: file for step, file in numbered.items() if step <= run.rows[-1]["step"]}:
            answers = read_lines(steps[max(steps)])
            shown = [one for one in answers if one["sample"] < OF_EACH][:SHOWN]
            rows = [
                f"<td>{_prompt(one)}</td><td>{_block(short(one['gts'], LONGEST))}</td>"
                f"{_answer(one | {'response': one['output']})}"
                for one in shown
            ]
            many = f"{len(rows)} of {len(answers)} responses of step {max(steps):,}"
            title = f"{run.label}: {many}, up to {OF_EACH} of a prompt"
            tables.append(f"<p>{escaped(title)}</p>" + table_of(_TRAINING, rows, "samples", title))
    return "<h2>Training responses</h2>\n" + "".join(tables) if tables else ""


def _change(run: RunRecord, prompts: Iterable[Asked]) -> str:
    """Shows the answers of a run's first and last evaluation side by side, in a folded section."""
    first, last = min(run.answers), max(run.answers)
    if first == last:
        return ""
    before, after = run.answers[first], run.answers[last]
    rows = [
        f"<td>{_block(key[1])}</td><td>{_block(before[key]['answer'])}</td>"
        f"{_answer(before[key])}{_answer(after[key])}"
        for key in prompts
        if key in before and key in after
    ]
    both = [key for key in before if key in after]
    gained = sum(_is_right(after[key]) - _is_right(before[key]) for key in both)
    judged = any(answer.get("acc") is not None for answer in after.values())
    right = f", {gained:+} right of {len(both)}" if judged else ""
    title = f"{run.label}: from step {first:,} to step {last:,}{right}"
    table = table_of(("prompt", "expected", f"step {first:,}", f"step {last:,}"), rows, "samples", title)
    return f"<details><summary>{escaped(title)}</summary>\n{table}</details>\n"


def _metrics(runs: Sequence[RunRecord]) -> str:
    """Returns a table of all metrics of each run, also the ones of the user's own functions."""
    parts = []
    for run in runs:
        rows = []
        for metric in sorted({name for row in run.rows for name in row} - {"step"}):
            if values := [v for v in _values(run.rows, metric) if isinstance(v, (int, float))]:
                shown = (values[0], values[-1], min(values), max(values))
                cells = "".join(_number_cell(f"{value:.4g}") for value in shown)
                rows.append(f'<th scope="row"><code>{escaped(metric)}</code></th>{cells}')
        title = f"All metrics of {run.label}"
        table = table_of(("metric", "first", "last", "lowest", "highest"), rows, "keys", title)
        parts.append(f"<details><summary>{escaped(title)}</summary>\n{table}</details>\n")
    return "".join(parts)


def _differences(runs: Sequence[RunRecord]) -> str:
    if len(runs) == 1:
        defaults = flat(default_table({"algorithm": {"name": runs[0].config["algorithm.name"]}}))
        title, columns = "Config, where it is not the default", [runs[0].config, defaults]
        head = ["key", runs[0].label, "default"]
    else:
        title, columns = "Config, code and data, where the runs differ", [run.config for run in runs]
        head = ["key", *(run.label for run in runs)]
    rows = []
    for key in dict.fromkeys(key for column in columns for key in column):
        values = [
            json.dumps(column[key], ensure_ascii=False, default=str) if key in column else MISSING
            for column in columns
        ]
        without = [key in run.unused or key not in run.config for run in runs]
        if len(set(values)) > 1 and not all(without):
            shown = [MISSING if missing else value for value, missing in zip_longest(values, without)]
            rows.append(_code_row(key, shown))
    for name in dict.fromkeys(name for run in runs for name in run.inputs):
        prints = [run.inputs.get(name, MISSING) for run in runs]
        # What only some runs read follows from their settings and code.
        if len({*prints} - {MISSING}) > 1:
            rows.append(_code_row(name, prints))
    body = table_of(head, rows, "keys", title) if rows else '<p class="soft">No key.</p>\n'
    left_out = '<p class="soft">Keys without effect are left out.</p>\n'
    return f"<h2>{title}</h2>\n{left_out}{body}"


def _code_row(name: str, values: Iterable[str]) -> str:
    cells = "".join(f"<td><code>{escaped(value)}</code></td>" for value in values)
    return f'<th scope="row"><code>{escaped(name)}</code></th>{cells}'


def _configs(runs: Sequence[RunRecord]) -> str:
    return "".join(
        f"<details><summary>The whole config of {escaped(run.label)}</summary>\n"
        f'<div class="scroll" tabindex="0"><pre>{escaped(run.toml)}</pre></div></details>\n'
        for run in runs
    )


def _footer(runs: Sequence[RunRecord], command: str) -> str:
    folders = "".join(
        f"<p>{escaped(run.label)}: <code>{escaped(str(run.folder.resolve()))}</code>, "
        f"last logged {_date((run.folder / 'metrics.jsonl').stat().st_mtime)}</p>\n"
        for run in runs
    )
    versions = f"verl_fn {__version__}, torch {version('torch')}, Python {platform.python_version()}"
    made = f"Made {_date(datetime.now(UTC).timestamp())} with {escaped(versions)}"
    return f"<footer>\n<p><code>{escaped(command)}</code></p>\n<p>{made}</p>\n{folders}</footer>\n"


def _phases(runs: Sequence[RunRecord]) -> dict[str, dict[int, tuple[float, str]]]:
    """Returns the median seconds by phase, the longest phase first, then by run, each with the sum in words."""
    phases: dict[str, dict[int, tuple[float, str]]] = {}
    for i, run in enumerate(runs):
        for metric in dict.fromkeys(m for row in run.rows for m in row if m.startswith("timing_s/")):
            seconds = _values(run.rows, metric)
            # A start happens once, and is no phase of a step.
            if seconds and metric != "timing_s/step" and not metric.startswith("timing_s/start/"):
                whole = sum(seconds)
                in_all = f", in all {f'{whole:.3g} s' if whole < 60 else duration(whole)}"
                phases.setdefault(metric.removeprefix("timing_s/"), {})[i] = (statistics.median(seconds), in_all)
    return dict(sorted(phases.items(), key=lambda item: -max(seconds for seconds, _ in item[1].values())))


def _listed(runs: Sequence[RunRecord], numbers: Sequence[int]) -> str:
    """Returns the names of some runs, as HTML."""
    names = [escaped(runs[i].label) for i in numbers]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _values(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    return [row[metric] for row in rows if row.get(metric) is not None]


def _median(rows: Sequence[Mapping[str, Any]], metric: str, form: str) -> str:
    values = _values(rows, metric)
    return form.format(statistics.median(values)) if values else MISSING


def _last_and_best(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Returns the last training reward, and the highest one with its step."""
    metric = "critic/score/mean"
    logged = [(row[metric], -row["step"]) for row in rows if row.get(metric) is not None]
    if not logged:
        return MISSING, ""
    best, step = max(logged)
    return f"{logged[-1][0]:.3f}", f"best {best:.3f}, step {-step:,}"


def _is_right(answer: Mapping[str, Any]) -> bool:
    return answer.get("acc") is not None and answer["acc"] >= 1


def _answer(answer: Mapping[str, Any] | None) -> str:
    if answer is None:
        return f"<td>{MISSING}</td>"
    right = (
        '<span class="mark right">✓ right</span>' if _is_right(answer) else '<span class="mark wrong">✗ wrong</span>'
    )
    if answer.get("acc") is None:
        right = ""
    reward = MISSING if answer.get("score") is None else f"{answer['score']:.3g}"
    cut = "" if answer["finished"] else ", cut off"
    if said := answer.get("messages"):
        cut = f", ended: {escaped(answer.get('ended', ''))}"
        content = "".join(f'<div class="soft">{escaped(m["role"])}</div>{_block(content_of(m))}' for m in said)
    else:
        content = _block(answer["response"])
    return f'<td>{content}{right} <span class="soft">reward {reward}{cut}</span></td>'


def escaped(value: str) -> str:
    """Escapes a string so that it may stand in an element or in an attribute.

    Example:
        >>> escaped("a < b")
        'a &lt; b'
    """
    return escape(printable(str(value)))


def _block(content: str) -> str:
    """Returns a box with a prompt or a response."""
    if content and not content.strip():
        return f'<div class="soft">(only white space: {escaped(json.dumps(content))})</div>'
    return f'<div class="text">{escaped(content)}</div>' if content else '<div class="soft">(empty)</div>'


def _prompt(answer: Mapping[str, Any]) -> str:
    """Returns a box with a prompt, and the text of its tokens in a folded one if that is another."""
    given = answer.get("input", answer["prompt"])
    if given == answer["prompt"]:
        return _block(given)
    folded = f"<details><summary>as the model reads it</summary>{_block(given)}</details>"
    return _block(answer["prompt"]) + folded


def _number_cell(value: str, note: str = "") -> str:
    """Returns a table cell with a number and a small note below it."""
    return f'<td class="number">{value}{f"<small>{note}</small>" if note else ""}</td>'


def table_of(head: Iterable[str], rows: Iterable[str], kind: str, label: str) -> str:
    """Returns a table in a box that scrolls on its own.

    Args:
        rows: the cells of each row, as HTML.
        kind: the table's CSS class.
        label: what the table shows, for screen readers.
    """
    columns = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(label)}"><table class="{kind}">\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def legend_of(labels: Sequence[str]) -> str:
    """Returns the names of runs with their colours."""
    items = "".join(f"<li>{_swatch(i)}{escaped(label)}</li>" for i, label in enumerate(labels))
    return f'<ul class="legend">{items}</ul>\n'


def card_of(title: str, metric: str, drawing: str, note: str = "") -> str:
    """Returns a figure with a title, the metric's name, a drawing and a caption."""
    caption = f"<figcaption>{note}</figcaption>" if note else ""
    return f'<figure class="card"><h3>{title}</h3><code>{escaped(metric)}</code>{drawing}{caption}</figure>\n'


def _swatch(run: int) -> str:
    """Returns a short line in the colour of a run's number."""
    return f'<span class="swatch {plots.line_class(run)}" aria-hidden="true"></span>'


def colors() -> str:
    """Returns the CSS of the runs' colours for light and dark pages; the PNG uses the same list."""
    light, dark = ("".join(f"--run{i}:{c[k]};" for i, c in enumerate(plots.COLORS)) for k in (0, 1))
    runs = "".join(f".run{i}{{border-color:var(--run{i})}}" for i in range(len(plots.COLORS)))
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{runs}\n"


def _date(timestamp: float) -> str:
    """Formats a Unix time as a date and time in UTC.

    Example:
        >>> _date(0.0)
        '1970-01-01 00:00 UTC'
    """
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M UTC")
