"""Problems with responses that are judged already, and pairs of such responses made of a generated task."""

from __future__ import annotations

import random
from typing import TypeAlias

import attrs

from verl_fn.data.columns import Messages
from verl_fn.data.tasks import Problem, Task
from verl_fn.state import Key

Response: TypeAlias = str | Messages
"""A response: a string, or the messages that follow the prompt's."""

MOST_EDITS = 4  # mistakes in a response that is made of a right answer


@attrs.frozen
class Judged(Problem):
    """A problem with responses of which is known whether they are good.

    Attributes:
        chosen: the good responses; one for a pair.
        rejected: the others; one for a pair.

    Example:
        >>> Judged("2+2=", "4", chosen=("4",), rejected=("5",)).responses
        [('4', True), ('5', False)]
    """

    chosen: tuple[Response, ...] = ()
    rejected: tuple[Response, ...] = ()

    @property
    def responses(self) -> list[tuple[Response, bool]]:
        """Returns each response, and whether it is good."""
        return [*((one, True) for one in self.chosen), *((one, False) for one in self.rejected)]


@attrs.frozen(eq=False)
class TaskPairs:
    """Pairs made of a generated task: the right answer, and one with one to four mistakes that scores less.

    Attributes:
        task: the task.

    Example:
        >>> from verl_fn.data.tasks import TASKS
        >>> pair = TaskPairs(TASKS["reverse"]).train(Key.from_seed(0), 0, 1)[0]
        >>> pair.chosen == (pair.answer,), pair.rejected == pair.chosen
        (True, False)
    """

    task: Task

    @property
    def max_prompt(self) -> int:
        """Returns the length of the longest prompt in characters."""
        return self.task.max_prompt

    @property
    def max_answer(self) -> int:
        """Returns the length of the longest response in characters."""
        return self.task.max_answer + MOST_EDITS

    def train(self, key: Key, start: int, count: int) -> tuple[Judged, ...]:
        """Returns pairs ``start`` to ``start + count`` of the stream that ``key`` names."""
        problems = self.task.train(key, start, count)
        return tuple(self._pair(problem, key.fold_in("mistakes").fold_in(problem.id)) for problem in problems)

    def held_out(self, count: int | None) -> tuple[Judged, ...]:
        """Returns up to ``count`` pairs for evaluation, the same for every run; no stream has their prompts."""
        key = Key.from_seed(0).fold_in("mistakes").fold_in(self.task.name)
        return tuple(self._pair(problem, key.fold_in(problem.id)) for problem in self.task.held_out(count))

    def _pair(self, problem: Problem, key: Key) -> Judged:
        dice = random.Random(key.seed())
        best = self.task.score(problem, problem.answer)
        while True:
            worse = problem.answer
            for _ in range(dice.randint(1, MOST_EDITS)):
                worse = edited(worse, self.task.alphabet, dice)
            if self.task.score(problem, worse) < best:
                fields = attrs.asdict(problem, recurse=False)
                return Judged(**fields, chosen=(problem.answer,), rejected=(worse,))


def edited(text: str, alphabet: str, dice: random.Random) -> str:
    """Returns the text after one random edit; it may be the same text.

    Most often a letter is replaced, by one of the alphabet or of the text. Otherwise two neighbours are swapped, a
    letter is added or removed, or the end is cut off.

    Args:
        text: the text.
        alphabet: the letters that may be put in.
        dice: decides.

    Example:
        >>> edited("abc", "abc", random.Random(1))
        'bac'
    """
    if len(text) < 2:
        return text + dice.choice(alphabet)
    letter = dice.choice(dice.choice((alphabet, text)))
    place = dice.randrange(len(text))
    kind = dice.choice(("replace",) * 4 + ("swap", "swap", "insert", "leave out", "cut"))
    if kind == "replace":
        return text[:place] + letter + text[place + 1 :]
    if kind == "swap":
        place = min(place, len(text) - 2)
        return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    if kind == "insert":
        return text[:place] + letter + text[place:]
    if kind == "leave out":
        return text[:place] + text[place + 1 :]
    return text[: max(1, place)]
