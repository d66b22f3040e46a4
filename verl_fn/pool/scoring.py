"""Runs reward functions in a worker.

The trainer sends the functions and their arguments, then calls: the number of a function, and rows. Each row is
reported when it begins and when it ends; of a batched function, the first row stands for all.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence, Set
from functools import partial
from types import coroutine
from typing import Any

from . import worker
from .worker import LARGEST, Failed, LoadError, Trainer, number_of, seed_numbers, shown

KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
EXPECTED = f'it must return a number between -{LARGEST:g} and {LARGEST:g}, or a dict with "score"'
CONCURRENT_ROWS = 256
NO_METRICS = (str, list, tuple, Mapping, type(None))
NOTHING = type(None).__name__

Keywords = Mapping[str, Any]
Scored = tuple[float, float | None, str | None, dict[str, float | str]]
"""Score, acc, pred and metrics of a row. In the metrics, the name of a type stands for an entry that is no number."""


def load(spec: str, folder: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Imports a reward function, see ``find``, and binds the arguments that it has parameters for.

    Raises:
        LoadError: it cannot be imported, or takes other parameters.
    """
    function = worker.find(spec, folder)
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


def outcome_of(value: Any) -> Scored:
    """Returns score, acc, pred and metrics of what a function returned for one row.

    Raises:
        Failed: it is no score.

    Example:
        >>> outcome_of({"score": True, "pred": 7, "length": 3, "note": "x"})
        (1.0, None, '7', {'length': 3.0, 'note': 'str'})
        >>> outcome_of(None)
        Traceback (most recent call last):
        verl_fn.pool.worker.Failed: returned None; it must return a number between -1e+30 and 1e+30, or a dict with
        "score"
    """
    if not isinstance(value, Mapping):
        score = number_of(value)
        if score is None or not _fits(score):
            raise Failed(f"returned {shown(value)}; {EXPECTED}")
        return score, None, None, {}
    numbers: dict[str, float] = {}
    for key, entry in value.items():
        if not isinstance(key, str):
            raise Failed(f"returned a dict with the key {shown(key)}; keys must be strings")
        if (number := number_of(entry)) is not None:
            numbers[key] = number
        elif not isinstance(entry, NO_METRICS):
            raise Failed(f'returned {shown(entry)} as "{key}"; it must be a number, or else a string, list or dict')
    if "score" not in numbers:
        raise Failed(f"returned {shown(dict(value))}; {EXPECTED}")
    if value.get("acc") is not None and not 0 <= numbers.get("acc", -1.0) <= 1:
        raise Failed(f'returned {shown(value["acc"])} as "acc"; it must be a number from 0 to 1')
    for key, number in numbers.items():
        if key != "pred" and not _fits(number):
            raise Failed(f'returned {number} as "{key}"; it must be finite and smaller than {LARGEST:g}')
    pred = None if value.get("pred") is None else str(value["pred"])
    metrics: dict[str, float | str] = {
        key: numbers.get(key, type(entry).__name__)
        for key, entry in value.items()
        if key not in ("score", "acc", "pred")
    }
    return numbers["score"], numbers.get("acc"), pred, metrics


def _fits(number: float) -> bool:
    return -LARGEST < number < LARGEST


async def _finish(value: Awaitable[Any]) -> Any:
    return await value


@coroutine
def _on_own_numbers(value: Awaitable[Any], seed: int) -> Generator[Any, None, Any]:
    """Awaits ``value`` with random numbers of its own, independent of what other coroutines draw meanwhile."""
    inner = _finish(value)
    step: Callable[[], Any] = partial(inner.send, None)
    # For numpy, exchanging the bit generator is much faster than exchanging its state.
    own = worker.np.random.MT19937(seed)
    use = worker.np.random.set_bit_generator
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
    """Answers the calls of the trainer.

    Args:
        timeout: seconds after which a coroutine is late.
        runner: the event loop, one for all calls, so that a client that a function keeps stays usable.
        send: reports a row to the trainer: its number with None when it begins, and with its outcome when it ends.
    """

    def __init__(self, timeout: float, runner: asyncio.Runner, send: Callable[[list[Any]], None]) -> None:
        self._timeout, self._runner, self._send = timeout, runner, send

    def answer(self, function: Callable[..., Any], rows: Sequence[tuple[Keywords, int]]) -> None:
        """Scores every row, each with a seed for its random numbers."""
        match kind(function):
            case "async":
                self._runner.run(self._together(function, rows))
            case "batched":
                self._batched(function, rows)
            case _:
                for i, (row, seed) in enumerate(rows):
                    self._send([i, None])
                    seed_numbers(seed)
                    self._send([i, worker.attempt(partial(self._one, function, row), [row["ground_truth"]])])

    def _one(self, function: Callable[..., Any], row: Keywords) -> Scored:
        return outcome_of(self._value(function(**row)))

    def _batched(self, function: Callable[..., Any], rows: Sequence[tuple[Keywords, int]]) -> None:
        self._send([0, None])
        seed_numbers(*(seed for _, seed in rows))
        lists = {many: [row[one] for row, _ in rows] for many, one in zip(BATCHED, KEYWORDS, strict=True)}
        try:
            returned = self._value(function(**lists))
            if isinstance(returned, Mapping | Set):
                raise Failed(f"returned {shown(returned)} for {len(rows)} responses; it must be a list of results")
            values = list(returned)
            if len(values) != len(rows):
                raise Failed(f"returned {len(values)} results for {len(rows)} responses")
        except BaseException as error:
            self._send([0, worker.failure(error, lists["ground_truths"])])
            return
        for i, value in enumerate(values):
            self._send([i, worker.attempt(partial(outcome_of, value))])

    def _value(self, returned: Any) -> Any:
        # A decorated coroutine function can look like a plain one.
        return self._runner.run(_finish(returned)) if inspect.isawaitable(returned) else returned

    async def _together(self, function: Callable[..., Any], rows: Sequence[tuple[Keywords, int]]) -> None:
        # Thousands of rows at once could run out of file descriptors, or overload a server that the function calls.
        places = asyncio.Semaphore(CONCURRENT_ROWS)

        async def one(i: int, row: Keywords, seed: int) -> None:
            async with places:
                self._send([i, None])
                # A coroutine may ignore its cancellation, so the trainer ends the process instead.
                alarm = asyncio.get_running_loop().call_later(self._timeout, self._send, [i, late(self._timeout)])
                try:
                    outcome: Any = outcome_of(await _on_own_numbers(function(**row), seed))
                except BaseException as error:
                    outcome = worker.failure(error, [row["ground_truth"]])
                alarm.cancel()
                self._send([i, outcome])

        await asyncio.gather(*(one(i, row, seed) for i, (row, seed) in enumerate(rows)))


def late(timeout: float) -> str:
    """Describes a function that did not end in time."""
    return f"took longer than reward.timeout ({timeout:g} s)"


def serve(trainer: Trainer) -> None:
    """Loads the functions that the trainer names, and answers its calls until it closes the connection."""
    folder, specs, timeout, arguments = trainer.receive()
    sys.path.insert(0, folder)
    functions = [load(spec, folder, arguments) for spec in specs]
    used = {name for function in functions for name in getattr(function, "keywords", ())}
    if unused := sorted(arguments.keys() - used):
        raise LoadError(f"no function has a parameter for reward.arguments.{unused[0]}; add it, or remove the key")
    trainer.send([kind(function) for function in functions])
    with asyncio.Runner() as runner:
        server = Server(timeout, runner, trainer.send)
        while call := trainer.receive():
            number, rows = call
            server.answer(functions[number], rows)
