"""The process of vLLM's core: it imports vLLM while the engine's process prepares what the core runs.

A pipe joins the two processes. If one of them ends, however it does, the other one notices, and a core that fails
sends its error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

from verl_fn.backends.vllm.arguments import EngineError, prepare_environment
from verl_fn.errors import UserError

KILLED = "vLLM's core was killed, or crashed, as it started; see the output above"
# What the process runs; it gets the pipe, and returns whether more may come.
Task = Callable[[Connection], bool]
SPAWN = multiprocessing.get_context("spawn")
# What the core imports. It has initialized no GPU afterwards.
IMPORTED = ("verl_fn.backends.vllm.core", "verl_fn.backends.vllm.worker")


class Started(SpawnProcess):
    """A process that runs already when vLLM starts it, and then gets its arguments."""

    begin: Callable[[], None] | None = None

    def start(self) -> None:
        """Starts the process; the second time, it begins what it is for."""
        if self.begin is None:
            super().start()
        else:
            self.begin()


class Core:
    """A process that imports vLLM, answers calls, and runs vLLM's core in the end.

    Attributes:
        pipe: to the process; it has the core's error once the core has failed.
        failure: the error with which the process has failed during a call.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._make()
        self.process.start()
        # multiprocessing would wait for the process as this one ends.
        self._unused = Finalize(self, _end, (self.process, self.pipe), exitpriority=0)

    def _make(self, begin: Task | None = None) -> None:
        # A process that has started drops its arguments, and so the other end is closed here.
        self.pipe, theirs = SPAWN.Pipe()
        self.process = Started(target=serve, args=(theirs, begin), name="EngineCore")

    @property
    def waits(self) -> bool:
        """Whether the process runs, and was given no core to run."""
        return self._unused.still_active() and self.process.is_alive()

    def end(self) -> None:
        """Ends the process, unless it was given a core to run."""
        self._unused()

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function in the process, before the core runs there; returns its result.

        Raises:
            Exception: as the function, or the error with which the process has failed.
        """
        try:
            self.pipe.send_bytes(ForkingPickler.dumps(functools.partial(answer, function)))
            reply = self.pipe.recv()
        except (EOFError, OSError):
            reply = EngineError(KILLED)
        if isinstance(reply, Exception):
            self.failure = reply
            raise reply
        succeeded, result = reply
        if not succeeded:
            raise result
        return result

    def Process(self, *, target: Callable[..., Any], kwargs: Mapping[str, Any], **_: Any) -> Started:
        """Returns the process that runs ``target``, a core, with these arguments, for vLLM to start.

        It is a new one if the core needs a queue, a place or libraries that a process gets only as it starts.
        """
        bound = kwargs["vllm_config"].parallel_config.numa_bind
        if bound or kwargs["tensor_queue"] is not None or "VLLM_ENABLE_CUDA_COMPATIBILITY" in os.environ:
            self.end()
            self._make(functools.partial(run, dict(os.environ), target, kwargs))
        else:
            self.process.begin = functools.partial(self._begin, target, kwargs)
        return self.process

    # vLLM takes this object for a context of multiprocessing.
    Queue = staticmethod(SPAWN.Queue)

    def _begin(self, target: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        task = ForkingPickler.dumps(functools.partial(run, dict(os.environ), target, arguments))
        self._unused.cancel()
        # vLLM notices a process that has ended.
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(task)


def _end(process: SpawnProcess, pipe: Connection) -> None:
    process.kill()
    process.join()
    pipe.close()


@contextlib.contextmanager
def core_process(device: str) -> Iterator[Core]:
    """Yields a process that imports vLLM for a core; it ends here if it was given no core to run.

    Args:
        device: ``cpu`` or ``cuda``, the engine's.
    """
    prepare_environment(device)
    core = Core()
    try:
        yield core
    finally:
        core.end()


def serve(pipe: Connection, begin: Task | None) -> None:
    """Imports vLLM and runs a core: at once, or after the calls that arrive at the pipe before it.

    The process ends when the one at the other end of the pipe does.
    """
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, tasks), name="verl_fn engine", daemon=True).start()
    # An interrupt from the terminal is for the engine's process.
    with contextlib.suppress(OSError):
        os.setpgrp()
    try:
        for name in IMPORTED:
            importlib.import_module(name)
        task = begin or pickle.loads(tasks.get())
        while task(pipe):
            task = pickle.loads(tasks.get())
    except Exception as error:
        pipe.send(portable(error))
        # vLLM has logged it.
        raise SystemExit(1) from error


def _receive(pipe: Connection, tasks: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            tasks.put(pipe.recv_bytes())
    os._exit(1)


def answer(function: Callable[[], Any], pipe: Connection) -> bool:
    """Sends the result of a function or its error; returns True, since more may be called."""
    try:
        reply = True, function()
    except Exception as error:
        reply = False, portable(error)
    pipe.send(reply)
    return True


def run(
    environment: Mapping[str, str], target: Callable[..., Any], arguments: Mapping[str, Any], pipe: Connection
) -> bool:
    """Runs a core in this process, with these variables, until it is shut down; returns False: that was the last."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    target(**arguments)
    return False


def portable(error: Exception) -> Exception:
    """Returns an error for another process, with its traceback in a note; errors for users have none.

    Example:
        >>> error = pickle.loads(pickle.dumps(portable(ValueError("no such name"))))
        >>> error, error.__notes__
        (ValueError('no such name'), ["in vLLM's process:\\n"])
    """
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = EngineError(f"{type(error).__name__}: {error}")
    if not isinstance(error, UserError):
        copy.add_note("in vLLM's process:\n" + "".join(traceback.format_tb(error.__traceback__)))
    return copy
