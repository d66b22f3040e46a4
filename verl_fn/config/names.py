"""Names in a config: references to objects of the user, as ``FILE.py:NAME`` or ``package.module:NAME``, and tasks."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from verl_fn import user_files
from verl_fn.errors import did_you_mean, instead_of, raised_as

from .options import ConfigError, check_path, home

# The options of algorithms that may refer to an object of the user.
OWN_PARTS = ("policy_loss", "adv_estimator", "loss_agg_mode")
TASK_NAMES = ("count", "reverse", "countdown", "calculator", "guess_number")
REASONING_GYM = "reasoning_gym:"
VERIFIERS = "verifiers:"
SCORER = "verl_fn.scores:reasoning_gym"


def is_reference(value: str) -> bool:
    """Returns whether a string has the form of a reference.

    Example:
        >>> is_reference("mine.py:raft"), is_reference("ppo")
        (True, False)
    """
    module, colon, name = value.rpartition(":")
    return bool(colon and module and name.isidentifier())


def one_of_or_own(*choices: str) -> Callable[[Any, Any, str], None]:
    """Returns a validator that accepts these names, and references to objects of the user."""

    def check(instance: Any, attribute: Any, value: str) -> None:
        if value not in choices and not is_reference(value):
            known = ", ".join(choices)
            raise ValueError(
                f"must be {known}, or an object of yours as FILE.py:NAME or MODULE:NAME (got {value!r})"
                f"{did_you_mean(value, choices)}"
            )

    return check


def absolute(reference: str, folder: Path) -> str:
    """Makes the file of a reference absolute; all other strings are returned unchanged.

    Raises:
        ConfigError: no file can have this path.

    Example:
        >>> absolute("mine.py:raft", Path("/a")), absolute("ppo", Path("/a"))
        ('/a/mine.py:raft', 'ppo')
    """
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py"):
        return reference
    try:
        return f"{(folder / check_path(home(file))).resolve()}:{name}"
    except ValueError as error:
        raise ConfigError(str(error)) from error


def beside(value: Any, folder: Path) -> Any:
    """Makes references to files that lie in a folder absolute, in a table or list; all other values stay.

    A config file is read from its own folder in this way. Files that are not there belong to the working directory,
    like all other paths.

    Example:
        >>> beside({"algorithm": {"name": "nowhere.py:raft"}}, Path("/a"))
        {'algorithm': {'name': 'nowhere.py:raft'}}
    """
    if isinstance(value, dict):
        return {key: beside(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [beside(inner, folder) for inner in value]
    if isinstance(value, str) and is_reference(value) and value.rpartition(":")[0].endswith(".py"):
        there = absolute(value, folder)
        return there if Path(there.rpartition(":")[0]).is_file() else value
    return value


def load_object(reference: str, key: str) -> Any:
    """Imports the object that a reference names.

    Args:
        reference: ``FILE.py:NAME`` or ``package.module:NAME``.
        key: the config key that holds the reference, for error messages.

    Raises:
        ConfigError: the file or module cannot be imported, or has no such name.
    """
    module, _, name = reference.rpartition(":")
    loaded = module_of(reference, key)
    if not hasattr(loaded, name):
        raise ConfigError(f"{key}: {module} has no {name!r}{instead_of(name, loaded)}")
    return getattr(loaded, name)


def module_of(reference: str, key: str) -> ModuleType:
    """Imports the module of a reference; see ``load_object``."""
    module = reference.rpartition(":")[0]
    try:
        return _load_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: there is no file {error.filename}") from error
    except Exception as error:  # a user's module may raise anything
        place = user_files.place_of(error, __file__)
        raise ConfigError(f"{key}: {module} cannot be imported: {type(error).__name__}: {error}{place}") from error


def source_file(reference: str) -> Path | None:
    """Returns the source file of a reference; None for a module without one."""
    module = reference.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module)
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec is not None and spec.origin else None


def options_class(factory: Callable[..., Any], key: str) -> type[Any]:
    """Returns the options class of an algorithm: the annotation of its factory's first parameter.

    Args:
        key: the config key that names it, for error messages.

    Raises:
        ConfigError: the object is not a function whose first parameter is annotated with an attrs class.
    """
    parameters: list[Any] = []
    if callable(factory):
        with raised_as(ConfigError, f"{key}: the annotations of {factory!r} cannot be read", NameError, TypeError):
            hints = typing.get_type_hints(factory)
        parameters = [kind for name, kind in hints.items() if name != "return"]
    if not parameters or not attrs.has(parameters[0]):
        raise ConfigError(
            f"{key}: {getattr(factory, '__name__', factory)!r} must be a function whose first parameter is annotated "
            "with an attrs class, its options: def mine(options: MyOptions) -> Algorithm"
        )
    return parameters[0]


def _load_file(file: Path) -> ModuleType:
    file = Path(check_path(home(str(file)))).resolve()
    if str(file.parent) not in sys.path:
        # The file may import its neighbours. They come last on the path, so that they cannot hide a library.
        sys.path.append(str(file.parent))
    return user_files.load(file)


def reasoning_names(task: str) -> tuple[str, ...]:
    """Returns the sets of Reasoning Gym that a task names; none for any other task.

    Example:
        >>> reasoning_names("reasoning_gym:chain_sum, leg_counting"), reasoning_names("reverse")
        (('chain_sum', 'leg_counting'), ())
    """
    if not task.startswith(REASONING_GYM):
        return ()
    return tuple(name.strip() for name in task.removeprefix(REASONING_GYM).split(","))


def verifiers_name(task: str) -> str:
    """Returns the environment of the package verifiers that a task names; an empty string for any other task.

    Example:
        >>> verifiers_name("verifiers:my-env"), verifiers_name("reverse")
        ('my-env', '')
    """
    name = task.removeprefix(VERIFIERS)
    return name if name != task and re.fullmatch(r"([^:]*/)?[\w.-]+", name) else ""


def is_task(instance: Any, attribute: Any, value: str) -> None:
    """Validates the name of a generated task, or of different sets of Reasoning Gym."""
    names = reasoning_names(value)
    if verifiers_name(value):
        return
    if value not in TASK_NAMES and not names:
        known = ", ".join(TASK_NAMES)
        raise ValueError(
            f"must be {known}, {REASONING_GYM}SET or {VERIFIERS}NAME (got {value!r}){did_you_mean(value, TASK_NAMES)}"
        )
    if not all(name.isidentifier() for name in names) or len(set(names)) < len(names):
        raise ValueError(f"must be {REASONING_GYM} and different names of sets, with commas between (got {value!r})")
