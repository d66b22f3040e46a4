"""Objects of the user's by name: ``FILE.py:NAME`` and ``package.module:NAME``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from .fields import ConfigError


def is_reference(value: str) -> bool:
    """Tells whether a value has the form of a reference to an object of the user's.

    Example:
        >>> is_reference("mine.py:raft"), is_reference("ppo")
        (True, False)
    """
    module, colon, name = value.rpartition(":")
    return bool(colon and module and name.isidentifier())


def absolute(reference: str, folder: Path) -> str:
    """Makes the file of a reference absolute; a module's name, and what is no reference, stay as they are.

    Example:
        >>> absolute("mine.py:raft", Path("/a")), absolute("ppo", Path("/a"))
        ('/a/mine.py:raft', 'ppo')
    """
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py"):
        return reference
    return f"{(folder / Path(file).expanduser()).resolve()}:{name}"


def load_object(reference: str, key: str) -> Any:
    """Imports the object that a reference names.

    Args:
        reference: ``FILE.py:NAME`` or ``package.module:NAME``.
        key: the config's key that holds it, for errors.

    Raises:
        ConfigError: the file or module cannot be imported, or has no such name.
    """
    module, _, name = reference.rpartition(":")
    loaded = _load_module(module, key)
    if not hasattr(loaded, name):
        raise ConfigError(f"{key}: {module} has no {name!r}")
    return getattr(loaded, name)


def source_file(reference: str) -> Path | None:
    """Returns the source file of a reference; None for a module that has none."""
    module = reference.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module)
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec is not None and spec.origin else None


def options_class(factory: Callable[..., Any], key: str) -> type[Any]:
    """Returns the options class of an algorithm: the annotation of its factory's first parameter.

    Raises:
        ConfigError: the object is not a function with one annotated parameter of an attrs class.
    """
    parameters: list[Any] = []
    if callable(factory):
        try:
            hints = typing.get_type_hints(factory)
        except (NameError, TypeError) as error:
            raise ConfigError(f"{key}: the annotations of {factory!r} cannot be read: {error}") from error
        parameters = [kind for name, kind in hints.items() if name != "return"]
    if not parameters or not attrs.has(parameters[0]):
        raise ConfigError(
            f"{key}: {getattr(factory, '__name__', factory)!r} must be a function whose first parameter is annotated "
            "with an attrs class, its options: def mine(options: MyOptions) -> Algorithm"
        )
    return parameters[0]


def _load_module(module: str, key: str) -> ModuleType:
    try:
        return _load_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: there is no file {error.filename}") from error
    except Exception as error:  # The user's own module may raise anything.
        raise ConfigError(f"{key}: {module} cannot be imported: {type(error).__name__}: {error}") from error


def _load_file(file: Path) -> ModuleType:
    """Imports a file once, under a name made of its path and its bytes, the same in every process."""
    file = file.expanduser().resolve()
    digest = hashlib.blake2b(str(file).encode() + b"\0" + file.read_bytes(), digest_size=6).hexdigest()
    name = f"_verl_fn_user_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        # Files beside it may be imported, at the end so that they hide no library.
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    return loaded
