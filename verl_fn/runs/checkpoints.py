"""Checkpoints of a run: written under a temporary name, synced, then renamed; with a checksum of every file."""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any

from verl_fn.algorithms import Workers
from verl_fn.backends.checkpoint.state_folder import CheckpointError
from verl_fn.backends.tensor_file import sync
from verl_fn.config import Plan
from verl_fn.state import serial

from .errors import RunError
from .state import RunState, run_of

MANIFEST = "checkpoint.json"


def checkpoints(folder: str | Path) -> list[Path]:
    """Returns the checkpoints of a run, newest first."""
    folders = [p for p in Path(folder).glob("checkpoints/step_*") if step_of(p) is not None]
    return sorted(folders, key=lambda p: -(step_of(p) or 0))


def step_of(checkpoint: Path) -> int | None:
    """Returns the step in a checkpoint's name; None for another folder.

    Example:
        >>> step_of(Path("runs/a/checkpoints/step_20")), step_of(Path("runs/a"))
        (20, None)
    """
    number = checkpoint.name.removeprefix("step_")
    return int(number) if number != checkpoint.name and number.isdigit() else None


def saved_step(checkpoint: Path) -> int:
    """Returns the step of the state in a checkpoint, whatever its name.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    step = read_manifest(checkpoint)["state"].get(".algorithm.step", step_of(checkpoint))
    return step if isinstance(step, int) else 0


def aside_of(final: Path) -> Path:
    """Returns the temporary folder in which a checkpoint is written before it is renamed."""
    return final.with_name(f".writing_{final.name}")


def save_roles(state: RunState, aside: Path, plan: Plan, w: Workers) -> None:
    """Writes the training state of each role into a folder of its name."""
    for name in plan.roles:
        w.trainers[name].save(state.role(name), aside / name)


def write_manifest(aside: Path, state: RunState, plan: Plan) -> None:
    """Writes a checkpoint's manifest: the state beside the training states, and each file's size and checksum.

    Raises:
        RunError: a worker wrote its role to a folder that this process does not see.
    """
    for name in plan.roles:
        if not (aside / name).is_dir():
            raise RunError(f"the worker of {name} wrote its checkpoint elsewhere than {aside}: no shared folder?")
    _, scalars = serial.flatten(state.without_roles(plan))
    paths = [path for path in sorted(aside.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(aside)): [path.stat().st_size, crc_of(path)] for path in paths}
    manifest = {"algorithm": plan.algorithm, "state": scalars, "files": files}
    write_text(aside / MANIFEST, json.dumps(manifest, indent=1))
    for path in (*aside.rglob("*"), aside):
        sync(path)


def restore(folder: Path, blank: RunState, plan: Plan, w: Workers) -> RunState:
    """Reads the state in a checkpoint.

    Args:
        folder: the checkpoint.
        blank: the run's state without its training states.
        plan: the plan of the run.
        w: the workers, which read the training states.

    Raises:
        RunError: the checkpoint is of another algorithm, lacks a role that the plan asks for, or is damaged. The
            message names the newest intact checkpoint.
    """
    try:
        manifest = verify(folder)
        roles = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if manifest["algorithm"] != plan.algorithm or roles != sorted(plan.roles):
            raise RunError(
                f"{folder} is of {manifest['algorithm']} with {', '.join(roles)}; "
                f"the config asks for {plan.algorithm} with {', '.join(plan.roles)}"
            )
        try:
            state = serial.unflatten(blank, {}, manifest["state"])
        except ValueError as error:
            raise RunError(f"{folder} is of a run with other settings of its algorithm: {error}") from error
        return state.with_roles({name: w.trainers[name].restore(folder / name) for name in plan.roles})
    except CheckpointError as error:
        raise RunError(f"{error}; {_intact_alternative(folder, Path(plan.trainer.dir))}") from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, state = manifest["files"], manifest["state"]
        whole = all(isinstance(size, int) and isinstance(crc, int) for size, crc in files.values())
        if not (whole and isinstance(manifest["algorithm"], str) and isinstance(state, dict)):
            raise ValueError("it lists other things than files and a state")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {MANIFEST} cannot be read: {error}") from error
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Compares every file of a checkpoint with its manifest, and returns the manifest.

    Raises:
        CheckpointError: a file is missing, or its size or checksum differs from the manifest.
    """
    manifest = read_manifest(folder)
    for name, (size, crc) in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is missing")
        try:
            if path.stat().st_size != size:
                raise CheckpointError(
                    f"the checkpoint {folder} is damaged: {name} has {path.stat().st_size} bytes of {size}"
                )
            if crc_of(path) != crc:
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is not what was written")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return manifest


def _intact_alternative(damaged: Path, training: Path) -> str:
    """Returns a sentence that names the newest whole checkpoint of the same run, and how to start from it.

    Args:
        damaged: a checkpoint that cannot be used.
        training: the folder of the run that would have started from it.
    """
    run = run_of(damaged)
    for folder in checkpoints(run) if run is not None else ():
        if folder != damaged:
            with contextlib.suppress(CheckpointError):
                verify(folder)
                if run == training:
                    return f"{folder} is whole: remove the damaged one to continue from there"
                return f"{folder} is whole: fork from that step instead (trainer.resume_from_path={folder})"
    return "no other checkpoint of this run is whole"


def write_text(path: Path, content: str) -> None:
    """Writes a file under a temporary name, syncs it, and renames it, so that a crash leaves no partial file."""
    aside = path.with_name(f".{path.name}.writing")
    aside.unlink(missing_ok=True)
    # "x" fails on a link that somebody else put there.
    with aside.open("x", encoding="utf-8") as file:
        file.write(content)
    sync(aside)
    aside.rename(path)


def crc_of(path: Path) -> int:
    """Returns the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc
