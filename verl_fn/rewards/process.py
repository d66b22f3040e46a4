"""A process that runs reward functions: how it is started, watched and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe

from verl_fn.rewards import worker
from verl_fn.rewards.reward import RewardError

START_SECONDS = 300.0
DEATH_SECONDS = 2.0


class RewardProcess:
    """A process that runs reward functions, and the connection to it.

    Args:
        folder: the current folder of the process.

    Attributes:
        connection: sends calls and receives the state of their rows.
    """

    def __init__(self, folder: str) -> None:
        self.connection, child_connection = Pipe()
        lifeline, self._alive = Pipe(duplex=False)
        with child_connection, lifeline:
            descriptors = child_connection.fileno(), lifeline.fileno()
            self._process = subprocess.Popen(
                # The worker runs as a file, since importing its package would import torch.
                [sys.executable, "-P", worker.__file__, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                # What functions print goes to stderr, since stdout shows the run's progress.
                stdout=2,
                pass_fds=descriptors,
                cwd=folder,
                # With random hashes, a score that depends on the order of a set could not be repeated.
                env=os.environ | {"PYTHONHASHSEED": "0"},
                # Ctrl-C goes to the driver alone, which then ends each worker with its process group.
                process_group=0,
            )

    def load(self, functions: Sequence[str], folder: str, timeout: float) -> list[str]:
        """Loads the functions in the process and returns the kind of each.

        Raises:
            RewardError: a function cannot be loaded.
        """
        try:
            self.connection.send((folder, functions, timeout))
            if not self.connection.poll(START_SECONDS):
                raise RewardError(f"importing reward.functions took longer than {START_SECONDS:g} s")
            kinds_or_error = self.connection.recv()
        except (EOFError, OSError):
            raise RewardError(f"importing reward.functions {self.death()}") from None
        if isinstance(kinds_or_error, str):
            raise RewardError(f"reward.functions: {kinds_or_error}")
        return kinds_or_error

    def is_alive(self) -> bool:
        """Returns whether the process has not ended."""
        # poll() would reap the process, and its number could then go to another process before stop() uses it.
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def death(self) -> str:
        """Describes how the process, whose connection has closed, ended; ends it if it has not."""
        # The connection closes shortly before the process ends, and a kill in between would hide its exit status.
        deadline = time.monotonic() + DEATH_SECONDS
        while (alive := self.is_alive()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.stop()
        if alive:
            return "closed the connection of its process (has it closed files that it had not opened?)"
        code = self._process.returncode
        names = {number.value: number.name for number in signal.Signals}
        return "ended its process with " + (f"exit code {code}" if code >= 0 else names.get(-code, f"signal {-code}"))

    def stop(self) -> None:
        """Ends the process, and the subprocesses that its functions have started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # The process may have left its group.
            self._process.kill()
            self._process.wait()
        self.connection.close()
        self._alive.close()
