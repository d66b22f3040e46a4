"""Verdicts of checks, of parts, of levels and of a whole run of ``verl-fn levels``.

A level passes only if every check that it is defined by was made and held. What says nothing about the provider,
such as a missing package, blocks a level and never fails it; ``TRAPS`` are known errors of the environment that look
like a failure of the model.
"""

from __future__ import annotations

import contextlib
import enum
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.atomic import existing


class Verdict(enum.StrEnum):
    """What became of a deliverable."""

    PASS = "Pass"
    FAIL = "Fail"
    BLOCKED = "Blocked"
    SKIPPED = "Skipped"
    NOT_REQUESTED = "Not requested"


STATUS = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.BLOCKED: 3}
"""The exit status of the command for its result."""


class SaysNothing(Exception):
    """A run says nothing about the model, for a reason that is not the model's."""


@attrs.frozen
class Check:
    """One criterion of a level.

    Attributes:
        held: whether it does.
        found: what was measured, with the bar.
    """

    name: str
    held: bool
    found: str


@attrs.frozen
class Outcome:
    """What one process of a level found.

    Attributes:
        checks: the criteria that it looked at.
        limitations: what it could not test.
        imports: the folder that each process imported ``megatron.bridge`` and ``megatron.core`` from.
        blocked: why it could not test the provider; empty if it could.
        failed: the error that ended it; empty if none did.
    """

    checks: tuple[Check, ...] = ()
    limitations: tuple[str, ...] = ()
    imports: Mapping[str, str] = attrs.field(factory=dict)
    blocked: str = ""
    failed: str = ""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Outcome:
        """Returns the outcome that ``attrs.asdict`` made a table of.

        Example:
            >>> outcome = Outcome((Check("one", True, "1"),), limitations=("a",))
            >>> Outcome.of(attrs.asdict(outcome)) == outcome
            True
        """
        checks = tuple(Check(**check) for check in saved["checks"])
        return cls(**{**saved, "checks": checks, "limitations": tuple(saved["limitations"])})


@attrs.frozen
class Deliverable:
    """A line of the report.

    Attributes:
        reason: why, in one sentence.
        outcomes: of its processes, by the names of their logs.
    """

    name: str
    verdict: Verdict
    reason: str
    outcomes: Mapping[str, Outcome] = attrs.field(factory=dict)

    @property
    def checks(self) -> list[Check]:
        """The checks of all its processes."""
        return [check for outcome in self.outcomes.values() for check in outcome.checks]


