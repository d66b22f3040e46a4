"""Runs reward functions in a process that its parent may kill: ``python -m verl_fn.rewards.worker``.

The parent sends what to load, then calls: the number of a function and its rows. Each row is answered twice, when
it begins and when it has ended, so that the parent knows which may hang. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import difflib
import fcntl
import importlib
import importlib.util
import inspect
import io
import math
import numbers
import os
import random
import select
import signal
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, coroutine
from typing import Any

import numpy as np

KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
WANTED = 'it must return a finite number, or a dict with "score"'
CONCURRENT_ROWS = 256
LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})

Row = Mapping[str, Any]
Judged = tuple[float, float | None, str | None, dict[str, float]]
Outcome = Judged | str
"""Score, acc, pred and metrics of a row; or a text: what the function did wrong."""


class LoadError(Exception):
    """A reward function that cannot be used, and why."""


def short(text: str, limit: int = 200) -> str:
    """``text`` with its middle left out where it is longer than ``limit`` characters.

    >>> short("abcdefghij" * 2, 10)
    'abcde ... fghij'
    """
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-(limit // 2) :]}"


def load(spec: str, folder: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``FILE.py:function`` names, seen from ``folder``.

    Raises:
        LoadError: there is no such file, module or function, importing it raised, or it takes other parameters.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise LoadError(f"{spec!r} is not of the form module:function or FILE.py:function")
    path = Path(folder, place)
    if place.endswith(".py") and not path.is_file():
        raise LoadError(f"there is no file {path}{nearest(path.name, {p.name for p in path.parent.glob('*.py')})}")
    try:
        module = _file(path) if place.endswith(".py") else importlib.import_module(place)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            found = {p.stem for p in Path(folder).glob("*.py")} | {p.parent.name for p in Path(folder).glob("*/*.py")}
            raise LoadError(f"there is no module {place!r}, seen from {folder}{nearest(place, found)}") from error
        raise LoadError(f"importing {place} {_raised(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = {n for n, value in vars(module).items() if callable(value)}
        raise LoadError(f"{place} has no function {name!r}{nearest(name, found)}")
    try:
        inspect.signature(function).bind(**dict.fromkeys(BATCHED if kind(function) == "batched" else KEYWORDS))
    except (TypeError, ValueError) as error:
        raise LoadError(
            f"{spec} cannot be called with the keywords {', '.join(KEYWORDS)}, nor with the batched "
            f"{', '.join(BATCHED)}: {error}"
        ) from error
    return function


def nearest(name: str, known: Sequence[str] | set[str]) -> str:
    """An offer of the known name that is most like ``name``, empty where none is.

    >>> nearest("compute_scor", ["compute_score", "np"])
    '; did you mean compute_score?'
    """
    near = difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def kind(function: Callable[..., Any]) -> str:
    """``batched`` for a function of lists, ``async`` for a coroutine function, else ``plain``.

    >>> kind(lambda data_sources, solution_strs, **others: [])
    'batched'
    """
    if set(inspect.signature(function).parameters) & set(BATCHED):
        return "batched"
    return "async" if inspect.iscoroutinefunction(function) else "plain"


def judged(value: Any) -> Outcome:
    """What a function returned for one row, checked.

    >>> judged({"score": True, "pred": 7, "length": 3, "note": "x"})
    (1.0, None, '7', {'length': 3.0})
    >>> judged([0.5])
    'returned [0.5]; it must return a finite number, or a dict with "score"'
    """
    if not isinstance(value, Mapping):
        score = _number(value)
        if score is None or not math.isfinite(score):
            return f"returned {short(repr(value))}; {WANTED}"
        return score, None, None, {}
    numeric = {str(key): number for key, entry in value.items() if (number := _number(entry)) is not None}
    if "score" not in numeric:
        return f"returned {short(repr(dict(value)))}; {WANTED}"
    if "acc" in value and "acc" not in numeric:
        return f'returned {short(repr(value["acc"]))} as "acc"; it must be a number'
    for key, number in numeric.items():
        if key != "pred" and not math.isfinite(number):
            return f'returned {number} as "{key}"; it must be finite'
    pred = None if value.get("pred") is None else str(value["pred"])
    extra = {key: number for key, number in numeric.items() if key not in ("score", "acc", "pred")}
    return numeric["score"], numeric.get("acc"), pred, extra


def _number(value: Any) -> float | None:
    # The numbers of numpy and torch are those of shape ().
    if not isinstance(value, numbers.Real) and (isinstance(value, str) or getattr(value, "shape", None) != ()):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _file(path: Path) -> ModuleType:
    name = f"reward_file:{path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(path.resolve().parent))
    # Dataclasses and pickle look their module up by name.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _raised(error: BaseException) -> str:
    """What was raised, and the last line of the user's own code that it came through."""
    files = [f for f in traceback.extract_tb(error.__traceback__) if f.filename and f.filename != __file__]
    frames = [f for f in files if not f.filename.startswith("<")]
    own = [f for f in frames if not f.filename.startswith(LIBRARIES)] or frames
    try:
        text = " ".join(str(error).split())
    except BaseException as other:
        text = f"(its text cannot be had, __str__ raised {type(other).__name__})"
    what = f"raised {type(error).__name__}" + (f": {short(text, 400)}" if text else "")
    return what + (f" (at {own[-1].filename}:{own[-1].lineno})" if own else "")


