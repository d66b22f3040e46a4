"""Runs environments in a process that its parent may end; the parent starts this file as a script.

The parent sends the class's name, then jobs: a conversation with all replies of the model so far. An instance that
has had all but the last reply takes that one. Otherwise the conversation is repeated with a new instance, as after
the end of an earlier process. The worker reports each call at its start, and each job at its end. Messages are lines
of JSON. This module does not import torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
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
        self._instances: dict[int, tuple[Any, int]] = {}

    def forget(self) -> None:
        """Drops the instances of earlier conversations."""
        self._instances.clear()

    def answer(self, place: int, number: int, seed: int, problem: Mapping[str, Any], replies: Sequence[str]) -> None:
        """Reports what the environment answers to the last reply, or to the problem if there is none.

        Args:
            place: the job's place in its call.
            number: of the conversation.
            seed: of the conversation's random numbers.
            problem: the fields of the problem.
            replies: all of the model so far.
        """
        instance, answered = self._instances.pop(number, (None, -1))
        if answered != len(replies) - 1:
            instance, answered = None, -1
        outcome: Any = None
        try:
            for turn in range(answered + 1, len(replies) + 1):
                self._send([place, None])
                functions.seed_numbers(seed, turn)
                if turn == 0:
                    instance = self._cls()
                    outcome = checked(instance.reset(SimpleNamespace(**problem)), first=True)
                else:
                    outcome = checked(instance.step(replies[turn - 1]))
            self._instances[number] = instance, len(replies)
            self._send([place, outcome])
        except Failed as error:
            self._send([place, str(error)])
        except BaseException as error:
            self._send([place, functions.raised(error)])


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
        numbers = [float(value.reward), float(value.acc)]
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
            raise Failed(f"returned the message {functions.short(repr(message))}; role and content must be strings")
        if role == "assistant":
            raise Failed("returned a message of the role assistant, which is the model's own")
    try:
        json.dumps(messages, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Failed(f"returned messages that cannot be JSON ({error})") from error
    return [dict(message) for message in messages]


def load(spec: str, folder: str) -> Callable[[], Any]:
    """Imports an environment's class.

    Raises:
        functions.LoadError: it cannot be imported, or is no class with ``reset`` and ``step`` that is made without
            arguments.
    """
    cls = functions.find(spec, folder, "class")
    for method in ("reset", "step"):
        if not callable(getattr(cls, method, None)):
            raise functions.LoadError(f"{spec} has no method {method}; an environment has reset and step")
    try:
        inspect.signature(cls).bind()
    except (TypeError, ValueError) as error:
        raise functions.LoadError(f"{spec} must be a class that is made without arguments: {error}") from error
    return cls


def serve(parent: functions.Parent) -> None:
    """Loads the class that the parent names, and answers its calls until it closes the connection."""
    folder, spec = parent.receive()
    sys.path.insert(0, folder)
    # Where the package is not installed, environments import ``Done`` from here; last, so that it hides nothing.
    sys.path.append(str(PACKAGE.parent))
    functions.seed_numbers(0)
    try:
        server = Server(load(spec, folder), parent.send)
    except functions.LoadError as error:
        parent.send(str(error))
        return
    parent.send([])
    while call := parent.receive():
        first, jobs = call
        if first:
            server.forget()
        for place, job in enumerate(jobs):
            server.answer(place, *job)


if __name__ == "__main__":
    functions.main(int(sys.argv[1]), serve)
