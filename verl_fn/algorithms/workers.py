"""What an algorithm runs on: backends, a reward, and a way to apply functions where the data lies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from verl_fn.backends.protocol import RolloutBackend, Sampling, TrainBackend

T = TypeVar("T")


def call_here(fn: Callable[..., Any], *args: Any, returns: int | None = None, **kwargs: Any) -> Any:
    """Applies ``fn`` in this process; with ``returns=k`` its k results come back as a list.

    Example:
        >>> call_here(divmod, 7, 3), call_here(divmod, 7, 3, returns=2)
        ((2, 1), [2, 1])
    """
    result = fn(*args, **kwargs)
    return result if returns is None else list(result)


def get_here(value: T) -> T:
    """Returns the value itself: in one process nothing is remote."""
    return value


@attrs.frozen(eq=False)
class Workers:
    """The parts that a step composes. Values that they exchange may be references: a step passes them on.

    Attributes:
        trainers: training backends by role.
        rollout: the engine that samples.
        reward: ``(batch, problems) -> batch`` with scores.
        tokenizer: the model's.
        sampling: how responses are drawn in training.
        max_prompt_length: longest prompt, in tokens.
        call: applies a function to values, references or handles, where they lie; ``returns=k`` for k results.
        get: returns the value behind a reference, or behind all references of a nested value.
        wait: blocks until what is behind references is there, and returns them.
        about: a line on what the workers run, for the screen.
    """

    trainers: Mapping[str, TrainBackend]
    rollout: RolloutBackend
    reward: Callable[..., Any]
    tokenizer: Any
    sampling: Sampling
    max_prompt_length: int | None = None
    call: Callable[..., Any] = call_here
    get: Callable[[Any], Any] = get_here
    wait: Callable[[Any], Any] = get_here
    about: str = ""


class Clock:
    """Seconds by phase, as verl's ``timing_s/*``; it waits for what a phase returns.

    Example:
        >>> clock = Clock(get_here)
        >>> clock.run("adv", lambda: 3), list(clock.seconds)
        (3, ['adv'])
    """

    def __init__(self, wait: Callable[[Any], Any], seconds: Mapping[str, float] | None = None) -> None:
        """Starts a clock.

        Args:
            wait: blocks until a value is there.
            seconds: phases that ran before, such as those of ``sample``.
        """
        self.seconds: dict[str, float] = dict(seconds or {})
        self._wait = wait
        self._earlier = sum(self.seconds.values())
        self._began = time.perf_counter()

    def run(self, phase: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns ``fn(*args, **kwargs)`` and adds its time to ``phase``."""
        return self.run_all({phase: lambda: fn(*args, **kwargs)})[phase]

    def run_all(self, phases: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Starts all phases, waits for each in turn, and returns their results by phase.

        Phases on workers of their own overlap; a phase is then charged with the time that it kept the step waiting.
        """
        started: dict[str, Any] = {}
        for phase, fn in phases.items():
            began = time.perf_counter()
            started[phase] = fn()
            self._add(phase, began)
        for phase, value in started.items():
            began = time.perf_counter()
            self._wait(value)
            self._add(phase, began)
        return started

    def total(self) -> float:
        """Returns the seconds since this clock was made and those before, with what lies between the phases."""
        return self._earlier + time.perf_counter() - self._began

    def _add(self, phase: str, began: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
