"""What the steps of a run were made with: the config, the inputs, and an identity that their checkpoints carry.

``config.toml`` and ``inputs.json`` hold for the newest steps, ``configs/until_step_N.toml`` and ``.json`` for earlier
ones, up to step N. ``run.json`` lists the identities. An identity is a digest of the settings and inputs that decide
what a run computes, and of the identity before, so runs that compute the same have the same one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from verl_fn import atomic
from verl_fn.config import Config, ConfigError, flat, load, to_table
from verl_fn.config.tables import Table

from .checkpoints import IDENTITY, carried_identity, checkpoints, identities, step_of
from .errors import RunError
from .inputs import INPUTS, changed_inputs, is_version, read_inputs

CONFIG = "config.toml"
_EARLIER, _UNTIL = "configs", "until_step_"
# Keys that speak of one start of a run, and not of its steps.
_OF_A_START = ("trainer.dir", "trainer.resume_mode")


def record(folder: Path, step: int | None, table: Table, inputs: Mapping[str, str], origin: str = "") -> None:
    """Records what the steps after ``step`` are made with; what earlier steps were made with stays recorded.

    A kill leaves the record as it was, or as it is to be. Settings of a continuation that saved no step are dropped.

    Args:
        folder: the run's folder.
        step: the last step that is done; None if the folder has no step yet.
        table: the config.
        inputs: the fingerprints of the inputs.
        origin: the identity of the checkpoint that a new run is a fork of.
    """
    kept = set()
    if step is not None:
        made_by, before = config_file(folder, step), recorded_inputs(folder, step)
        kept = {end for end in _ends(folder) if end < step}
        if changed_keys(folder, table) or changed_inputs(before, inputs):
            kept.add(step)
            until = folder / _EARLIER / f"{_UNTIL}{step}.toml"
            until.parent.mkdir(exist_ok=True)
            if made_by != until:
                atomic.write(until.with_suffix(".json"), json.dumps(before, indent=1))
                atomic.write(until, made_by.read_bytes())
    _record_identity(folder, step, table, inputs, origin)
    atomic.write(folder / INPUTS, json.dumps(dict(inputs), indent=1))
    atomic.write(folder / CONFIG, tomli_w.dumps(table))
    for end in _ends(folder):
        if end not in kept:
            for suffix in (".toml", ".json"):
                (folder / _EARLIER / f"{_UNTIL}{end}{suffix}").unlink(missing_ok=True)


def _record_identity(folder: Path, step: int | None, table: Table, inputs: Mapping[str, str], origin: str) -> None:
    settings = _digest(
        {key: _name(value) for key, value in flat(table).items() if _decides(key)},
        sorted(value for value in inputs.values() if not is_version(value)),
    )
    known = identities(folder) if step is not None else []
    if step is not None and not known:
        # The run is older than identities, or its file is lost.
        known = [{"since": 0, "id": _carried(folder), "settings": ""}]
    known = [one for i, one in enumerate(known) if i == 0 or one["since"] < (step or 0)]
    if not known or known[-1]["settings"] != settings:
        before = known[-1]["id"] if known else origin
        known.append({"since": step or 0, "id": _digest(before, settings), "settings": settings})
    atomic.write(folder / IDENTITY, json.dumps(known, indent=1))


def _decides(key: str) -> bool:
    """Returns whether a key decides what a run computes; folders, lengths, logs, processes and the day do not."""
    return key == "trainer.seed" or not key.startswith(("trainer.", "driver.", "ray.", "data.date"))


def _name(value: Any) -> Any:
    """Returns a path without its folders, since copies of a run may read their files elsewhere."""
    if isinstance(value, list | tuple):
        return [_name(one) for one in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _carried(folder: Path) -> str:
    """Returns the identity that the newest checkpoint carries; empty for those of older versions.

    Raises:
        RunError: some checkpoints carry one and others none, so they are of several runs.
    """
    found = {checkpoint: carried_identity(checkpoint) for checkpoint in checkpoints(folder)}
    if len({bool(identity) for identity in found.values()}) > 1:
        names = ", ".join(checkpoint.name for checkpoint, identity in found.items() if identity)
        raise RunError(
            f"the checkpoints in {folder} are of several runs: {names} were put there, or {folder / IDENTITY} is "
            "lost. Restore that file, or move the checkpoints of other runs away"
        )
    return next(iter(found.values()))


def run_config(folder: str | Path, step: int | None = None) -> tuple[Config, int | None]:
    """Returns the config that a step of a run was made with, and the step after which that config applied.

    Args:
        folder: the run's folder.
        step: the step, by default the run's last one.

    Returns:
        The config, and the step; None if it applied from the beginning of the run.

    Raises:
        RunError: the folder is not a run's.
    """
    folder = Path(folder)
    file = config_file(folder, step)
    try:
        cfg = load(file)
    except ConfigError as error:
        raise RunError(f"{file} does not fit this version of verl_fn: {error}; change the file") from error
    own_end = int(file.stem.removeprefix(_UNTIL)) if file.name != CONFIG else None
    forked = step_of(Path(cfg.trainer.resume_from_path)) if cfg.trainer.resume_from_path else None
    since = max((end for end in _ends(folder) if own_end is None or end < own_end), default=forked)
    return attrs.evolve(cfg, trainer=attrs.evolve(cfg.trainer, dir=str(folder))), since


def config_file(folder: Path, step: int | None = None) -> Path:
    """Returns the file with the config that a step was made with; see ``run_config``."""
    if not (folder / CONFIG).is_file():
        raise RunError(f"{folder} is not a run's folder: it has no {CONFIG}")
    later = [end for end in _ends(folder) if step is not None and end >= step]
    return folder / _EARLIER / f"{_UNTIL}{later[0]}.toml" if later else folder / CONFIG


def recorded_inputs(folder: Path, step: int | None = None) -> dict[str, str]:
    """Returns the fingerprints of the inputs that a step was made with; empty where they were not recorded."""
    file = config_file(folder, step)
    return read_inputs(folder / INPUTS if file.name == CONFIG else file.with_suffix(".json"))


def changed_keys(folder: Path, table: Table) -> dict[str, str]:
    """Returns the keys that differ from the config of the folder's newest checkpoint, and both values.

    Without a checkpoint, it is the config that the folder was last trained with.

    Raises:
        RunError: the folder has checkpoints, but its config cannot be read, so that nobody knows what has changed.
    """
    saved = checkpoints(folder)
    try:
        before = flat(to_table(run_config(folder, step_of(saved[0]) if saved else None)[0]))
    except RunError as error:
        if not saved:
            return {}
        raise RunError(
            f"{error}. Without it nobody knows which settings have changed; restore the file, or fork a checkpoint "
            f"into another trainer.dir (trainer.resume_from_path={saved[0]})"
        ) from error
    now = flat(table)
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in _OF_A_START]
    return {key: f"{before.get(key)!r} -> {now.get(key)!r}" for key in keys}


def _ends(folder: Path) -> list[int]:
    """Returns the last steps of earlier configs, in order."""
    return sorted(end for _, end in numbered(folder, f"{_EARLIER}/{_UNTIL}*.toml", _UNTIL))


def numbered(folder: Path, pattern: str, prefix: str) -> Iterator[tuple[Path, int]]:
    """Yields the files of a pattern with the number in each name; files without a number are passed over."""
    for file in folder.glob(pattern):
        if (number := file.stem.removeprefix(prefix)).isdecimal():
            yield file, int(number)
