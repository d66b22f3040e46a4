"""The contract of an algorithm: a value made from its options, with pure functions over a state of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs

from verl_fn.config.algorithms import Outline
from verl_fn.data.tasks import Problem
from verl_fn.errors import UserError, place_of, signature_of, takes
from verl_fn.state import Batch, Key

from .workers import Workers

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


S = TypeVar("S", bound=AlgorithmState)

CALLS = {
    "init": ("states", "key"),
    "sample": ("state", "problems", "workers"),
    "learn": ("state", "experience", "workers"),
    "updates": ("role", "prompts", "steps"),
    "evaluate": ("state", "problems", "workers"),
}


@attrs.frozen(eq=False)
class Experience:
    """The result of ``sample``, from which ``learn`` learns. It can be saved between the two.

    Attributes:
        batch: the rows.
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


@attrs.frozen(eq=False, kw_only=True)
class Algorithm(Generic[S]):
    """An algorithm; ``learn(state, sample(state, problems, workers), workers)`` is one step of it.

    Attributes:
        init: makes the state from the training states by role and a key. A training state may be a handle to
            another process, or None where only the other fields are needed, so ``init`` must only pass it on.
            A role without workers of its own (a frozen copy, with LoRA) has None, too, and ``annotate`` knows it.
        sample: draws experience and does not change the state. Where sampling runs ahead of learning, it is called
            with the weights of an earlier step, ``workers.version``, and the ``step`` that will learn. So it must
            take randomness only from ``key`` and ``step``, and ask for the version that ``publish`` returns.
        learn: returns the next state, whose ``step`` is one higher, and the step's metrics.
        outline: its models, and what else it asks of a run; by default an actor that learns from samples.
        evaluate: ``(state, problems, workers)`` to metrics on held-out problems, beside those of sampled answers.

    Example:
        A complete algorithm is ``examples/custom_algorithm.py``; ``verl_fn/algorithms/grpo.py`` is a built-in one.
    """

    init: Callable[[Mapping[str, Any], Key], S]
    sample: Callable[[S, Sequence[Problem], Workers], Experience]
    learn: Callable[[S, Experience, Workers], tuple[S, Report]]
    outline: Outline = attrs.field(factory=Outline, validator=attrs.validators.instance_of(Outline))
    evaluate: Callable[[S, Sequence[Problem], Workers], Report] | None = None

    def __attrs_post_init__(self) -> None:
        """Checks the parameters of the functions.

        Raises:
            AlgorithmError: one cannot be called as it would be.
        """
        for name, arguments in CALLS.items():
            function = getattr(self.outline if name == "updates" else self, name)
            if function is not None and not takes(function, arguments):
                raise AlgorithmError(
                    f"{place_of(function)} is the {name} of an algorithm, which is called as "
                    f"{name}({', '.join(arguments)}), and it takes {signature_of(function)}"
                )

    def step(self, state: S, problems: Sequence[Problem], workers: Workers) -> tuple[S, Report]:
        """Takes one step; it spends ``state``, since ``learn`` donates the training states that it updates."""
        return self.learn(state, self.sample(state, problems, workers), workers)
