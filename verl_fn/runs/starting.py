"""What a run waits for until its first step: a line about each part that takes long, and its seconds as metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from verl_fn.algorithms import Report

from .progress import Say, waiting

PREFIX = "timing_s/start/"
# The parts in their order, with what a run says of them.
PARTS = {
    "imports": "imports",
    "check": "checks of config, data and models",
    "processes": "processes",
    "load": "models",
    "evaluate": "evaluation",
    "save": "first save",
}
LONG = 5.0  # seconds


class Start:
    """The start of a run, from the command to the first step.

    Args:
        say: prints a line.
        began: ``time.monotonic()`` of the command; None if the imports are not known.

    Attributes:
        seconds: of each part of ``PARTS`` that has ended.

    Example:
        >>> start = Start(print)
        >>> with start.part("load"):
        ...     pass
        >>> sorted(start.report())
        ['timing_s/start/load', 'timing_s/start/total']
    """

    def __init__(self, say: Say, began: float | None = None) -> None:
        now = time.monotonic()
        self._say = say
        self._began = now if began is None else began
        self.seconds: dict[str, float] = {} if began is None else {"imports": now - began}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures one part, and says of a long one how long it has taken; parts of one name add up."""
        began = time.monotonic()
        try:
            # A save tells more of itself.
            with contextlib.nullcontext() if name == "save" else waiting(self._say, PARTS[name]):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def report(self) -> Report:
        """Returns the seconds of each part, and of all from the command to now, as metrics."""
        total = time.monotonic() - self._began
        return {f"{PREFIX}{name}": seconds for name, seconds in self.seconds.items()} | {f"{PREFIX}total": total}

    def announce(self) -> None:
        """Says how long the start took and what for, if it took long."""
        total = time.monotonic() - self._began
        if total >= LONG:
            named = ", ".join(f"{PARTS[name]} {seconds:.1f}" for name, seconds in self.seconds.items())
            self._say(f"started in {total:.1f} s: {named}")
