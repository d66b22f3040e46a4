"""Runs environments in a process that its parent may end; the parent starts this file as a script.

The parent sends the class's name and arguments, then jobs: a conversation with all replies of the model so far. An
instance that has had all but the last reply takes that one. Otherwise the conversation is repeated with a new
instance, as after the end of an earlier process. The worker reports each call at its start, and each job at its end.
Messages are lines of JSON. This module imports neither torch nor any installed package but numpy, if there is one:
the interpreter may be another one than the parent's.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

PACKAGE = Path(__file__).resolve().parents[1]

if TYPE_CHECKING:
    from verl_fn.rewards import worker as functions
else:
    # By its file, since importing its package would import torch.
    _spec = importlib.util.spec_from_file_location("verl_fn_rewards_worker", PACKAGE / "rewards/worker.py")
    functions = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(functions)

VERIFIERS = "verifiers:"
PROBLEMS = "problems"
CLOSES = -1  # instead of the place of a job: an instance is closed
GROUPS = ["score_group"]  # the greeting of a process whose environment scores groups
EXPECTED = "it must return a list of messages, each with role and content, or Done(reward)"


class Failed(Exception):
    """Raised for an environment that failed; the message says how."""


class Server:
    """Answers the jobs of one parent.

    Args:
        cls: the environment.
        send: reports to the parent: a job's place with None for a call that begins, and with its outcome at its end.
    """

    def __init__(self, cls: Callable[[], Any], send: Callable[[list[Any]], None]) -> None:
        self._cls, self._send = cls, send
        self._score_group = group_scorer(cls)
        # With each instance, the number of replies that it has had, and its last outcome.
        self._instances: dict[int, tuple[Any, int, Any]] = {}

    def forget(self) -> None:
        """Closes and drops the instances of earlier conversations."""
        for number in list(self._instances):
            self._close(number)

    def answer(self, place: int, number: int, seed: int, problem: Mapping[str, Any], replies: Sequence[str]) -> None:
        """Reports what the environment answers to the last reply, or to the problem if there is none.

        Args:
            place: the job's place in its call.
            number: of the conversation.
            seed: of the conversation's random numbers.
            problem: the fields of the problem.
            replies: all of the model so far.
        """
        outcome = attempt(lambda: self._play(place, len(replies) - 1, number, seed, problem, replies), [problem])
        # A conversation that is scored with its group keeps its instance until then.
        if isinstance(outcome, str) or (is_end(outcome) and self._score_group is None):
            self._close(number)
        self._send([place, outcome])

    def score(self, place: int, seed: int, jobs: Sequence[Sequence[Any]]) -> None:
        """Reports the scores of conversations of a group, all of which have ended.

        Args:
            place: the job's place in its call.
            seed: of the random numbers.
            jobs: for each conversation, the arguments of ``answer`` that ended it.
        """
        outcome = attempt(lambda: self._scores(place, seed, jobs), [problem for _, _, problem, _ in jobs])
        for number, *_ in jobs:
            self._close(number)
        self._send([place, outcome])

    def _scores(self, place: int, seed: int, jobs: Sequence[Sequence[Any]]) -> dict[str, Any]:
        for job in jobs:
            if not is_end(self._play(place, len(job[-1]), *job)):
                raise Failed("did not end a conversation again that was repeated; it must depend only on its calls")
        assert self._score_group is not None
        self._send([place, None])
        functions.seed_numbers(seed, 0)
        return scores(self._score_group([self._instances[number][0] for number, *_ in jobs]), len(jobs))

    def _play(
        self, place: int, had: int, number: int, seed: int, problem: Mapping[str, Any], replies: Sequence[str]
    ) -> Any:
        """Returns the outcome of the last reply, after the calls that a conversation's instance has not had.

        Args:
            place: the job's place in its call.
            had: how many replies its instance must have had; otherwise the conversation is repeated with a new one.
            number, seed, problem, replies: as for ``answer``.
        """
        instance, answered, outcome = self._instances.get(number, (None, -1, None))
        if answered != had:
            self._close(number)
            answered = -1
        for turn in range(answered + 1, len(replies) + 1):
            self._send([place, None])
            functions.seed_numbers(seed, turn)
            if turn == 0:
                instance = self._cls()
                self._instances[number] = instance, -1, None
                outcome = opening(instance, SimpleNamespace(**problem))
            else:
                outcome = checked(instance.step(replies[turn - 1]))
            self._instances[number] = instance, turn, outcome
        return outcome

    def _close(self, number: int) -> None:
        """Closes and drops the instance of a conversation, within the time of a call."""
        if number in self._instances:
            self._send([CLOSES, None])
            close(self._instances.pop(number)[0])


def attempt(call: Callable[[], Any], problems: Sequence[Mapping[str, Any]] = ()) -> Any:
    """Returns the outcome of a call about problems, or a string that says how it failed."""
    try:
        return call()
    except Failed as error:
        return str(error)
    except BaseException as error:
        remarks = (functions.json_text(problem["answer"], "problem.answer") for problem in problems)
        return functions.raised(error) + next(filter(None, remarks), "")


def group_scorer(environment: Callable[[], Any]) -> Callable[[list[Any]], Any] | None:
    """Returns the function that scores the instances of a group together; None if there is none."""
    # ``load`` returns a partial of a class.
    return getattr(getattr(environment, "func", environment), "score_group", None)


def close(instance: Any) -> None:
    """Calls the method ``close`` of an instance that is not needed any more, if it has one."""
    method = getattr(instance, "close", None)
    if callable(method):
        try:
            method()
        except BaseException as error:
            print(f"close of {type(instance).__name__} {functions.raised(error)}", file=sys.stderr)


def is_end(outcome: Any) -> bool:
    """Returns whether a value of ``checked`` ends a conversation.

    Example:
        >>> is_end([1.0, 1.0]), is_end([{"role": "user", "content": "2+3?"}])
        (True, False)
    """
    return isinstance(outcome, list) and isinstance(outcome[0], float)


def opening(instance: Any, problem: Any) -> Any:
    """Returns the first messages of a conversation as JSON, together with the tools of the environment if it has any.

    Raises:
        Failed: the environment has returned no messages, or its tools are no list of JSON objects.
    """
    messages = checked(instance.reset(problem), first=True)
    tools = getattr(instance, "tools", None)
    if not tools:
        return messages
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Failed(f"has the tools {functions.short(repr(tools))}; they must be a list of JSON schemas")
    return {"messages": messages, "tools": as_json("tools", [dict(tool) for tool in tools])}


def as_json(what: str, values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns ``values`` if they can be JSON.

    Raises:
        Failed: they cannot.
    """
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Failed(f"returned {what} that cannot be JSON ({error})") from error
    return values


