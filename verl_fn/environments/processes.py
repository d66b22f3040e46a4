"""The processes that run environments: jobs are shared among them, and one that hangs or crashes is replaced."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.errors import UserError
from verl_fn.rewards.child import (
    START_SECONDS,
    Child,
    GarbledError,
    Pool,
    Work,
    environment,
    garbled,
    one_line,
    parsed,
)
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
        self._folder = str(Path(folder or ".").resolve())
        allowed = environment(variables, "env.variables", EnvError)
        if python:
            check_interpreter(python)
            allowed = variables_of_its_own(allowed, variables)
        try:
            json.dumps(arguments)
        except (TypeError, ValueError) as error:
            raise EnvError(f"env.arguments cannot be JSON ({error}); write dates and times as strings") from error
        start = functools.partial(Child, str(SCRIPT), self._folder, allowed, python or sys.executable)
        greeting = [self._folder, self.name, dict(arguments or {}), self.calls]
        self._pool, self._num_workers = Pool(num_workers, start, greeting, "env.name", EnvError), num_workers
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
        self._pool.run({i: deque([_Share(places, jobs, results, self._timeout)]) for i, places in shares.items()})
        return [results[place] for place in range(len(jobs))]

    def problems(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the problems that the environment brings, each with ``train`` or ``held_out``.

        Raises:
            EnvError: they cannot be read.
        """
        child = self._pool.child(0)
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
            self._pool.stop()


class _Share(Work):
    """The jobs of one process."""

    def __init__(
        self, places: Sequence[int], jobs: Sequence[Call], results: dict[int, Result], timeout: float
    ) -> None:
        super().__init__(places, timeout)
        self._jobs, self._results = jobs, results
        self._sent: list[int] = []
        self._late = f"took longer than env.timeout ({timeout:g} s)"

    def message(self) -> Any:
        self._sent = list(self.open)
        first = all(self._jobs[place].calls == 1 for place in self._sent)
        return [first, [self._jobs[place].message for place in self._sent]]

    def report(self, line: bytes) -> None:
        at, result = _report(line)
        if (at, result) == (CLOSES, None):
            self.extend()
            return
        place = self._sent[at] if 0 <= at < len(self._sent) else -1
        # A job that began for ever would extend the time limit for ever.
        if place not in self.open or not _fits(result, self._jobs[place], self.open[place]):
            raise GarbledError(garbled(line))
        self.extend()
        if result is None:
            self.open[place] += 1
        else:
            self._results[place] = result
            del self.open[place]

    def failed(self, problem: str) -> None:
        for place in self.suspects()[:1]:
            self._results[place] = Failure("env_crashed" if problem else "env_timed_out", problem or self._late)
            del self.open[place]


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
