"""Processes that run code of the user: how they are started, talked to, watched, ended and replaced."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from verl_fn.rewards import keeper, worker
from verl_fn.rewards.reward import RewardError
from verl_fn.rewards.worker import LONGEST

START_SECONDS = 300.0
# How long work goes on after it was cancelled.
CANCEL_SECONDS = 0.5
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


class Work:
    """Calls that one process makes together; a subclass says what it gets, and what its reports mean.

    Args:
        places: the numbers of the calls.
        timeout: the most seconds between two reports.

    Attributes:
        open: the calls without a result, and how often each has begun.
        deadline: when the process counts as hung; 0 before it has the work.
    """

    def __init__(self, places: Iterable[int], timeout: float) -> None:
        self.open = dict.fromkeys(places, 0)
        self.timeout, self.deadline = timeout, 0.0

    def message(self) -> Any:
        """Returns what the process gets, for the calls that are open."""
        raise NotImplementedError

    def report(self, line: bytes) -> None:
        """Reads a line that the process has sent; raises a ``GarbledError`` if it is no report."""
        raise NotImplementedError

    def failed(self, problem: str) -> None:
        """Closes the call at which the process failed, or hung if there is no problem; or raises an error."""
        raise NotImplementedError

    def extend(self) -> None:
        """Gives the process time until its next report."""
        self.deadline = time.monotonic() + self.timeout

    def suspects(self) -> list[int]:
        """Returns the calls that may have stopped the process from responding."""
        return [place for place, begun in self.open.items() if begun] or list(self.open)[:1]


class Pool:
    """Processes that share work. They start when they have some, and end with this object.

    Args:
        count: the most processes.
        start: starts a process; it refers to nothing that refers to this object.
        greeting: the first message to each, on which it imports the user's code.
        key: the config key that names the code, for errors.
        error: the class of errors.

    Attributes:
        cancelled: another thread sets it to end the work; ``run`` then raises an error.
    """

    def __init__(
        self, count: int, start: Callable[[], Child], greeting: Any, key: str, error: type[Exception]
    ) -> None:
        self._start, self._greeting, self._key, self._error = start, greeting, key, error
        self._children: list[Child | None] = [None] * count
        self.cancelled = threading.Event()
        weakref.finalize(self, _stop, self._children)

    def start(self, numbers: Iterable[int]) -> list[Any]:
        """Starts the processes with these numbers that do not run, side by side, and returns their answers."""
        new = [i for i in numbers if self._children[i] is None]
        try:
            for i in new:
                self._children[i] = self._start()
            return [self.child(i).greet(self._greeting, self._key, self._error) for i in new]
        except BaseException:
            self.stop()
            raise

    def child(self, number: int) -> Child:
        """Returns a process, and starts it if it does not run."""
        self.start([number])
        child = self._children[number]
        assert child is not None
        return child

    def stop(self) -> None:
        """Ends all processes."""
        _stop(self._children)

    def run(self, queues: Mapping[int, deque[Work]]) -> None:
        """Has each process do its work, one after the other. A process that fails is replaced.

        Args:
            queues: the work by the number of the process.

        Raises:
            Exception: ``Work.failed`` raised it, the work was cancelled, or the code cannot be imported again.
        """
        # A process may have ended since its last work, or have sent what is no answer.
        for i, child in enumerate(self._children):
            if child is not None and not child.is_ready():
                self._children[i] = None
                child.stop()
        try:
            self.start(queues)
            while queues := {i: queue for i, queue in queues.items() if queue}:
                for i, queue in queues.items():
                    if not queue[0].deadline:
                        with self._replacing(i, queue) as child:
                            queue[0].extend()
                            child.send(queue[0].message(), queue[0].timeout)
                sent = {i: queue for i, queue in queues.items() if queue and queue[0].deadline}
                first = min((queue[0].deadline for queue in sent.values()), default=0.0)
                connections = [self.child(i).connection for i in sent]
                ready = wait(connections, min(max(first - time.monotonic(), 0.0), CANCEL_SECONDS))
                if self.cancelled.is_set():
                    raise self._error(f"the call of {self._key} was cancelled")
                for i, queue in sent.items():
                    with self._replacing(i, queue) as child:
                        for line in child.lines(0.0) if child.connection in ready else ():
                            queue[0].report(line)
                        if child.connection not in ready and queue[0].deadline < time.monotonic():
                            raise TimeoutError
        except BaseException:
            # Late results would otherwise be read as results of the next call.
            self.stop()
            raise

    @contextlib.contextmanager
    def _replacing(self, number: int, queue: deque[Work]) -> Iterator[Child]:
        """Ends a process that fails in the body, and tells its work; work without open calls leaves the queue."""
        child, work = self.child(number), queue[0]
        try:
            yield child
        except (EOFError, OSError, GarbledError) as error:
            problem = str(error) if isinstance(error, GarbledError) else ""
            if not isinstance(error, (GarbledError, TimeoutError)):
                problem = child.death()
            self._children[number] = None
            child.stop()
            work.failed(problem)
            work.open, work.deadline = dict.fromkeys(work.open, 0), 0.0
        if not work.open:
            queue.popleft()


def _stop(children: list[Child | None]) -> None:
    for i, child in enumerate(children):
        if child is not None:
            children[i] = None
            child.stop()


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
