"""The base of all errors that a user can cause and fix."""

import sys
from pathlib import Path


class UserError(Exception):
    """An error whose message says what to do: the command line shows it as one line, without a traceback.

    >>> class DiskError(UserError, OSError):
    ...     pass
    >>> isinstance(DiskError("no room"), UserError)
    True
    """


class UsageError(UserError, ValueError):
    """An argument or a setting that cannot be used; the command line ends with status 2, as for unknown options."""


class ArgumentError(UserError, TypeError):
    """A function was called with a value of another kind than it takes."""


def install(*requirements: str) -> str:
    """Returns the command that installs packages beside this one; ``make setup`` makes an environment without pip.

    Example:
        >>> install("wandb").endswith(" wandb")
        True
    """
    uv = Path(sys.prefix).parent / ".uv" / "bin" / "uv"
    return " ".join([str(uv if uv.is_file() else "uv"), "pip install --python", sys.executable, *requirements])