def _checked(value: Any) -> Outcome:
    # Even to show a value may raise.
    try:
        return judged(value)
    except BaseException as error:
        return _raised(error)


def _seed(*seeds: int) -> None:
    # numpy is imported above: a function that imports it while it runs would find it seeded by chance.
    random.seed(repr(seeds))
    np.random.seed(seeds)


async def _finish(value: Awaitable[Any]) -> Any:
    return await value


@coroutine
def _on_own_numbers(value: Awaitable[Any], seed: int) -> Generator[Any, None, Any]:
    """Finish ``value`` on random numbers of its own, whatever others draw while it waits."""
    inner = _finish(value)
    step: Callable[[], Any] = partial(inner.send, None)
    # Another generator in its place costs numpy much less time than another state.
    own = np.random.MT19937(seed)
    use = np.random.set_bit_generator  # type: ignore[attr-defined]
    use(own)
    _seed(seed)
    while True:
        use(own)
        try:
            waited = step()
        except StopIteration as end:
            return end.value
        state = random.getstate()
        try:
            yield waited
            step = partial(inner.send, None)
        except BaseException as error:
            step = partial(inner.throw, error)
        random.setstate(state)


class Server:
    """Answers the calls of one parent.

    Args:
        timeout: seconds after which a coroutine is late.
        runner: holds the event loop, one for all calls, so that a client kept between them stays usable.
        tell: sends a row's index with None where it begins, with its outcome where it has ended.
    """

    def __init__(self, timeout: float, runner: asyncio.Runner, tell: Callable[[tuple[int, Outcome | None]], None]):
        self._timeout, self._runner, self._tell = timeout, runner, tell

    def answer(self, function: Callable[..., Any], rows: Sequence[tuple[Row, int]]) -> None:
        """Judge every row, each with a seed for its random numbers, and tell of each."""
        match kind(function):
            case "async":
                self._runner.run(self._together(function, rows))
            case "batched":
                self._tell((0, None))
                for i, outcome in enumerate(self._batched(function, rows)):
                    self._tell((i, outcome))
            case _:
                for i, (row, seed) in enumerate(rows):
                    self._tell((i, None))
                    self._tell((i, self._one(function, row, seed)))

    def _one(self, function: Callable[..., Any], row: Row, seed: int) -> Outcome:
        _seed(seed)
        try:
            return judged(self._value(function(**row)))
        except BaseException as error:
            return _raised(error)

    def _batched(self, function: Callable[..., Any], rows: Sequence[tuple[Row, int]]) -> list[Outcome]:
        _seed(*(seed for _, seed in rows))
        lists = {many: [row[one] for row, _ in rows] for many, one in zip(BATCHED, KEYWORDS, strict=True)}
        try:
            values = list(self._value(function(**lists)))
        except BaseException as error:
            return [_raised(error)]
        if len(values) != len(rows):
            return [f"returned {len(values)} results for {len(rows)} responses"]
        return [_checked(value) for value in values]

    def _value(self, returned: Any) -> Any:
        # A decorator may hide that a function is a coroutine function.
        return self._runner.run(_finish(returned)) if inspect.isawaitable(returned) else returned

    async def _together(self, function: Callable[..., Any], rows: Sequence[tuple[Row, int]]) -> None:
        # A batch of thousands would run out of files, or be turned away by the server that functions ask.
        places = asyncio.Semaphore(CONCURRENT_ROWS)

        async def one(i: int, row: Row, seed: int) -> None:
            async with places:
                self._tell((i, None))
                # Not by cancelling: a coroutine may swallow that. The parent ends the process.
                alarm = asyncio.get_running_loop().call_later(self._timeout, self._tell, (i, late(self._timeout)))
                outcome = await self._awaited(function, row, seed)
                alarm.cancel()
                self._tell((i, outcome))

        await asyncio.gather(*(one(i, row, seed) for i, (row, seed) in enumerate(rows)))

    async def _awaited(self, function: Callable[..., Any], row: Row, seed: int) -> Outcome:
        try:
            return judged(await _on_own_numbers(function(**row), seed))
        except BaseException as error:
            return _raised(error)


def late(timeout: float) -> str:
    """What is said of a function that did not end in time."""
    return f"took longer than reward.timeout ({timeout:g} s)"


def _die_with(lifeline: int) -> None:
    """Have the kernel end this process and its group when the other end of a pipe closes, even inside a regex."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
    # Linux only; elsewhere the signal is SIGIO, which ends those that do not handle it.
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit()


def main(connection: int, lifeline: int) -> None:
    """Serve the parent, which made this process the leader of a group; both are file descriptors."""
    _die_with(lifeline)
    # Subprocesses that held the connection would hide the end of this process.
    for end in (connection, lifeline):
        os.set_inheritable(end, False)
    # A kill loses no line that a function has printed.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    with Connection(connection) as parent, asyncio.Runner() as runner:
        folder, specs, timeout = parent.recv()
        sys.path.insert(0, folder)
        _seed(0)
        try:
            functions = [load(spec, folder) for spec in specs]
        except LoadError as error:
            parent.send(str(error))
            return
        parent.send([kind(function) for function in functions])
        server = Server(timeout, runner, parent.send)
        while True:
            try:
                number, rows = parent.recv()
            except EOFError:
                os.killpg(os.getpid(), signal.SIGKILL)
                return
            server.answer(functions[number], rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
