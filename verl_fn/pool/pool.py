"""The trainer's side of worker processes: how they are started, talked to, watched, ended and replaced."""

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
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from . import keeper, worker

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
OF_INTERPRETER = ("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "CONDA_PREFIX")
"""The variables of ``ENVIRONMENT`` that would lead another interpreter to the trainer's packages."""


class WorkerFailed(Exception):
    """Raised for a process that has ended or sent what is no message; the message says how it failed."""


class WorkerHangs(WorkerFailed):
    """Raised for a process that did not send or read in time."""


def environment(names: Sequence[str] = (), *, same_interpreter: bool = True) -> dict[str, str]:
    """Returns the variables of ``ENVIRONMENT`` and ``names``.

    Args:
        names: further variables that are set.
        same_interpreter: whether the process runs the trainer's interpreter; if not, ``OF_INTERPRETER`` is left out.
    """
    known = ENVIRONMENT if same_interpreter else [name for name in ENVIRONMENT if name not in OF_INTERPRETER]
    allowed = {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, name) for name in known)}
    # With random hashes, a score that depends on the order of a set could not be repeated.
    return allowed | {name: os.environ[name] for name in names} | {"PYTHONHASHSEED": "0"}


class Worker:
    """A process that runs code of the user. It and the trainer exchange lines of JSON.

    The process may be stopped, may have closed its connection or have written anything into it, so nothing waits for
    it without a limit.

    Args:
        module: the module of this package that serves.

    Attributes:
        connection: is readable when messages of the process have arrived, or when it has ended.
    """

    def __init__(self, module: str, folder: str, environment: Mapping[str, str], python: str) -> None:
        self.connection, worker_end = socket.socketpair()
        self._lifeline, keeper_end = socket.socketpair()
        self._received = b""
        with worker_end, keeper_end:
            descriptors = worker_end.fileno(), keeper_end.fileno()
            self._keeper = subprocess.Popen(
                [python, "-P", keeper.__file__, *map(str, descriptors), module],
                stdin=subprocess.DEVNULL,
                # What the code prints goes to stderr, since stdout shows the run's progress.
                stdout=2,
                pass_fds=descriptors,
                cwd=folder,
                env=dict(environment),
                # Ctrl-C goes only to the driver; it then ends each worker.
                process_group=0,
            )

    def send(self, message: Any, seconds: float) -> None:
        """Sends a message.

        Raises:
            WorkerFailed: the process has ended, has closed its connection, or does not read.
        """
        self.connection.settimeout(seconds)
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            raise WorkerHangs from None
        except OSError:
            raise WorkerFailed(self._death()) from None

    def receive(self, seconds: float) -> list[Any]:
        """Returns the messages that have arrived, after waiting for a part of one.

        Raises:
            WorkerFailed: the process has ended, closed its connection, sent what is no JSON, or sent nothing in time.
        """
        if not wait([self.connection], max(seconds, 0.0)):
            raise WorkerHangs
        try:
            part = self.connection.recv(2**20)
        except OSError:
            part = b""
        if not part:
            raise WorkerFailed(self._death())
        *lines, self._received = (self._received + part).split(b"\n")
        return [_parsed(line) for line in lines]

    def is_ready(self) -> bool:
        """Returns whether the process has neither ended nor sent anything since its last call."""
        return not self._received and not wait([self.connection], 0)

    def _death(self) -> str:
        """Describes how the process, whose connection has closed, ended; ends it if it has not."""
        try:
            code = self._keeper.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            code = worker.DISCONNECTED
        self.stop()
        if code == worker.DISCONNECTED:
            return "closed the connection of its process (has it closed files that it had not opened?)"
        number = -code if code < 0 else code - 128
        names = {signal.value: signal.name for signal in signal.Signals}
        return f"ended its process with {names.get(number, f'exit code {code}')}"

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
    """Calls that one process makes together. The process reports each call when it begins and when it ends.

    Args:
        places: the numbers of the calls.
        seconds: the most seconds between two reports.
        message: returns what the process gets for the calls with these numbers.
        end: takes the number of a call that has ended, and what the process says of it.
        fail: takes the numbers of the calls that may have ended or stopped the process, and how: empty if it hangs.
            The first of them has ended then; the others are repeated.

    Attributes:
        open: the calls that have not ended, and whether each has begun.
        deadline: when the process counts as hung; 0 before it has the work.
    """

    def __init__(
        self,
        places: Iterable[int],
        seconds: float,
        message: Callable[[list[int]], Any],
        end: Callable[[int, Any], None],
        fail: Callable[[list[int], str], None],
    ) -> None:
        self.open = dict.fromkeys(places, False)
        self._seconds, self._message, self._end, self._fail, self.deadline = seconds, message, end, fail, 0.0

    def begin(self, process: Worker) -> None:
        """Gives the work to a process."""
        self._extend()
        process.send(self._message(list(self.open)), self._seconds)

    def report(self, message: Any) -> None:
        """Takes a message of the process."""
        match message:
            case str(problem):
                raise WorkerFailed(problem)
            case [int(place), None]:
                if place in self.open:
                    self.open[place] = True
            case [int(place), outcome] if place in self.open:
                del self.open[place]
                self._end(place, outcome)
            case _:
                raise WorkerFailed(_garbled(json.dumps(message).encode()))
        self._extend()

    def fail(self, problem: str) -> None:
        """Ends the first call that may have ended or stopped the process, and resets the others."""
        suspects = [place for place, begun in self.open.items() if begun] or list(self.open)[:1]
        self._fail(suspects, problem)
        self.open, self.deadline = {place: False for place in self.open if place != suspects[0]}, 0.0

    def _extend(self) -> None:
        self.deadline = time.monotonic() + self._seconds


