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


def birth(pid: int) -> str:
    """Returns what tells a process from every other: its namespace, its id and when it started; empty if it ended.

    An id comes again, and containers that share a folder have ids of their own.

    Example:
        >>> birth(os.getpid()) == birth(os.getpid()) != birth(os.getppid())
        True
    """
    status = _status(pid)
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{namespace} {pid} {status[19]}" if status and status[0] not in "ZX" else ""


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
    """Returns the fields of a process from its state and its parent's id on; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
