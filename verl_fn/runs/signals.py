"""Stopping a run in order: the first signal asks, the second one acts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from .progress import Say


@contextlib.contextmanager
def stop_requests(say: Say) -> Iterator[list[int]]:
    """Yields a list that the first SIGINT or SIGTERM is put into; the second one acts at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        say("stopping after this step; once more stops at once, without saving")
        for one in before:
            signal.signal(one, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
