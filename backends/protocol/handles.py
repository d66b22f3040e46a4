"""Values that lie elsewhere: handles to what stays with its workers, references to what travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeAlias, TypeVar

from verl_fn.state import Params, TrainState

P = ParamSpec("P")
T = TypeVar("T")


class Freed(LookupError):
    """A handle stands for a value that its worker does not hold."""


class Remote(Generic[T]):
    """Stands for a value that stays with the workers that made it, such as a training state or gradients.

    A driver's own class derives from this one. Whoever holds it can pass it on, and read the fields that are
    themselves values of that kind.
    """

    __slots__ = ()

    @property
    def params(self: Remote[TrainState]) -> Remote[Params]:
        """The parameters of a training state."""
        raise NotImplementedError

    @property
    def base(self: Remote[Params]) -> Remote[Params]:
        """The parameters that are not trained."""
        raise NotImplementedError


class Reference(Generic[T]):
    """Stands for a value that a call will have made, such as a batch or metrics; ``get`` of the workers fetches it.

    A driver's own class of references derives from this one.
    """

    __slots__ = ()


Handle: TypeAlias = T | Remote[T]
"""A value that a training backend made: the value itself in one process, a ``Remote`` where it stays with workers.

An algorithm passes handles on and reads ``state.params``; both kinds allow that. A backend takes back handles of the
kind that it gives out, which Python's types cannot say."""

Ref: TypeAlias = T | Reference[T]
"""A value that travels between workers: the value itself in one process, a ``Reference`` otherwise."""


def where_used(fn: Callable[P, T]) -> Callable[P, T]:
    """Marks a function for ``call`` as cheap and pure: each process that uses its result applies it itself.

    For functions that cut up a batch, such as into minibatches: the rows are then in every process already, and do
    not travel again.

    >>> @where_used
    ... def halves(rows):
    ...     return rows[: len(rows) // 2], rows[len(rows) // 2 :]
    >>> halves([1, 2]), is_where_used(halves)
    (([1], [2]), True)
    """
    fn.__where_used__ = True  # type: ignore[attr-defined]
    return fn


def is_where_used(fn: object) -> bool:
    """Whether ``where_used`` marked a function."""
    return getattr(fn, "__where_used__", False)
