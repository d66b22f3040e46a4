"""What an algorithm runs on: backends, a reward, and a way to apply functions where the data lies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs

from verl_fn.backends.protocol import RolloutBackend, TrainBackend
from verl_fn.errors import UserError


def call_here(fn: Callable[..., Any], *args: Any, returns: int | None = None, **kwargs: Any) -> Any:
    """Apply ``fn`` in this process; with ``returns=k`` its k results come back as a list.

    >>> call_here(divmod, 7, 3), call_here(divmod, 7, 3, returns=2)
    ((2, 1), [2, 1])
    """
    found = fn(*args, **kwargs)
    return found if returns is None else list(found)


def get_here(value: Any) -> Any:
    """The value itself: in one process nothing is remote."""
    return value


@attrs.frozen(eq=False)
class Workers:
    """The parts that a step composes. Values that they exchange may be references: a step passes them on.

    Attributes:
        actor, critic, reference: training backends, the last two where the algorithm wants them.
        rollout: the engine that samples.
        reward: ``(batch, problems) -> batch`` with scores.
        tokenizer: the model's.
        call: applies a function to values, references or handles, where they lie; ``returns=k`` for k results.
        get: the value behind a reference, or behind all references of a nested value.
        wait: blocks until what is behind references is there, and passes them on.
        about: a line on what the workers run, for the screen.
    """

    actor: TrainBackend
    rollout: RolloutBackend
    reward: Callable[..., Any]
    tokenizer: Any
    critic: TrainBackend | None = None
    reference: TrainBackend | None = None
    call: Callable[..., Any] = call_here
    get: Callable[[Any], Any] = get_here
    wait: Callable[[Any], Any] = get_here
    about: str = ""


class ActorDied(UserError, RuntimeError):
    """A worker's process ended; the message holds its own error and the end of its log."""


class ActorHangs(UserError, RuntimeError):
    """A worker is not where others wait or waited for it; the message says where it is."""


class Freed(LookupError):
    """A handle stands for a value that its worker does not hold."""


class Clock:
    """Seconds by phase, as verl's ``timing_s/*``; waits for what a phase returns.

    >>> clock = Clock(get_here)
    >>> clock.run("adv", lambda: 3), list(clock.seconds)
    (3, ['adv'])
    """

    def __init__(self, wait: Callable[[Any], Any]) -> None:
        self.seconds: dict[str, float] = {}
        self._wait = wait
        self._began = time.perf_counter()

    def run(self, phase: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``fn(*args, **kwargs)``, its time added to ``phase``."""
        start = time.perf_counter()
        found = self._wait(fn(*args, **kwargs))
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        return found

    def total(self) -> float:
        """Seconds since this clock was made, with what lies between the phases."""
        return time.perf_counter() - self._began
