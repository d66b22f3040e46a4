"""Runs the calls of a backend one at a time, and each in the same settings of torch."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from verl_fn.backends.hf.skeleton import repeatable
from verl_fn.state import isolated

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class OneCall:
    """Lets one thread at a time compute with a backend, whose model all calls share.

    Args:
        deterministic: use bitwise repeatable kernels.
        refusal: makes the error that is raised while another thread computes; None waits for it instead.

    Example:
        >>> one_call = OneCall(deterministic=False)
        >>> with one_call(gradients=True):
        ...     pass
    """

    def __init__(self, deterministic: bool, refusal: Callable[[], Exception] | None = None) -> None:
        self.deterministic = deterministic
        self.refusal = refusal
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def __call__(self, *, gradients: bool | None = False) -> Iterator[None]:
        """Computes inside; ``gradients`` is as for ``isolated``."""
        if not self._lock.acquire(blocking=self.refusal is None):
            assert self.refusal is not None
            raise self.refusal()
        try:
            with isolated(gradients=gradients), repeatable(self.deterministic):
                yield
        finally:
            self._lock.release()


def one_at_a_time(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Makes a method run as one call of its backend, whose ``_one_call`` is a ``OneCall``."""

    @functools.wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        backend: Any = self
        with backend._one_call():
            return method(self, *args, **kwargs)

    return alone
