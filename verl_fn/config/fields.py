"""How a key is declared: a default, a line of documentation, and checks of its range."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import attrs

from verl_fn.errors import UsageError


class ConfigError(UsageError):
    """A configuration that cannot be used; the message names the key."""


class RangeError(ValueError):
    """A field's name and what is wrong with its value."""


def opt(default: Any, doc: str, *checks: Callable[..., Any]) -> Any:
    """A field with a default, a line of documentation, and checks of its range."""

    def check(instance: Any, attribute: Any, value: Any) -> None:
        for one in checks if value is not None else ():
            try:
                one(instance, attribute, value)
            except ValueError as error:
                raise RangeError(attribute.name, str(error.args[0])) from error

    return attrs.field(default=default, validator=check, metadata={"doc": doc})


def home(value: Any) -> Any:
    """A path, or each of several, with a leading ``~`` replaced by the home folder."""
    if isinstance(value, tuple):
        return tuple(map(home, value))
    try:
        return os.path.expanduser(value) if isinstance(value, str) else value
    except ValueError:  # no user has such a name
        return value


def paths(default: Any, doc: str) -> Any:
    """A field of one or several paths."""
    return attrs.field(default=default, converter=home, metadata={"doc": doc})


def all_or_some(instance: Any, attribute: Any, value: int) -> None:
    if value != -1 and value < 1:
        raise ValueError(f"must be -1, which keeps all, or at least 1 (got {value})")


def each_in(*choices: str) -> Callable[..., Any]:
    def check(instance: Any, attribute: Any, values: tuple[str, ...]) -> None:
        for value in values:
            if value not in choices:
                raise ValueError(f"must be of {choices} (got {value!r})")

    return check


def each_below_one(instance: Any, attribute: Any, values: tuple[float, ...]) -> None:
    if not all(0 <= value < 1 for value in values):
        raise ValueError(f"must be at least 0 and below 1 (got {list(values)})")


def sub(cls: type) -> Any:
    """A nested table."""
    return attrs.field(factory=cls)


MOST = 1e6  # of factors and ranges; beyond it numbers overflow and mean nothing
