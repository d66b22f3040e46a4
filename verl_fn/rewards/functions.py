"""Rewards by functions of the user. They run in separate processes, so that a function that hangs can be ended."""

from __future__ import annotations

import functools
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_fn.rewards import worker as worker_script
from verl_fn.rewards.child import Child, GarbledError, Pool, Work, environment, garbled, one_line, parsed
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
        self._timeout, self._num_workers = timeout, num_workers
        place = str(Path(folder or ".").resolve())
        start = functools.partial(Child, worker_script.__file__, place, environment(env))
        greeting = [place, list(functions), timeout, dict(arguments or {})]
        self._pool = Pool(num_workers, start, greeting, "reward.functions", RewardError)
        # Starting the first process here lets a wrong name end the run before anything is sampled.
        (self._kinds,) = self._pool.start([0])
        if not isinstance(self._kinds, list) or not all(kind in KINDS for kind in self._kinds):
            self._pool.stop()
            raise RewardError(f"importing reward.functions {garbled(json.dumps(self._kinds).encode())}")

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
        queues: dict[int, deque[Work]] = {}
        for number, (name, kind) in enumerate(zip(self._functions, self._kinds, strict=True)):
            shares = min(1 if kind == "batched" else self._num_workers, len(rows))
            for share in range(shares):
                own = range(share, len(rows), shares)
                sent = [[rows[i], seeds[i]] for i in own]
                own_answers = [answers[i] for i in own]
                call = _Call(number, name, kind, sent, own_answers, own, results[number], self._timeout)
                queues.setdefault((share + number) % self._num_workers, deque()).append(call)
        self._pool.run(queues)
        for function, judged in zip(self._functions, results, strict=True):
            _check_kinds(function, judged, answers)
        return [self._combined(a, [by_function[i] for by_function in results]) for i, a in enumerate(answers)]

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


class _Call(Work):
    """Rows that one process judges by one function.

    Args:
        function: the function's number.
        name: the function, for errors.
        kind: of the function.
        message: what the process gets for each row.
        answers: the rows' answers.
        rows: the rows' places in ``results``.
        results: gets what the function returned.
        timeout: seconds that a row may take.
    """

    def __init__(
        self,
        function: int,
        name: str,
        kind: str,
        message: Sequence[Any],
        answers: Sequence[Answer],
        rows: Sequence[int],
        results: list[Judged],
        timeout: float,
    ) -> None:
        # A worker itself reports a late coroutine. The grace period is for one that blocks the worker's event loop.
        super().__init__(range(len(answers)), timeout + GRACE_SECONDS * (kind == "async"))
        self._late = late(timeout) + " and let no other coroutine run" * (kind == "async")
        self._function, self._name, self._kind, self._message = function, name, kind, message
        self._answers, self._rows, self._results = answers, rows, results

    def message(self) -> Any:
        return [self._function, self._message]

    def report(self, line: bytes) -> None:
        row, outcome = report_of(line)
        if isinstance(outcome, str):
            raise self._failure(outcome, row)
        # A row that began for ever would extend the time limit for ever.
        if row is None or row not in self.open or (outcome is None and self.open[row]):
            raise GarbledError(garbled(line))
        self.extend()
        if outcome is None:
            self.open[row] = 1
        else:
            self._results[self._rows[row]] = outcome
            del self.open[row]

    def failed(self, problem: str) -> None:
        raise self._failure(problem or self._late)

    def _failure(self, problem: str, row: int | None = None) -> RewardError:
        suspects = self.suspects() if row is None or row >= len(self._answers) else [row]
        judged = describe(self._answers[suspects[0]])
        if self._kind == "batched" and len(self._answers) > 1:
            judged = f"a batch of {len(self._answers)} with {judged}"
        elif len(suspects) > 1:
            judged += f" (or one of {len(suspects) - 1} others that had begun)"
        return RewardError(f"the reward function {self._name} {problem}, judging {judged}")


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


def report_of(line: bytes) -> tuple[int | None, Outcome | None]:
    """Returns the place of a row, with None if it has begun, otherwise with its outcome.

    A string in place of None stands for a failure of the whole call.

    Raises:
        GarbledError: the line is no report.
    """
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
