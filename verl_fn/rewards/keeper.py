"""Keeps a process that runs reward functions: starts it, and ends it with everything that it has started.

The trainer starts this file as a script. On Linux a process whose parent has ended becomes a child of the keeper, so
sessions of their own and double forks don't hide processes from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END_SECONDS = 5.0


def start(worker: str, connection: int) -> int:
    """Starts the worker, in a process group of its own, and returns its process id."""
    keeper = os.getpid()
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Where memory runs out, the kernel ends this process and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if os.getppid() == keeper:
        os.execv(sys.executable, [sys.executable, "-P", worker, str(connection)])
    os._exit(1)


def exit_code(worker: int) -> int | None:
    """Returns the worker's exit code, or minus the signal that ended it; None while it runs.

    The worker stays a zombie, so that its number keeps naming its process group. Adopted processes are reaped.
    """
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if ended.si_pid == worker:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        os.waitpid(ended.si_pid, 0)
    return None


def end_all(worker: int) -> None:
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


def main(connection: int, lifeline: int, worker: str) -> None:
    """Keeps a worker until it ends, or until the trainer closes the lifeline or ends.

    Args:
        connection: file descriptor of the worker's connection to the trainer.
        lifeline: file descriptor of a socket to the trainer; it gets the exit code of a worker that ends by itself.
        worker: the worker's script.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(lifeline, False)
    # Every end of a child makes `woken` readable.
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = start(worker, connection)
    os.close(connection)
    # Only the lifeline ends the keeper: what has left the worker's group would otherwise survive it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=lifeline) as trainer:
        while not select.select([trainer, woken], [], [])[0].count(trainer):
            woken.recv(4096)
            if (code := exit_code(pid)) is not None:
                with contextlib.suppress(OSError):
                    trainer.send(str(code).encode())
                break
        end_all(pid)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
