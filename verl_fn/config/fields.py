"""Declaration of config keys: a default, a line of documentation, and checks of the range."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

import attrs

from verl_fn.errors import UsageError, did_you_mean


class ConfigError(UsageError):
    """Raised for a configuration that cannot be used; the message names the key."""


class RangeError(ValueError):
    """Raised for a value out of range; the arguments are the field's name and a message."""


def opt(default: Any, doc: str, *checks: Callable[..., Any]) -> Any:
    """Declares a field with a default, a line of documentation, and checks of its range.

    Args:
        default: the default value.
        doc: the documentation that ``verl-fn config`` prints.
        checks: attrs validators. They are not applied to None.
    """

    def check(instance: Any, attribute: Any, value: Any) -> None:
        for validator in checks if value is not None else ():
            try:
                validator(instance, attribute, value)
            except ValueError as error:
                raise RangeError(attribute.name, str(error.args[0])) from error

    return attrs.field(default=default, validator=check, metadata={"doc": doc})


def home(value: Any) -> Any:
    """Replaces a leading ``~`` by the home folder, in one path or in each of several."""
    if isinstance(value, tuple):
        return tuple(map(home, value))
    try:
        return os.path.expanduser(value) if isinstance(value, str) else value
    except ValueError:  # the name has a null byte; check_path reports it
        return value


def check_path(value: str) -> str:
    """Returns a path whose ``~`` was replaced, if a file can have it.

    Raises:
        ValueError: it has a null byte or is not Unicode, or its ``~name`` is of no user.

    Example:
        >>> check_path("~nobody_of_this_name/x")
        Traceback (most recent call last):
        ValueError: '~nobody_of_this_name/x' names the home of a user who does not exist; write ./~ for such a name
    """
    if "\0" in value:
        raise ValueError(f"{value!r} has a null byte; no path may have one")
    if value.startswith("~"):
        raise ValueError(f"{value!r} names the home of a user who does not exist; write ./~ for such a name")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} is not Unicode; rename the file") from None
    return value


def paths(default: Any, doc: str, *, required: bool = False) -> Any:
    """Declares a field of one or several paths.

    Args:
        default: the default value.
        doc: the documentation that ``verl-fn config`` prints.
        required: whether an empty path is an error.
    """

    def check(instance: Any, attribute: Any, value: Any) -> None:
        try:
            for item in value if isinstance(value, tuple) else () if value is None else (value,):
                check_path(item)
        except ValueError as error:
            raise RangeError(attribute.name, str(error)) from error
        if required and not value:
            raise RangeError(attribute.name, "must not be empty")

    return attrs.field(default=default, converter=home, validator=check, metadata={"doc": doc})


def all_or_some(instance: Any, attribute: Any, value: int) -> None:
    """Validates a count: -1 for all, or at least 1."""
    if value != -1 and value < 1:
        raise ValueError(f"must be -1 (keeps all) or at least 1 (got {value})")


def is_date(instance: Any, attribute: Any, value: str) -> None:
    """Validates a day as ``YYYY-MM-DD``."""
    try:
        right = datetime.date.fromisoformat(value).isoformat() == value
    except ValueError:
        right = False
    if not right:
        raise ValueError(f"must be a day as YYYY-MM-DD (got {value!r})")


def one_of(*choices: str) -> Callable[[Any, Any, str], None]:
    """Returns a validator that checks that a string is one of ``choices``."""

    def check(instance: Any, attribute: Any, value: str) -> None:
        if value not in choices:
            *first, last = choices
            raise ValueError(f"must be {', '.join(first)} or {last} (got {value!r}){did_you_mean(value, choices)}")

    return check


def each_in(*choices: str) -> Callable[..., Any]:
    """Returns a validator that checks that each of several strings is one of ``choices``."""

    def check(instance: Any, attribute: Any, values: tuple[str, ...]) -> None:
        for value in values:
            if value not in choices:
                raise ValueError(f"must be of {', '.join(choices)} (got {value!r}){did_you_mean(value, choices)}")

    return check


def each_below_one(instance: Any, attribute: Any, values: tuple[float, ...]) -> None:
    """Validates that each of several numbers is at least 0 and below 1."""
    if not all(0 <= value < 1 for value in values):
        raise ValueError(f"must be at least 0 and below 1 (got {list(values)})")


def free(doc: str) -> Any:
    """Declares a table of keys that are checked where they are used.

    Args:
        doc: the documentation that ``verl-fn config`` prints.
    """
    return attrs.field(factory=dict, metadata={"doc": doc})


def sub(cls: type) -> Any:
    """Declares a nested table."""
    return attrs.field(factory=cls)


MOST = 1e6  # upper limit of factors and ranges, far beyond any useful value; much larger ones would overflow
