"""Configurations as nested tables, before they are checked: TOML files and ``key=value`` overrides."""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .fields import ConfigError

Table: typing.TypeAlias = dict[str, Any]


def read_table(path: str | Path | None) -> Table:
    """Reads a TOML file; without a path the table is empty.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def put(table: Table, overrides: Iterable[str], kind_of: Callable[[str], Any]) -> Table:
    """Writes ``key=value`` overrides into a table and returns it.

    Args:
        kind_of: the type of a key, or None for a key that there is not.

    Raises:
        ConfigError: an override has another form.
    """
    for override in overrides:
        key, _, text = split_override(override)
        value = _value(key, text, kind_of(key))
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
        ConfigError: there is none, or no key before it.

    Example:
        >>> split_override("data.task=count")
        ('data.task', '=', 'count')
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not of the form key=value")
    return key.strip(), equals, text


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


def _value(key: str, text: str, kind: Any) -> Any:
    """Returns what an override's text means: TOML, or else the string itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if list(parsed) == ["value"] else text
    except (ValueError, RecursionError):
        if typing.get_origin(kind) is tuple and text.lstrip().startswith("["):
            raise ConfigError(
                f"{key}: {text} is not a list; strings in it need quotes, which the shell removes "
                f"unless all is quoted once more: '{key}=[\"...\"]'"
            ) from None
        return text
    # A folder may be called 2027-01-05 or 7.
    if kind in (str, str | None, tuple[str, ...]) and not isinstance(value, (str, list, dict)):
        return text.strip()
    return value
