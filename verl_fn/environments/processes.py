"""The processes that run environments: jobs are shared among them, and one that hangs or crashes is replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import attrs

from verl_fn.errors import UserError
from verl_fn.rewards.child import START_SECONDS, Child, GarbledError, environment, garbled, one_line, parsed
from verl_fn.state import EndReason

from .calls import HERMES
from .worker import CLOSES, GROUPS, PROBLEMS

OLDEST = (3, 11)
INTERPRETER_SECONDS = 60.0
OF_INTERPRETER = ("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "CONDA_PREFIX")
"""Variables that describe the trainer's interpreter, and would lead another one to the trainer's packages."""


class EnvError(UserError, RuntimeError):
    """Raised where an environment cannot be used; the message names it and the problem."""


def check_interpreter(python: str) -> None:
    """Checks that a program is an interpreter that can run environments.

    Args:
        python: its path.

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


def variables_of_its_own(variables: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Returns environment variables without the trainer's interpreter's own.

    Args:
        variables: all variables of the processes.
        names: variables that the user names; they are kept.

    Example:
        >>> variables_of_its_own({"HOME": "/h", "PYTHONPATH": "/a", "VIRTUAL_ENV": "/b"}, ["PYTHONPATH"])
        {'HOME': '/h', 'PYTHONPATH': '/a'}
    """
    return {name: value for name, value in variables.items() if name in names or name not in OF_INTERPRETER}


SCRIPT = Path(__file__).with_name("worker.py")
# How long a call goes on after it was cancelled.
CANCEL_SECONDS = 0.5


@attrs.frozen
class Job:
    """A call of an environment.

    Attributes:
        number: of the conversation.
        seed: of its random numbers.
        problem: the fields of its problem, as values of JSON.
        replies: all replies of the model so far; without any, the conversation begins.
        group: the number of its group.
    """

    number: int
    seed: int
    problem: Mapping[str, Any]
    replies: tuple[str, ...] = ()
    group: int = 0

    @property
    def calls(self) -> int:
        """Returns how many calls a process makes that has none of the conversation's instances."""
        return len(self.replies) + 1

    @property
    def message(self) -> list[Any]:
        """Returns what the process gets."""
        return ["answer", self.number, self.seed, self.problem, self.replies]


@attrs.frozen
class Scoring:
    """A call that scores conversations of a group together.

    Attributes:
        seed: of its random numbers.
        jobs: the last job of each conversation: the one that has ended it.
    """

    seed: int
    jobs: tuple[Job, ...]

    @property
    def calls(self) -> int:
        """Returns how many calls a process makes that has none of the conversations' instances."""
        return sum(job.calls for job in self.jobs) + 1

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
class End:
    """The end of a conversation, as ``Done``."""

    reward: float
    acc: float


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

    ends: tuple[End, ...]


Call = Job | Scoring
Result = tuple[Mapping[str, Any], ...] | Opening | End | Scores | Failure
"""Messages, or the end of a conversation, or the scores of a group, or why there is none of these."""
_Results = dict[int, Result]


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
        variables: environment variables that the processes get besides ``child.ENVIRONMENT``.
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
        self.cancelled = threading.Event()
        self.scores_groups = False
        self._folder = str(Path(folder or ".").resolve())
        self._environment = environment(variables, "env.variables", EnvError)
        self._python, self._arguments = python or sys.executable, dict(arguments or {})
        if python:
            check_interpreter(python)
            self._environment = variables_of_its_own(self._environment, variables)
        try:
            json.dumps(self._arguments)
        except (TypeError, ValueError) as error:
            raise EnvError(f"env.arguments cannot be JSON ({error}); write dates and times as strings") from error
        self._children: list[Child | None] = [None] * num_workers
        weakref.finalize(self, _stop, self._children)
        # Starting the first process here lets a wrong name end the run before anything is sampled.
        self._child(0)

    def __call__(self, jobs: Sequence[Call]) -> list[Result]:
        """Returns the result of each job. Calls of a conversation come in order; all conversations begin together."""
        shares: dict[int, _Share] = {}
        for place, job in enumerate(jobs):
            # Where the instances of the conversations are.
            one = job.jobs[0] if isinstance(job, Scoring) else job
            process = (one.group if self.scores_groups else one.number) % len(self._children)
            shares.setdefault(process, _Share([])).places.append(place)
        results: dict[int, Result] = {}
        try:
            self._run(shares, jobs, results)
        except BaseException:
            # Late results would otherwise be read as results of the next call.
            _stop(self._children)
            raise
        return [results[place] for place in range(len(jobs))]

    def problems(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the problems that the environment brings, each with ``train`` or ``held_out``.

        Raises:
            EnvError: they cannot be read.
        """
        child = self._child(0)
        try:
            child.send(PROBLEMS, START_SECONDS)
            while True:
                for line in child.lines(START_SECONDS):
                    match parsed(line):
                        case []:
                            return
                        case [("train" | "held_out") as part, dict(row)]:
                            yield part, row
                        case str(problem) | [_, str(problem)]:
                            raise EnvError(f"reading the problems of {self.name}: {one_line(problem)}")
                        case _:
                            raise GarbledError(garbled(line))
        except TimeoutError:
            raise EnvError(f"reading the problems of {self.name} took longer than {START_SECONDS:g} s") from None
        except (EOFError, OSError):
            raise EnvError(f"reading the problems of {self.name} {child.death()}") from None
        except GarbledError as error:
            raise EnvError(f"reading the problems of {self.name}: the environment {error}") from None
        finally:
            # Lines that were not read would be taken for results of the next call.
            _stop(self._children)

    def _run(self, shares: dict[int, _Share], jobs: Sequence[Call], results: _Results) -> None:
        for i, share in shares.items():
            self._send(i, share, jobs, results)
        while shares:
            owners = {self._child(i).connection: i for i in shares}
            first = min(share.deadline for share in shares.values())
            ready = wait(list(owners), min(max(first - time.monotonic(), 0.0), CANCEL_SECONDS))
            if self.cancelled.is_set():
                raise EnvError(f"the call of {self.name} was cancelled")
            for connection, i in owners.items():
                share = shares[i]
                if connection in ready:
                    self._read(i, share, jobs, results)
                elif share.deadline < time.monotonic():
                    late = Failure("env_timed_out", f"took longer than env.timeout ({self._timeout:g} s)")
                    self._fail(i, share, late, jobs, results)
                if not share.places:
                    del shares[i]

    def _send(self, i: int, share: _Share, jobs: Sequence[Call], results: _Results) -> None:
        """Gives a process the jobs of its share that have no result."""
        child = self._child(i)
        share.sent, share.begun = list(share.places), {}
        share.deadline = time.monotonic() + self._timeout
        first = all(jobs[place].calls == 1 for place in share.places)
        chosen = [jobs[place].message for place in share.places]
        try:
            child.send([first, chosen], self._timeout)
        except OSError:
            self._fail(i, share, Failure("env_crashed", child.death()), jobs, results)

    def _read(self, i: int, share: _Share, jobs: Sequence[Call], results: _Results) -> None:
        """Reads what a process has reported."""
        child = self._child(i)
        try:
            for line in child.lines(0.0):
                at, result = _report(line)
                if (at, result) == (CLOSES, None):
                    share.deadline = time.monotonic() + self._timeout
                    continue
                place = share.sent[at] if 0 <= at < len(share.sent) else -1
                calls = share.begun.get(place, 0)
                # A job that began for ever would extend the time limit for ever.
                if place not in share.places or not _fits(result, jobs[place], calls):
                    raise GarbledError(garbled(line))
                share.deadline = time.monotonic() + self._timeout
                if result is None:
                    share.begun[place] = calls + 1
                else:
                    results[place] = result
                    share.places.remove(place)
        except (EOFError, OSError):
            self._fail(i, share, Failure("env_crashed", child.death()), jobs, results)
        except GarbledError as error:
            self._fail(i, share, Failure("env_crashed", str(error)), jobs, results)

    def _fail(
        self, i: int, share: _Share, failure: Failure, jobs: Sequence[Call], results: dict[int, Result]
    ) -> None:
        """Replaces a process; the job that it was at has failed, and the others of its share are made again."""
        child, self._children[i] = self._child(i), None
        child.stop()
        at = next((place for place in share.places if place in share.begun), next(iter(share.places), None))
        if at is not None:
            results[at] = failure
            share.places.remove(at)
        if share.places:
            self._send(i, share, jobs, results)

    def _child(self, i: int) -> Child:
        """Returns a process, and starts it if there is none."""
        child = self._children[i]
        if child is None:
            child = self._children[i] = Child(str(SCRIPT), self._folder, self._environment, self._python)
            try:
                greeting = child.greet([self._folder, self.name, self._arguments, self.calls], "env.name", EnvError)
                self.scores_groups = greeting == GROUPS
            except BaseException:
                self._children[i] = None
                child.stop()
                raise
        return child


@attrs.define
class _Share:
    """The jobs of one process.

    Attributes:
        places: the places of the jobs without a result.
        sent: the places of the jobs that the process was sent, in order.
        begun: how many calls each of them has begun.
        deadline: when the process counts as hung.
    """

    places: list[int]
    sent: list[int] = attrs.field(factory=list)
    begun: dict[int, int] = attrs.field(factory=dict)
    deadline: float = 0.0


def _fits(result: Result | None, job: Call, begun: int) -> bool:
    """Returns whether a process may report this about a job, of which it has begun so many calls."""
    if result is None:
        return begun < job.calls
    if isinstance(result, Scores):
        return isinstance(job, Scoring) and len(result.ends) == len(job.jobs)
    return isinstance(result, Failure) or isinstance(job, Job)


def _report(line: bytes) -> tuple[int, Result | None]:
    match parsed(line):
        case str(problem):
            raise GarbledError(one_line(problem))
        case [int(at), None]:
            return at, None
        case [int(at), str(problem)]:
            return at, Failure("env_crashed", one_line(problem))
        case [int(at), [float(reward), float(acc)]]:
            return at, End(reward, acc)
        case [int(at), {"rewards": [*rewards], "acc": [*accs]}] if len(rewards) == len(accs) and all(
            isinstance(number, float) for number in (*rewards, *accs)
        ):
            return at, Scores(tuple(map(End, rewards, accs)))
        case [int(at), [{"role": str(), "content": str()}, *_] as messages]:
            return at, tuple(messages)
        case [
            int(at),
            {"messages": [{"role": str(), "content": str()}, *_] as messages, "tools": [dict(), *_] as tools},
        ]:
            return at, Opening(tuple(messages), tuple(tools))
    raise GarbledError(garbled(line))


def _stop(children: list[Child | None]) -> None:
    for i, child in enumerate(children):
        if child is not None:
            children[i] = None
            child.stop()
