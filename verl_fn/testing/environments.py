"""Plays conversations with an environment that a user wrote, as runs do, and checks what runs rely on."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np

from verl_fn.pool import playing
from verl_fn.pool.worker import attempt, seed_numbers

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
    * Replies: an empty reply, or a tool call that is no JSON, is answered and raises nothing.
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
    rows = [_row(problem) for problem in problems]
    require(bool(rows), "Signature", "there is no problem", "an empty list of problems")
    with _own_numbers():
        alone = [_play(make, i, row, replies)[0] for i, row in enumerate(rows)]
        for i, row in enumerate(rows):
            _same("Repetition", i, replies, alone[i], _play(make, i, row, replies)[0], _SHARED)
        for i, together in enumerate(_interleaved(make, rows, replies)):
            _same("Independence", i, replies, alone[i], together, "a state that instances share")
        for odd in ODD_REPLIES:
            _play(make, 0, rows[0], [odd], "Replies", "a reply that is taken for well-formed")
        _check_group(environment, make, rows, replies)


def _row(problem: Any) -> dict[str, Any]:
    """Returns the fields of a problem as an environment gets them."""
    given = problem if isinstance(problem, Mapping) else None
    return {
        name: copy.deepcopy(given.get(name, default) if given is not None else getattr(problem, name, default))
        for name, default in FIELDS.items()
    }


@attrs.define
class _Conversation:
    """A conversation in progress: its instance, and the answers so far."""

    make: Callable[[], Any]
    number: int
    row: dict[str, Any]
    law: str = "Signature"
    cause: str = _OWN_ERROR
    answers: list[Any] = attrs.field(factory=list)
    instance: Any = None

    @property
    def ended(self) -> bool:
        return bool(self.answers) and playing.is_end(self.answers[-1])

    def advance(self, replies: Sequence[str]) -> None:
        """Makes the next call: ``reset``, or ``step`` with the next reply."""
        turn = len(self.answers)
        seed_numbers(self.number, turn)
        given = SimpleNamespace(**copy.deepcopy(self.row))

        def call() -> Any:
            if turn:
                return playing.checked(self.instance.step(replies[turn - 1]))
            self.instance = self.make()
            return playing.opening(self.instance, given)

        answer = attempt(call)
        said = f"reply {turn}, {replies[turn - 1]!r}," if turn else "reset"
        require(not isinstance(answer, str), self.law, f"problem {self.number}: {said} {answer}", self.cause)
        changed = turn == 0 and vars(given) != self.row
        require(not changed, "Purity", f"problem {self.number} was changed by reset", "an update in place")
        self.answers.append(answer)


def _play(
    make: Callable[[], Any],
    number: int,
    row: dict[str, Any],
    replies: Sequence[str],
    law: str = "Signature",
    cause: str = _OWN_ERROR,
) -> tuple[list[Any], Any]:
    """Returns the answers of a whole conversation, and its closed instance."""
    one = _Conversation(make, number, row, law, cause)
    for _ in range(len(replies) + 1):
        if not one.ended:
            one.advance(replies)
    playing.close(one.instance)
    return one.answers, one.instance


def _interleaved(make: Callable[[], Any], rows: Sequence[dict[str, Any]], replies: Sequence[str]) -> list[list[Any]]:
    """Plays two conversations of each problem turn by turn, and returns the answers of the first ones."""
    every = [_Conversation(make, i, row) for i, row in enumerate(rows)]
    others = [_Conversation(make, len(rows) + i, row) for i, row in enumerate(rows)]
    for _ in range(len(replies) + 1):
        for one in (*every, *others):
            if not one.ended:
                one.advance(replies)
    for one in (*every, *others):
        playing.close(one.instance)
    return [one.answers for one in every]


def _same(law: str, number: int, replies: Sequence[str], expected: Any, found: Any, cause: str) -> None:
    for turn, (before, after) in enumerate(zip(expected, found, strict=False)):
        said = f"reply {turn}, {replies[turn - 1]!r}," if turn else "reset"
        require(
            before == after,
            law,
            f"problem {number}: another instance answered {said} with {after!r:.200}, after {before!r:.200}",
            cause,
        )


def _check_group(
    environment: Any, make: Callable[[], Any], rows: Sequence[dict[str, Any]], replies: Sequence[str]
) -> None:
    score_group = playing.group_scorer(environment)
    if score_group is None:
        return
    results = []
    for _ in range(2):
        group = [_Conversation(make, i, rows[0]) for i in range(2)]
        for one in group:
            while not one.ended and len(one.answers) <= len(replies):
                one.advance(replies)
        ended = [one.instance for one in group if one.ended]
        seed_numbers(0, 0)
        outcome = attempt(partial(_scores, score_group, ended))
        require(not isinstance(outcome, str), "Group", f"score_group {outcome}", "it takes a list of instances")
        results.append(outcome)
        for one in group:
            playing.close(one.instance)
    require(results[0] == results[1], "Group", f"scores {results[1]} came after {results[0]}", _SHARED)


def _scores(score_group: Callable[[list[Any]], Any], ended: list[Any]) -> dict[str, Any]:
    return playing.scores(score_group(ended), len(ended)) if ended else {}


@contextlib.contextmanager
def _own_numbers() -> Iterator[None]:
    """Leaves the generators that the environment is given seeded as they were."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
