"""What the functions of an algorithm exchange: its state, experience and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import attrs

from verl_fn.errors import UserError
from verl_fn.state import Batch, Key

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