def checked(value: Any, first: bool = False) -> Any:
    """Returns what an environment returned as JSON: a list of messages, or reward and acc.

    Raises:
        Failed: it is neither, or ``first`` and no list.

    Example:
        >>> checked([{"role": "user", "content": "2+3?"}])
        [{'role': 'user', 'content': '2+3?'}]
        >>> checked("2+3?")
        Traceback (most recent call last):
        verl_fn.environments.worker.Failed: returned '2+3?'; it must return a list of messages, each with role and
        content, or Done(reward)
    """
    if hasattr(value, "reward") and hasattr(value, "acc") and not first:
        numbers = []
        for what in (value.reward, value.acc):
            if (number := functions.number_of(what)) is None:
                raise Failed(f"returned Done with {functions.shown(what)}; reward and acc must be numbers")
            numbers.append(number)
        if not all(math.isfinite(number) and abs(number) < functions.LARGEST for number in numbers):
            raise Failed(f"returned a reward of {numbers[0]} with acc {numbers[1]}; both must be finite")
        if not 0.0 <= numbers[1] <= 1.0:
            raise Failed(f"returned {numbers[1]} as acc; it must be from 0 to 1")
        return numbers
    messages = list(value) if isinstance(value, list | tuple) else []
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise Failed(f"returned {functions.short(repr(value))}; {EXPECTED}")
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            advice = "role and content must be strings"
            if isinstance(content, list):
                advice += "; data with lists of messages as prompts has them in problem.prompt: return that list"
            raise Failed(f"returned the message {functions.short(repr(message))}; {advice}")
        if role == "assistant" and not first:
            raise Failed("returned a message of the role assistant, but that is the model's own")
    return as_json("messages", [dict(message) for message in messages])


