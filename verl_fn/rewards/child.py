"""A process that runs code of the user: how it is started, talked to, watched and ended."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from verl_fn.rewards import keeper, worker
from verl_fn.rewards.reward import RewardError
from verl_fn.rewards.worker import LONGEST

START_SECONDS = 300.0
DEATH_SECONDS = 2.0

ENVIRONMENT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*", "TERM"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "*_NUM_THREADS"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
"""Names and patterns of the environment variables that every process gets: none that usually holds a key."""


class GarbledError(Exception):
    """Raised for what no worker sends; the message describes it."""


def environment(
    names: Sequence[str], key: str = "reward.env", error: type[Exception] = RewardError
) -> dict[str, str]:
    """Returns the environment of a process: the variables of ``ENVIRONMENT`` and ``names``.

    Args:
        names: further variables.
        key: the config key that names them, for the error.
        error: the class to raise.

    Raises:
        RewardError: one of ``names`` is not set. The class is ``error``.
    """
    for name in names:
        if name not in os.environ:
            raise error(f"{key} names {name}, which is not set in the environment; set it or remove the name")
    allowed = {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, name) for name in ENVIRONMENT)}
    # With random hashes, a score that depends on the order of a set could not be repeated.
    return allowed | {name: os.environ[name] for name in names} | {"PYTHONHASHSEED": "0"}


class Child:
    """A process that runs code of the user. It and its parent exchange lines of JSON.

    The process may be stopped, may have closed its connection or have written anything into it, so nothing waits for
    it without a limit, and what it sends is checked.

    Args:
        script: the file that the process runs; it gets the file descriptor of its connection as its argument.
        folder: the current folder of the process.
        environment: its environment variables.
        python: the interpreter that runs it, by default this one.

    Attributes:
        connection: is readable when reports of the process have arrived, or when it has ended.
    """

    def __init__(
        self, script: str, folder: str, environment: Mapping[str, str], python: str = sys.executable
    ) -> None:
        self.connection, worker_end = socket.socketpair()
        self._lifeline, keeper_end = socket.socketpair()
        self._received = b""
        with worker_end, keeper_end:
            descriptors = worker_end.fileno(), keeper_end.fileno()
            self._keeper = subprocess.Popen(
                # It runs as a file, since importing its package would import torch.
                [python, "-P", keeper.__file__, *map(str, descriptors), script],
                stdin=subprocess.DEVNULL,
                # What the code prints goes to stderr, since stdout shows the run's progress.
                stdout=2,
                pass_fds=descriptors,
                cwd=folder,
                env=dict(environment),
                # Ctrl-C goes only to the driver; it then ends each worker.
                process_group=0,
            )

    def greet(self, message: Any, key: str, error: type[Exception]) -> Any:
        """Sends the first message, on which the process imports the user's code, and returns its answer.

        Args:
            message: says what to import.
            key: the config key that names it, for errors.
            error: the class to raise.

        Raises:
            RewardError: the import failed or did not end. The class is ``error``.
        """
        deadline = time.monotonic() + START_SECONDS
        try:
            self.send(message, START_SECONDS)
            while not (lines := self.lines(deadline - time.monotonic())):
                pass
            reply = parsed(lines[0])
        except TimeoutError:
            raise error(f"importing {key} took longer than {START_SECONDS:g} s") from None
        except (EOFError, OSError):
            raise error(f"importing {key} {self.death()}") from None
        except GarbledError as garbled_line:
            raise error(f"importing {key} {garbled_line}") from None
        if isinstance(reply, str):
            raise error(f"{key}: {one_line(reply)}")
        if len(lines) > 1:
            raise error(f"importing {key} {garbled(lines[1])}")
        return reply

    def send(self, message: Any, timeout: float) -> None:
        """Sends a message.

        Raises:
            OSError: the process has ended or closed its connection; a TimeoutError if it does not read.
        """
        self.connection.settimeout(timeout)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def lines(self, timeout: float) -> list[bytes]:
        """Returns the whole lines that have arrived, after waiting for a part of one."""
        if not wait([self.connection], max(timeout, 0.0)):
            raise TimeoutError
        part = self.connection.recv(2**20)
        if not part:
            raise EOFError
        *lines, self._received = (self._received + part).split(b"\n")
        if len(self._received) > LONGEST:
            raise GarbledError(garbled(self._received))
        return lines

    def is_ready(self) -> bool:
        """Returns whether the process has neither ended nor sent anything since its last call."""
        return not self._received and not wait([self.connection], 0)

    def death(self) -> str:
        """Describes how the process, whose connection has closed, ended; ends it if it has not."""
        code = ""
        # The connection closes shortly before the keeper knows the exit code.
        if alive := not wait([self._lifeline], DEATH_SECONDS):
            self.stop()
        else:
            with contextlib.suppress(OSError):
                code = self._lifeline.recv(16).decode()
            self.stop()
        if alive or code == str(worker.DISCONNECTED):
            return "closed the connection of its process (has it closed files that it had not opened?)"
        number = int(code or self._keeper.returncode)
        names = {signal.value: signal.name for signal in signal.Signals}
        return "ended its process with " + (
            f"exit code {number}" if number >= 0 else names.get(-number, f"signal {-number}")
        )

    def stop(self) -> None:
        """Ends the process, and everything that its code has started."""
        with contextlib.suppress(OSError):
            # Unlike close(), this also reaches the keeper when a fork of the trainer holds a copy of the socket.
            self._lifeline.shutdown(socket.SHUT_RDWR)
        try:
            self._keeper.wait(2 * keeper.END_SECONDS)
        except subprocess.TimeoutExpired:
            # The code has stopped the keeper. The process ends with it.
            self._keeper.kill()
            self._keeper.wait()
        self._lifeline.close()
        self.connection.close()


def garbled(line: bytes) -> str:
    """Describes what a process sent in place of reports."""
    return (
        f"sent {worker.short(repr(line), 80)} in place of a result (has it written to files that it had not opened?)"
    )


def parsed(line: bytes) -> Any:
    """Returns the value of a line of JSON.

    Raises:
        GarbledError: it is none.
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise GarbledError(garbled(line)) from None


def one_line(problem: str) -> str:
    """Returns a description without line breaks, shortened."""
    return worker.short(" ".join(problem.split()), 800)
