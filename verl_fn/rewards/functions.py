"""Rewards by functions of the user. They run in separate processes, so that a function that hangs can be ended."""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import attrs

from verl_fn.rewards import worker as worker_script
from verl_fn.rewards.child import Child, GarbledError, environment, garbled, one_line, parsed
from verl_fn.rewards.reward import Answer, RewardError, describe, fingerprint
from verl_fn.rewards.worker import KINDS, Judged, Outcome, Row, late

GRACE_SECONDS = 1.0


class RewardFunctions:
    """Judges answers by the weighted sum of functions with verl's signature.

    A function is called with the keywords ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info``. It
    returns a number, or a dict with ``score``. The rows of an ``async`` function run concurrently. A function whose
    parameters have verl's batched names (``data_sources`` and so on) is called once, with lists.

    Processes serve many calls and are replaced after a failure. They end with this object or with the process that
    made it, and so does every process that a function has started. A process answers in JSON, and gets neither the
    keys nor most of the other variables of the environment. That is no sandbox: a function may do what the user may.

    Scores are repeatable, whatever the number of workers and the order of rows. Before each call ``random`` and
    ``numpy.random`` are seeded from the problem's id, its source and the response (a batched call from these of all
    its rows), and string hashes are the same in every process. A function must seed any other generator itself.
    State that a function keeps between calls is local to one worker and is not part of a checkpoint, so scores that
    depend on it are not the same after a resume.

    Args:
        functions: ``module:function`` or ``FILE.py:function``, imported when this object is made.
        weights: the weight of each function's score, by default 1.
        timeout: seconds that one call may take.
        num_workers: processes that share the rows.
        folder: the folder that modules and files are looked up from, by default the current one.
        env: environment variables that the functions get besides ``child.ENVIRONMENT``.
        arguments: further keyword arguments, values of JSON; each function gets the ones that it has parameters for.

    Raises:
        RewardError: a function does not exist or cannot be called with these keywords, no function has a parameter
            for an argument, or a variable is not set.
    """

    def __init__(
        self,
        functions: Sequence[str],
        weights: Sequence[float] = (),
        timeout: float = 30.0,
        num_workers: int = 1,
        folder: str | os.PathLike[str] | None = None,
        env: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._functions, self._names = tuple(functions), _names(functions)
        self._weights = tuple(weights) or (1.0,) * len(functions)
        self._timeout, self._num_workers, self._arguments = timeout, num_workers, dict(arguments or {})
        self._folder = str(Path(folder or ".").resolve())
        self._environment = environment(env)
        self._workers: list[RewardProcess] = []
        self._kinds: list[str] = []
        weakref.finalize(self, _stop, self._workers)
        # Starting the first process here lets a wrong name end the run before anything is sampled.
        self._start(1)

    def __call__(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Returns ``score``, ``pred`` and metrics of each answer, and ``acc`` if a function returns it.

        Raises:
            RewardError: a function raised, hung, ended its process, or returned neither a number nor a dict with
                ``score``, or a number and something else under one key; the message names the function and the
                answer.
        """
        rows = [_row(answer) for answer in answers]
        seeds = [fingerprint(f"{a.problem.id} {a.problem.data_source} {a.text}") % 2**32 for a in answers]
        results: list[list[Judged]] = [[(0.0, None, None, {})] * len(rows) for _ in self._functions]
        try:
            self._run(self._calls(len(rows)), answers, rows, seeds, results)
        except BaseException:
            # Late results of the other processes would otherwise be read as results of the next call.
            _stop(self._workers)
            raise
        for function, judged in zip(self._functions, results, strict=True):
            _check_kinds(function, judged, answers)
        return [self._combined(a, [by_function[i] for by_function in results]) for i, a in enumerate(answers)]

    def _calls(self, rows: int) -> list[_Call]:
        calls = []
        for number, kind in enumerate(self._kinds):
            shares = min(1 if kind == "batched" else self._num_workers, rows)
            calls += [_Call(number, list(range(rows))[share::shares]) for share in range(shares)]
        return calls

    def _run(
        self,
        calls: Sequence[_Call],
        answers: Sequence[Answer],
        rows: Sequence[Row],
        seeds: Sequence[int],
        results: list[list[Judged]],
    ) -> None:
        self._start(min(self._num_workers, len(calls)))
        idle, pending = list(self._workers), deque(calls)
        busy: dict[socket.socket, tuple[RewardProcess, _Call]] = {}
        while pending or busy:
            while idle and pending:
                worker, call = idle.pop(), pending.popleft()
                busy[worker.connection] = worker, call
                self._extend(call)
                try:
                    worker.send([call.function, [[rows[i], seeds[i]] for i in call.rows]], self._timeout)
                except TimeoutError:
                    raise self._failure(call, self._late(call), answers) from None
                except OSError:
                    raise self._failure(call, worker.death(), answers) from None
            first = min(call.deadline for _, call in busy.values())
            ready = wait(list(busy), max(first - time.monotonic(), 0.0))
            for connection, (worker, call) in list(busy.items()):
                if connection in ready:
                    self._read(worker, call, answers, results)
                if not call.unfinished:
                    del busy[connection]
                    idle.append(worker)
                elif call.deadline < time.monotonic():
                    raise self._failure(call, self._late(call), answers)

    def _read(
        self, worker: RewardProcess, call: _Call, answers: Sequence[Answer], results: list[list[Judged]]
    ) -> None:
        """Reads what a worker has reported of a call."""
        try:
            for row, outcome in worker.reports():
                if isinstance(outcome, str):
                    raise self._failure(call, outcome, answers, row)
                # A row that began for ever would extend the time limit for ever.
                if row is None or row not in call.unfinished or (outcome is None and call.unfinished[row]):
                    raise GarbledError(garbled(f"row {row}, {outcome}".encode()))
                self._extend(call)
                if outcome is None:
                    call.unfinished[row] = True
                else:
                    results[call.function][call.rows[row]] = outcome
                    del call.unfinished[row]
        except (EOFError, OSError):
            raise self._failure(call, worker.death(), answers) from None
        except GarbledError as error:
            raise self._failure(call, str(error), answers) from None

    def _extend(self, call: _Call) -> None:
        # A worker itself reports a late coroutine. The grace period is for one that blocks the worker's event loop.
        grace = GRACE_SECONDS if self._kinds[call.function] == "async" else 0.0
        call.deadline = time.monotonic() + self._timeout + grace

    def _late(self, call: _Call) -> str:
        blocks = " and let no other coroutine run" if self._kinds[call.function] == "async" else ""
        return late(self._timeout) + blocks

    def _failure(self, call: _Call, problem: str, answers: Sequence[Answer], row: int | None = None) -> RewardError:
        suspects = call.suspects() if row is None or row >= len(call.rows) else [row]
        judged = describe(answers[call.rows[suspects[0]]])
        if self._kinds[call.function] == "batched" and len(call.rows) > 1:
            judged = f"a batch of {len(call.rows)} with {judged}"
        elif len(suspects) > 1:
            judged += f" (or one of {len(suspects) - 1} others that had begun)"
        return RewardError(f"the reward function {self._functions[call.function]} {problem}, judging {judged}")

    def _combined(self, answer: Answer, results: Sequence[Judged]) -> dict[str, Any]:
        """Combines what the functions returned for an answer; each function's metrics carry its name."""
        score = sum(weight * result[0] for weight, result in zip(self._weights, results, strict=True))
        pred = next((result[2] for result in results if result[2] is not None), answer.text.strip())
        combined: dict[str, Any] = {"score": score, "pred": pred}
        # As in verl, only a function that returns acc says which answers are right.
        if (acc := next((result[1] for result in results if result[1] is not None), None)) is not None:
            combined["acc"] = acc
        for name, (own_score, _, _, metrics) in zip(self._names, results, strict=True):
            prefix = f"{name}/" if len(results) > 1 else ""
            if prefix:
                combined[f"{prefix}score"] = own_score
            combined |= {f"{prefix}{key}": value for key, value in metrics.items() if not isinstance(value, str)}
        return combined

    def _start(self, count: int) -> None:
        """Starts processes until ``count`` live ones have loaded the functions."""
        for worker in [w for w in self._workers if not w.is_ready()]:
            self._workers.remove(worker)
            worker.stop()
        try:
            started = [RewardProcess(self._folder, self._environment) for _ in range(count - len(self._workers))]
            self._workers += started
            for worker in started:
                self._kinds = worker.load(self._functions, self._folder, self._timeout, self._arguments)
        except BaseException:
            _stop(self._workers)
            raise


@attrs.define(eq=False)
class _Call:
    """Rows that one worker judges by one function.

    Attributes:
        function: the function's number.
        rows: the rows' numbers in the batch.
        deadline: when the call counts as hung unless the worker reports a row before.
        unfinished: the rows without a result, by their place in ``rows``, and whether each has begun.
    """

    function: int
    rows: list[int]
    deadline: float = 0.0
    unfinished: dict[int, bool] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.unfinished = dict.fromkeys(range(len(self.rows)), False)

    def suspects(self) -> list[int]:
        """Returns the rows that may have stopped the worker from responding."""
        return [i for i, begun in self.unfinished.items() if begun] or list(self.unfinished)[:1]


def _check_kinds(function: str, judged: Sequence[Judged], answers: Sequence[Answer]) -> None:
    """Checks that what a function returned under a key is a number for all answers for which it has the key, or none.

    Raises:
        RewardError: it is a number for some answers only.
    """
    first: dict[str, tuple[bool, str, Answer]] = {}
    for answer, (_, _, _, metrics) in zip(answers, judged, strict=True):
        for key, value in metrics.items():
            kind = value if isinstance(value, str) else "number"
            is_number, other, where = first.setdefault(key, (kind == "number", kind, answer))
            if is_number != (kind == "number"):
                raise RewardError(
                    f"the reward function {function} returned {key!r} as a {other}, judging {describe(where)}, and "
                    f"as a {kind}, judging {describe(answer)}; return numbers, and None or no key where there is none"
                )


def _row(answer: Answer) -> Row:
    """Returns what a function gets, as values of JSON.

    Raises:
        RewardError: the problem's ``extra_info`` cannot be JSON.
    """
    problem, extra = answer.problem, dict(answer.problem.extra_info)
    try:
        json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(f"extra_info cannot be JSON ({error}), judging {describe(answer)}") from error
    return {
        "data_source": problem.data_source,
        "solution_str": answer.text,
        "ground_truth": problem.answer,
        "extra_info": extra,
    }


def _stop(workers: list[RewardProcess]) -> None:
    while workers:
        workers.pop().stop()


def _names(functions: Sequence[str]) -> list[str]:
    """Returns short names for metrics: each function's name, after its module's and its folders' as far as needed."""
    paths = []
    for spec in functions:
        place, _, name = spec.rpartition(":")
        file = place.endswith(".py")
        paths.append([*(Path(place).with_suffix("").parts if file else place.split(".")), name])
    names = []
    for path in paths:
        if paths.count(path) > 1:
            raise RewardError(f"reward.functions has {'.'.join(path[-2:])} twice; their metrics need different names")
        length = next(n for n in range(1, len(path) + 1) if sum(path[-n:] == other[-n:] for other in paths) == 1)
        names.append(".".join(path[-length:]))
    return names


class RewardProcess(Child):
    """A process that runs reward functions.

    Args:
        folder: the current folder of the process.
        environment: its environment variables.
    """

    def __init__(self, folder: str, environment: Mapping[str, str]) -> None:
        super().__init__(worker_script.__file__, folder, environment)

    def load(self, functions: Sequence[str], folder: str, timeout: float, arguments: Mapping[str, Any]) -> list[str]:
        """Loads the functions in the process, with their arguments, and returns the kind of each.

        Raises:
            RewardError: a function cannot be loaded.
        """
        reply = self.greet([folder, list(functions), timeout, arguments], "reward.functions", RewardError)
        match reply:
            case [*kinds] if len(kinds) == len(functions) and all(kind in KINDS for kind in kinds):
                return kinds
        raise RewardError(f"importing reward.functions {garbled(json.dumps(reply).encode())}")

    def reports(self) -> list[tuple[int | None, Outcome | None]]:
        """Returns what has arrived: the place of each row, with None if it has begun, otherwise with its outcome.

        A string in place of None stands for a failure of the whole call.

        Raises:
            EOFError, OSError: the process has ended or closed its connection.
            GarbledError: something other than reports has arrived.
        """
        return [_report(line) for line in self.lines(0.0)]


def _report(line: bytes) -> tuple[int | None, Outcome | None]:
    match parsed(line):
        case str(problem):
            return None, one_line(problem)
        case [int(row), None]:
            return row, None
        case [int(row), str(problem)]:
            return row, one_line(problem)
        case [int(row), [float(score), float() | None as acc, str() | None as pred, dict(metrics)]] if all(
            isinstance(value, float | str) for value in metrics.values()
        ):
            return row, (score, acc, pred, metrics)
    raise GarbledError(garbled(line))
