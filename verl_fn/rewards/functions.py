"""Rewards by functions of the user. They run in separate processes, so that a function that hangs can be ended."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_fn.pool.pool import Pool, Work
from verl_fn.pool.scoring import NOTHING, Keywords, Scored, late
from verl_fn.rewards.reward import Answer, RewardError, describe, fingerprint

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
        env: environment variables that the functions get besides ``pool.pool.ENVIRONMENT``.
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
        self._pool = Pool(
            "verl_fn.pool.scoring",
            [list(functions), timeout, dict(arguments or {})],
            count=num_workers,
            folder=folder,
            key="reward.functions",
            variables=env,
            variables_key="reward.env",
            error=RewardError,
        )
        # Starting the first process here lets a wrong name end the run before anything is sampled.
        (self._kinds,) = self._pool.start([0])

    def __call__(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Returns ``score``, ``pred`` and metrics of each answer, and ``acc`` if a function returns it.

        Raises:
            RewardError: a function raised, hung, ended its process, or returned neither a number nor a dict with
                ``score``, or a number and something else under one key; the message names the function and the
                answer.
        """
        results = self.judged(answers)
        for name, judged in zip(self._functions, results, strict=True):
            _check_kinds(name, judged, answers)
        return [self._combined(a, [by_function[i] for by_function in results]) for i, a in enumerate(answers)]

    def judged(self, answers: Sequence[Answer]) -> list[list[Scored]]:
        """Returns what each function returned for each answer.

        Raises:
            RewardError: as for a call, except for a number and something else under one key.
        """
        rows = [_row(answer) for answer in answers]
        seeds = [fingerprint(f"{a.problem.id} {a.problem.data_source} {a.text}") % 2**32 for a in answers]
        sent = list(zip(rows, seeds, strict=True))
        results: list[list[Scored]] = [[(0.0, None, None, {})] * len(rows) for _ in self._functions]
        queues: dict[int, deque[Work]] = {}
        for function, kind in enumerate(self._kinds):
            shares = min(1 if kind == "batched" else self._num_workers, len(rows))
            for share in range(shares):
                process = (share + function) % self._num_workers
                part = slice(share, None, shares)
                work = self._work(function, sent[part], answers[part], results[function], part)
                queues.setdefault(process, deque()).append(work)
        self._pool.run(queues)
        return results

    def _work(
        self,
        function: int,
        rows: Sequence[tuple[Keywords, int]],
        answers: Sequence[Answer],
        results: list[Scored],
        part: slice,
    ) -> Work:
        """Returns the work of one process: one function for some rows, whose results are a part of all results."""
        kind, places = self._kinds[function], range(len(results))[part]

        def failure(rows: Sequence[int], problem: str) -> RewardError:
            judged = describe(answers[rows[0]])
            if kind == "batched" and len(answers) > 1:
                judged = f"a batch of {len(answers)} with {judged}"
            elif len(rows) > 1:
                judged += f" (or one of {len(rows) - 1} others that had begun)"
            return RewardError(f"the reward function {self._functions[function]} {problem}, judging {judged}")

        def end(row: int, outcome: Any) -> None:
            if isinstance(outcome, str):
                raise failure([row], outcome)
            results[places[row]] = outcome

        def fail(suspects: list[int], problem: str) -> None:
            raise failure(suspects, problem or late(self._timeout) + " and let no other coroutine run" * is_async)

        is_async = kind == "async"
        # A worker itself reports a late coroutine. The grace period is for one that blocks the worker's event loop.
        seconds = self._timeout + GRACE_SECONDS * is_async
        return Work(range(len(answers)), seconds, lambda _: [function, list(rows)], end, fail)

    def _combined(self, answer: Answer, results: Sequence[Scored]) -> dict[str, Any]:
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


def _check_kinds(function: str, judged: Sequence[Scored], answers: Sequence[Answer]) -> None:
    """Raises RewardError if what a function returned under a key is a number for some answers and not for others."""
    first: dict[str, tuple[bool, str, Answer]] = {}
    for answer, (_, _, _, metrics) in zip(answers, judged, strict=True):
        for key, value in metrics.items():
            if value == NOTHING:
                continue
            kind = value if isinstance(value, str) else "number"
            is_number, other, where = first.setdefault(key, (kind == "number", kind, answer))
            if is_number != (kind == "number"):
                raise RewardError(
                    f"the reward function {function} returned {key!r} as a {other}, judging {describe(where)}, and "
                    f"as a {kind}, judging {describe(answer)}; return numbers, and None or no key where there is none"
                )


def _row(answer: Answer) -> Keywords:
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
