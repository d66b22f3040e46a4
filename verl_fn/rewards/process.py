"""A process that runs reward functions: how it is started, talked to, watched and ended."""

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
from verl_fn.rewards.worker import KINDS, LONGEST, Outcome

START_SECONDS = 300.0
DEATH_SECONDS = 2.0

ENVIRONMENT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*", "TERM"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "*_NUM_THREADS"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
"""Names and patterns of the environment variables that every worker gets: none that usually holds a key."""


class GarbledError(Exception):
    """Raised for what no worker sends; the message describes it."""


def environment(names: Sequence[str]) -> dict[str, str]:
    """Returns the environment of a worker: the variables of ``ENVIRONMENT``, and those of ``names``.

    Raises:
        RewardError: one of ``names`` is not set.
    """
    for name in names:
        if name not in os.environ:
            raise RewardError(
                f"reward.env names {name}, which is not set in the environment; set it or remove the name"
            )
    allowed = {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, name) for name in ENVIRONMENT)}
    # With random hashes, a score that depends on the order of a set could not be repeated.
    return allowed | {name: os.environ[name] for name in names} | {"PYTHONHASHSEED": "0"}


class RewardProcess:
    """A process that runs reward functions. It and its parent exchange lines of JSON.

    The process may be stopped, may have closed its connection or have written anything into it, so nothing waits for
    it without a limit, and what it sends is checked.

    Args:
        folder: the current folder of the process.
        environment: its environment variables.

    Attributes:
        connection: is readable when reports of the process have arrived, or when it has ended.
    """

    def __init__(self, folder: str, environment: Mapping[str, str]) -> None:
        self.connection, worker_end = socket.socketpair()
        self._lifeline, keeper_end = socket.socketpair()
        self._received = b""
        with worker_end, keeper_end:
            descriptors = worker_end.fileno(), keeper_end.fileno()
            self._keeper = subprocess.Popen(
                # They run as files, since importing their package would import torch.
                [sys.executable, "-P", keeper.__file__, *map(str, descriptors), worker.__file__],
                stdin=subprocess.DEVNULL,
                # What functions print goes to stderr, since stdout shows the run's progress.
                stdout=2,
                pass_fds=descriptors,
                cwd=folder,
                env=dict(environment),
                # Ctrl-C goes to the driver alone, which then ends each worker.
                process_group=0,
            )

    def load(self, functions: Sequence[str], folder: str, timeout: float) -> list[str]:
        """Loads the functions in the process and returns the kind of each.

        Raises:
            RewardError: a function cannot be loaded.
        """
        deadline = time.monotonic() + START_SECONDS
        try:
            self.send([folder, list(functions), timeout], START_SECONDS)
            while not (lines := self._lines(deadline - time.monotonic())):
                pass
            reply = _parsed(lines[0])
        except TimeoutError:
            raise RewardError(f"importing reward.functions took longer than {START_SECONDS:g} s") from None
        except (EOFError, OSError):
            raise RewardError(f"importing reward.functions {self.death()}") from None
        except GarbledError as error:
            raise RewardError(f"importing reward.functions {error}") from None
        if isinstance(reply, str):
            raise RewardError(f"reward.functions: {_line(reply)}")
        match reply:
            case [*kinds] if len(lines) == 1 and len(kinds) == len(functions) and all(k in KINDS for k in kinds):
                return kinds
        raise RewardError(f"importing reward.functions {garbled(lines[0])}")

    def send(self, message: Any, timeout: float) -> None:
        """Sends a message.

        Raises:
            OSError: the process has ended or closed its connection; a TimeoutError if it does not read.
        """
        self.connection.settimeout(timeout)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def reports(self) -> list[tuple[int | None, Outcome | None]]:
        """Returns what has arrived: the place of each row, with None if it has begun, otherwise with its outcome.

        A string in place of None stands for a failure of the whole call.

        Raises:
            EOFError, OSError: the process has ended or closed its connection.
            GarbledError: something other than reports has arrived.
        """
        return [_report(line) for line in self._lines(0.0)]

    def _lines(self, timeout: float) -> list[bytes]:
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
        """Ends the process, and everything that its functions have started."""
        with contextlib.suppress(OSError):
            # Unlike close(), this also reaches the keeper when a fork of the trainer holds a copy of the socket.
            self._lifeline.shutdown(socket.SHUT_RDWR)
        try:
            self._keeper.wait(2 * keeper.END_SECONDS)
        except subprocess.TimeoutExpired:
            # A function has stopped the keeper. The worker ends with it.
            self._keeper.kill()
            self._keeper.wait()
        self._lifeline.close()
        self.connection.close()


def garbled(line: bytes) -> str:
    """Describes what a process sent in place of reports."""
    return (
        f"sent {worker.short(repr(line), 80)} in place of a result (has it written to files that it had not opened?)"
    )


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise GarbledError(garbled(line)) from None


def _line(problem: str) -> str:
    return worker.short(" ".join(problem.split()), 800)


def _report(line: bytes) -> tuple[int | None, Outcome | None]:
    match _parsed(line):
        case str(problem):
            return None, _line(problem)
        case [int(row), None]:
            return row, None
        case [int(row), str(problem)]:
            return row, _line(problem)
        case [int(row), [float(score), float() | None as acc, str() | None as pred, dict(metrics)]] if all(
            isinstance(value, float) for value in metrics.values()
        ):
            return row, (score, acc, pred, metrics)
    raise GarbledError(garbled(line))
