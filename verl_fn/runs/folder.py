"""A run's folder: the resolved config, ``metrics.jsonl``, and checkpoints that a killed process leaves intact."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_fn import atomic
from verl_fn.algorithms import Workers
from verl_fn.config import Plan
from verl_fn.data.prepare import write_answers
from verl_fn.errors import in_one_line
from verl_fn.errors import say as print_line

from . import RunError, logs
from .checkpoints import (
    REMOVED,
    WRITING,
    aside_of,
    begin,
    carried_identity,
    checkpoints,
    identity_at,
    prune,
    seal,
)
from .history import fingerprints, numbered, record
from .logs import Row
from .progress import Say, waiting
from .state import RunState, run_of

ANSWERS = "answers"
FAILURE = "failure.txt"


class Run:
    """The folder of one run.

    Args:
        say: prints a line; it reports checkpoints that cannot be removed.

    Raises:
        RunError: the folder or a link in it cannot be written, or the plan's models lie among its checkpoints.
    """

    def __init__(self, plan: Plan, say: Say = print_line) -> None:
        self.folder = Path(plan.trainer.dir)
        self._say = say
        self._plan = plan
        # A checkpoint that is being written, its manifest, and whether threads write it.
        self._unfinished: tuple[Path, dict[str, Any], bool] | None = None
        # The last line of metrics.jsonl.
        self._row: Row = {}
        link = self.folder / "model"
        if link.exists() and not link.is_symlink():
            raise RunError(
                f"{link} is in the way: a run makes a link of that name to its newest model; move it, or choose "
                f"another trainer.dir"
            )
        for role in plan.roles.values():
            if Path(role.folder).is_relative_to(self.folder / "checkpoints"):
                raise RunError(
                    f"{role.folder} is one of the run's own checkpoints; they are removed as the run goes on; copy "
                    f"the model to another folder, or choose another trainer.dir"
                )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder, and locks it for this process.

        Raises:
            RunError: another process trains in it.
        """
        with contextlib.ExitStack() as stack:
            with self.written("the run's folder"):
                self.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(self.folder / ".lock", "a", opener=_no_link))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"another process trains in {self.folder}; wait for it, or choose another trainer.dir"
                ) from None
            self._clean()
            yield

    def _clean(self) -> None:
        """Removes what killed processes left unfinished: possibly whole training states."""
        patterns = (f"checkpoints/{WRITING}*", f"checkpoints/{REMOVED}*", ".*.writing", "*/.*.writing")
        for left in (path for pattern in patterns for path in self.folder.glob(pattern)):
            with contextlib.suppress(OSError):
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink()

    @functools.cached_property
    def inputs(self) -> Mapping[str, str]:
        """Returns the fingerprints of the run's inputs, computed once since data may be large."""
        return fingerprints(self._plan)

    def start(self, step: int, *, origin: Path | None) -> None:
        """Prepares the folder for a run that continues after ``step``.

        Log lines up to ``step`` stay, or are copied from the run that is forked. Later lines are removed, since the
        run will write them again. If config or inputs have changed, the previous ones are copied to ``configs/``.

        Args:
            step: the last step that is done; 0 for a new run.
            origin: the checkpoint to continue from; None for a new run.

        Raises:
            RunError: a new run would overwrite the checkpoints of another one, or the folder cannot be written.
        """
        newest = self.latest()
        if newest is not None and origin is None:
            raise RunError(
                f"{self.folder} holds checkpoints of another run, up to {newest.name}; "
                f"choose another trainer.dir, remove it, or continue it with trainer.resume_mode=auto"
            )
        with self.written("the run's folder"):
            (self.folder / FAILURE).unlink(missing_ok=True)
            forked = carried_identity(origin) if origin is not None else ""
            record(self.folder, step if newest is not None else None, self._plan.table, self.inputs, forked)
            for pattern in ("samples/step_*.safetensors", f"{ANSWERS}/step_*.parquet"):
                for file, at in numbered(self.folder, pattern, "step_"):
                    if at > step:
                        file.unlink()
            if newest is not None:
                self._point_at(newest / "actor")
            self._start_logs(step, run_of(origin) if origin is not None else None)

    def failed(self, error: Exception) -> None:
        """Writes how the run ended, for reports; the file is removed when the run continues."""
        step = self._row.get("step", 0)
        with contextlib.suppress(OSError):
            atomic.write(self.folder / FAILURE, f"ended after step {step} with an error: {in_one_line(error)}\n")

    def _start_logs(self, step: int, source: Path | None) -> None:
        """Writes the lines of the logs in ``source`` up to ``step``; without a source, the logs begin empty."""
        evaluated = bool(logs.last_evaluation(source, step))
        known = logs.read_checksums(source) if source is not None else []
        sums: list[str] = []
        for name in logs.LOGS:
            # A run that was killed in an evaluation repeats it, and writes its answers again.
            end = step if name != logs.GENERATIONS or evaluated else step - 1
            rows = [row for row in logs.read_lines(source / name) if row["step"] <= end] if source is not None else []
            kept = {row["step"] for row in rows}
            own = [line for log, at, line in known if log == name and at in kept]
            sums += own if known else logs.checksums_of(name, rows)
            if rows or name == logs.METRICS or (self.folder / name).exists():
                atomic.write(self.folder / name, "".join(map(logs.line_of, rows)))
            if rows and name == logs.METRICS:
                self._row = rows[-1]
        atomic.write(self.folder / logs.SUMS, "".join(sums))

    def log(self, step: int, report: Mapping[str, float]) -> None:
        """Appends a step's metrics to ``metrics.jsonl``; values that are not finite become null."""
        self._row = logs.metrics_row(step, report)
        self.append(logs.METRICS, self._row)

    def amend(self, step: int, report: Mapping[str, float]) -> None:
        """Adds further metrics of the step that was logged last, so that ``metrics.jsonl`` has one line for it."""
        if self._row.get("step") != step:
            self.log(step, report)
            return
        values, length = self._row | logs.metrics_row(step, report), len(logs.line_of(self._row))
        self._row = {"step": step} | dict(sorted(item for item in values.items() if item[0] != "step"))
        line = logs.line_of(self._row)
        self._append(logs.SUMS, logs.checksum(logs.METRICS, step, line))
        with self.written(logs.METRICS), open(self.folder / logs.METRICS, "r+b", opener=_no_link) as file:
            # The longer line replaces the shorter one in a single write, so that a kill leaves one of them.
            os.pwrite(file.fileno(), line.encode(), file.seek(-length, os.SEEK_END))

    def append(self, name: str, *rows: Mapping[str, Any]) -> None:
        """Appends the lines of a step to a log."""
        # Checksums come first, so that no kill leaves a line without one.
        self._append(logs.SUMS, "".join(logs.checksums_of(name, rows)))
        self._append(name, "".join(map(logs.line_of, rows)))

    def _append(self, name: str, content: str) -> None:
        with self.written(name), open(self.folder / name, "a", opener=_no_link) as file:
            file.write(content)

    def keep_answers(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Writes all answers of the evaluation after ``step`` as a Parquet file in ``answers/``."""
        with self.written(f"the answers of step {step}"):
            (self.folder / ANSWERS).mkdir(exist_ok=True)
            write_answers(self.folder / ANSWERS / f"step_{step}.parquet", answers)

    def latest(self) -> Path | None:
        """Returns the newest checkpoint, or None."""
        return next(iter(checkpoints(self.folder)), None)

    def save(self, state: RunState, w: Workers, *, later: bool = False) -> Path:
        """Writes a checkpoint under a temporary name, syncs it to the disk, and then renames it.

        Args:
            later: let threads write the files until ``saved`` is called, as ``trainer.async_save`` does.

        Returns:
            The checkpoint.

        Raises:
            RunError: the checkpoint, or the one before, cannot be written; earlier checkpoints are unchanged.
        """
        self.saved(w)
        final = self.folder / "checkpoints" / f"step_{state.step}"
        aside = aside_of(final)
        shutil.rmtree(aside, ignore_errors=True)
        later = later or self._plan.trainer.async_save
        with self._saving(final):
            aside.mkdir(parents=True)
            manifest = begin(state, aside, self._plan, w, identity_at(self.folder, state.step) or "", later=later)
        self._unfinished = final, manifest, later
        if not later:
            self.saved(w)
        return final

    def saved(self, w: Workers) -> None:
        """Waits until the checkpoint that was begun is whole, if there is one, and removes old ones.

        Raises:
            RunError: the checkpoint cannot be written; earlier checkpoints are unchanged.
        """
        if self._unfinished is None:
            return
        (final, manifest, later), self._unfinished = self._unfinished, None
        aside = aside_of(final)
        with self._saving(final):
            seal(aside, manifest, self._plan, w, later=later)
            for name in (*logs.LOGS, logs.SUMS):
                if (self.folder / name).exists():
                    atomic.sync(self.folder / name)
            aside.rename(final)
            atomic.sync(final.parent)
            self._point_at(final / "actor")
        for problem in prune(self.folder, self._plan.trainer.max_ckpt_to_keep):
            self._say(f"warning: {problem}")

    @contextlib.contextmanager
    def _saving(self, final: Path) -> Iterator[None]:
        """Says of a long save how much is written; an error removes what was."""
        what, aside = f"the checkpoint of {final.name.replace('_', ' ')}", aside_of(final)
        try:
            with self.written(what), waiting(self._say, what, lambda: _share_written(aside)):
                yield
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    @contextlib.contextmanager
    def written(self, what: str, folder: Path | None = None) -> Iterator[None]:
        """Turns a disk error into a RunError that names the folder, its free space and the last checkpoint.

        Args:
            folder: where ``what`` is written; by default the run's folder.
        """
        folder = folder or self.folder
        try:
            yield
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RunError(f"{error.filename} is a symbolic link; remove it") from error
            last = self.latest()
            intact = f"the last intact checkpoint is {last}" if last is not None else "there is no checkpoint yet"
            free = shutil.disk_usage(atomic.existing(folder)).free / 2**20
            raise RunError(
                f"{what} cannot be written to {folder}: {error.strerror or error} ({free:,.0f} MiB are free on "
                f"its disk); {intact}. Make room or fix the folder, then run the same command to continue"
            ) from error

    def _point_at(self, actor: Path) -> None:
        """Points the link ``model`` in the run's folder at its newest model."""
        with atomic.replaced(self.folder / "model") as aside:
            aside.symlink_to(actor.relative_to(self.folder))


def _share_written(folder: Path) -> float:
    """Returns how much of the files in a folder is on the disk; they have their full sizes from the start."""
    with contextlib.suppress(OSError):
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        size = sum(file.st_size for file in files)
        return sum(min(512 * file.st_blocks, file.st_size) for file in files) / size if size else 0.0
    return 0.0


def _no_link(path: str, flags: int) -> int:
    """Opens a file unless it is a symbolic link: somebody else may have put that there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
