"""Starts a worker process, keeps it, and ends it with everything that it has started.

The trainer starts this file as a script, and the script forks the worker. On Linux a process whose parent has ended
becomes a child of the keeper, so sessions of their own and double forks don't hide processes from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import io
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END_SECONDS = 5.0

if "verl_fn" not in sys.modules:
    # The package may not be installed here. Its folder stays out of sys.path: it may hold all packages of another
    # interpreter. A process that the user's code spawns by multiprocessing runs this file too, and needs the package.
    folder = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(
        "verl_fn", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["verl_fn"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["verl_fn"])


def keep(pid: int, trainer: socket.socket) -> int:
    """Waits until the worker ends, or until the trainer closes the lifeline or ends; then ends all processes.

    Returns:
        The worker's exit code, 128 and the signal that ended it, or 0 if the trainer ended it.
    """
    # Every end of a child makes `woken` readable.
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Only the lifeline ends the keeper: what has left the worker's group would otherwise survive it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while (code := _exit_code(pid)) is None and trainer not in select.select([trainer, woken], [], [])[0]:
        woken.recv(4096)
    _end_all(pid)
    return code or 0


def _exit_code(worker: int) -> int | None:
    """Returns the worker's exit code, or 128 and the signal that ended it; None while it runs.

    The worker stays a zombie, so that its number keeps naming its process group. Adopted processes are reaped.
    """
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if ended.si_pid == worker:
            return ended.si_status + (0 if ended.si_code == os.CLD_EXITED else 128)
        os.waitpid(ended.si_pid, 0)
    return None


def _end_all(worker: int) -> None:
    """Ends the worker, its process group and all of their descendants."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    # A process of another user (as of a setuid program) cannot be ended, so the wait is limited.
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            # The children of each process that ends here become children of this process: the next to end.
            for child in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)


def _children() -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                yield int(name)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def work(connection: int, module: str) -> None:
    """Becomes a worker that serves the trainer by ``serve`` of a module, and ends the process."""
    os.setpgid(0, 0)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Where memory runs out, the kernel ends this process and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # With line buffering, a kill loses no line that a function has printed.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    importlib.import_module("verl_fn.pool.worker").main(connection, importlib.import_module(module).serve)


def main(connection: int, lifeline: int, module: str) -> None:
    """Starts a worker and keeps it.

    Args:
        connection: file descriptor of the worker's connection to the trainer.
        lifeline: file descriptor of a socket whose other end the trainer closes to end the worker.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if pid := os.fork():
        os.close(connection)
        os._exit(keep(pid, socket.socket(fileno=lifeline)))
    os.close(lifeline)
    work(connection, module)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
