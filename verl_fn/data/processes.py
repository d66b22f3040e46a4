"""A function called on many items by several processes, with the results in order."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from verl_fn.errors import UserError

MOST = 32  # processes
AHEAD = 4  # results for each process that wait for an earlier one

T = TypeVar("T")
R = TypeVar("R")


class ProcessEnded(UserError, RuntimeError):
    """Raised if a process ended by itself; the message has its exit status."""


def in_order(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields the result of each item, in the order of the items.

    The function runs in a process for each core. They are forked, so the function may be anything, and items and
    results are pickled. Each process has one item at a time, and few results wait for an earlier one, so memory does
    not grow with the number of items. If this process is killed, the others end.

    Args:
        function: is called on each item, in the order of the items if there is one core.
        items: the items.

    Raises:
        ProcessEnded: a process was killed.
        Exception: what the function raised for the first item on which it fails.

    Example:
        >>> list(in_order(abs, [-1, 2, -3]))
        [1, 2, 3]
    """
    count = min(MOST, len(os.sched_getaffinity(0))) if sys.platform == "linux" else 1
    if count == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes: dict[Connection, Any] = {}
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            processes[ours] = context.Process(target=_serve, args=(function, theirs, list(pipes)), daemon=True)
            processes[ours].start()
            theirs.close()
        yield from _gathered(processes, enumerate(items))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes.values():
            # It may be in the middle of an item.
            process.kill()
            process.join()


def _gathered(processes: dict[Connection, Any], items: Iterator[tuple[int, Any]]) -> Iterator[Any]:
    free, at = list(processes), dict[Connection, int]()
    results: dict[int, tuple[Any, BaseException | None]] = {}
    first, more = 0, True
    while True:
        while free and more and len(results) < AHEAD * len(processes):
            number, item = next(items, (-1, None))
            more = number >= 0
            if more:
                pipe = free.pop()
                at[pipe] = number
                with contextlib.suppress(BrokenPipeError):  # it has ended, as receiving will find
                    pipe.send(item)
        if not at and not results:
            return
        # A process that has answered gets its next item before an earlier result is handed out and used.
        ready = [one for one in wait(list(at), 0 if first in results else None) if isinstance(one, Connection)]
        for pipe in ready:
            try:
                results[at.pop(pipe)] = pipe.recv()
            except (EOFError, ConnectionResetError) as error:
                processes[pipe].join()
                raise ProcessEnded(
                    f"a process that reads data ended with exit status {processes[pipe].exitcode}; the system may "
                    "have killed it for lack of memory"
                ) from error
            free.append(pipe)
        if not ready:
            result, failure = results.pop(first)
            if failure is not None:
                raise failure
            first += 1
            yield result


def _serve(function: Callable[[Any], Any], pipe: Connection, inherited: list[Connection]) -> None:
    """Calls the function on what comes, until the other end is closed."""
    # Of the parent's ends, the parent must have the only copy.
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would compete with the other processes
    gc.freeze()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            item = pipe.recv()
            answer: tuple[Any, BaseException | None]
            try:
                answer = (function(item), None)
            except Exception as error:
                answer = (None, error)
            try:
                pipe.send(answer)
            except (BrokenPipeError, ConnectionResetError):
                return
            except Exception:
                # Its result, or its error, cannot be pickled.
                pipe.send((None, RuntimeError("".join(traceback.format_exception(answer[1])) or "not picklable")))
