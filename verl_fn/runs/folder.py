"""A run's folder: the resolved config, ``metrics.jsonl``, and checkpoints that a killed process leaves intact."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from verl_fn.algorithms import Workers
from verl_fn.backends.tensor_file import sync
from verl_fn.config import Config, ConfigError, Plan, flat, load, to_table
from verl_fn.config.tables import Table
from verl_fn.driver import ranks

from .checkpoints import aside_of, checkpoints, save_roles, step_of, write_manifest, write_text
from .errors import RunError
from .state import RunState, run_of

LOGS = ("metrics.jsonl", "generations.jsonl", "journal.jsonl")
TIMED = ("timing_s/", "perf/time_per_step", "perf/throughput")


class Run:
    """The folder of one run.

    Attributes:
        folder: its path.
    """

    def __init__(self, plan: Plan) -> None:
        self.folder = Path(plan.trainer.dir)
        self._keep = plan.trainer.max_ckpt_to_keep
        self._plan = plan
        with self.written("the run's folder"):
            self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder for this process.

        Raises:
            RunError: another process trains in it.
        """
        with self.written("the run's folder"), (self.folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"another process trains in {self.folder}; wait for it, or choose another trainer.dir"
                ) from None
            yield

    @property
    def metrics_file(self) -> Path:
        """Returns the path of ``metrics.jsonl``."""
        return self.folder / "metrics.jsonl"

    def start(self, step: int, *, origin: Path | None) -> None:
        """Prepares the folder for a run that continues after ``step``.

        Log lines up to ``step`` stay, or are copied from the run that is forked. Later lines are removed, since the
        run will write them again. If the config has changed, the previous one is copied to ``configs/``.

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
            if newest is not None and changed_keys(self.folder, self._plan.table):
                (self.folder / "configs").mkdir(exist_ok=True)
                shutil.copy(self.folder / "config.toml", self.folder / "configs" / f"until_step_{step}.toml")
            write_text(self.folder / "config.toml", tomli_w.dumps(self._plan.table))
            for sample in self.folder.glob("samples/step_*.safetensors"):
                if int(sample.stem.removeprefix("step_")) > step:
                    sample.unlink()
            if newest is not None:
                self._point_at(newest / "actor")
            for name in LOGS:
                source = run_of(origin) / name if origin is not None else None
                rows = [row for row in read_lines(source) if row["step"] <= step] if source is not None else []
                if rows or name == LOGS[0] or (self.folder / name).exists():
                    write_text(self.folder / name, "".join(json.dumps(row) + "\n" for row in rows))

    def log(self, step: int, report: Mapping[str, float]) -> None:
        """Appends a step's metrics to ``metrics.jsonl``; values that are not finite become null."""
        self.append("metrics.jsonl", metrics_row(step, report))

    def append(self, name: str, *rows: Mapping[str, Any]) -> None:
        """Appends lines to a file of the folder."""
        with self.written(name), (self.folder / name).open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def latest(self) -> Path | None:
        """Returns the newest checkpoint, or None."""
        return next(iter(checkpoints(self.folder)), None)

    def save(self, state: RunState, w: Workers) -> Path:
        """Writes a checkpoint under a temporary name, syncs it to the disk, and then renames it.

        Raises:
            RunError: the checkpoint cannot be written; earlier checkpoints are unchanged.
        """
        final = self._checkpoint(state.step)
        aside = aside_of(final)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            with self.written(f"the checkpoint of step {state.step}"):
                # If several processes save, the folder must exist before any of them writes.
                with ranks.together():
                    aside.mkdir(parents=True)
                save_roles(state, aside, self._plan, w)
                # No process may continue, and perhaps exit, before the checkpoint is renamed.
                with ranks.together():
                    write_manifest(aside, state, self._plan)
                    for name in LOGS:
                        if (self.folder / name).exists():
                            sync(self.folder / name)
                    aside.rename(final)
                    sync(final.parent)
                    self._point_at(final / "actor")
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        for old in checkpoints(self.folder)[self._keep :]:
            shutil.rmtree(old)
        return final

    @contextlib.contextmanager
    def written(self, what: str) -> Iterator[None]:
        """Turns a disk error into a RunError that names the folder, its free space and the last checkpoint."""
        try:
            yield
        except OSError as error:
            last = self.latest()
            intact = f"the last intact checkpoint is {last}" if last is not None else "there is no checkpoint yet"
            raise RunError(
                f"{what} cannot be written to {self.folder}: {error.strerror or error}{_free(self.folder)}; "
                f"{intact}. Make room or fix the folder, then run the same command to continue"
            ) from error

    def _checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step}"

    def _point_at(self, actor: Path) -> None:
        """Points the link ``model`` in the run's folder at its newest model."""
        link, aside = self.folder / "model", self.folder / ".model.writing"
        aside.unlink(missing_ok=True)
        aside.symlink_to(actor.relative_to(self.folder))
        aside.replace(link)


