"""Configurations as nested, unchecked tables: TOML files and ``key=value`` overrides."""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_fn.errors import did_you_mean

from .fields import ConfigError

Table: typing.TypeAlias = dict[str, Any]


def read_table(path: str | Path | None) -> Table:
    """Reads a TOML file; returns an empty table for None.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        beside = sorted({str(file) for file in Path(path).parent.glob("*.toml")} - {str(path)})
        hint = did_you_mean(path, beside) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path} cannot be read: {error.strerror}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def put(table: Table, overrides: Iterable[str], kind_of: Callable[[str], Any]) -> Table:
    """Writes ``key=value`` overrides into a table and returns it.

    Args:
        table: the table; it is changed.
        overrides: strings of the form ``key=value``.
        kind_of: returns the type of a key, or None for an unknown key.

    Raises:
        ConfigError: an override does not have the form ``key=value``, or its value is not a list where one is
            expected.
    """
    for override in overrides:
        key, _, string = split_override(override)
        value = _value(key, string, kind_of(key))
        *path, name = key.split(".")
        inner = table
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{key}: {part} is a value, not a table of keys")
        inner[name] = value
    return table


def split_override(override: str) -> tuple[str, str, str]:
    """Splits ``key=value`` at the first equals sign.

    Raises:
        ConfigError: there is no equals sign, or no key before it.

    Example:
        >>> split_override("data.task=count")
        ('data.task', '=', 'count')
    """
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not of the form key=value")
    return key.strip(), equals, value


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested tables by dotted key.

    Example:
        >>> flat({"data": {"task": "count"}})
        {'data.task': 'count'}
    """
    values: dict[str, Any] = {}
    for name, value in table.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return values


def _value(key: str, string: str, kind: Any) -> Any:
    """Parses the value of an override as TOML; returns the string itself if it is not TOML.

    An empty value unsets an optional key: TOML has no null, and ``verl-fn config`` shows such a key without a value.
    """
    if not string.strip() and type(None) in typing.get_args(kind):
        return None
    try:
        parsed = tomllib.loads(f"value = {string}")
        value = parsed["value"] if list(parsed) == ["value"] else string
    except (ValueError, RecursionError):
        if typing.get_origin(kind) is tuple and string.lstrip().startswith("["):
            raise ConfigError(
                f"{key}: {string} is not a list; strings in it need quotes, which the shell removes "
                f"unless the whole argument is quoted as well: '{key}=[\"...\"]'"
            ) from None
        return string
    # A folder may have a name that TOML reads as a date or a number, such as 2027-01-05 or 7.
    if kind in (str, str | None, tuple[str, ...]) and not isinstance(value, (str, list, dict)):
        return string.strip()
    return value
