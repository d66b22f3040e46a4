"""Stopping a run by signals: the first one asks for an orderly stop, the second one stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from .progress import Say

STOPPING = "stopping after this step; once more stops at once, without saving"
ENDING = "the run is done and saved, and its processes are ending; once more ends them at once"


@contextlib.contextmanager
def stop_requests(say: Say, reply: str = STOPPING) -> Iterator[list[int]]:
    """Yields a list to which the first SIGINT or SIGTERM is appended; a second one interrupts the process at once.

    In a thread other than the main one no signals can be handled, and the list stays empty.

    Args:
        say: prints a line.
        reply: the line that answers the first signal.
    """
    requests: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def record(number: int, frame: FrameType | None) -> None:
        requests.append(number)
        say(reply)
        for handled in previous:
            signal.signal(handled, signal.default_int_handler)

    previous = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
