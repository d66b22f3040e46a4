"""Runs reward functions in a process that its parent may kill; the parent starts this file as a script.

The parent sends the names of the functions, then one message for each call: a function's number and its rows. The
worker reports every row twice, at its start and at its end, so that the parent knows which rows may hang. Messages
are lines of JSON. This module imports neither torch nor, where it is not installed, numpy.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import io
import math
import numbers
import os
import random
import socket
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from json import dumps, loads
from pathlib import Path
from types import coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_fn import user_files
    from verl_fn.errors import did_you_mean
else:

    def _neighbour(name):
        """Imports a module by its file, since the package may not be installed here."""
        path = Path(__file__).resolve().parents[1] / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"verl_fn_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    user_files, did_you_mean = _neighbour("user_files"), _neighbour("errors").did_you_mean

np: Any = importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None
KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
KINDS = ("plain", "async", "batched")
LARGEST = 1e30
LONGEST = 2**24
EXPECTED = f'it must return a number between -{LARGEST:g} and {LARGEST:g}, or a dict with "score"'
CONCURRENT_ROWS = 256
DISCONNECTED = os.EX_IOERR
NO_METRICS = (str, list, tuple, Mapping, type(None))

Row = Mapping[str, Any]
Judged = tuple[float, float | None, str | None, dict[str, float | str]]
Outcome = Judged | str
"""Score, acc, pred and metrics of a row, or a string that describes what the function did wrong. In the metrics, the
name of a type stands for an entry that is no number."""


class LoadError(Exception):
    """Raised for code of the user that cannot be used; the message gives the reason."""


def short(string: str, limit: int = 200) -> str:
    """Returns ``string``, without its middle if it is longer than ``limit`` characters.

    Example:
        >>> short("abcdefghij" * 2, 10)
        'abcde ... fghij'
    """
    return string if len(string) <= limit else f"{string[: limit // 2]} ... {string[-(limit // 2) :]}"


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
    if not callable(loaded):
        names = {n for n, value in vars(module).items() if callable(value)}
        raise LoadError(f"{place} has no {what} {name!r}{did_you_mean(name, names)}")
    return loaded


def load(spec: str, folder: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Imports a reward function, see ``find``, and binds the arguments that it has parameters for.

    Raises:
        LoadError: it cannot be imported, or takes other parameters.
    """
    function = find(spec, folder)
    try:
        parameters = inspect.signature(function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        bound = {name: value for name, value in arguments.items() if takes_all or name in parameters}
        function = partial(function, **bound) if bound else function
        inspect.signature(function).bind(**dict.fromkeys(BATCHED if kind(function) == "batched" else KEYWORDS))
    except (TypeError, ValueError) as error:
        raise LoadError(
            f"{spec} cannot be called with the keywords {', '.join(KEYWORDS)}, nor with the batched "
            f"{', '.join(BATCHED)}: {error}"
        ) from error
    return function


def kind(function: Callable[..., Any]) -> str:
    """Returns ``batched`` for a function of lists, ``async`` for a coroutine function, otherwise ``plain``.

    Example:
        >>> kind(lambda data_sources, solution_strs, **others: [])
        'batched'
    """
    if set(inspect.signature(function).parameters) & set(BATCHED):
        return "batched"
    return "async" if inspect.iscoroutinefunction(function) else "plain"


def judged(value: Any) -> Outcome:
    """Checks what a function returned for one row.

    Example:
        >>> judged({"score": True, "pred": 7, "length": 3, "note": "x"})
        (1.0, None, '7', {'length': 3.0, 'note': 'str'})
        >>> judged(None)
        'returned None; it must return a number between -1e+30 and 1e+30, or a dict with "score"'
    """
    if not isinstance(value, Mapping):
        score = number_of(value)
        if score is None or not _fits(score):
            return f"returned {shown(value)}; {EXPECTED}"
        return score, None, None, {}
    numbers_by_key: dict[str, float] = {}
    for key, entry in value.items():
        if not isinstance(key, str):
            return f"returned a dict with the key {shown(key)}; keys must be strings"
        if (number := number_of(entry)) is not None:
            numbers_by_key[str.__str__(key)] = number
        elif not isinstance(entry, NO_METRICS):
            return f'returned {shown(entry)} as "{key}"; it must be a number, or else a string, list or dict'
    if "score" not in numbers_by_key:
        return f"returned {shown(dict(value))}; {EXPECTED}"
    if value.get("acc") is not None and not 0 <= numbers_by_key.get("acc", -1.0) <= 1:
        return f'returned {shown(value["acc"])} as "acc"; it must be a number from 0 to 1'
    for key, number in numbers_by_key.items():
        if key != "pred" and not _fits(number):
            return f'returned {number} as "{key}"; it must be finite and smaller than {LARGEST:g}'
    pred = None if value.get("pred") is None else str(value["pred"])
    metrics: dict[str, float | str] = {
        str.__str__(key): numbers_by_key.get(key, type(entry).__name__)
        for key, entry in value.items()
        if key not in ("score", "acc", "pred") and entry is not None
    }
    return numbers_by_key["score"], numbers_by_key.get("acc"), pred, metrics


def _fits(number: float) -> bool:
    return -LARGEST < number < LARGEST


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


def shown(value: Any) -> str:
    """Returns a short form of a value, with its type unless the form shows it."""
    shown = short(repr(value))
    return shown if type(value).__module__ == "builtins" else f"a {type(value).__name__}, {shown}"


def raised(error: BaseException) -> str:
    """Describes an exception, with the last line of the user's own code in its traceback."""
    try:
        message = " ".join(str(error).split())
    except BaseException as other:
        message = f"(it has no message, since __str__ raised {type(other).__name__})"
    description = f"raised {type(error).__name__}" + (f": {short(message, 400)}" if message else "")
    return description + user_files.place_of(error, __file__)


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


def _checked(value: Any) -> Outcome:
    # The repr of a user's value may raise.
    try:
        return judged(value)
    except BaseException as error:
        return raised(error)


def seed_numbers(*seeds: int) -> None:
    # numpy is imported by this module because a function that imports it first would find it seeded at random.
    random.seed(repr(seeds))
    if np is not None:
        np.random.seed(seeds)


async def _finish(value: Awaitable[Any]) -> Any:
    return await value


@coroutine
def _on_own_numbers(value: Awaitable[Any], seed: int) -> Generator[Any, None, Any]:
    """Awaits ``value`` with random numbers of its own, independent of what other coroutines draw meanwhile."""
    inner = _finish(value)
    step: Callable[[], Any] = partial(inner.send, None)
    # For numpy, exchanging the bit generator is much faster than exchanging its state.
    own = np.random.MT19937(seed)
    use = np.random.set_bit_generator
    use(own)
    seed_numbers(seed)
    while True:
        use(own)
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
        state = random.getstate()
        try:
            yield awaited
            step = partial(inner.send, None)
        except BaseException as error:
            step = partial(inner.throw, error)
        random.setstate(state)


class Server:
    """Answers the calls of one parent.

    Args:
        timeout: seconds after which a coroutine is late.
        runner: the event loop, one for all calls, so that a client that a function keeps stays usable.
        send: reports a row to the parent: its index with None at its start, and with its outcome at its end.
    """

    def __init__(self, timeout: float, runner: asyncio.Runner, send: Callable[[list[Any]], None]):
        self._timeout, self._runner, self._send = timeout, runner, send

    def answer(self, function: Callable[..., Any], rows: Sequence[tuple[Row, int]]) -> None:
        """Judges every row, each with a seed for its random numbers, and reports each to the parent."""
        match kind(function):
            case "async":
                self._runner.run(self._together(function, rows))
            case "batched":
                self._send([0, None])
                for i, outcome in enumerate(self._batched(function, rows)):
                    self._send([i, outcome])
            case _:
                for i, (row, seed) in enumerate(rows):
                    self._send([i, None])
                    self._send([i, self._one(function, row, seed)])

    def _one(self, function: Callable[..., Any], row: Row, seed: int) -> Outcome:
        seed_numbers(seed)
        try:
            return judged(self._value(function(**row)))
        except BaseException as error:
            return raised(error) + json_text(row["ground_truth"])

    def _batched(self, function: Callable[..., Any], rows: Sequence[tuple[Row, int]]) -> list[Outcome]:
        seed_numbers(*(seed for _, seed in rows))
        lists = {many: [row[one] for row, _ in rows] for many, one in zip(BATCHED, KEYWORDS, strict=True)}
        try:
            values = list(self._value(function(**lists)))
        except BaseException as error:
            return [raised(error) + next(filter(None, map(json_text, lists["ground_truths"])), "")]
        if len(values) != len(rows):
            return [f"returned {len(values)} results for {len(rows)} responses"]
        return [_checked(value) for value in values]

    def _value(self, returned: Any) -> Any:
        # A decorated coroutine function can look like a plain one.
        return self._runner.run(_finish(returned)) if inspect.isawaitable(returned) else returned

    async def _together(self, function: Callable[..., Any], rows: Sequence[tuple[Row, int]]) -> None:
        # Thousands of rows at once could run out of file descriptors, or overload a server that the function calls.
        places = asyncio.Semaphore(CONCURRENT_ROWS)

        async def one(i: int, row: Row, seed: int) -> None:
            async with places:
                self._send([i, None])
                # A coroutine may ignore its cancellation, so the parent ends the process instead.
                alarm = asyncio.get_running_loop().call_later(self._timeout, self._send, [i, late(self._timeout)])
                outcome = await self._awaited(function, row, seed)
                alarm.cancel()
                self._send([i, outcome])

        await asyncio.gather(*(one(i, row, seed) for i, (row, seed) in enumerate(rows)))

    async def _awaited(self, function: Callable[..., Any], row: Row, seed: int) -> Outcome:
        try:
            return judged(await _on_own_numbers(function(**row), seed))
        except BaseException as error:
            return raised(error) + json_text(row["ground_truth"])


def late(timeout: float) -> str:
    """Describes a function that did not end in time."""
    return f"took longer than reward.timeout ({timeout:g} s)"


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


class Parent:
    """The connection to the parent: lines of JSON in both directions."""

    def __init__(self, descriptor: int) -> None:
        self._owner = os.getpid()
        self._socket = socket.socket(fileno=descriptor)
        # Programs and forks that a function starts would keep the connection open after the end of this process.
        self._socket.set_inheritable(False)
        os.register_at_fork(after_in_child=partial(_close, descriptor))
        self._lines = self._socket.makefile("rb")

    def receive(self) -> Any:
        """Returns the next message, or None if the parent has closed the connection."""
        line = self._lines.readline()
        return loads(line) if line else None

    def send(self, message: Any) -> None:
        """Sends a message; ends the process if it is a fork or if a function has closed the connection."""
        if os.getpid() != self._owner:
            os._exit(0)  # a function has forked, and the copy has returned from it too
        line = dumps(message).encode()
        if len(line) > LONGEST:
            line = dumps([message[0], f"returned {len(line)} bytes of JSON, more than {LONGEST}"]).encode()
        try:
            self._socket.sendall(line + b"\n")
        except OSError:
            os._exit(DISCONNECTED)


def serve(parent: Parent) -> None:
    """Loads the functions that the parent names, and answers its calls until it closes the connection."""
    folder, specs, timeout, arguments = parent.receive()
    sys.path.insert(0, folder)
    seed_numbers(0)
    try:
        functions = [load(spec, folder, arguments) for spec in specs]
        used = {name for function in functions for name in getattr(function, "keywords", ())}
        if unused := sorted(arguments.keys() - used):
            raise LoadError(
                f"no function has a parameter for reward.arguments.{unused[0]}; add it, or remove the key"
            )
    except LoadError as error:
        parent.send(str(error))
        return
    parent.send([kind(function) for function in functions])
    with asyncio.Runner() as runner:
        server = Server(timeout, runner, parent.send)
        while call := parent.receive():
            number, rows = call
            server.answer(functions[number], rows)


def main(connection: int, serve: Callable[[Parent], None]) -> None:
    """Serves the parent, whose connection has this file descriptor."""
    # With line buffering, a kill loses no line that a function has printed.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    parent = Parent(connection)
    try:
        serve(parent)
    except BaseException as error:
        # What a function has left behind, such as a signal handler or a task, may raise at any time.
        parent.send(raised(error))
    finally:
        # Threads that functions have left behind would delay a usual end.
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), serve)