class Pool:
    """Processes that share work. They start when they have some, and end with this object.

    Args:
        module: the module of this package that serves in them.
        greeting: the first message to each after the folder, on which it imports the user's code.
        count: the most processes.
        folder: the folder that the user's modules and files are looked up from, by default the current one.
        key: the config key that names the code, for errors.
        variables: environment variables that the processes get besides ``ENVIRONMENT``.
        variables_key: the config key that names them.
        python: the interpreter of the processes; empty for this one.
        error: the class of errors.

    Attributes:
        cancelled: another thread sets it to end the work; ``run`` then raises an error.

    Raises:
        Exception: of the class ``error``: a variable is not set.
    """

    def __init__(
        self,
        module: str,
        greeting: Sequence[Any],
        *,
        count: int,
        folder: str | os.PathLike[str] | None,
        key: str,
        variables: Sequence[str],
        variables_key: str,
        python: str = "",
        error: type[Exception],
    ) -> None:
        for name in variables:
            if name not in os.environ:
                raise error(
                    f"{variables_key} names {name}, which is not set in the environment; set it or remove the name"
                )
        folder = str(Path(folder or ".").resolve())
        own = environment(variables, same_interpreter=not python)
        self._start = partial(Worker, module, folder, own, python or sys.executable)
        self._greeting, self._key, self._error = [folder, *greeting], key, error
        self._processes: list[Worker | None] = [None] * count
        self.cancelled = threading.Event()
        weakref.finalize(self, _stop, self._processes)

    def start(self, numbers: Iterable[int]) -> list[Any]:
        """Starts the processes with these numbers that do not run, side by side, and returns their answers.

        Raises:
            Exception: of the class of errors: the import of the user's code failed or did not end.
        """
        new = [i for i in numbers if self._processes[i] is None]
        try:
            for i in new:
                self._processes[i] = self._start()
            return [next(self.ask(i, self._greeting, f"importing {self._key}", f"{self._key}:")) for i in new]
        except BaseException:
            self.stop()
            raise

    def process(self, number: int) -> Worker:
        """Returns a process, and starts it if it does not run."""
        self.start([number])
        process = self._processes[number]
        assert process is not None
        return process

    def ask(self, number: int, message: Any, doing: str, about: str) -> Iterator[Any]:
        """Sends a message to a process, and yields what it answers.

        Args:
            doing: what the process does for it, for errors.
            about: the start of an error whose text the process sends.

        Raises:
            Exception: of the class of errors: the process fails, answers with text, or does not answer in time.
        """
        process = self.process(number)
        try:
            process.send(message, START_SECONDS)
            while True:
                for answer in process.receive(START_SECONDS):
                    if isinstance(answer, str):
                        raise self._error(f"{about} {answer}")
                    yield answer
        except WorkerHangs:
            raise self._error(f"{doing} took longer than {START_SECONDS:g} s") from None
        except WorkerFailed as failure:
            raise self._error(f"{doing} {failure}") from None

    def stop(self) -> None:
        """Ends all processes."""
        _stop(self._processes)

    def run(self, queues: Mapping[int, deque[Work]]) -> None:
        """Has each process do its work, one after the other. A process that fails is replaced.

        Raises:
            Exception: a function of ``Work`` raised it, the work was cancelled, or the code cannot be imported again.
        """
        # A process may have ended since its last work, or have sent what is no answer.
        for i, process in enumerate(self._processes):
            if process is not None and not process.is_ready():
                self._processes[i] = None
                process.stop()
        try:
            self.start(queues)
            while queues := {i: queue for i, queue in queues.items() if queue}:
                for i, queue in queues.items():
                    if not queue[0].deadline:
                        with self._replacing(i, queue) as process:
                            queue[0].begin(process)
                sent = {i: queue for i, queue in queues.items() if queue and queue[0].deadline}
                first = min((queue[0].deadline for queue in sent.values()), default=0.0)
                connections = [self.process(i).connection for i in sent]
                ready = wait(connections, min(max(first - time.monotonic(), 0.0), CANCEL_SECONDS))
                if self.cancelled.is_set():
                    raise self._error(f"the call of {self._key} was cancelled")
                for i, queue in sent.items():
                    with self._replacing(i, queue) as process:
                        for message in process.receive(0.0) if process.connection in ready else ():
                            queue[0].report(message)
                        if queue[0].open and queue[0].deadline < time.monotonic():
                            raise WorkerHangs
        except BaseException:
            # Late results would otherwise be read as results of the next call.
            self.stop()
            raise

    @contextlib.contextmanager
    def _replacing(self, number: int, queue: deque[Work]) -> Iterator[Worker]:
        """Ends a process that fails in the body, and tells its work; work without open calls leaves the queue."""
        process, work = self.process(number), queue[0]
        try:
            yield process
        except WorkerFailed as failure:
            self._processes[number] = None
            process.stop()
            if work.open:
                work.fail(str(failure))
        if not work.open:
            queue.popleft()


def _stop(processes: list[Worker | None]) -> None:
    for i, process in enumerate(processes):
        if process is not None:
            processes[i] = None
            process.stop()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise WorkerFailed(_garbled(line)) from None


def _garbled(line: bytes) -> str:
    return (
        f"sent {worker.short(repr(line), 80)} in place of a result (has it written to files that it had not opened?)"
    )
