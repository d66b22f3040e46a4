"""An algorithm: a value made from its options, with pure functions over a state of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs

from verl_fn.config.algorithms import Outline
from verl_fn.data.tasks import Problem
from verl_fn.errors import place_of, signature_of, takes
from verl_fn.state import Key, Node, node

from .experience import draw
from .workers import AlgorithmError, AlgorithmState, Experience, Report, Workers

S = TypeVar("S", bound=AlgorithmState)

CALLS = {
    "init": ("states", "key"),
    "sample": ("state", "problems", "workers"),
    "learn": ("state", "experience", "workers"),
    "updates": ("role", "prompts", "steps"),
    "evaluate": ("state", "problems", "workers"),
}


@node
class ActorState(Node):
    """The state of an algorithm whose only model is the actor.

    Attributes:
        actor: the training state, or a handle to it.
    """

    actor: Any
    key: Key
    step: int


@attrs.frozen(eq=False, kw_only=True)
class Algorithm(Generic[S]):
    """An algorithm; ``learn(state, sample(state, problems, workers), workers)`` is one step of it.

    Attributes:
        learn: returns the next state, whose ``step`` is one higher, and the step's metrics.
        outline: its models, and what else it asks of a run; by default an actor that learns from samples.
        init: makes the state from the training states by role and a key; by default an ``ActorState``, for an
            algorithm whose only model is the actor. A training state may be a handle to another process, or None
            where only the other fields are needed, so ``init`` must only pass it on. A role without workers of its
            own (a frozen copy, with LoRA) has None, too, and ``annotate`` knows it.
        sample: draws experience and does not change the state; by default responses to each problem, with their
            scores if the outline needs a reward. Where sampling runs ahead of learning, it is called with the weights
            of an earlier step, ``workers.version``, and the ``step`` that will learn. So it must take randomness only
            from ``key`` and ``step``, and ask for the version that ``publish`` returns.
        evaluate: ``(state, problems, workers)`` to metrics on held-out problems, besides sampled answers' metrics.

    Example:
        A complete algorithm is ``examples/custom_algorithm.py``; built-in ones are in
        ``verl_fn/algorithms/policy_optimization.py``.
    """

    learn: Callable[[S, Experience, Workers], tuple[S, Report]]
    outline: Outline = attrs.field(factory=Outline, validator=attrs.validators.instance_of(Outline))
    init: Callable[[Mapping[str, Any], Key], S] = attrs.field()
    sample: Callable[[S, Sequence[Problem], Workers], Experience] = attrs.field()
    evaluate: Callable[[S, Sequence[Problem], Workers], Report] | None = None

    @init.default
    def _only_an_actor(self) -> Any:
        if list(self.outline.roles) != ["actor"]:
            raise AlgorithmError(
                f"an algorithm with the roles {', '.join(self.outline.roles)} needs an init, a function of states "
                "and key that returns a state with key, step and a field for each role"
            )
        return lambda states, key: ActorState(states["actor"], key, step=0)

    @sample.default
    def _responses(self) -> Any:
        if self.outline.learns_from != "samples":
            raise AlgorithmError(
                f"an algorithm that learns from {self.outline.learns_from} needs a sample, a function of state, "
                "problems and workers that returns an Experience"
            )
        return functools.partial(draw, score=self.outline.needs_reward)

    def __attrs_post_init__(self) -> None:
        """Raises AlgorithmError for a function that cannot be called as it would be."""
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
