"""Values in other processes: handles to values that stay with their workers, references to values that travel."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

from verl_fn.state import Params, TrainState

T = TypeVar("T")


class Freed(LookupError):
    """A handle refers to a value that its worker does not hold."""


class Remote(Generic[T]):
    """Refers to a value that stays with the workers that made it, such as a training state or gradients.

    Each driver derives a class of its own. A handle can be passed to the backend that made it, and the fields that
    are handles too can be read.
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
    """Refers to the result of a call, such as outputs or metrics; ``get`` of the workers waits for it and returns it.

    Each driver derives a class of its own.
    """

    __slots__ = ()


Handle: TypeAlias = T | Remote[T]
"""A value that a training backend made: the value itself in one process, a ``Remote`` where it stays with workers.

An algorithm passes handles on and reads ``state.params``; both kinds allow that. A backend accepts only the kind that
it returns itself, which Python's types cannot express."""

Ref: TypeAlias = T | Reference[T]
"""The result of a call: the value itself in one process, a ``Reference`` where the call runs in another one."""


def here(value: Handle[T]) -> T:
    """Returns a value that lies in this process, for backends that have no other values.

    Raises:
        TypeError: it is a handle to a value of another process.

    Example:
        >>> here(3)
        3
        >>> here(Remote())
        Traceback (most recent call last):
        TypeError: a Remote stands for a value of other processes; pass it to the backend that made it
    """
    if isinstance(value, Remote):
        name = type(value).__name__
        raise TypeError(f"a {name} stands for a value of other processes; pass it to the backend that made it")
    return value
