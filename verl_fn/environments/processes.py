"""The processes that run environments: jobs are shared among them, and one that hangs or crashes is replaced."""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from verl_fn.errors import UserError
from verl_fn.pool.playing import GROUPS, PROBLEMS
from verl_fn.pool.pool import Pool, Work
from verl_fn.state import EndReason

from . import Done
from .calls import HERMES

OLDEST = (3, 11)
INTERPRETER_SECONDS = 60.0


class EnvError(UserError, RuntimeError):
    """Raised where an environment cannot be used; the message names it and the problem."""


def check_interpreter(python: str) -> None:
    """Checks that a program is an interpreter that can run environments.

    Raises:
        EnvError: it cannot be run, or it is no Python of a version that is new enough.

    Example:
        >>> check_interpreter("/no/such/python")
        Traceback (most recent call last):
        verl_fn.environments.processes.EnvError: env.python: /no/such/python cannot be run (No such file or
        directory); set it to the interpreter of a virtual environment, such as .venv-env/bin/python
    """
    advice = "set it to the interpreter of a virtual environment, such as .venv-env/bin/python"
    # This runs in any version of Python, so that one that is too old is named.
    command = [python, "-c", "import sys; print('%d %d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INTERPRETER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise EnvError(f"env.python: {python} did not start within {INTERPRETER_SECONDS:g} s; {advice}") from None
    except (OSError, ValueError) as error:
        raise EnvError(
            f"env.python: {python} cannot be run ({getattr(error, 'strerror', error)}); {advice}"
        ) from error
    numbers = done.stdout.split()
    if done.returncode or len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        raise EnvError(f"env.python: {python} is no Python interpreter; {advice}")
    version = tuple(map(int, numbers))
    if version < OLDEST:
        raise EnvError(
            f"env.python: {python} is Python {version[0]}.{version[1]}, and environments need Python "
            f"{OLDEST[0]}.{OLDEST[1]} or later; make the virtual environment with a later one"
        )


@attrs.frozen
class Job:
    """A call of an environment.

    Attributes:
        problem: the fields of its problem, as values of JSON.
        replies: all replies of the model so far; without any, the conversation begins.
    """

    number: int
    seed: int
    problem: Mapping[str, Any]
    replies: tuple[str, ...] = ()
    group: int = 0

    @property
    def message(self) -> list[Any]:
        """Returns what the process gets."""
        return ["answer", self.number, self.seed, self.problem, self.replies]


@attrs.frozen
class Scoring:
    """A call that scores conversations of a group together.

    Attributes:
        jobs: the last job of each conversation: the one that has ended it.
    """

    seed: int
    jobs: tuple[Job, ...]

    @property
    def message(self) -> list[Any]:
        """Returns what the process gets."""
        return ["score", self.seed, [job.message[1:] for job in self.jobs]]


@attrs.frozen
class Failure:
    """Why a call has no result.

    Attributes:
        reason: ``env_timed_out`` or ``env_crashed``.
        problem: what the environment did.
    """

    reason: EndReason
    problem: str


@attrs.frozen
class Opening:
    """The first messages of a conversation in which the model can call tools.

    Attributes:
        messages: the model replies to them.
        tools: JSON schemas of functions, for the chat template to show to the model.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]


@attrs.frozen
class Scores:
    """The scores of a group, one for each conversation that was scored."""

    ends: tuple[Done, ...]


Call = Job | Scoring
Result = tuple[Mapping[str, Any], ...] | Opening | Done | Scores | Failure
"""Messages, or the end of a conversation, or the scores of a group, or why there is none of these."""


class EnvProcesses:
    """Runs a class of environments in processes that get harmless environment variables and answer in JSON.

    A call that takes too long, raises an error, ends its process or returns something else than messages or an end
    fails, and no other call. Its process is replaced, and conversations that it also had are repeated in the new one.
    If the class scores groups, one process has all conversations of a group.

    Args:
        name: ``module:Name`` or ``FILE.py:Name``, imported when this object is made.
        timeout: seconds that one call may take.
        num_workers: processes that share the conversations.
        folder: the folder that modules and files are looked up from, by default the current one.
        variables: environment variables that the processes get besides ``pool.pool.ENVIRONMENT``.
        python: the interpreter of the processes; empty for this one. Another one needs no packages.
        arguments: keyword arguments of the class, as values of JSON.
        calls: the format in which the model calls tools, as ``call_format`` returns it; empty if it is not known.

    Attributes:
        cancelled: another thread sets it to end a call; the call then raises an ``EnvError``.
        scores_groups: whether the class scores the conversations of a group together.

    Raises:
        EnvError: there is no such class, it has other methods or arguments, a variable is not set, or the interpreter
            cannot be used.
    """

    def __init__(
        self,
        name: str,
        timeout: float = 30.0,
        num_workers: int = 1,
        folder: str | os.PathLike[str] | None = None,
        variables: Sequence[str] = (),
        *,
        python: str = "",
        arguments: Mapping[str, Any] | None = None,
        calls: str = HERMES,
    ) -> None:
        self.calls = calls
        self.name, self._timeout = name, timeout
        if python:
            check_interpreter(python)
        try:
            json.dumps(arguments)
        except (TypeError, ValueError) as error:
            raise EnvError(f"env.arguments cannot be JSON ({error}); write dates and times as strings") from error
        self._num_workers = num_workers
        self._pool = Pool(
            "verl_fn.pool.playing",
            [name, dict(arguments or {}), calls],
            count=num_workers,
            folder=folder,
            key="env.name",
            variables=variables,
            variables_key="env.variables",
            python=python,
            error=EnvError,
        )
        self.cancelled = self._pool.cancelled
        # Starting the first process here lets a wrong name end the run before anything is sampled.
        self.scores_groups = self._pool.start([0]) == [GROUPS]

    def __call__(self, jobs: Sequence[Call]) -> list[Result]:
        """Returns the result of each job. Calls of a conversation come in order; all conversations begin together."""
        shares: dict[int, list[int]] = {}
        for place, job in enumerate(jobs):
            # Where the instances of the conversations are.
            one = job.jobs[0] if isinstance(job, Scoring) else job
            process = (one.group if self.scores_groups else one.number) % self._num_workers
            shares.setdefault(process, []).append(place)
        results: dict[int, Result] = {}
        self._pool.run({i: deque([self._work(jobs, places, results)]) for i, places in shares.items()})
        return [results[place] for place in range(len(jobs))]

    def _work(self, jobs: Sequence[Call], places: Sequence[int], results: dict[int, Result]) -> Work:
        """Returns the work of one process: the jobs at some places, whose results it writes."""

        def message(places: list[int]) -> Any:
            first = not any(isinstance(job := jobs[place], Scoring) or job.replies for place in places)
            return [first, [[place, *jobs[place].message] for place in places]]

        def end(place: int, outcome: Any) -> None:
            results[place] = _result(outcome)

        def fail(suspects: list[int], problem: str) -> None:
            late = f"took longer than env.timeout ({self._timeout:g} s)"
            results[suspects[0]] = Failure("env_crashed" if problem else "env_timed_out", problem or late)

        return Work(places, self._timeout, message, end, fail)

    def problems(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the problems that the environment brings, each with ``train`` or ``held_out``.

        Raises:
            EnvError: they cannot be read.
        """
        doing = f"reading the problems of {self.name}"
        try:
            for answer in self._pool.ask(0, PROBLEMS, doing, f"{doing}:"):
                if not answer:
                    return
                part, row = answer
                yield part, row
        finally:
            # Lines that were not read would be taken for results of the next call.
            self._pool.stop()


def _result(outcome: Any) -> Result:
    """Returns the result of a job that has ended; ``pool.playing`` says what the process sends."""
    match outcome:
        case {"end": [reward, acc]}:
            return Done(reward, acc)
        case {"ends": ends}:
            return Scores(tuple(Done(*end) for end in ends))
        case {"messages": messages, "tools": tools}:
            return Opening(tuple(messages), tuple(tools))
        case {"messages": messages}:
            return tuple(messages)
    return Failure("env_crashed", str(outcome))
