"""The whole configuration as TOML for people to read: every key with its documentation and its origin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from .algorithms import BUILT_IN
from .loading import raw_table
from .schema import AlgorithmTable, Config
from .tables import flat


def origins(path: str | Path | None = None, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Returns where each key was set: the name of the file, or ``command line``; keys at their defaults are absent.

    Example:
        >>> origins(overrides=["data.task=count"])
        {'data.task': 'command line'}
    """
    keys = dict.fromkeys(flat(raw_table(path, ())), str(path))
    return keys | dict.fromkeys(flat(raw_table(None, overrides)), "command line")


def describe(cfg: Config, origins: Mapping[str, str]) -> str:
    """Returns the whole config as TOML, with a line of documentation and an origin for every key.

    Example:
        >>> print(describe(Config(), {}).splitlines()[1])
        dir = "runs/run"                      # the run's folder [default]
    """
    lines: list[str] = []
    _describe(cfg, "", origins, lines)
    return "\n".join(lines).strip() + "\n"


def options_lines(options: Any, prefix: str, origins: Mapping[str, str] | None = None) -> list[str]:
    """Returns one line for each option of an algorithm: its value, its documentation and its origin."""
    lines: list[str] = []
    _describe(options, prefix, origins or {}, lines)
    return lines


def _describe(value: Any, prefix: str, origins: Mapping[str, str], lines: list[str]) -> None:
    if isinstance(value, AlgorithmTable):
        lines.append(f"[{prefix}]")
        lines.append(
            _line("name", value.name, f"{', '.join(BUILT_IN)}, or FILE.py:NAME or MODULE:NAME", prefix, origins)
        )
        start = len(lines)
        _describe(value.options, prefix, origins, lines)
        # The options belong to the table of the name, whose header is already there.
        if lines[start:] and lines[start] == f"[{prefix}]":
            del lines[start]
        return
    fields = attrs.fields(type(value))
    tables = [f for f in fields if attrs.has(type(getattr(value, f.name)))]
    if prefix and len(tables) < len(fields):
        lines.append(f"[{prefix}]")
    for f in fields:
        if f not in tables:
            lines.append(_line(f.name, getattr(value, f.name), f.metadata.get("doc", ""), prefix, origins))
    lines.append("")
    for f in tables:
        _describe(getattr(value, f.name), f"{prefix}.{f.name}".lstrip("."), origins, lines)


def _line(name: str, value: Any, doc: str, prefix: str, origins: Mapping[str, str]) -> str:
    setting = f"{name} = {_toml(value)}" if value is not None else f"# {name} ="
    key = f"{prefix}.{name}"
    origin = next((place for k, place in origins.items() if k == key or k.startswith(f"{key}.")), "default")
    return f"{setting:<36}  # {doc} [{origin}]"


def _toml(value: Any) -> str:
    """Formats a value as TOML on one line."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(name)} = {_toml(inner)}' for name, inner in value.items())}}}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")
