"""Checkpoints of a run: written under a temporary name, synced, then renamed; with a checksum of every file.

``checkpoint.json`` holds these checksums and one of itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file

from verl_fn import atomic
from verl_fn.algorithms import Workers
from verl_fn.backends.checkpoint.state_folder import CheckpointError
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.tensor_file import TENSORS
from verl_fn.checksums import crc_of
from verl_fn.config import Plan
from verl_fn.state import tree

from . import RunError
from .recorder import read_waiting, save_waiting
from .state import RunState, run_of

MANIFEST = "checkpoint.json"
# The tensors of an algorithm's own state.
STATE = "algorithm.safetensors"
IDENTITY = "run.json"
CHECKSUM = "checksum"
WRITING, REMOVED = ".writing_", ".removing_"


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
    return int(number) if number != checkpoint.name and number.isdecimal() and number.isascii() else None


def saved_step(checkpoint: Path) -> int:
    """Returns the step of the state in a checkpoint, whatever its name.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    step = read_manifest(checkpoint)["state"].get(".algorithm.step", step_of(checkpoint))
    return step if isinstance(step, int) else 0


def aside_of(final: Path) -> Path:
    """Returns the temporary folder in which a checkpoint is written before it is renamed."""
    return final.with_name(f"{WRITING}{final.name}")


def begin(
    state: RunState, aside: Path, plan: Plan, w: Workers, identity: str = "", *, later: bool = False
) -> dict[str, Any]:
    """Begins to write a checkpoint: the training state of each role, and what waits; ``seal`` ends it.

    Args:
        state: the state.
        aside: the folder.
        plan: the plan of the run.
        w: the workers.
        identity: the run's.
        later: let threads write the training states, from copies.

    Returns:
        The manifest without the files: the rest of the state.

    Raises:
        RunError: a worker wrote its role to a folder that this process does not see.
    """
    for name in plan.roles:
        w.trainers[name].save(state.role(name), aside / name, **({"later": True} if later else {}))
    for name in plan.roles:
        if not (aside / name).is_dir():
            raise RunError(f"the worker of {name} wrote its checkpoint elsewhere than {aside}: no shared folder?")
    waiting = save_waiting(state.waiting, aside, w)
    tensors, scalars = tree.flatten(state.without_roles(plan))
    if tensors:
        # Clones, since tensors of one file must not share memory.
        copies = {path: t.detach().cpu().clone(memory_format=torch.contiguous_format) for path, t in tensors.items()}
        save_file(copies, aside / STATE)
    manifest: dict[str, Any] = {"algorithm": plan.algorithm, "state": scalars}
    manifest |= {"waiting": waiting} if waiting else {}
    return manifest | ({"run": identity} if identity else {})


def seal(aside: Path, manifest: Mapping[str, Any], plan: Plan, w: Workers, *, later: bool = False) -> None:
    """Waits until a checkpoint that ``begin`` began is written, and writes its manifest with the files' checksums."""
    for name in plan.roles if later else ():
        w.trainers[name].saved()
    paths = [path for path in sorted(aside.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(aside)): [path.stat().st_size, crc_of(path)] for path in paths}
    whole = {**manifest, "files": files}
    atomic.write(aside / MANIFEST, json.dumps(whole | {CHECKSUM: _checksum(whole)}, indent=1))
    for path in (*aside.rglob("*"), aside):
        atomic.sync(path)


