"""A run's folder: the resolved config, ``metrics.jsonl`` and checkpoints that a kill cannot spoil."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import tomli_w

from verl_fn.backends.checkpoint import CheckpointError
from verl_fn.config import ConfigError, flat, load, to_table
from verl_fn.driver.build import roles
from verl_fn.schema import Config
from verl_fn.state import serial
from verl_fn.workers import Workers

S = TypeVar("S")
ROLES = ("actor", "critic", "reference")
MANIFEST = "checkpoint.json"
TIMED = ("timing_s/", "perf/time_per_step", "perf/throughput")


class RunError(ValueError):
    """A run's folder that cannot be begun, continued or written."""


class Run:
    """The folder of one run.

    Attributes:
        folder: where everything lies.
    """

    def __init__(self, cfg: Config) -> None:
        # Absolute, since workers may run in another directory.
        self.folder = Path(cfg.trainer.dir).resolve()
        self._keep = cfg.trainer.max_ckpt_to_keep
        self._cfg = cfg
        with self.written("the run's folder"):
            self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def start(self, step: int, *, origin: Path | None) -> None:
        """Begin after ``step``, new or from the checkpoint ``origin``.

        What was logged up to ``step`` is kept, or taken over from the run that is forked; what an earlier try
        logged beyond it is dropped, since it will come again.

        Raises:
            RunError: a new run would write over the checkpoints of another, or the folder cannot be written.
        """
        newest = self.latest()
        if newest is not None and origin is None:
            raise RunError(
                f"{self.folder} holds checkpoints of another run, up to {newest.name}; "
                f"choose another trainer.dir, remove it, or continue it with trainer.resume_mode=auto"
            )
        with self.written("the run's folder"):
            _write(self.folder / "config.toml", tomli_w.dumps(to_table(self._cfg)))
            if newest is not None:
                self._point_at(newest / "actor")
            for name in ("metrics.jsonl", "generations.jsonl", "journal.jsonl"):
                source = origin.parents[1] / name if origin is not None else None
                rows = [row for row in read_lines(source) if row["step"] <= step] if source is not None else []
                if rows or name == "metrics.jsonl" or (self.folder / name).exists():
                    _write(self.folder / name, "".join(json.dumps(row) + "\n" for row in rows))

    def log(self, step: int, report: Mapping[str, float]) -> None:
        """Append one line; what is not a number in JSON becomes null."""
        self.append("metrics.jsonl", metrics_row(step, report))

    def append(self, name: str, *rows: Mapping[str, Any]) -> None:
        """Append lines to a file of the folder."""
        with self.written(name), (self.folder / name).open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        return next(iter(checkpoints(self.folder)), None)

    def save(self, state: Any, w: Workers) -> Path:
        """Write a checkpoint aside, bring it to the disk, and only then give it its name.

        Raises:
            RunError: it cannot be written; the checkpoints before it are as they were.
        """
        final = self.folder / "checkpoints" / f"step_{state.step}"
        aside = final.with_name(f".writing_{final.name}")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            with self.written(f"the checkpoint of step {state.step}"):
                aside.mkdir(parents=True)
                self._fill(aside, state, w)
                aside.rename(final)
                _sync(final.parent)
                self._point_at(final / "actor")
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        for old in checkpoints(self.folder)[self._keep :]:
            shutil.rmtree(old)
        return final

    def _fill(self, aside: Path, state: Any, w: Workers) -> None:
        rest = state
        for role in ROLES:
            if getattr(state, role, None) is not None:
                getattr(w, role).save(getattr(state, role), aside / role)
                if not (aside / role).is_dir():
                    raise RunError(
                        f"the worker of {role} wrote its checkpoint elsewhere than {aside}: no shared folder?"
                    )
                rest = attrs.evolve(rest, **{role: None})
        _, scalars = serial.flatten(rest)
        held = [path for path in sorted(aside.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(aside)): [path.stat().st_size, _crc(path)] for path in held}
        about = {"algorithm": self._cfg.algorithm.name, "state": scalars, "files": files}
        _write(aside / MANIFEST, json.dumps(about, indent=1))
        for path in (*aside.rglob("*"), aside):
            _sync(path)

    @contextlib.contextmanager
    def written(self, what: str) -> Iterator[None]:
        """Errors of the disk become one sentence that names the disk and the last checkpoint."""
        try:
            yield
        except OSError as error:
            last = self.latest()
            kept = f"the last whole checkpoint is {last}" if last is not None else "there is no checkpoint yet"
            raise RunError(
                f"{what} cannot be written to {self.folder}: {error.strerror or error}{_room(self.folder)}; {kept}. "
                f"Make room or mend the folder, then run the same command to continue"
            ) from error

    def _point_at(self, actor: Path) -> None:
        """Let ``model`` in the run's folder be its newest model."""
        link, aside = self.folder / "model", self.folder / ".model.writing"
        aside.unlink(missing_ok=True)
        aside.symlink_to(actor.relative_to(self.folder))
        aside.replace(link)


