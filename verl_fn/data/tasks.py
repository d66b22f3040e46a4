"""Tasks generated from a key, without a download: problems, their reward, and a held-out set."""

from __future__ import annotations

import functools
import hashlib
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from verl_fn.state import Key

# Data sources of prepared files, whose rows name them and whose answers have a rule.
GSM8K, ARITHMETIC, SQUARES = "openai/gsm8k", "arithmetic", "squares"

HELD_OUT_SHARE = 8  # one prompt in so many is held out
HELD_OUT = 512  # held-out problems of a task by default
MAX_FAILED_DRAWS = 1000  # the search for held-out problems ends after so many draws in a row without a new one


@attrs.frozen
class Problem:
    """A prompt and what its answer is judged by.

    Attributes:
        prompt: a string, or chat messages that the tokenizer's template turns into one.
        answer: a correct answer, or what the reward compares responses with.
        id: the problem's number, from which sampling keys are derived.
        data_source: where the problem comes from; metrics and rewards are grouped by source.
        extra_info: further fields of the data.
        chat_template_kwargs: arguments of the chat template for this problem; they replace the run's.
        tools: JSON schemas of the functions that the assistant can call, for the template to show.
        images: the contents of image files; ``<image>`` stands for each in the prompt.
        place: file or data set, and row, for people to find it; empty for a generated problem.
    """

    prompt: str | tuple[Mapping[str, Any], ...]
    answer: str
    id: int = 0
    data_source: str = ""
    extra_info: Mapping[str, Any] = attrs.field(factory=dict, eq=False)
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict, eq=False)
    tools: tuple[Mapping[str, Any], ...] = ()
    images: tuple[bytes, ...] = attrs.field(default=(), repr=False)
    place: str = attrs.field(default="", eq=False, repr=False)


