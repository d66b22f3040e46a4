"""Plays conversations with an environment that a user wrote, as runs do, and checks what runs rely on."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from verl_fn.pool import playing

from .violation import require

# What a model may write: nothing, a call that is no JSON, a call of nothing, odd characters.
ODD_REPLIES = (
    "",
    " \n",
    '<tool_call>{"name": </tool_call>',
    '<tool_call>{"name": "?"}</tool_call>',
    "\u00e9\u4e16\u0000",
)
_OWN_ERROR = "a value of another kind, or an error of the environment"
_SHARED = "a state that instances share, or randomness of another generator than random and numpy.random"
FIELDS = {"prompt": "", "answer": "", "id": 0, "data_source": "", "extra_info": {}}


def check_environment(
    environment: Callable[..., Any],
    problems: Sequence[Any],
    replies: Sequence[str],
    *,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Checks that an environment answers as runs expect, and that its conversations can be repeated.

    * Signature: ``reset`` returns messages and ``step`` messages or ``Done``, with finite numbers, all as JSON.
    * Replies: at each turn an empty reply, or a tool call that is no JSON, is answered and raises nothing.
    * Repetition: the same problem and replies give the same answers from another instance, ``random`` and
      ``numpy.random`` being seeded before each call; so a run resumes and replays bitwise.
    * Independence: conversations that go on at the same time do not change each other.
    * Purity: the problem is not changed.
    * Group: ``score_group``, if there is one, returns ``Done`` for each conversation that has ended.

    Args:
        environment: the class that ``env.name`` would name.
        problems: at least one, with any of the attributes or keys ``prompt``, ``answer``, ``id``, ``data_source`` and
            ``extra_info``.
        replies: what the model says in each conversation, in order; a conversation may end before the last one.
        arguments: ``env.arguments``.

    Raises:
        LawViolation: a law is broken; the message names it, the problem and the reply.

    Example:
        >>> from verl_fn.environments import Done
        >>> class Echo:
        ...     def reset(self, problem):
        ...         self.answer = problem.answer
        ...         return [{"role": "user", "content": problem.prompt}]
        ...
        ...     def step(self, reply):
        ...         return Done(float(reply == self.answer))
        >>> check_environment(Echo, [{"prompt": "2+3?", "answer": "5"}], ["5"])
    """
    make = partial(environment, **(arguments or {}))
    rows = dict(enumerate(map(_row, problems)))
    require(bool(rows), "Signature", "there is no problem", "an empty list of problems")
    with _own_numbers():
        alone = [_play(make, {i: row}, replies)[i] for i, row in rows.items()]
        for i, row in rows.items():
            _same("Repetition", i, replies, alone[i], _play(make, {i: row}, replies)[i], _SHARED)
        others = {len(rows) + i: row for i, row in rows.items()}
        together = _play(make, rows | others, replies)
        for i in rows:
            _same("Independence", i, replies, alone[i], together[i], "a state that instances share")
        # Instead of each reply in turn: an environment may read its first and its last one by other code.
        for turn in range(sum(not playing.is_end(answer) for answer in alone[0])):
            for odd in ODD_REPLIES:
                _play(make, {0: rows[0]}, [*replies[:turn], odd], "Replies", "a reply that is taken for well-formed")
        if playing.group_scorer(environment) is not None:
            first, second = (_group_scores(make, rows[0], replies) for _ in range(2))
            require(first == second, "Group", f"scores {second} came after {first}", _SHARED)


def _row(problem: Any) -> dict[str, Any]:
    """Returns the fields of a problem as an environment gets them."""
    given = problem if isinstance(problem, Mapping) else None
    return {
        name: copy.deepcopy(given.get(name, default) if given is not None else getattr(problem, name, default))
        for name, default in FIELDS.items()
    }


def _play(
    make: Callable[[], Any],
    rows: Mapping[int, dict[str, Any]],
    replies: Sequence[str],
    law: str = "Signature",
    cause: str = _OWN_ERROR,
) -> dict[int, list[Any]]:
    """Plays conversations as the process of a run does, turn by turn side by side, and closes their instances.

    Returns:
        The answers of each conversation, by its number.
    """
    sent: list[Any] = []
    server = playing.Server(make, sent.append)
    answers: dict[int, list[Any]] = {number: [] for number in rows}
    for turn in range(len(replies) + 1):
        for number, row in rows.items():
            if turn and playing.is_end(answers[number][-1]):
                continue
            given = copy.deepcopy(row)
            server.answer(0, number, number, given, replies[:turn])
            _, answer = sent[-1]
            said = f"reply {turn}, {replies[turn - 1]!r}," if turn else "reset"
            require(not isinstance(answer, str), law, f"problem {number}: {said} {answer}", cause)
            require(given == row, "Purity", f"problem {number} was changed by reset", "an update in place")
            answers[number].append(answer)
    server.forget()
    return answers


def _group_scores(make: Callable[[], Any], row: dict[str, Any], replies: Sequence[str]) -> Any:
    """Returns the scores of the conversations of a group that have ended."""
    sent: list[Any] = []
    server = playing.Server(make, sent.append)
    jobs = []
    for number in range(2):
        for turn in range(len(replies) + 1):
            server.answer(0, number, number, row, replies[:turn])
            if playing.is_end(sent[-1][1]):
                jobs.append((number, number, row, replies[:turn]))
                break
    if not jobs:
        return None
    server.score(0, 0, jobs)
    _, outcome = sent[-1]
    server.forget()
    require(not isinstance(outcome, str), "Group", f"score_group {outcome}", "it takes a list of instances")
    return outcome


def _same(law: str, number: int, replies: Sequence[str], expected: Any, found: Any, cause: str) -> None:
    for turn, (before, after) in enumerate(zip(expected, found, strict=False)):
        said = f"reply {turn}, {replies[turn - 1]!r}," if turn else "reset"
        require(
            before == after,
            law,
            f"problem {number}: another instance answered {said} with {after!r:.200}, after {before!r:.200}",
            cause,
        )


@contextlib.contextmanager
def _own_numbers() -> Iterator[None]:
    """Leaves the generators that the environment is given seeded as they were."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