def of_level(name: str, required: Sequence[str], outcomes: Mapping[str, Outcome]) -> Deliverable:
    """Returns the verdict about a level.

    Args:
        required: the names of the checks that it is defined by.

    Example:
        >>> of_level("Level 0", ["a", "b"], {"one": Outcome((Check("a", True, "0 of 1"),))}).reason
        'not checked: b'
        >>> of_level("Level 0", ["a"], {"one": Outcome((Check("a", False, "3 of 1"),))}).reason
        'a: 3 of 1'
    """
    checks = [check for outcome in outcomes.values() for check in outcome.checks]
    missed = [check for check in checks if not check.held]
    failed = [outcome.failed for outcome in outcomes.values() if outcome.failed]
    blocked = [outcome.blocked for outcome in outcomes.values() if outcome.blocked]
    absent = [one for one in required if one not in {check.name for check in checks}]
    if missed:
        reasons = [f"{check.name}: {check.found}" for check in missed]
        return Deliverable(name, Verdict.FAIL, "; ".join([*reasons, *failed]), outcomes)
    if failed:
        return Deliverable(name, Verdict.FAIL, failed[0], outcomes)
    if blocked:
        return Deliverable(name, Verdict.BLOCKED, blocked[0], outcomes)
    if absent or not checks:
        return Deliverable(name, Verdict.FAIL, f"not checked: {', '.join(absent) or 'anything'}", outcomes)
    return Deliverable(name, Verdict.PASS, f"{len(checks)} checks held", outcomes)


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns the result of a run: Fail before Blocked before Pass, and Pass only if something passed.

    Example:
        >>> overall([Verdict.PASS, Verdict.SKIPPED]), overall([Verdict.BLOCKED, Verdict.FAIL]), overall([])
        (<Verdict.PASS: 'Pass'>, <Verdict.FAIL: 'Fail'>, <Verdict.BLOCKED: 'Blocked'>)
    """
    return next((one for one in (Verdict.FAIL, Verdict.BLOCKED, Verdict.PASS) if one in verdicts), Verdict.BLOCKED)


# Of the folder with logs and checkpoints, and of the caches.
LEAST_FREE = 2**28
MEMORY = ("tmpfs", "ramfs")


@attrs.frozen
class Trap:
    """A known failure of the environment.

    Attributes:
        pattern: matches a log or an error.
        advice: what to do.
    """

    name: str
    pattern: str
    advice: str


DISK = Trap(
    "the disk is full",
    r"No space left on device|Errno 28\b|Disk quota exceeded",
    "move HF_HOME, HF_HUB_CACHE and --out to a larger disk, and name the model by its local folder",
)
ROCR = Trap(
    "ROCR_VISIBLE_DEVICES is set beside CUDA_VISIBLE_DEVICES",
    r"don't set ROCR_VISIBLE_DEVICES",
    "unset ROCR_VISIBLE_DEVICES in the launcher or the container",
)
GPUS = Trap(
    "a GPU is too few",
    r"invalid device ordinal|No CUDA GPUs are available|Found no NVIDIA driver|ask for \d+ GPUs, and the cluster",
    "give the processes the GPUs that the level needs, or take --device cpu",
)
TRAPS = (
    DISK,
    ROCR,
    Trap(
        "workers do not see Megatron-Bridge",
        r"No module named '?megatron(\.bridge|\.core)?'?(?![.\w])",
        "workers did not inherit PYTHONPATH: pass it in Ray's runtime environment (env_vars), as --ray does",
    ),
    Trap(
        "a package is missing: {0}",
        r"No module named '?(megatron\.energon|(?!megatron|verl_fn)\w+)",
        "install {0} in the environment of all processes, or use an image that has it",
    ),
    GPUS,
    Trap(
        "the memory of a GPU is full",
        # Named only with what others hold: a model that is too large by itself may be the provider's mistake.
        r"CUDA out of memory[^\n]*Process \d+ has|Free memory on device|Error in memory profiling",
        "end what else runs on the GPU",
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


def preflight(out: Path, device: str, gpus: int, environment: Mapping[str, str]) -> list[str]:
    """Returns the traps that can be seen before anything starts."""
    found = []
    if "ROCR_VISIBLE_DEVICES" in environment and {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} & set(environment):
        found.append(f"{ROCR.name}; {ROCR.advice}")
    caches = [environment[name] for name in ("HF_HOME", "HF_HUB_CACHE") if name in environment]
    for folder in dict.fromkeys([str(out), *caches]):
        free = shutil.disk_usage(existing(Path(folder))).free
        if free < LEAST_FREE:
            found.append(f"{DISK.name}: {folder} has {free / 2**20:.0f} MiB; {DISK.advice}")
    if reason := goes_away(out, environment):
        found.append(f"{reason}; name a folder on a disk that stays with --out")
    if device == "cuda":
        import torch

        if (have := torch.cuda.device_count()) < gpus:
            found.append(f"{GPUS.name}: {gpus} are needed and {have} are visible; {GPUS.advice}")
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
    kind = _file_system(existing(place))
    if kind in MEMORY:
        return f"logs in {out} are lost with this machine's memory: the folder is on {kind}"
    local = [Path("/tmp"), *(Path(environment[name]) for name in ("TMPDIR", "SLURM_TMPDIR") if environment.get(name))]
    if "SLURM_JOB_ID" in environment and any(place.is_relative_to(folder.resolve()) for folder in local):
        return f"logs in {out} are lost when Slurm job {environment['SLURM_JOB_ID']} ends: the folder is of this node"
    return ""


def _file_system(folder: Path) -> str:
    """Returns the kind of file system that a folder is on; nothing if the system does not say."""
    command = ["stat", "-f", "-c", "%T", str(folder)]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""
