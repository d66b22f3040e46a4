"""The names of generated tasks, and of sets of Reasoning Gym."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import attrs

from verl_fn.errors import did_you_mean

from .fields import MOST
from .names import absolute
from .scoring import EnvConfig

TASK_NAMES = ("count", "reverse", "countdown", "calculator", "guess_number")
REASONING_GYM = "reasoning_gym:"
VERIFIERS = "verifiers:"
SCORER = "verl_fn.scores:reasoning_gym"


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


def each_above_zero(instance: Any, attribute: Any, values: tuple[float, ...]) -> None:
    """Validates that each of several numbers is above 0 and not too large."""
    if not all(0 < value <= MOST for value in values):
        raise ValueError(f"must be above 0 and at most {MOST:g} (got {list(values)})")


def absolute_task(task: str, folder: Path) -> str:
    """Makes the file of an environment of verifiers absolute; all other tasks are returned unchanged.

    Args:
        task: of the config.
        folder: relative paths are seen from it.

    Example:
        >>> absolute_task("verifiers:envs/my-env", Path("/a")), absolute_task("verifiers:my-env", Path("/a"))
        ('verifiers:/a/envs/my-env', 'verifiers:my-env')
    """
    name = verifiers_name(task)
    if not name:
        return task
    path = (folder / Path(name).expanduser()).resolve()
    is_file = "/" in name or path.with_name(f"{path.name.replace('-', '_')}.py").is_file()
    return f"{VERIFIERS}{path}" if is_file else task


def absolute_env(env: EnvConfig, folder: Path) -> EnvConfig:
    """Returns the table of environments with absolute paths.

    Args:
        env: the config's ``[env]`` table.
        folder: relative paths are seen from it.

    Example:
        >>> env = absolute_env(EnvConfig(name="mine.py:Game", python=".venv-env/bin/python"), Path("/a"))
        >>> env.name, env.python
        ('/a/mine.py:Game', '/a/.venv-env/bin/python')
    """
    # Links are not resolved: the interpreter of a virtual environment is a link, and knows the folder by its path.
    python = env.python and os.path.abspath(folder / env.python)
    return attrs.evolve(env, name=absolute(env.name, folder), python=python)