def restore(folder: Path, blank: RunState, plan: Plan, w: Workers) -> RunState:
    """Reads the state in a checkpoint.

    Args:
        folder: the checkpoint.
        blank: the run's state without its training states.
        plan: the plan of the run.
        w: the workers; they read the training states.

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
            tensors = load_file(folder / STATE) if STATE in manifest["files"] else {}
            state = tree.unflatten(blank, tensors, manifest["state"])
        except ValueError as error:
            raise RunError(f"{folder} is of a run with other settings of its algorithm: {error}") from error
        state = attrs.evolve(state, waiting=read_waiting(manifest.get("waiting", ()), folder))
        return state.with_roles({name: w.trainers[name].restore(folder / name) for name in plan.roles})
    except ModelError as error:
        raise RunError(
            f"{error}. The tables model and data decide on the model: set them as they were, or choose another "
            "trainer.dir"
        ) from error
    except CheckpointError as error:
        raise RunError(f"{error}; {_intact_alternative(folder, Path(plan.trainer.dir))}") from error


def verify(folder: Path, matters: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Compares the files of a checkpoint with its manifest, and returns the manifest.

    Args:
        folder: the checkpoint.
        matters: whether to compare a file, by its path in the checkpoint; by default all are compared.

    Raises:
        CheckpointError: a file is missing, its size or checksum differs from the manifest, the manifest is damaged,
            or the checkpoint has the name of another step.
    """
    manifest = read_manifest(folder)
    for name, (size, crc) in manifest["files"].items():
        path = folder / name
        if not matters(name):
            continue
        try:
            if not path.is_file():
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is missing")
            if path.stat().st_size != size:
                raise CheckpointError(
                    f"the checkpoint {folder} is damaged: {name} has {path.stat().st_size} bytes of {size}"
                )
            if crc_of(path) != crc:
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is not what was written")
        except OSError as error:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} cannot be read: {error}") from error
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, it is not what was written, or it is of another step than the folder's name or
            of another run than the folder around it.
    """
    manifest = _intact_manifest(folder)
    named, saved = step_of(folder), manifest["state"].get(".algorithm.step")
    if named is not None and named != saved:
        raise CheckpointError(f"the checkpoint {folder} holds the state of step {saved}; rename it to step_{saved}")
    run = run_of(folder)
    own = identity_at(run, saved) if run is not None and isinstance(saved, int) else None
    if own is not None and manifest.get("run", "") != own:
        raise CheckpointError(
            f"the checkpoint {folder} is of another run than {run}, or was made with other settings: move it away. "
            f"Another trainer.dir can then go on from it (trainer.resume_from_path)"
        )
    return manifest


def identities(run: Path) -> list[dict[str, Any]]:
    """Returns the identities of a run, each with the step ``since`` which it holds; none for runs of older versions.

    Raises:
        RunError: the file is damaged.
    """
    try:
        known = json.loads((run / IDENTITY).read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{run / IDENTITY} cannot be read: {error}; restore or remove it") from error
    kinds = {"since": int, "id": str, "settings": str}
    if not isinstance(known, list) or not all(
        isinstance(one, dict) and all(isinstance(one.get(name), kind) for name, kind in kinds.items())
        for one in known
    ):
        raise RunError(f"{run / IDENTITY} is damaged: it is no list of identities; restore or remove it")
    return known


def identity_at(run: Path, step: int) -> str | None:
    """Returns the identity that a run's checkpoint of a step carries; None for a run without identities."""
    known = identities(run)
    return next((one["id"] for one in reversed(known) if one["since"] < step), known[0]["id"]) if known else None


def carried_identity(checkpoint: Path) -> str:
    """Returns the identity of the run that made a checkpoint; empty where it carries none or cannot be read."""
    try:
        identity = _intact_manifest(checkpoint).get("run", "")
    except CheckpointError:
        return ""
    return identity if isinstance(identity, str) else ""


def _intact_manifest(folder: Path) -> dict[str, Any]:
    """Reads a manifest and compares it with its own checksum."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.pop(CHECKSUM, None) != _checksum(manifest):
        raise CheckpointError(f"the checkpoint {folder} is damaged: {MANIFEST} is not what was written")
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> str:
    content = json.dumps(manifest, sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def check_model_folder(folder: str | Path) -> None:
    """Compares the model in a folder of a checkpoint with the checkpoint's manifest; does nothing for other folders.

    Raises:
        CheckpointError: the model or the manifest is damaged.
    """
    folder = Path(folder)
    if (folder.parent / MANIFEST).is_file():
        verify(folder.parent, lambda name: name.startswith(f"{folder.name}/") and not name.endswith(TENSORS))


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


def prune(folder: Path, keep: int) -> list[str]:
    """Removes all but the newest checkpoints of a run, as far as it can.

    A folder is renamed before it is removed, so that a kill leaves no part of it under a checkpoint's name.

    Returns:
        A line about each that could not be removed.
    """
    for unfinished in folder.glob(f"checkpoints/{REMOVED}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    problems = []
    for old in checkpoints(folder)[keep:]:
        try:
            if old.is_symlink():
                old.unlink()
            else:
                aside = old.with_name(f"{REMOVED}{old.name}")
                old.rename(aside)
                shutil.rmtree(aside)
        except OSError as error:
            problems.append(f"the old checkpoint {old} cannot be removed: {error.strerror or error}")
    return problems
