"""A run's logs (``metrics.jsonl``, ``generations.jsonl``, ``journal.jsonl``), read with a check of each line.

TensorBoard and wandb are further loggers, if ``trainer.logger`` asks for them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_fn import atomic
from verl_fn.algorithms import Report
from verl_fn.config.schema import Table, TrainerConfig

from . import RunError

METRICS, GENERATIONS, JOURNAL = "metrics.jsonl", "generations.jsonl", "journal.jsonl"
LOGS = (METRICS, GENERATIONS, JOURNAL)
SUMS = "logs.crc"
EVALUATED = ("val-", "val/")  # families of metrics of an evaluation
TIMED = ("timing_s/", "perf/time_per_step", "perf/throughput", "perf/engine_restarts")

Row = dict[str, Any]
Log = Callable[[int, Mapping[str, float]], None]


def metrics_row(step: int, report: Mapping[str, float]) -> Row:
    """Returns a step's report as a line of ``metrics.jsonl``; values that are not finite become null.

    Example:
        >>> metrics_row(3, {"loss": 0.5, "kl": math.nan, "grad_norm": math.inf})
        {'step': 3, 'grad_norm': None, 'kl': None, 'loss': 0.5}
    """
    return {"step": step} | {k: v if math.isfinite(v) else None for k, v in sorted(report.items())}


def read_metrics(folder: str | Path) -> list[Row]:
    """Reads the rows of ``metrics.jsonl``, without a last line that a killed process left incomplete.

    Raises:
        RunError: another line is damaged.
    """
    return read_lines(Path(folder) / METRICS)


def read_answers(folder: str | Path) -> list[Row]:
    """Reads the held-out answers of ``generations.jsonl``, as ``read_metrics`` reads the metrics."""
    return read_lines(Path(folder) / GENERATIONS)


def read_journal(folder: str | Path) -> dict[int, Row]:
    """Reads the lines of ``journal.jsonl`` by step, as ``read_metrics`` reads the metrics."""
    return {row["step"]: row for row in read_lines(Path(folder) / JOURNAL)}


def last_evaluation(folder: Path | None, step: int) -> Report:
    """Returns the logged metrics of the evaluation after ``step``; empty if there was none, or no folder."""
    rows = [row for row in read_metrics(folder) if row["step"] == step] if folder is not None else []
    return {k: v for row in rows for k, v in row.items() if k.startswith(EVALUATED)}


def read_lines(file: Path) -> list[Row]:
    """Reads the rows of a JSONL file, without an incomplete last line; returns no rows if there is no file.

    Raises:
        RunError: another line is damaged, or a line has no ``step``.
    """
    rows: list[Row] = []
    lines = file.read_bytes().splitlines() if file.exists() else []
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if i < len(lines) - 1:
                raise _damaged(file, i, str(error)) from error
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise _damaged(file, i, "it is not a table with a step")
        rows.append(row)
    return rows


def line_of(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of a log."""
    return json.dumps(row) + "\n"


def checksum(name: str, step: int, lines: str) -> str:
    r"""Returns the line of ``logs.crc`` about the lines of a step in a log.

    Example:
        >>> checksum("metrics.jsonl", 3, line_of({"step": 3, "loss": 0.5}))
        'metrics.jsonl 3 4792afe0\n'
    """
    return f"{name} {step} {zlib.crc32(lines.encode()):08x}\n"


def read_checksums(folder: Path) -> list[tuple[str, int, str]]:
    """Returns the lines of ``logs.crc``, each with its log and step; none for a run of an older version."""
    file = folder / SUMS
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if file.is_file() else []
    parts = [(line.split(), line) for line in lines]
    return [(words[0], int(words[1]), line) for words, line in parts if len(words) == 3 and words[1].isdecimal()]


