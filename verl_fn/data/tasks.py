"""Tasks made from a key, with no download: problems, their reward, and a held-out set apart from training."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from verl_fn.state import Key

HELD_OUT_SHARE = 8
HELD_OUT = 512  # held-out problems of a task where none are asked for
VAIN_DRAWS = 1000


@attrs.frozen
class Problem:
    """One prompt and what its answer is judged by.

    Attributes:
        prompt: a text, or chat messages that the tokenizer's template turns into one.
        answer: a correct answer, or what the reward compares with.
        id: its name, the number that sampling keys are derived from.
        data_source: where it comes from; metrics and rewards are by source.
        extra_info: whatever else the data say of it.
    """

    prompt: str | tuple[Mapping[str, str], ...]
    answer: str
    id: int = 0
    data_source: str = ""
    extra_info: Mapping[str, Any] = attrs.field(factory=dict, eq=False)


class Source(Protocol):
    """Where problems come from. Both are functions of their arguments, so a run can be continued anywhere.

    Attributes:
        max_prompt: of the longest prompt: characters of a made task, tokens of files.
    """

    max_prompt: int

    def train(self, key: Key, start: int, count: int) -> tuple[Problem, ...]:
        """Training problems ``start`` to ``start + count`` of the stream that ``key`` names."""
        ...

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """Up to ``count`` problems for evaluation; None asks for the usual number of them."""
        ...


@attrs.frozen(eq=False)
class Task:
    """A source of problems and the reward for an answer.

    Attributes:
        name: the data source in metric names.
        alphabet: every character of prompts and answers.
        make: draws a problem.
        score: reward of an answer's text, 1.0 for a right one.
        max_prompt, max_answer: longest prompt and answer, in characters.

    >>> task = TASKS["reverse"]
    >>> problem = task.train(Key.from_seed(0), 0, 1)[0]
    >>> task.score(problem, problem.answer), problem.answer == problem.prompt[-2::-1]
    (1.0, True)
    """

    name: str
    alphabet: str
    make: Callable[[random.Random], Problem]
    score: Callable[[Problem, str], float]
    max_prompt: int
    max_answer: int

    def train(self, key: Key, start: int, count: int) -> tuple[Problem, ...]:
        """Training problems ``start`` to ``start + count`` of the stream that ``key`` names."""
        return tuple(self._draw(key.fold_in("train").fold_in(i), i, False) for i in range(start, start + count))

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """Up to ``count`` different problems that no training stream contains, the same for every run.

        A task has only so many: the search ends after many draws in a row that found nothing new.
        """
        count = HELD_OUT if count is None else count
        found: dict[str, Problem] = {}
        key, i, last = Key.from_seed(0).fold_in("held-out").fold_in(self.name), 0, 0
        while len(found) < count and i - last < VAIN_DRAWS:
            problem = self._draw(key.fold_in(i), len(found), True)
            i += 1
            if problem.prompt not in found:
                found[problem.prompt], last = problem, i
        return tuple(found.values())

    def _draw(self, key: Key, name: int, held_out: bool) -> Problem:
        rng = random.Random(key.seed())
        while True:
            problem = self.make(rng)
            if _is_held_out(problem.prompt) == held_out:
                return attrs.evolve(problem, id=name, data_source=self.name)


def _is_held_out(prompt: str) -> bool:
    return hashlib.blake2b(prompt.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def overlap(answer: str, text: str) -> float:
    """1.0 for the answer itself, else half the share of positions that agree.

    >>> overlap("abc", "abc"), overlap("abc", "abd") == 0.5 * 2 / 3, overlap("abc", "")
    (1.0, True, 0.0)
    """
    if text == answer:
        return 1.0
    return 0.5 * sum(a == b for a, b in zip(answer, text, strict=False)) / max(len(answer), len(text), 1)


def _count(rng: random.Random) -> Problem:
    # Two letters to ignore make prompts many enough for a held-out set.
    noise = "".join(rng.choice("bcdefghi") for _ in range(2))
    n = rng.randint(1, 9)
    return Problem(f"{noise}{n}>", "a" * n)


def _reverse(rng: random.Random) -> Problem:
    text = "".join(rng.choice("abcdefgh") for _ in range(rng.randint(4, 8)))
    return Problem(f"{text}>", text[::-1])


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


def _countdown(rng: random.Random) -> Problem:
    a, b, op = rng.randint(1, 9), rng.randint(1, 9), rng.choice("+-*")
    if op == "-" and a < b:
        a, b = b, a
    return Problem(f"{a},{b},{_OPERATIONS[op](a, b)}>", f"{a}{op}{b}")


def _score_countdown(problem: Problem, text: str) -> float:
    a, b, target = problem.prompt[:-1].split(",")
    found = re.fullmatch(r"(\d+)([+\-*])(\d+)", text)
    if not found or sorted([found[1], found[3]]) != sorted([a, b]):
        return 0.0
    return 1.0 if _OPERATIONS[found[2]](int(found[1]), int(found[3])) == int(target) else 0.1


def _by_overlap(problem: Problem, text: str) -> float:
    return overlap(problem.answer, text)


TASKS = {
    task.name: task
    for task in (
        Task("count", "0123456789>abcdefghi", _count, _by_overlap, 4, 9),
        Task("reverse", "abcdefgh>", _reverse, _by_overlap, 9, 8),
        Task("countdown", "0123456789,+-*>", _countdown, _score_countdown, 7, 3),
    )
}
