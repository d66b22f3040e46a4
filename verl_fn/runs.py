"""A run's folder: the resolved config, ``metrics.jsonl`` and checkpoints that a kill cannot spoil."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import tomli_w

from verl_fn.config import Config, to_table
from verl_fn.driver.build import roles
from verl_fn.state import serial
from verl_fn.workers import Workers

S = TypeVar("S")
ROLES = ("actor", "critic", "reference")


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
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def start(self, step: int, *, resumed: bool) -> None:
        """Begin at ``step``: what an earlier try logged beyond it is dropped, since it will come again.

        Raises:
            RunError: a new run would write over the checkpoints of another.
        """
        newest = self.latest()
        if newest is not None and not resumed:
            raise RunError(
                f"{self.folder} holds checkpoints of another run, up to {newest.name}; "
                f"choose another trainer.dir, remove it, or continue it with trainer.resume_mode=auto"
            )
        _write(self.folder / "config.toml", tomli_w.dumps(to_table(self._cfg)))
        if newest is not None:
            self._point_at(newest / "actor")
        kept = [row for row in read_metrics(self.folder) if row["step"] <= step] if resumed else []
        _write(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept))

    def log(self, step: int, report: Mapping[str, float]) -> None:
        """Append one line; what is not a number in JSON becomes null."""
        row = {"step": step} | {k: v if math.isfinite(v) else None for k, v in sorted(report.items())}
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = sorted(self.folder.glob("checkpoints/step_*"), key=lambda path: int(path.name.split("_")[1]))
        return found[-1] if found else None

    def save(self, state: Any, w: Workers) -> Path:
        """Write a checkpoint aside, bring it to the disk, and only then give it its name."""
        final = self.folder / "checkpoints" / f"step_{state.step}"
        aside = final.with_name(f".writing_{final.name}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
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
        _write(aside / "algorithm.json", json.dumps({"name": self._cfg.algorithm.name, "state": scalars}, indent=1))
        for path in (*aside.rglob("*"), aside):
            _sync(path)
        aside.rename(final)
        _sync(final.parent)
        self._point_at(final / "actor")
        for old in sorted(final.parent.glob("step_*"), key=lambda p: int(p.name.split("_")[1]))[: -self._keep]:
            shutil.rmtree(old)
        return final

    def _point_at(self, actor: Path) -> None:
        """Let ``model`` in the run's folder be its newest model."""
        link, aside = self.folder / "model", self.folder / ".model.writing"
        aside.unlink(missing_ok=True)
        aside.symlink_to(actor.relative_to(self.folder))
        aside.replace(link)


def restore(folder: Path, blank: S, w: Workers, cfg: Config) -> S:
    """The state in a checkpoint; ``blank`` is the algorithm's state without its roles.

    Raises:
        RunError: the checkpoint is of another algorithm, lacks a role that the config asks for, or is damaged.
    """
    try:
        found = json.loads((folder / "algorithm.json").read_text())
        held = tuple(role for role in ROLES if (folder / role).is_dir())
        if (found["name"], held) != (cfg.algorithm.name, roles(cfg)):
            raise RunError(
                f"{folder} is of {found['name']} with {', '.join(held)}; "
                f"the config asks for {cfg.algorithm.name} with {', '.join(roles(cfg))}"
            )
        state = serial.unflatten(blank, {}, found["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{folder}/algorithm.json cannot be read: {error}") from error
    return attrs.evolve(state, **{role: getattr(w, role).restore(folder / role) for role in held})  # type: ignore[type-var]


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl``; a last line that a kill cut short is left out."""
    file = Path(folder) / "metrics.jsonl"
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
