"""What an algorithm asks of a run before anything is made: its models, its updates, its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs
from attrs.validators import in_


@attrs.frozen
class Role:
    """A model that an algorithm works with.

    Attributes:
        head: ``lm`` for a language model, ``value`` for one number a token.
        trained: whether the algorithm updates it; one that is not trained has no optimizer state.
        copy_of: for a model that stays what another role is at the beginning, that role's name. With LoRA the other
            role's frozen base is that model, so no second one is made.
        path: its model folder; empty takes ``critic.path`` for a value head where that is set, else ``model.path``.

    Example:
        >>> Role(head="value").trained
        True
    """

    head: str = attrs.field(default="lm", validator=in_(("lm", "value")))
    trained: bool = True
    copy_of: str | None = None
    path: str = ""


class Outline(Protocol):
    """The part of an algorithm that a plan is made from; an ``Algorithm`` has it, and so have built-in options.

    Attributes:
        roles: the models by name. The policy is ``actor``: it is sampled from, evaluated and exported.
        min_n: fewest responses a prompt that it can learn from.
    """

    @property
    def roles(self) -> Mapping[str, Role]: ...

    @property
    def min_n(self) -> int: ...

    def updates(self, role: str, prompts: int, steps: int) -> int:
        """Returns the optimizer updates of ``role`` in ``steps`` steps of ``prompts`` prompts each."""
        ...


def one_a_step(role: str, prompts: int, steps: int) -> int:
    """Counts one update a step.

    Example:
        >>> one_a_step("actor", prompts=8, steps=100)
        100
    """
    return steps