def text_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns a prompt as a string for people to read.

    Example:
        >>> text_of(({"role": "user", "content": "2+2?"},))
        'user: 2+2?'
    """
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{m['role']}: {content_of(m)}" for m in prompt)


def content_of(message: Mapping[str, Any]) -> str:
    """Returns the content of a message and its tool calls as a string for people to read.

    Example:
        >>> content_of({"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]})
        "[{'name': 'add'}]"
    """
    parts = (message.get("content"), message.get("tool_calls"))
    return "\n".join(str(part) for part in parts if part is not None)


class Source(Protocol):
    """A source of problems. Its methods depend only on their arguments, so a run can continue at any problem.

    Attributes:
        max_prompt: length of the longest prompt, in characters for a generated task and in tokens for files.
    """

    @property
    def max_prompt(self) -> int: ...

    def train(self, key: Key, start: int, count: int) -> tuple[Problem, ...]:
        """Returns training problems ``start`` to ``start + count`` of the stream that ``key`` names."""
        ...

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """Returns up to ``count`` problems for evaluation; None means the source's default number."""
        ...


@attrs.frozen(eq=False)
class Task:
    """A generated task: a source of problems and the reward for an answer.

    Attributes:
        name: the data source in metric names.
        alphabet: every character of prompts and answers.
        make: draws a problem.
        score: returns the reward of a response, 1.0 for a correct one.
        max_prompt, max_answer: length of the longest prompt and answer, in characters.
        dialogue: for a task that an environment is needed for, a problem's conversation to imitate.

    Example:
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
    dialogue: Callable[[Problem], tuple[Mapping[str, Any], ...]] | None = None

    def train(self, key: Key, start: int, count: int) -> tuple[Problem, ...]:
        """Returns training problems ``start`` to ``start + count`` of the stream that ``key`` names."""
        return tuple(self._draw(key.fold_in("train").fold_in(i), i, False) for i in range(start, start + count))

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """Returns up to ``count`` different problems that no training stream contains, the same for every run.

        A task has a limited number of problems, so fewer than ``count`` may be returned.
        """
        key = Key.from_seed(0).fold_in("held-out").fold_in(self.name)
        return different(count, key, functools.partial(self._draw, held_out=True), _string_prompt)

    def _draw(self, key: Key, number: int, held_out: bool) -> Problem:
        rng = random.Random(key.seed())
        while True:
            problem = self.make(rng)
            if is_held_out(_string_prompt(problem)) == held_out:
                return attrs.evolve(problem, id=number, data_source=self.name)


def different(
    count: int | None, key: Key, draw: Callable[[Key, int], Problem], text_of: Callable[[Problem], str]
) -> tuple[Problem, ...]:
    """Returns up to ``count`` problems of different texts, by default ``HELD_OUT``, of a key and a number each."""
    problems: dict[str, Problem] = {}
    draws = last_new = 0
    while len(problems) < (HELD_OUT if count is None else count) and draws - last_new < MAX_FAILED_DRAWS:
        problem = draw(key.fold_in(draws), len(problems))
        draws += 1
        if (text := text_of(problem)) not in problems:
            problems[text], last_new = problem, draws
    return tuple(problems.values())


def _string_prompt(problem: Problem) -> str:
    """Returns the prompt of a generated problem: always a string."""
    if not isinstance(problem.prompt, str):
        raise TypeError(f"the prompt of a generated problem must be a string, not {problem.prompt!r}")
    return problem.prompt


def is_held_out(prompt: str) -> bool:
    """Returns whether a generated problem with this prompt is kept for evaluation, as one in eight is."""
    return hashlib.blake2b(prompt.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def overlap(answer: str, response: str) -> float:
    """Returns 1.0 for the answer itself, otherwise half the share of positions that agree.

    Example:
        >>> overlap("abc", "abc"), overlap("abc", "abd") == 0.5 * 2 / 3, overlap("abc", "")
        (1.0, True, 0.0)
    """
    if response == answer:
        return 1.0
    agreeing = sum(a == b for a, b in zip(answer, response, strict=False))
    return 0.5 * agreeing / max(len(answer), len(response), 1)


def _count(rng: random.Random) -> Problem:
    # Two random letters without a meaning give enough different prompts for a held-out set.
    noise = "".join(rng.choice("bcdefghi") for _ in range(2))
    n = rng.randint(1, 9)
    return Problem(f"{noise}{n}>", "a" * n)


def _reverse(rng: random.Random) -> Problem:
    letters = "".join(rng.choice("abcdefgh") for _ in range(rng.randint(4, 8)))
    return Problem(f"{letters}>", letters[::-1])


_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def _countdown(rng: random.Random) -> Problem:
    a, b, op = rng.randint(1, 9), rng.randint(1, 9), rng.choice("+-*")
    if op == "-" and a < b:
        a, b = b, a
    return Problem(f"{a},{b},{_OPERATIONS[op](a, b)}>", f"{a}{op}{b}")


def _score_countdown(problem: Problem, response: str) -> float:
    a, b, target = _string_prompt(problem)[:-1].split(",")
    match = re.fullmatch(r"(\d+)([+\-*])(\d+)", response)
    if not match or sorted([match[1], match[3]]) != sorted([a, b]):
        return 0.0
    return 1.0 if _OPERATIONS[match[2]](int(match[1]), int(match[3])) == int(target) else 0.1


def _product(rng: random.Random) -> Problem:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return Problem(f"{a}*{b}", str(a * b))


def _with_calculator(problem: Problem) -> tuple[Mapping[str, Any], ...]:
    question = _string_prompt(problem)
    if problem.id % 4:  # a model that mostly gives up learns by reward to ask
        return ({"role": "user", "content": question}, {"role": "assistant", "content": "?"})
    turns = (
        ("user", question),
        ("assistant", f"={question}"),
        ("tool", problem.answer),
        ("assistant", problem.answer),
    )
    return tuple({"role": role, "content": content} for role, content in turns)


def _secret(rng: random.Random) -> Problem:
    # Random letters without a meaning give enough different prompts for a held-out set.
    return Problem("".join(rng.choice("abcdefg") for _ in range(4)) + ">", str(rng.randint(1, 7)))


def _with_guesses(problem: Problem) -> tuple[Mapping[str, Any], ...]:
    low, high, secret = 1, 7, int(problem.answer)
    messages = [{"role": "user", "content": _string_prompt(problem)}]
    while True:
        # A model that mostly counts up from 1 learns by reward to halve.
        guess = low if problem.id % 4 else (low + high) // 2
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret or len(messages) == 6:
            return tuple(messages)
        messages.append({"role": "user", "content": "h" if guess < secret else "l"})
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)


def _exactly(problem: Problem, response: str) -> float:
    return float(response == problem.answer)


def _by_overlap(problem: Problem, response: str) -> float:
    return overlap(problem.answer, response)


TASKS = {
    task.name: task
    for task in (
        Task("count", "0123456789>abcdefghi", _count, _by_overlap, 4, 9),
        Task("reverse", "abcdefgh>", _reverse, _by_overlap, 9, 8),
        Task("countdown", "0123456789,+-*>", _countdown, _score_countdown, 7, 3),
        Task("calculator", "0123456789*=?", _product, _exactly, 5, 4, _with_calculator),
        Task("guess_number", "1234567hl>abcdefg", _secret, _exactly, 5, 1, _with_guesses),
    )
}
