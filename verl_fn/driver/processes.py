"""Processes of this machine, by their ids: the running ones, their descendants, and how all of them end.

Run as a program, this file waits for a word of the process that started it. If that ends without one, it ends all
processes that have files of a folder open, and removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
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
    """Waits for processes to end, and kills the ones that do not."""
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


def users_of(folder: Path) -> Iterator[int]:
    """Yields the other processes of this user that have files of a folder open."""
    inside = f"{folder.resolve()}/"
    for process in Path("/proc").iterdir():
        other = process.name.isdigit() and process.name != str(os.getpid())
        if other and any(file.startswith(inside) for file in _open_files(process)):
            yield int(process.name)


def _open_files(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for opened in (process / "fd").iterdir() if process.stat().st_uid == os.getuid() else ():
            with contextlib.suppress(OSError):
                yield os.readlink(opened)


def _status(pid: int) -> list[str]:
    """Returns the fields of a process from its state and its parent's id on; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    # The other end of this pipe closes however the process that holds it ends.
    if not sys.stdin.buffer.read():
        while pids := list(users_of(Path(sys.argv[1]))):
            kill(pids)
            time.sleep(0.05)
        shutil.rmtree(sys.argv[1], ignore_errors=True)