class Follower(Run):
    """The folder of a run as a process other than the first uses it.

    Only the first process writes logs and manifests. A follower reads them, and saves its part of the state.
    """

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def start(self, step: int, *, origin: Path | None) -> None:
        pass

    def append(self, name: str, *rows: Mapping[str, Any]) -> None:
        pass

    def save(self, state: RunState, w: Workers) -> Path:
        final = self._checkpoint(state.step)
        with self.written(f"the checkpoint of step {state.step}"):
            with ranks.together():
                pass
            save_roles(state, aside_of(final), self._plan, w)
            with ranks.together():
                pass
        return final


def metrics_row(step: int, report: Mapping[str, float]) -> dict[str, Any]:
    """Returns a step's report as a line of ``metrics.jsonl``; values that are not finite become null.

    Example:
        >>> metrics_row(3, {"loss": 0.5, "kl": math.nan})
        {'step': 3, 'kl': None, 'loss': 0.5}
    """
    return {"step": step} | {k: v if math.isfinite(v) else None for k, v in sorted(report.items())}


def run_config(folder: str | Path, step: int | None = None) -> tuple[Config, int]:
    """Returns the config that a step of a run was made with, and the step after which that config applied.

    Args:
        folder: the run's folder.
        step: the step, by default the run's last one.

    Raises:
        RunError: the folder is not a run's.
    """
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        raise RunError(f"{folder} is not a run's folder: it has no config.toml")
    ends = sorted(int(p.stem.removeprefix("until_step_")) for p in folder.glob("configs/until_step_*.toml"))
    later = [end for end in ends if step is not None and end >= step]
    file = folder / "configs" / f"until_step_{later[0]}.toml" if later else folder / "config.toml"
    cfg = load(file)
    forked = step_of(Path(cfg.trainer.resume_from_path)) if cfg.trainer.resume_from_path else None
    since = max((end for end in ends if not later or end < later[0]), default=forked or 0)
    return attrs.evolve(cfg, trainer=attrs.evolve(cfg.trainer, dir=str(folder))), since


def changed_keys(folder: Path, table: Table) -> dict[str, str]:
    """Returns the keys that differ from the config that the folder was last trained with, and both values."""
    try:
        before = flat(to_table(run_config(folder)[0]))
    except (RunError, ConfigError):
        return {}
    now = flat(table)
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key != "trainer.dir"]
    return {key: f"{before.get(key)!r} -> {now.get(key)!r}" for key in keys}


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Reads the rows of ``metrics.jsonl``, without a last line that a killed process left incomplete."""
    return read_lines(Path(folder) / "metrics.jsonl")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Reads the rows of a JSONL file, without an incomplete last line; returns no rows if there is no file.

    Raises:
        RunError: another line is damaged.
    """
    rows: list[dict[str, Any]] = []
    lines = file.read_bytes().splitlines() if file.exists() else []
    for i, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if i < len(lines) - 1:
                raise RunError(f"{file}, line {i + 1}, is damaged: {error}; fix or remove the line") from error
    return rows


def _free(folder: Path) -> str:
    existing = next((p for p in (folder, *folder.parents) if p.exists()), None)
    if existing is None:
        return ""
    return f" ({shutil.disk_usage(existing).free / 2**20:,.0f} MiB are free on its disk)"
