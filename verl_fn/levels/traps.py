"""Traps of the environment: errors that look like a failure of the model and say nothing about it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import attrs

# Of the folder with logs and checkpoints, and of the caches.
LEAST_FREE = 2**28
MEMORY = ("tmpfs", "ramfs")


@attrs.frozen
class Trap:
    """A known failure of the environment.

    Attributes:
        name: what it is.
        pattern: matches a log or an error.
        advice: what to do.
    """

    name: str
    pattern: str
    advice: str


TRAPS = (
    Trap(
        "the disk is full",
        r"No space left on device|Errno 28\b|Disk quota exceeded",
        "move HF_HOME, HF_HUB_CACHE and --out to a larger disk, and name the model by its local folder",
    ),
    Trap(
        "ROCR_VISIBLE_DEVICES is set beside CUDA_VISIBLE_DEVICES",
        r"don't set ROCR_VISIBLE_DEVICES",
        "unset ROCR_VISIBLE_DEVICES in the launcher or the container",
    ),
    Trap(
        "workers do not see Megatron-Bridge",
        r"No module named '?megatron(\.bridge|\.core)?'?(?![.\w])",
        "workers did not inherit PYTHONPATH: pass it in Ray's runtime environment (env_vars), as --ray does",
    ),
    Trap(
        "a package is missing: {0}",
        r"No module named '?((?!megatron|verl_fn)[\w]+)",
        "install {0} in the environment of all processes, or use an image that has it",
    ),
    Trap(
        "a GPU is too few",
        r"invalid device ordinal|No CUDA GPUs are available|Found no NVIDIA driver|ask for \d+ GPUs, and the cluster",
        "give the processes the GPUs that the level needs, or take --device cpu",
    ),
    Trap(
        "no Ray cluster answers",
        r"no Ray cluster answers|Ray does not start with|Could not (?:find any running|connect to) Ray",
        "start one with `ray start --head`, or leave out --ray",
    ),
)


def trap_in(text: str) -> str:
    """Returns the trap that a log or an error shows, with what to do; nothing if it shows none.

    Example:
        >>> trap_in("ModuleNotFoundError: No module named 'modelopt'")
        'a package is missing: modelopt; install modelopt in the environment of all processes, or use an image...'
        >>> trap_in("KeyError: 'model.norm.weight'")
        ''
    """
    for trap in TRAPS:
        if match := re.search(trap.pattern, text):
            return f"{trap.name}; {trap.advice}".format(*match.groups())
    return ""


def preflight(out: Path, device: str, gpus: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the traps that can be seen before anything starts.

    Args:
        out: the folder with logs and checkpoints.
        device: ``cpu`` or ``cuda``.
        gpus: how many GPUs the levels need.
        environment: the variables of the processes.
    """
    found = []
    if "ROCR_VISIBLE_DEVICES" in environment and {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} & set(environment):
        found.append(f"{TRAPS[1].name}; {TRAPS[1].advice}")
    caches = [environment[name] for name in ("HF_HOME", "HF_HUB_CACHE") if name in environment]
    for folder in dict.fromkeys([str(out), *caches]):
        free = shutil.disk_usage(_existing(Path(folder))).free
        if free < LEAST_FREE:
            found.append(f"{TRAPS[0].name}: {folder} has {free / 2**20:.0f} MiB; {TRAPS[0].advice}")
    if reason := goes_away(out, environment):
        found.append(f"{reason}; name a folder on a disk that stays with --out")
    if device == "cuda":
        import torch

        if (have := torch.cuda.device_count()) < gpus:
            found.append(f"{TRAPS[4].name}: {gpus} are needed and {have} are visible; {TRAPS[4].advice}")
    return found


def goes_away(out: Path, environment: Mapping[str, str]) -> str:
    """Returns why a folder's files will be lost; nothing if they stay.

    Example:
        >>> goes_away(Path("/tmp/logs"), {"SLURM_JOB_ID": "7"})
        'logs in /tmp/logs are lost when Slurm job 7 ends: the folder is of this node'
        >>> goes_away(Path("/home/me/logs"), {"SLURM_JOB_ID": "7"})
        ''
    """
    place = out.resolve()
    kind = _file_system(_existing(place))
    if kind in MEMORY:
        return f"logs in {out} are lost with this machine's memory: the folder is on {kind}"
    local = [Path("/tmp"), *(Path(environment[name]) for name in ("TMPDIR", "SLURM_TMPDIR") if name in environment)]
    if "SLURM_JOB_ID" in environment and any(place.is_relative_to(folder.resolve()) for folder in local):
        return f"logs in {out} are lost when Slurm job {environment['SLURM_JOB_ID']} ends: the folder is of this node"
    return ""


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _file_system(folder: Path) -> str:
    """Returns the kind of file system that a folder is on; nothing if the system does not say."""
    best, kind = Path(), ""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in mounts:
        place, of = line.split()[1:3]
        point = Path(place.encode().decode("unicode_escape"))
        if folder.resolve().is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, of
    return kind