def checksums_of(name: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of ``logs.crc`` about the rows of a log."""
    by_step = itertools.groupby(rows, key=operator.itemgetter("step"))
    return [checksum(name, step, "".join(map(line_of, some))) for step, some in by_step]


def altered(folder: Path) -> list[str]:
    """Returns sentences about logged steps that are not what the run wrote, or are gone.

    A step has several checksums if an evaluation was added to its line; one of them must fit. The newest step may
    lack lines, since a kill can precede them.

    Raises:
        RunError: a line of a log is damaged.
    """
    known = read_checksums(folder)
    sentences = []
    for name in LOGS if known else ():
        rows = read_lines(folder / name)
        written = {row["step"] for row in rows}
        sums = set(checksums_of(name, rows))
        whole = {step for log, step, line in known if log == name and line in sums}
        wrong = written - whole
        gone = {step for log, step, _ in known if log == name and step < max(written, default=0)} - written
        for steps, what in ((wrong, "not what the run wrote"), (gone, "gone")):
            if steps:
                first = f"step {min(steps)}" + (f" and {len(steps) - 1} more" if len(steps) > 1 else "")
                sentences.append(f"{folder / name} was changed: {first} is {what}")
    return sentences


def _damaged(file: Path, i: int, problem: str) -> RunError:
    return RunError(f"{file}, line {i + 1}, is damaged: {problem}; fix or remove the line")


@contextlib.contextmanager
def loggers(t: TrainerConfig, table: Table, folder: Path, start: int | None) -> Iterator[list[Log]]:
    """Opens the loggers of ``trainer.logger`` and closes them at the end.

    Args:
        table: the whole config, for the logger's own display.
        start: the last step that is done; None for a run that begins.

    Yields:
        A function for each logger that takes a step and its report.

    Raises:
        ConfigError: a logger is not installed.
        RunError: a logger failed.
    """
    makers = {"tensorboard": _tensorboard, "wandb": _wandb}
    with contextlib.ExitStack() as stack:
        logs: list[Log] = []
        for name in (name for name in t.logger if name in makers):
            with _failures(name):
                logs.append(_failures(name)(stack.enter_context(makers[name](t, table, folder, start))))
        yield logs


@contextlib.contextmanager
def _failures(name: str) -> Iterator[None]:
    """Replaces any error of a logger, such as a lost connection, by one that names it; decorates a logger, too."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise RunError(
            f"the logger {name} failed: {type(error).__name__}: {error}; repair it or take it out of trainer.logger, "
            "then run the same command to continue from the last checkpoint"
        ) from error


@contextlib.contextmanager
def _tensorboard(t: TrainerConfig, table: Table, folder: Path, start: int | None) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    # A run repeats the steps after its last checkpoint, or all of them, so TensorBoard drops what it has of them.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0 if start is None else start + 1)

    def log(step: int, report: Mapping[str, float]) -> None:
        for name, value in report.items():
            if math.isfinite(value):
                writer.add_scalar(name, value, step)

    with contextlib.closing(writer):
        yield log


@contextlib.contextmanager
def _wandb(t: TrainerConfig, table: Table, folder: Path, start: int | None) -> Iterator[Log]:
    import wandb

    run = wandb.init(
        project=t.project_name,
        name=t.experiment_name or folder.name,
        id=_identity(folder, fresh=start is None),
        resume="allow",
        dir=str(folder),
        config=table,
    )
    try:
        yield lambda step, report: run.log(dict(report), step=step)
    finally:
        run.finish()


def _identity(folder: Path, *, fresh: bool) -> str:
    """Returns the id that wandb knows the run by; it is kept in the run's folder, with the folder's path.

    A continued run is the same one for wandb, wherever its folder was moved. A run that starts over is another one,
    since wandb takes no step twice, and so is the copy of a folder that is still there.
    """
    file = folder / "wandb_id"
    kept = file.read_text() if file.exists() else ""
    name, _, home = kept.partition("\n")
    original = Path(home or folder, file.name)
    copied = original.exists() and not original.samefile(file) and original.read_text() == kept
    if fresh or copied or not name:
        name = secrets.token_hex(8)
    if (text := f"{name}\n{folder.resolve()}") != kept:
        atomic.write(file, text)
    return name
