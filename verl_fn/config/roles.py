"""The requirements of an algorithm: its models, its updates, and its responses per prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

import attrs

LearnsFrom: TypeAlias = Literal["samples", "answers", "pairs", "labels"]
"""What an algorithm learns from: responses that it samples, the answers in the data, pairs of a preferred and another
response, or responses that are each labelled good or bad."""


@attrs.frozen
class Role:
    """A model that an algorithm works with.

    Attributes:
        head: ``lm`` for a language model, ``value`` for one number per token.
        trained: whether the algorithm updates the model; a model that is not trained has no optimizer state.
        copy_of: the role whose initial weights this frozen model has, such as ``actor`` for a reference policy. With
            LoRA that role's frozen base is used, so no second model is made.
        path: the model folder. If empty, a value head takes ``critic.path`` if that is set; otherwise
            ``model.path`` is used.

    Example:
        >>> Role(head="value").trained
        True
    """

    head: str = attrs.field(default="lm", validator=attrs.validators.in_(("lm", "value")))
    trained: bool = True
    copy_of: str | None = None
    path: str = ""


class Outline(Protocol):
    """The part of an algorithm that a plan needs. ``Algorithm`` satisfies it, and so do the built-in options."""

    @property
    def roles(self) -> Mapping[str, Role]:
        """Returns the models by name. ``actor`` is the policy: it is sampled from, evaluated and exported."""
        ...

    @property
    def min_n(self) -> int:
        """Returns the fewest responses per prompt that the algorithm can learn from."""
        ...

    @property
    def learns_from(self) -> LearnsFrom:
        """Returns what the algorithm learns from; only one that learns from ``samples`` uses the rollout to train."""
        ...

    @property
    def needs_reward(self) -> bool:
        """Returns whether the workers' reward scores training responses."""
        ...

    def updates(self, role: str, prompts: int, steps: int) -> int:
        """Returns the optimizer updates of ``role`` in ``steps`` steps of ``prompts`` prompts each."""
        ...


def one_a_step(role: str, prompts: int, steps: int) -> int:
    """Counts the updates of an algorithm with one update per step.

    Example:
        >>> one_a_step("actor", prompts=8, steps=100)
        100
    """
    return steps


def uses_critic(name: str, role: Role) -> bool:
    """Returns whether the settings of a role are those of the critic's table.

    Example:
        >>> uses_critic("critic", Role(head="value")), uses_critic("actor", Role(head="value"))
        (True, False)
    """
    return name != "actor" and role.head == "value"
