"""The bytes that the checkpoints of a run take, compared with the room on its disk and in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

from verl_fn import build
from verl_fn.backends.hf.config import compute_dtype
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.sizes import model_sizes, width_of
from verl_fn.config import ConfigError, Plan, RolePlan

from .checkpoints import checkpoints
from .memory import FLOAT32, GIB, moment_bytes

CGROUP = Path("/sys/fs/cgroup")
# The files of both versions of control groups.
LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def checkpoint_bytes(plan: Plan) -> int:
    """Returns the bytes of the tensors in one checkpoint; the other files are small."""
    return sum(_role_bytes(role, plan) for role in plan.roles.values())


def _role_bytes(role: RolePlan, plan: Plan) -> int:
    """Returns the bytes of a role's weights and moments in its files.

    With adapters, a checkpoint refers to the frozen weights. Only if the model's files contain buffers, it holds the
    merged model, whose adapted layers are fp32, and the weights of these layers without adapters.
    """
    sizes = model_sizes(role.folder, role.head, Lora(*role.lora) if role.lora else None)
    width = width_of(compute_dtype(role.dtype, role.folder, build.device(plan.driver)))
    if not role.lora:
        each = FLOAT32 + moment_bytes(role) if role.trained else width
        return sizes.total * each
    trained = sizes.trained * (FLOAT32 + moment_bytes(role))
    frozen = sizes.total - sizes.trained
    return trained if not sizes.buffers else trained + sizes.adapted * FLOAT32 + frozen * width


def checkpoints_at_once(plan: Plan) -> int:
    """Returns the most checkpoints in a run's folder at a time: the ones that it keeps, and one in writing."""
    steps, every = plan.trainer.total_training_steps, plan.trainer.save_freq
    # The first is saved before the first step, and the last after the last one.
    saved = 2 if every <= 0 else 2 + (steps - 1) // every
    return min(plan.trainer.max_ckpt_to_keep + 1, saved)


def check_disk(plan: Plan) -> None:
    """Checks that the disk of a run's folder has room for its checkpoints, less the ones that are there.

    Raises:
        ConfigError: it has not.
    """
    folder = Path(plan.trainer.dir)
    there = next(place for place in (folder, *folder.parents) if place.exists())
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
    return not plan.ray.address and 4 * checkpoint_bytes(plan) <= _free_memory()


def _free_memory() -> int:
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
