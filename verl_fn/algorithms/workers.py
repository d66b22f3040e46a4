"""What an algorithm gets and gives: the parts that it runs on, the clock of a step, experience and metrics."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import attrs

from verl_fn.backends.memory import in_phase
from verl_fn.backends.protocol import RolloutBackend, Sampling, TrainBackend
from verl_fn.data.tasks import Problem
from verl_fn.errors import ArgumentError, UserError
from verl_fn.state import Batch, Key

T = TypeVar("T")


def get_here(value: T) -> T:
    """Returns the value itself, since in one process nothing is remote."""
    return value


def no_more(count: int) -> Sequence[Problem]:
    """Raises an error, since there is no source of further problems."""
    raise ArgumentError(
        f"this step asks for {count} more problems, and its workers have no source of them; a run has one, and "
        "elsewhere attrs.evolve(workers, more=...) sets a function that returns so many problems"
    )


@attrs.frozen(eq=False)
class Processes:
    """The processes of the workers, for the loop of a run.

    Attributes:
        about: a line about them, for the screen.
        gpu_memory: bytes of the GPU of a training rank; None where ranks compute on the CPU.
        submit: calls a function, in another thread if the engine works in other processes, and returns its result
            for ``Workers.get``.
        restarts: returns why engines were restarted since it was called last, in a sentence each.
    """

    about: str = ""
    gpu_memory: int | None = None
    submit: Callable[[Callable[[], Any]], Any] = operator.call
    restarts: Callable[[], list[str]] = list


class Roles(dict[str, Any]):
    """Values by role, such as training backends.

    Raises:
        AlgorithmError: a role is read that is not there.
    """

    def __missing__(self, role: str) -> Any:
        others = ", ".join(self) or "none"
        raise AlgorithmError(
            f"there is no role {role!r}, but {others}; in a run, the roles are the ones of the algorithm's outline, "
            f'such as Outline({{"actor": Role(), "{role}": Role(trained=False, copy_of="actor")}}), and in a program '
            "the trainers of Workers"
        )


@attrs.frozen(eq=False)
class Workers:
    """The parts that a step uses. Batches are values; what trainers and engine return is read by ``get``.

    A run makes them of its config. A program makes them of a backend, an engine and a reward, as the example of
    ``sample_and_score`` does.

    Attributes:
        trainers: the training backends by role.
        reward: ``(batch, problems) -> batch``; adds scores to a batch.
        more: returns so many further training problems; no other step gets them. Where sampling runs ahead of
            learning, an algorithm should not need it, since it could only ask after waiting for samples.
        sampling: the sampling settings of training rollouts; evaluations have their own.
        version: the step of the weights that the engine draws with, where sampling runs ahead of learning; None where
            the algorithm's step is the version.
        max_prompt_length: the longest prompt allowed, in tokens.
        truncation: how longer prompts are cut; ``error`` if they are not.
        converses: whether the engine lets the model talk to an environment, so that requests carry problems.
        end_tokens: the tokens that end a response; supervised answers end with the first. By default the
            tokenizer's own.
        get: waits for the result of a call of a trainer or the engine, or for all results in a nested value, and
            returns it. Without ``get`` in between, calls of roles on processes of their own run side by side.
        processes: what only the loop of a run needs of them; no algorithm uses it.
        router_replay: whether updates of the actor replay the experts of each token: those of the engine where its
            samples have them, and otherwise those that ``forward`` gives as ``routed_experts``.
        gives_likeliest: whether the actor's ``forward`` gives the likeliest tokens of each place.
        exact: ``off``; ``audit`` if the engine's log-probs are to equal the actor's in every bit, and the step counts
            those that do not; ``strict`` if it fails at the first.
    """

    trainers: Mapping[str, TrainBackend] = attrs.field(converter=Roles)
    rollout: RolloutBackend
    reward: Callable[..., Any]
    tokenizer: Any
    sampling: Sampling
    version: int | None = None
    max_prompt_length: int | None = None
    truncation: str = "error"
    converses: bool = False
    end_tokens: tuple[int, ...] = attrs.field()
    more: Callable[[int], Sequence[Problem]] = no_more
    get: Callable[[Any], Any] = get_here
    processes: Processes = Processes()
    router_replay: bool = False
    gives_likeliest: bool = True
    exact: str = "off"

    @end_tokens.default
    def _own_end_token(self) -> tuple[int, ...]:
        token = getattr(self.tokenizer, "eos_token_id", None)
        return () if token is None else (token,)


class Clock:
    """Measures the seconds of each phase, for verl's ``timing_s/*``; a phase ends when its result is there.

    Example:
        >>> clock = Clock(get_here)
        >>> clock.run("adv", lambda: 3), list(clock.seconds)
        (3, ['adv'])
    """

    def __init__(self, get: Callable[[Any], Any], seconds: Mapping[str, float] | None = None) -> None:
        """Starts a clock.

        Args:
            get: waits for a result, as ``Workers.get`` does.
            seconds: the seconds of earlier phases, such as ``sample``.
        """
        self.seconds: dict[str, float] = dict(seconds or {})
        self._get = get
        self._earlier = sum(self.seconds.values())
        self._start = time.perf_counter()

    def run(self, phase: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the result of ``fn(*args, **kwargs)``, and adds its time to ``phase``; see ``run_all``."""
        return self.run_all({phase: lambda: fn(*args, **kwargs)})[phase]

    def run_all(self, phases: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Starts all phases, gets the result of each in turn, and returns the results by phase.

        Phases on different workers overlap. Only the time for which the step waits is then counted for a phase.

        Raises:
            PhaseOutOfMemory: a phase does not fit into memory.
        """
        results = {phase: self._timed(phase, fn) for phase, fn in phases.items()}
        for phase in results:
            # In place, so that no handle outlives its result.
            results[phase] = self._timed(phase, self._get, results[phase])
        return results

    def total(self) -> float:
        """Returns the seconds of earlier phases plus all those since this clock started."""
        return self._earlier + time.perf_counter() - self._start

    def _timed(self, phase: str, fn: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        with in_phase(phase):
            result = fn(*args)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        return result


Report: TypeAlias = dict[str, float]
"""The metrics of a step by name, as numbers."""


class AlgorithmError(UserError, TypeError):
    """A function of an algorithm takes or returns something else than it should."""


class AlgorithmState(Protocol):
    """The fields that every algorithm's state has. A state is a ``@node`` with one further field for each role."""

    @property
    def key(self) -> Key:
        """Returns the run's key; each step derives a key of its own from it and ``step``."""
        ...

    @property
    def step(self) -> int:
        """Returns the number of steps done."""
        ...


@attrs.frozen(eq=False)
class Experience:
    """The result of ``sample``, from which ``learn`` learns. It can be saved between the two.

    Attributes:
        problems: the number of problems that the rows answer.
        seconds: the duration of each phase so far.
        report: the metrics so far.
        dropped: the sampled rows that are not in ``batch``, by the reason. Rows that are in neither count as dropped
            by the algorithm.
    """

    batch: Batch
    problems: int
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    report: Report = attrs.field(factory=dict)
    dropped: Mapping[str, Batch] = attrs.field(factory=dict)
