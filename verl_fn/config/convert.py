"""Conversion of tables into frozen classes, with a check of every value's type and range."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import cattrs

from .fields import ConfigError, RangeError

T = TypeVar("T")


def structured(table: Mapping[str, Any], cls: type[T], prefix: str = "") -> T:
    """Makes an instance of ``cls`` from a table.

    Args:
        table: the values by name.
        cls: an attrs class.
        prefix: the dotted key of the table, for error messages.

    Raises:
        ConfigError: values have the wrong type or range; the message names all of them.
    """
    try:
        return _CONVERTER.structure(table, cls)
    except cattrs.BaseValidationError as error:
        raise ConfigError("; ".join(_messages(error, prefix))) from error


def pass_through(cls: type) -> None:
    """Makes ``structured`` accept instances of ``cls`` and leave them unchanged."""
    _CONVERTER.register_structure_hook(cls, lambda value, _: value)


def _messages(error: BaseException, prefix: str) -> Iterator[str]:
    """Yields a message for each leaf of cattrs's tree of errors, with the dotted key in front."""
    if isinstance(error, cattrs.BaseValidationError):
        for inner in error.exceptions:
            notes = [n for n in getattr(inner, "__notes__", ()) if isinstance(n, cattrs.AttributeValidationNote)]
            yield from _messages(inner, f"{prefix}.{notes[0].name}".lstrip(".") if notes else prefix)
    elif isinstance(error, ConfigError):
        yield str(error)
    elif isinstance(error, RangeError):
        name, message = error.args
        yield f"{prefix}.{name}".lstrip(".") + ": " + message.removeprefix(f"'{name}' ")
    else:
        yield f"{prefix}: {error.args[0] if error.args else error}"


def _strict(kind: type, *accepted: type) -> Callable[[Any, Any], Any]:
    """Returns a hook that converts values of the accepted types to ``kind`` and rejects all others."""

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"expected {_KINDS[kind]}, got {value!r}")
        if kind is str and not _is_unicode(cast(str, value)):
            raise TypeError(f"expected Unicode, got {value!r}")
        if kind is float and not -sys.float_info.max <= cast(float, value) <= sys.float_info.max:
            raise TypeError(f"expected a finite number, got {value!r}")
        if kind is int and not -(2**63) <= cast(int, value) < 2**63:
            raise TypeError("expected a whole number of at most 64 bits")
        return kind(value)

    return hook


def _is_unicode(value: str) -> bool:
    """Returns whether a string can be written to a file; bytes of the command line may be no UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _optional(value: Any, hint: Any) -> Any:
    inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    try:
        return None if value is None else _CONVERTER.structure(value, inner)
    except TypeError as error:
        if value in ("", "none", "None", "null"):
            raise TypeError(f"{error}; to unset the key, write nothing after its =") from None
        raise


def _tuple(value: Any, hint: Any) -> Any:
    """Converts a list to a tuple; a single value becomes a tuple of one, as the command line allows."""
    kinds = typing.get_args(hint)
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(values)
    if len(values) != len(kinds):
        raise TypeError(f"expected {len(kinds)} values, got {value!r}")
    return tuple(_CONVERTER.structure(item, kind) for item, kind in zip(values, kinds, strict=True))


def _is_tuple(hint: Any) -> bool:
    origin: Any = typing.get_origin(hint)
    return origin is tuple


def _free(value: Any, _: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a table of keys, got {value!r}")
    return dict(value)


def _is_mapping(hint: Any) -> bool:
    origin: Any = typing.get_origin(hint)
    return origin is Mapping


_KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
for _kind, _accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
    _CONVERTER.register_structure_hook(_kind, _strict(_kind, *_accepted))
_CONVERTER.register_structure_hook_func(_is_tuple, _tuple)
_CONVERTER.register_structure_hook_func(_is_mapping, _free)
_CONVERTER.register_structure_hook_func(
    lambda hint: isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint), _optional
)
