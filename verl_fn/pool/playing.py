"""Runs environments in a worker.

The trainer sends the class's name and arguments, then jobs: a conversation with all replies of the model so far. An
instance that has had all but the last reply takes that one. Otherwise the conversation is repeated with a new
instance, as after the end of an earlier worker. The outcome of a job is ``{"messages": ...}``, with ``tools`` at the
start of a conversation; ``{"end": [reward, acc]}``; or ``{"ends": ...}`` for a group.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from . import worker
from .worker import Failed, LoadError, Trainer, seed_numbers, short

VERIFIERS = "verifiers:"
PROBLEMS = "problems"
CLOSES = -1  # instead of the place of a job: an instance is closed
GROUPS = ["score_group"]  # the greeting of a process whose environment scores groups
EXPECTED = "it must return a list of messages, each with role and content, or Done(reward)"

Outcome = dict[str, Any]


class Server:
    """Answers the jobs of the trainer.

    Args:
        send: reports to the trainer: a job's place with None for a call that begins, and with its outcome at its end.
    """

    def __init__(self, environment: Callable[[], Any], send: Callable[[list[Any]], None]) -> None:
        self._environment, self._send = environment, send
        self._score_group = group_scorer(environment)
        # With each instance, the number of replies that it has had, and its last outcome.
        self._instances: dict[int, tuple[Any, int, Any]] = {}

    def forget(self) -> None:
        """Closes and drops the instances of earlier conversations."""
        for number in list(self._instances):
            self._close(number)

    def answer(self, place: int, number: int, seed: int, problem: Mapping[str, Any], replies: Sequence[str]) -> None:
        """Reports what the environment answers to the last reply, or to the problem if there is none."""
        play = partial(self._play, place, len(replies) - 1, number, seed, problem, replies)
        outcome = worker.attempt(play, [problem["answer"]], "problem.answer")
        # A conversation that is scored with its group keeps its instance until then.
        if isinstance(outcome, str) or (is_end(outcome) and self._score_group is None):
            self._close(number)
        self._send([place, outcome])

    def score(self, place: int, seed: int, jobs: Sequence[Sequence[Any]]) -> None:
        """Reports the scores of conversations of a group, all of which have ended.

        Args:
            jobs: for each conversation, the arguments of ``answer`` that ended it.
        """
        answers = [problem["answer"] for _, _, problem, _ in jobs]
        outcome = worker.attempt(partial(self._scores, place, seed, jobs), answers, "problem.answer")
        for number, *_ in jobs:
            self._close(number)
        self._send([place, outcome])

    def _scores(self, place: int, seed: int, jobs: Sequence[Sequence[Any]]) -> Outcome:
        for job in jobs:
            if not is_end(self._play(place, len(job[-1]), *job)):
                raise Failed("did not end a conversation again that was repeated; it must depend only on its calls")
        assert self._score_group is not None
        self._send([place, None])
        seed_numbers(seed, 0)
        return scores(self._score_group([self._instances[number][0] for number, *_ in jobs]), len(jobs))

    def _play(
        self, place: int, had: int, number: int, seed: int, problem: Mapping[str, Any], replies: Sequence[str]
    ) -> Any:
        """Returns the outcome of the last reply, after the calls that a conversation's instance has not had.

        Args:
            had: how many replies its instance must have had; otherwise the conversation is repeated with a new one.
            number, seed, problem, replies: as for ``answer``.
        """
        instance, answered, outcome = self._instances.get(number, (None, -1, None))
        if answered != had:
            self._close(number)
            answered = -1
        for turn in range(answered + 1, len(replies) + 1):
            self._send([place, None])
            seed_numbers(seed, turn)
            if turn == 0:
                instance = self._environment()
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
            print(f"close of {type(instance).__name__} {worker.raised(error)}", file=sys.stderr)


def is_end(outcome: Outcome) -> bool:
    """Returns whether an outcome ends a conversation."""
    return "end" in outcome


def opening(instance: Any, problem: Any) -> Outcome:
    """Returns the first messages of a conversation, together with the tools of the environment if it has any.

    Raises:
        Failed: the environment has returned no messages, or its tools are no list of JSON objects.
    """
    outcome = checked(instance.reset(problem), first=True)
    tools = getattr(instance, "tools", None)
    if not tools:
        return outcome
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Failed(f"has the tools {short(repr(tools))}; they must be a list of JSON schemas")
    return outcome | {"tools": _as_json("tools", tools)}


def _as_json(what: str, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns ``values`` if they can be JSON.

    Raises:
        Failed: they cannot.
    """
    try:
        # Half of a character's surrogate pair is JSON, but no text that a tokenizer takes.
        json.dumps(plain := list(map(dict, values)), allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Failed(f"returned {what} that cannot be JSON ({error})") from error
    return plain


def checked(value: Any, first: bool = False) -> Outcome:
    """Returns what an environment returned: messages, or reward and acc.

    Raises:
        Failed: it is neither, or ``first`` and no list.

    Example:
        >>> checked([{"role": "user", "content": "2+3?"}])
        {'messages': [{'role': 'user', 'content': '2+3?'}]}
        >>> checked("2+3?")
        Traceback (most recent call last):
        verl_fn.pool.worker.Failed: returned '2+3?'; it must return a list of messages, each with role and content, or
        Done(reward)
    """
    if hasattr(value, "reward") and hasattr(value, "acc") and not first:
        return {"end": _numbers(value)}
    messages = list(value) if isinstance(value, list | tuple) else []
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise Failed(f"returned {short(repr(value))}; {EXPECTED}")
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            advice = "role and content must be strings"
            if isinstance(content, list) and any(_is_image(part) for part in content):
                advice += "; images are shown only in the first messages, by the mark <image> for each of the row's"
            elif isinstance(content, list):
                advice += "; data with lists of messages as prompts has them in problem.prompt: return that list"
            raise Failed(f"returned the message {short(repr(message))}; {advice}")
        if role == "assistant" and not first:
            raise Failed("returned a message of the role assistant, but that is the model's own")
    return {"messages": _as_json("messages", messages)}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and str(part.get("type", "")).startswith("image")


def _numbers(done: Any) -> list[float]:
    """Returns the reward and acc of ``Done``.

    Raises:
        Failed: they are no numbers, or out of range.
    """
    numbers = []
    for what in (done.reward, done.acc):
        if (number := worker.number_of(what)) is None:
            raise Failed(f"returned Done with {worker.shown(what)}; reward and acc must be numbers")
        numbers.append(number)
    reward, acc = numbers
    if not all(math.isfinite(number) and abs(number) < worker.LARGEST for number in numbers):
        raise Failed(f"returned a reward of {reward} with acc {acc}; both must be finite")
    if not 0.0 <= acc <= 1.0:
        raise Failed(f"returned {acc} as acc; it must be from 0 to 1")
    return numbers


def scores(values: Any, count: int) -> Outcome:
    """Returns what ``score_group`` returned: the rewards of the conversations, and how right they were.

    Raises:
        Failed: it is no end for each.

    Example:
        >>> scores([SimpleNamespace(reward=2, acc=1)], 1)
        {'ends': [[2.0, 1.0]]}
        >>> scores([0.5], 1)
        Traceback (most recent call last):
        verl_fn.pool.worker.Failed: returned [0.5] from score_group; it must return Done(reward) for each of the 1
        conversations
    """
    ends = list(values) if isinstance(values, list | tuple) else []
    if len(ends) != count or not all(hasattr(end, "reward") and hasattr(end, "acc") for end in ends):
        raise Failed(
            f"returned {short(repr(values))} from score_group; it must return Done(reward) for each of the {count} "
            "conversations"
        )
    return {"ends": [_numbers(end) for end in ends]}


def load(spec: str, folder: str, arguments: Mapping[str, Any], calls: str) -> Callable[[], Any]:
    """Imports an environment, and returns a function that makes an instance with keyword arguments.

    ``calls`` is the format in which the model calls tools, for environments of verifiers.

    Raises:
        LoadError: it cannot be imported, or is no class with ``reset`` and ``step`` that takes them.
    """
    if spec.startswith(VERIFIERS):
        adapter = importlib.import_module("verl_fn.environments.verifiers")
        try:
            loaded: Callable[[], Any] = adapter.load(spec.removeprefix(VERIFIERS), arguments, calls)
        except BaseException as error:
            raise LoadError(f"loading {spec} {worker.raised(error)}") from error
        return loaded
    cls = worker.find(spec, folder, "class")
    for method in ("reset", "step"):
        if not callable(getattr(cls, method, None)):
            raise LoadError(f"{spec} has no method {method}; an environment has reset and step")
    if hasattr(cls, "score_group") and not isinstance(
        inspect.getattr_static(cls, "score_group"), staticmethod | classmethod
    ):
        raise LoadError(f"{spec} has a score_group that is no @staticmethod; it gets a list of instances")
    try:
        inspect.signature(cls).bind(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(arguments) or "no arguments"
        raise LoadError(f"{spec} cannot be made with env.arguments ({given}): {error}") from error
    return partial(cls, **arguments)


def serve(trainer: Trainer) -> None:
    """Loads the class that the trainer names, and answers its calls until it closes the connection."""
    folder, spec, arguments, calls = trainer.receive()
    sys.path.insert(0, folder)
    environment = load(spec, folder, arguments, calls)
    trainer.send(GROUPS if group_scorer(environment) is not None else [])
    server = Server(environment, trainer.send)
    while call := trainer.receive():
        if call == PROBLEMS:
            # Only environments of verifiers bring problems. An empty list ends them.
            for part, row in environment.problems():  # type: ignore[attr-defined]
                trainer.send([part, row])
            trainer.send([])
            continue
        first, jobs = call
        if first:
            server.forget()
        for place, method, *arguments in jobs:
            getattr(server, method)(place, *arguments)
