"""Ends processes of this machine.

Run as a program, this file waits for a word of the process that started it. If that ends without one, it ends all
processes that write files of a folder, and removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# For how long a process may end by itself, and for how long the end of a killed one is awaited.
END_SECONDS = 10.0


def runs(pid: int) -> bool:
    """Returns whether a process exists and has not ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def end(pids: Callable[[], Iterable[int]], patience: float = END_SECONDS) -> None:
    """Waits until none of the processes runs, and kills the ones that do not end.

    Args:
        pids: returns the processes; they may start others meanwhile.
        patience: seconds in which they may end by themselves.
    """
    start = time.monotonic()
    while left := [pid for pid in pids() if runs(pid)]:
        seconds = time.monotonic() - start
        if seconds > patience + END_SECONDS:
            return
        if seconds >= patience:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def users_of(folder: Path) -> Iterator[int]:
    """Yields the other processes of this user that write files of a folder, such as their logs.

    Whoever reads a log or lists the folder does not belong to it.
    """
    inside = f"{folder.resolve()}/"
    for process in Path("/proc").iterdir():
        other = process.name.isdigit() and process.name != str(os.getpid())
        if other and any(file.startswith(inside) for file in _written_files(process)):
            yield int(process.name)


def _written_files(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for opened in (process / "fd").iterdir() if process.stat().st_uid == os.getuid() else ():
            with contextlib.suppress(OSError, ValueError):
                flags = re.search(r"^flags:\s*(\d+)", (process / "fdinfo" / opened.name).read_text(), re.MULTILINE)
                if flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                    yield os.readlink(opened)


if __name__ == "__main__":
    # The other end of this pipe closes however the process that holds it ends.
    if not sys.stdin.buffer.read():
        end(lambda: users_of(Path(sys.argv[1])), patience=0.0)
        shutil.rmtree(sys.argv[1], ignore_errors=True)