def metrics_row(step: int, report: Mapping[str, float]) -> dict[str, Any]:
    """A step's report as a line of ``metrics.jsonl``; what is not a number in JSON becomes null.

    >>> metrics_row(3, {"loss": 0.5, "kl": math.nan})
    {'step': 3, 'kl': None, 'loss': 0.5}
    """
    return {"step": step} | {k: v if math.isfinite(v) else None for k, v in sorted(report.items())}


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [p for p in Path(folder).glob("checkpoints/step_*") if step_of(p) is not None]
    return sorted(found, key=lambda p: -(step_of(p) or 0))


def step_of(checkpoint: Path) -> int | None:
    """The step that a checkpoint's name says.

    >>> step_of(Path("runs/a/checkpoints/step_20")), step_of(Path("runs/a"))
    (20, None)
    """
    number = checkpoint.name.removeprefix("step_")
    return int(number) if number != checkpoint.name and number.isdigit() else None


def restore(folder: Path, blank: S, w: Workers, cfg: Config) -> S:
    """The state in a checkpoint; ``blank`` is the algorithm's state without its roles.

    Raises:
        RunError: the checkpoint is of another algorithm, lacks a role that the config asks for, or is damaged;
            then the last good one is named.
    """
    try:
        about = verify(folder)
        held = tuple(role for role in ROLES if (folder / role).is_dir())
        if (about["algorithm"], held) != (cfg.algorithm.name, roles(cfg)):
            raise RunError(
                f"{folder} is of {about['algorithm']} with {', '.join(held)}; "
                f"the config asks for {cfg.algorithm.name} with {', '.join(roles(cfg))}"
            )
        state = serial.unflatten(blank, {}, about["state"])
        return attrs.evolve(state, **{role: getattr(w, role).restore(folder / role) for role in held})  # type: ignore[type-var]
    except CheckpointError as error:
        raise RunError(f"{error}; {_another(folder)}") from error


def verify(folder: Path) -> dict[str, Any]:
    """What a checkpoint's manifest says, after every file has been compared with it.

    Raises:
        CheckpointError: a file is missing, or its length or check sum is not what was written.
    """
    try:
        about = json.loads((folder / MANIFEST).read_text())
        for name, (size, crc) in about["files"].items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is missing")
            if path.stat().st_size != size:
                raise CheckpointError(
                    f"the checkpoint {folder} is damaged: {name} has {path.stat().st_size} bytes of {size}"
                )
            if _crc(path) != crc:
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is not what was written")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint {folder} is damaged: {MANIFEST} cannot be read: {error}") from error
    return about


def _another(damaged: Path) -> str:
    for folder in checkpoints(damaged.parents[1]):
        if folder != damaged:
            with contextlib.suppress(CheckpointError):
                verify(folder)
                return f"{folder} is whole: remove the damaged one to continue from there"
    return "no other checkpoint of this run is whole"


def run_config(folder: str | Path, overrides: Any = ()) -> Config:
    """The config that a run was made with.

    Raises:
        RunError: the folder is no run.
    """
    file = Path(folder) / "config.toml"
    if not file.is_file():
        raise RunError(f"{folder} is not a run's folder: it has no config.toml")
    return load(file, overrides)


def changed_keys(folder: Path, cfg: Config) -> list[str]:
    """How ``cfg`` differs from the config that the folder was last trained with, a line a key."""
    try:
        before = flat(to_table(run_config(folder)))
    except (RunError, ConfigError):
        return []
    now = flat(to_table(cfg))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key != "trainer.dir"]
    return [f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in keys]


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl``; a last line that a kill cut short is left out."""
    return read_lines(Path(folder) / "metrics.jsonl")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file up to the first that is not whole; none where there is no file."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text)
    _sync(aside)
    aside.rename(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _room(folder: Path) -> str:
    there = next((p for p in (folder, *folder.parents) if p.exists()), None)
    if there is None:
        return ""
    return f" ({shutil.disk_usage(there).free / 2**20:,.0f} MiB are free on its disk)"
