"""Checkpoints of a run: written under a temporary name, synced, then renamed; and the room that they take.

``checkpoint.json`` holds a checksum of every file and one of itself.
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

from verl_fn import atomic, build
from verl_fn.algorithms import Workers
from verl_fn.atomic import crc_of
from verl_fn.backends.checkpoint import CheckpointError
from verl_fn.backends.hf.config import ModelError, compute_dtype
from verl_fn.backends.tensor_file import TENSORS
from verl_fn.config import ConfigError, Plan, RolePlan
from verl_fn.errors import raised_as
from verl_fn.state import tree

from . import RunError
from .memory import FLOAT32, GIB, moment_bytes, sizes_of, width_of
from .recorder import read_waiting, save_waiting
from .state import RunState, counted_updates, made_updates, other_updates, run_of

MANIFEST = "checkpoint.json"
# The tensors of an algorithm's own state.
STATE = "algorithm.safetensors"
IDENTITY = "run.json"
CHECKSUM = "checksum"
WRITING, REMOVED = ".writing_", ".removing_"
CGROUP = Path("/sys/fs/cgroup")
# The files of both versions of control groups.
LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


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
        later: let threads write the training states, from copies.

    Returns:
        The manifest without the files: the rest of the state, and of each role the updates that it had, the ones
        that its outline counts up to the step, and how many more the run has.

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
    counted, others = counted_updates(plan, state.step), other_updates(plan)
    updates = {name: [made_updates(state, name, w), count, others[name]] for name, count in counted.items()}
    manifest: dict[str, Any] = {"algorithm": plan.algorithm, "state": scalars, "updates": updates}
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
        blank: the run's state without its training states.
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
                f"the config asks for {plan.algorithm} with {', '.join(plan.roles)}. {way_out(folder, plan)}"
            )
        with raised_as(RunError, f"{folder} is of a run with other settings of its algorithm", ValueError):
            tensors = load_file(folder / STATE) if STATE in manifest["files"] else {}
            state = tree.unflatten(blank, tensors, manifest["state"])
        state = attrs.evolve(state, waiting=read_waiting(manifest.get("waiting", ()), folder))
        return state.with_roles({name: w.trainers[name].restore(folder / name) for name in plan.roles})
    except ModelError as error:
        raise RunError(
            f"{error}. The tables model and data decide on the model: set them as they were, or choose another "
            "trainer.dir"
        ) from error
    except CheckpointError as error:
        raise RunError(f"{error}; {_intact_alternative(folder, Path(plan.trainer.dir))}") from error


def way_out(checkpoint: Path, plan: Plan) -> str:
    """Says how a plan with other roles than a checkpoint's can have its weights."""
    model = checkpoint / next(iter(plan.roles))
    reference = " (it is then the reference, too)" if "reference" in plan.roles else ""
    return (
        "Set what decides on the roles (the table algorithm, actor.lora_rank) as it was, or begin a new run from the "
        "weights, with "
        f"model.path={model}{reference}, in another trainer.dir and without trainer.resume_from_path"
    )


def verify(folder: Path, matters: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Compares the files of a checkpoint with its manifest, and returns the manifest.

    Args:
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
        with raised_as(CheckpointError, f"the checkpoint {folder} is damaged: {name} cannot be read", OSError):
            if not path.is_file():
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is missing")
            if path.stat().st_size != size:
                raise CheckpointError(
                    f"the checkpoint {folder} is damaged: {name} has {path.stat().st_size} bytes of {size}"
                )
            if crc_of(path) != crc:
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is not what was written")
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
    identity = None
    with contextlib.suppress(CheckpointError):
        identity = _intact_manifest(checkpoint).get("run")
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


def checkpoint_bytes(plan: Plan) -> int:
    """Returns the bytes of the tensors in one checkpoint; the other files are small."""
    return sum(_role_bytes(role, plan) for role in plan.roles.values())


def _role_bytes(role: RolePlan, plan: Plan) -> int:
    """Returns the bytes of a role's weights and moments in its files.

    With adapters, a checkpoint refers to the frozen weights. Only if the model's files contain buffers, it holds the
    merged model, whose adapted layers are fp32, and the weights of these layers without adapters.
    """
    sizes = sizes_of(role)
    width = width_of(compute_dtype(role.dtype, role.folder, build.device(plan.driver)))
    count = sizes.trained if role.trained else 0
    trained, frozen = count * (FLOAT32 + moment_bytes(role)), (sizes.total - count) * width
    if not role.lora:
        return trained + frozen
    return trained if not sizes.buffers else trained + sizes.adapted * FLOAT32 + frozen


def checkpoints_at_once(plan: Plan) -> int:
    """Returns the most checkpoints in a run's folder at a time: the ones that it keeps, and one in writing."""
    steps, every = plan.trainer.total_training_steps, plan.trainer.save_freq
    # The first is saved before the first step, and the last after the last one.
    saved = 2 if every <= 0 else 2 + (steps - 1) // every
    return min(plan.trainer.max_ckpt_to_keep + 1, saved)


def check_disk(plan: Plan) -> None:
    """Checks that the disk of a run's folder has room for its checkpoints, less the ones that are there."""
    folder = Path(plan.trainer.dir)
    there = atomic.existing(folder)
    each, free, most = checkpoint_bytes(plan), shutil.disk_usage(there).free, checkpoints_at_once(plan)
    more = max(1, most - len(checkpoints(folder)))
    if more * each > free:
        keep = plan.trainer.max_ckpt_to_keep
        raise ConfigError(
            f"trainer.dir: a checkpoint of this run takes {_size(each)}, and {there} must have room for {more} more "
            f"(trainer.max_ckpt_to_keep = {keep}, and one that is written), {_size(more * each)}; {_size(free)} are "
            "free: make room, choose a folder on another disk, or lower trainer.max_ckpt_to_keep"
        )


def can_be_held(plan: Plan) -> bool:
    """Returns whether a copy of the training states takes at most a quarter of the memory that is free here.

    Training states that are offloaded while the engine generates, and the page cache of their files, need room too.
    The memory of the other machines of a cluster is not known here.
    """
    return not plan.ray.address and 4 * checkpoint_bytes(plan) <= free_memory()


def free_memory() -> int:
    """Returns the bytes that this machine has free, or this container if it is allowed fewer."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used in LIMITS:
        if (CGROUP / limit).exists() and (most := (CGROUP / limit).read_text().strip()) != "max":
            free = min(free, int(most) - int((CGROUP / used).read_text()))
    return free


def disk_line(plan: Plan) -> str:
    """Returns a line of ``--check`` about the checkpoints of a run."""
    each, most = checkpoint_bytes(plan), checkpoints_at_once(plan)
    at_once = f"up to {most} lie in the folder at a time, {_size(most * each)}"
    return f"disk        a checkpoint takes {_size(each)}; {at_once}"


def _size(nbytes: int) -> str:
    """Returns a number of bytes for people.

    Example:
        >>> _size(3 * 2**30), _size(5_000_000)
        ('3.0 GiB', '4.8 MiB')
    """
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"