def scores(values: Any, count: int) -> dict[str, list[float]]:
    """Returns what ``score_group`` returned as JSON: the rewards of the conversations, and how right they were.

    Raises:
        Failed: it is no end for each.

    Example:
        >>> scores([SimpleNamespace(reward=2, acc=1)], 1)
        {'rewards': [2.0], 'acc': [1.0]}
        >>> scores([0.5], 1)
        Traceback (most recent call last):
        verl_fn.environments.worker.Failed: returned [0.5] from score_group; it must return Done(reward) for each of
        the 1 conversations
    """
    ends = list(values) if isinstance(values, list | tuple) else []
    if len(ends) != count or not all(hasattr(end, "reward") and hasattr(end, "acc") for end in ends):
        raise Failed(
            f"returned {functions.short(repr(values))} from score_group; it must return Done(reward) for each of the "
            f"{count} conversations"
        )
    rewards, acc = zip(*map(checked, ends), strict=True)
    return {"rewards": list(rewards), "acc": list(acc)}


def load(spec: str, folder: str, arguments: Mapping[str, Any], calls: str) -> Callable[[], Any]:
    """Imports an environment, and returns a function that makes an instance with keyword arguments.

    ``calls`` is the format in which the model calls tools, for environments of verifiers.

    Raises:
        functions.LoadError: it cannot be imported, or is no class with ``reset`` and ``step`` that takes them.
    """
    if spec.startswith(VERIFIERS):
        adapter = importlib.import_module("verl_fn.environments.verifiers")
        try:
            loaded: Callable[[], Any] = adapter.load(spec.removeprefix(VERIFIERS), arguments, calls)
        except BaseException as error:
            raise functions.LoadError(f"loading {spec} {functions.raised(error)}") from error
        return loaded
    cls = functions.find(spec, folder, "class")
    for method in ("reset", "step"):
        if not callable(getattr(cls, method, None)):
            raise functions.LoadError(f"{spec} has no method {method}; an environment has reset and step")
    if hasattr(cls, "score_group") and not isinstance(
        inspect.getattr_static(cls, "score_group"), staticmethod | classmethod
    ):
        raise functions.LoadError(f"{spec} has a score_group that is no @staticmethod; it gets a list of instances")
    try:
        inspect.signature(cls).bind(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(arguments) or "no arguments"
        raise functions.LoadError(f"{spec} cannot be made with env.arguments ({given}): {error}") from error
    return partial(cls, **arguments)


def provide_package() -> None:
    """Lets environments import ``Done`` from this package where it is not installed.

    Its parent folder stays out of ``sys.path``: that may hold all packages of another interpreter.
    """
    if importlib.util.find_spec("verl_fn") is None:
        spec = importlib.util.spec_from_file_location(
            "verl_fn", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["verl_fn"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["verl_fn"])


def send_problems(environment: Any, parent: functions.Parent) -> None:
    """Sends the problems that an environment brings, each with its part of the data, and then an empty list."""
    try:
        for part, row in environment.problems():
            parent.send([part, row])
        parent.send([])
    except BaseException as error:
        parent.send(functions.raised(error))


def serve(parent: functions.Parent) -> None:
    """Loads the class that the parent names, and answers its calls until it closes the connection."""
    folder, spec, arguments, calls = parent.receive()
    sys.path.insert(0, folder)
    provide_package()
    functions.seed_numbers(0)
    try:
        environment = load(spec, folder, arguments, calls)
    except functions.LoadError as error:
        parent.send(str(error))
        return
    parent.send(GROUPS if group_scorer(environment) is not None else [])
    server = Server(environment, parent.send)
    while call := parent.receive():
        if call == PROBLEMS:
            send_problems(environment, parent)
            continue
        first, jobs = call
        if first:
            server.forget()
        for place, (method, *arguments) in enumerate(jobs):
            getattr(server, method)(place, *arguments)


if __name__ == "__main__":
    functions.main(int(sys.argv[1]), serve)
