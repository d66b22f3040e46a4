"""Processes of this machine, by their ids: which run, which descend from which, and how all of them end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

END_SECONDS = 10


def runs(pid: int) -> bool:
    """Returns whether a process exists and has not ended.

    Example:
        >>> runs(os.getpid())
        True
    """
    status = _status(pid)
    return bool(status) and status[0] not in "ZX"


def with_descendants(pids: Iterable[int]) -> list[int]:
    """Returns processes and all that they started, directly or not.

    Example:
        >>> os.getpid() in with_descendants([os.getppid()])
        True
    """
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (status := _status(int(folder.name))):
            children.setdefault(int(status[1]), []).append(int(folder.name))
    family = list(dict.fromkeys(pids))
    for pid in family:
        family += [child for child in children.get(pid, ()) if child not in family]
    return family


def await_end(pids: Iterable[int]) -> None:
    """Waits for processes to end, and kills those that do not."""
    deadline = time.monotonic() + END_SECONDS
    while pids := [pid for pid in pids if runs(pid)]:
        if time.monotonic() > deadline:
            kill(pids)
            return
        time.sleep(0.05)


def kill(pids: Iterable[int]) -> None:
    """Ends processes at once."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _status(pid: int) -> list[str]:
    """Returns the state and the parent's id of a process; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return []
