"""What workers for reward functions and for environments share: their connection, and how they load the user's code.

The trainer sends a greeting that names the code. Its answer is a string if the code cannot be used. Then it sends
calls. The worker reports each call twice: its number with None when it begins, so that the trainer knows which calls
may hang, and with its outcome when it ends. A string as the outcome says how the code failed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import numbers
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import partial
from json import dumps, loads
from pathlib import Path
from typing import Any

from verl_fn import user_files
from verl_fn.errors import did_you_mean, instead_of

np: Any = importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None
LARGEST = 1e30
DISCONNECTED = os.EX_IOERR


class LoadError(Exception):
    """Raised for code of the user that cannot be used; the message gives the reason."""


class Failed(Exception):
    """Raised for code of the user that returned what it must not; the message says what."""


class Trainer:
    """The connection to the trainer: lines of JSON in both directions."""

    def __init__(self, descriptor: int) -> None:
        self._owner = os.getpid()
        self._socket = socket.socket(fileno=descriptor)
        # Programs and forks that a function starts would keep the connection open after the end of this process.
        self._socket.set_inheritable(False)
        os.register_at_fork(after_in_child=partial(_close, descriptor))
        self._lines = self._socket.makefile("rb")

    def receive(self) -> Any:
        """Returns the next message, or None if the trainer has closed the connection."""
        line = self._lines.readline()
        return loads(line) if line else None

    def send(self, message: Any) -> None:
        """Sends a message; ends the process if it is a fork or if a function has closed the connection."""
        if os.getpid() != self._owner:
            os._exit(0)  # a function has forked, and the copy has returned from it too
        try:
            self._socket.sendall(dumps(message).encode() + b"\n")
        except OSError:
            os._exit(DISCONNECTED)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def main(connection: int, serve: Callable[[Trainer], None]) -> None:
    """Serves the trainer, whose connection has this file descriptor, and ends the process."""
    trainer = Trainer(connection)
    seed_numbers(0)
    try:
        serve(trainer)
    except LoadError as error:
        trainer.send(str(error))
    except BaseException as error:
        # What a function has left behind, such as a signal handler or a task, may raise at any time.
        trainer.send(raised(error))
    finally:
        # Threads that functions have left behind would delay a usual end.
        os._exit(0)


def seed_numbers(*seeds: int) -> None:
    """Seeds ``random`` and ``numpy.random``."""
    # numpy is imported by this module because a function that imports it first would find it seeded at random.
    random.seed(repr(seeds))
    if np is not None:
        np.random.seed(seeds)


def find(spec: str, folder: str, what: str = "function") -> Callable[..., Any]:
    """Imports ``module:NAME`` or ``FILE.py:NAME``, seen from a folder; ``what`` says in errors what it should be.

    Raises:
        LoadError: there is no such file, module or name, or importing it raised.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise LoadError(f"{spec!r} is not of the form module:{what} or FILE.py:{what}")
    path = Path(folder, place)
    if place.endswith(".py") and not path.is_file():
        raise LoadError(
            f"there is no file {path}{did_you_mean(path.name, {p.name for p in path.parent.glob('*.py')})}"
        )
    try:
        if place.endswith(".py"):
            if (beside := str(path.resolve().parent)) not in sys.path:
                sys.path.insert(0, beside)
            module = user_files.load(path)
        else:
            module = importlib.import_module(place)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            known = {p.stem for p in Path(folder).glob("*.py")} | {p.parent.name for p in Path(folder).glob("*/*.py")}
            raise LoadError(
                f"there is no module {place!r}, seen from {folder}{did_you_mean(place, known)}"
            ) from error
        raise LoadError(f"importing {place} {raised(error)}") from error
    loaded = getattr(module, name, None)
    if loaded is None:
        raise LoadError(f"{place} has no {what} {name!r}{instead_of(name, module)}")
    if not callable(loaded):
        raise LoadError(f"{name} of {place} is {shown(loaded)} and no {what}")
    return loaded


def attempt(call: Callable[[], Any], truths: Iterable[Any] = (), name: str = "ground_truth") -> Any:
    """Returns the outcome of a call of the user's code, or a string that says how it failed.

    Args:
        truths: the ground truths that the code had; see ``json_text``.
        name: what the code calls them.
    """
    try:
        return call()
    except BaseException as error:
        return failure(error, truths, name)


def failure(error: BaseException, truths: Iterable[Any] = (), name: str = "ground_truth") -> str:
    """Describes how the user's code failed; see ``attempt``."""
    if isinstance(error, Failed):
        return str(error)
    return raised(error) + next(filter(None, (json_text(truth, name) for truth in truths)), "")


def short(string: str, limit: int = 200) -> str:
    """Returns ``string``, without its middle if it is longer than ``limit`` characters.

    Example:
        >>> short("abcdefghij" * 2, 10)
        'abcde ... fghij'
    """
    return string if len(string) <= limit else f"{string[: limit // 2]} ... {string[-(limit // 2) :]}"


def shown(value: Any) -> str:
    """Returns a short form of a value in one line, with its type unless the form shows it."""
    form = short(" ".join(repr(value).split()))
    return form if type(value).__module__ == "builtins" else f"a {type(value).__name__}, {form}"


def raised(error: BaseException) -> str:
    """Describes an exception, with the last line of the user's own code in its traceback."""
    try:
        message = " ".join(str(error).split())
    except BaseException as other:
        message = f"(it has no message, since __str__ raised {type(other).__name__})"
    description = f"raised {type(error).__name__}" + (f": {short(message, 400)}" if message else "")
    modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, KeyError) and modules[-1:] == ["os"]:
        description += ", as reward.env (of environments env.variables) names the variables that functions get,"
    return description + user_files.place_of(error, str(Path(__file__).parent))


def number_of(value: Any) -> float | None:
    """Returns a number of Python, numpy or torch as a float; None for text and anything else.

    Example:
        >>> number_of(Decimal("0.5")), number_of("0.5")
        (0.5, None)
    """
    if not isinstance(value, numbers.Real | Decimal):
        # Scalars of numpy and torch have the shape (); scalars of text and complex numbers are none of ours.
        dtype = str(getattr(value, "dtype", ""))
        if isinstance(value, str | bytes) or getattr(value, "shape", None) != () or "complex" in dtype:
            return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def json_text(truth: Any, name: str = "ground_truth") -> str:
    """Returns a remark for an error about a ground truth with an object or a list: it comes as JSON text.

    Args:
        truth: the ground truth; other values than text get no remark.
        name: what the user's code calls it.

    Example:
        >>> json_text("[1, 2]")
        '; the ground truth is JSON text, as objects and lists in the data are: json.loads(ground_truth) reads it'
        >>> json_text("[1, 2"), json_text("42")
        ('', '')
    """
    try:
        is_text = truth[:1] in ("{", "[") and isinstance(loads(truth), dict | list)
    except (TypeError, ValueError, RecursionError):
        is_text = False
    remark = f"; the ground truth is JSON text, as objects and lists in the data are: json.loads({name}) reads it"
    return remark * is_text
