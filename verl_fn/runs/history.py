"""What the steps of a run were made with: the config, the inputs, and an identity that their checkpoints carry.

``config.toml`` and ``inputs.json`` hold for the newest steps, ``configs/until_step_N.toml`` and ``.json`` for earlier
ones, up to step N. ``run.json`` lists the identities. An identity is a digest of the settings and inputs that decide
what a run computes, and of the identity before, so runs that compute the same have the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli_w
import torch

from verl_fn import __version__, atomic, build
from verl_fn.atomic import crc_of
from verl_fn.config import Config, ConfigError, Plan, flat, load, to_table
from verl_fn.config.load import default_table
from verl_fn.config.names import is_reference, reasoning_names, verifiers_name
from verl_fn.config.schema import Table
from verl_fn.data.hub import is_set, recorded, set_files
from verl_fn.driver.ranks import training_ranks
from verl_fn.errors import installed_version
from verl_fn.user_files import code_files, with_imports

from . import RunError
from .checkpoints import IDENTITY, carried_identity, checkpoints, identities, step_of
from .logs import METRICS

CONFIG = "config.toml"
WRITER = ".run"  # beside responses of training: the folder of the run that wrote them
_EARLIER, _UNTIL = "configs", "until_step_"
# Keys that speak of one start of a run, and not of its steps.
_OF_A_START = ("trainer.dir", "trainer.resume_mode")


def record(folder: Path, step: int | None, table: Table, inputs: Mapping[str, str], origin: str = "") -> None:
    """Records what the steps after ``step`` are made with; what earlier steps were made with stays recorded.

    A kill leaves the record as it was, or as it is to be. Settings of a continuation that saved no step are dropped.

    Args:
        step: the last step that is done; None if the folder has no step yet.
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
        sorted(value for value in inputs.values() if not value.startswith(_VERSION)),
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
    """Returns the identity that the newest checkpoint carries; empty for checkpoints of older versions.

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
    forked = step_of(Path(cfg.trainer.resume_from_path)) if cfg.trainer.resume_from_path else None
    since = max((end for end in _ends(folder) if step is None or end < step), default=forked)
    return attrs.evolve(cfg, trainer=attrs.evolve(cfg.trainer, dir=str(folder))), since


def run_around(path: Path) -> Path | None:
    """Returns the folder of the run that a path lies in, links resolved; None if it lies in none.

    Example:
        >>> run_around(Path("/no/such/run/model"))
    """
    return next((place for place in path.resolve().parents if is_run(place)), None)


def run_meant(path: Path) -> str:
    """Returns the end of an error about a path that is no run: the run that it lies in; empty if it lies in none.

    Example:
        >>> run_meant(Path("/no/such/run/model"))
        ''
    """
    return f"; did you mean {run}?" if (run := run_around(path)) is not None else ""


def is_run(folder: Path) -> bool:
    """Returns whether a run has begun in a folder.

    Example:
        >>> is_run(Path("/no/such/run"))
        False
    """
    return (folder / CONFIG).is_file() and (folder / METRICS).is_file()


def other_writer(texts: Path, folder: Path) -> Path | None:
    """Returns the run that has written responses of training to ``texts``, if it is not the run in ``folder``.

    None if that run's folder is no longer there. What lies in a run's own folder is its own, in a copy too.

    Example:
        >>> other_writer(Path("/no/such/responses"), Path("/no/such/run"))
    """
    if folder in (texts, *texts.parents) or not (texts / WRITER).is_file():
        return None
    writer = Path((texts / WRITER).read_text("utf-8").strip())
    return writer if writer != folder and (writer / CONFIG).is_file() else None


def run_of_config(file: Path) -> Path | None:
    """Returns the folder of the run that a file is the config of, now or in earlier steps; None for other files.

    Example:
        >>> run_of_config(Path("/no/such/run/config.toml"))
    """
    folder = file.parent.parent if file.match(f"{_EARLIER}/{_UNTIL}*.toml") else file.parent
    return folder if is_run(folder) and (folder != file.parent or file.name == CONFIG) else None


def config_file(folder: Path, step: int | None = None) -> Path:
    """Returns the file with the config that a step was made with; see ``run_config``."""
    if not (folder / CONFIG).is_file():
        raise RunError(f"{folder} is not a run's folder: it has no {CONFIG}{run_meant(folder)}")
    later = [end for end in _ends(folder) if step is not None and end >= step]
    return folder / _EARLIER / f"{_UNTIL}{later[0]}.toml" if later else folder / CONFIG


def recorded_inputs(folder: Path, step: int | None = None) -> dict[str, str]:
    """Returns the fingerprints of the inputs that a step was made with; none if they are not recorded or damaged."""
    file = config_file(folder, step)
    file = folder / INPUTS if file.name == CONFIG else file.with_suffix(".json")
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
        found = json.loads(file.read_text(encoding="utf-8")).items()
        return {name: fingerprint for name, fingerprint in found if isinstance(fingerprint, str)}
    return {}


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
    return _changes(before, flat(table))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in _OF_A_START]
    return {key: f"{before.get(key)!r} -> {now.get(key)!r}" for key in keys}


def continuations(folder: Path) -> list[str]:
    """Returns a sentence for each time that a run was continued with other settings, code or data.

    A file that cannot be read gives none.
    """
    said = []
    for end in _ends(folder):
        try:
            tables = (tomllib.loads(config_file(folder, step).read_text("utf-8")) for step in (end, end + 1))
            # A version may have keys that an earlier one had not.
            before, now = (flat(default_table(table)) | flat(table) for table in tables)
        except (ConfigError, OSError, ValueError, RecursionError):
            continue
        changes = [f"{key} {change}" for key, change in _changes(before, now).items()]
        changes += changed_inputs(recorded_inputs(folder, end), recorded_inputs(folder, end + 1))
        said += [f"after step {end:,} it was continued with changes: {'; '.join(changes)}"] if changes else []
    return said


def _ends(folder: Path) -> list[int]:
    """Returns the last steps of earlier configs, in order."""
    return sorted(end for _, end in numbered(folder, f"{_EARLIER}/{_UNTIL}*.toml", _UNTIL))


def numbered(folder: Path, pattern: str, prefix: str) -> Iterator[tuple[Path, int]]:
    """Yields the files of a pattern with the number in each name; files without a number are passed over."""
    for file in folder.glob(pattern):
        if (number := file.stem.removeprefix(prefix)).isdecimal():
            yield file, int(number)


INPUTS = "inputs.json"
CPU = "CPU"  # names the fingerprint of vector instructions and threads
_VERSION = "version "  # begins the fingerprint of a package, and of the CPU


def fingerprints(plan: Plan) -> dict[str, str]:
    """Returns what a run reads beside its config.

    Returns:
        The size and the checksum of every file by path, the commits of folders from the hub, the versions of
        libraries and, on a CPU, the instructions and threads that kernels use.
    """
    data = (*plan.data.train_files, *plan.data.val_files)
    # Sets of the hub have no files of their own, since the config has their commit.
    sets = {entry: set_files(entry) for entry in data if is_set(entry)}
    files = [*(Path(entry) for entry in data if entry not in sets), *_files(plan)]
    prints = {
        str(file): f"{file.stat().st_size} bytes, CRC {crc_of(file):08x}"
        for file in dict.fromkeys(files)
        if file.is_file()
    }
    prints |= {entry: _whole(read) for entry, read in sets.items() if read}
    own = plan.model if plan.new_model is not None else None
    models = [Path(role.folder) for role in plan.roles.values() if role.folder != own]
    of_data = [file for entry in data for file in sets.get(entry, [Path(entry)])]
    folders = dict.fromkeys([*models, *(up for file in of_data for up in file.parents)])
    if not data and reasoning_names(plan.data.task) and importlib.util.find_spec("reasoning_gym") is not None:
        # Another version may make other questions of the same seeds.
        prints["reasoning-gym"] = _VERSION + importlib.metadata.version("reasoning-gym")
    prints |= {"verl_fn": _VERSION + __version__, "python": _VERSION + platform.python_version()}
    for library in ("torch", "transformers", *(["vllm"] if plan.rollout.name == "vllm" else [])):
        # A cluster may have a library that this process lacks.
        if version := installed_version(library):
            prints[library] = _VERSION + version
    # What a cluster computes on is not known here.
    if build.device(plan.driver) == "cpu" and not (plan.driver.kind == "ray" and plan.ray.address):
        # Sums of other vectors and threads have another order, and so other roundings.
        ranks = training_ranks(plan)
        count = build.threads(plan.driver, ranks, by_user=plan.driver.kind == "local" and ranks == 1)
        prints[CPU] = f"{_VERSION}{torch.backends.cpu.get_cpu_capability()}, threads {count}"
    # A folder that was copied from the hub is recorded by its commit there.
    return prints | {str(folder): source for folder in folders if (source := recorded(folder)) is not None}


def changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describes the inputs whose fingerprints differ; inputs that are only on one side are not among them.

    Example:
        >>> before = {"/a.py": "3 bytes, CRC 1", "torch": "version 1"}
        >>> changed_inputs(before, {"/a.py": "4 bytes, CRC 2", "torch": "version 2"})
        ['another content of /a.py', 'another version of torch (1 -> 2)']
    """
    return [
        f"another {'set-up of the' if name == CPU else 'version of'} {name} "
        f"({was.removeprefix(_VERSION)} -> {fingerprint.removeprefix(_VERSION)})"
        if fingerprint.startswith(_VERSION)
        else f"another content of {name}"
        for name, fingerprint in now.items()
        if (was := before.get(name, fingerprint)) != fingerprint
    ]


def _whole(files: Sequence[Path]) -> str:
    """Returns one fingerprint of all files of a data set; it also changes if a file is added or removed."""
    lines = "".join(f"{file} {file.stat().st_size} {crc_of(file):08x}\n" for file in files)
    return f"{len(files)} files, CRC {zlib.crc32(lines.encode()):08x}"


def _files(plan: Plan) -> Iterator[Path]:
    """Yields the user's code, and what makes tokens of text in a model that the run did not make itself."""
    for reference in (*plan.code, *plan.data.convert, *plan.reward.functions, plan.env.name):
        if is_reference(reference) and not verifiers_name(reference):
            yield from code_files(reference.rpartition(":")[0])
    if name := verifiers_name(plan.env.name):
        # An installed environment is found from the processes that run it.
        file = Path(name).resolve()
        yield from with_imports(file.with_name(file.name.replace("-", "_") + ".py"))
    if plan.new_model is None:
        for pattern in ("tokenizer*", "chat_template*", "special_tokens*", "added_tokens*", "generation_config*"):
            yield from sorted(Path(plan.model).glob(pattern))
