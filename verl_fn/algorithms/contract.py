"""What an algorithm is: a value made from its own options, of pure functions over its own state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs

from verl_fn.config.roles import Role, one_a_step
from verl_fn.data.tasks import Problem
from verl_fn.state import Key

from .workers import Workers

Report: TypeAlias = dict[str, float]
"""Metrics of a step by name, as numbers."""


class AlgorithmState(Protocol):
    """What every algorithm's state has; it is a ``@node``, with one more field for each role, under its name.

    Attributes:
        key: of the run; a step derives its own from it and ``step``.
        step: steps done.
    """

    @property
    def key(self) -> Key: ...

    @property
    def step(self) -> int: ...


S = TypeVar("S", bound=AlgorithmState)


@attrs.frozen(eq=False)
class Experience:
    """What ``sample`` hands to ``learn``; it can be saved between the two.

    Attributes:
        batch: the rows, a ``Batch`` or a reference to one.
        problems: how many problems they answer.
        seconds: the time of each phase so far.
        report: metrics so far.
    """

    batch: Any
    problems: int
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    report: Report = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class Algorithm(Generic[S]):
    """An algorithm: ``learn(state, sample(state, problems, workers), workers)`` is one step.

    Attributes:
        roles: the models by name. ``actor`` is the policy: it is sampled from, evaluated and exported.
        init: makes the state from the training states by role and a key. States may be handles to other processes,
            and are None where only the rest of the state is wanted: ``init`` passes them on and looks at none.
            A role without workers of its own (a frozen copy, with LoRA) is missing.
        sample: draws experience and does not change the state.
        learn: returns the next state, with ``step`` one higher, and the step's metrics.
        updates: counts the updates of a role in so many steps, the length of its learning-rate decay.
        min_n: fewest responses a prompt that it can learn from.

    Example:
        A complete algorithm is ``examples/custom_algorithm.py``; ``verl_fn/algorithms/grpo.py`` is a built-in one.
    """

    roles: Mapping[str, Role]
    init: Callable[[Mapping[str, Any], Key], S]
    sample: Callable[[S, Sequence[Problem], Workers], Experience]
    learn: Callable[[S, Experience, Workers], tuple[S, Report]]
    updates: Callable[[str, int, int], int] = one_a_step
    min_n: int = 1

    def step(self, state: S, problems: Sequence[Problem], workers: Workers) -> tuple[S, Report]:
        """Samples and learns. ``state`` is spent: what ``learn`` updates is donated."""
        return self.learn(state, self.sample(state, problems, workers), workers)
