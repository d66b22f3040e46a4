"""Problems with responses that are judged already: from files, or pairs made of a generated task."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from verl_fn.data.columns import (
    BEHIND,
    OPTIONAL,
    Messages,
    check_turns,
    fields_of,
    ground_truth_of,
    learned_turns,
    prompt_of,
)
from verl_fn.data.entries import Kind
from verl_fn.data.rows import DataError, Row
from verl_fn.data.tasks import Problem, Task
from verl_fn.state import Key

Response: TypeAlias = str | Messages
"""A response: a string, or the messages that follow the prompt's."""

JudgedParts: TypeAlias = tuple[Response, tuple[Response, ...], tuple[Response, ...]]
"""A prompt with its good responses, and with the others."""

PAIR_COLUMNS = ("chosen", "rejected")
LABEL_COLUMNS = ("completion", "label")
SOURCE = "preferences"  # the data source of rows that name none
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


def pair_rows(prompt_key: str = "prompt") -> Kind:
    """Returns the kind of rows that are preference pairs.

    Each row has ``chosen`` and ``rejected``, strings or lists of chat messages. The prompt is a column of its own;
    without it, chosen and rejected are whole conversations, and the prompt is how both begin. They may
    also begin with the messages of the prompt, or with a user's message of its text. Optional are ``data_source``,
    ``reward_model`` with the ``ground_truth`` that sampled answers are judged by, ``ability``, ``extra_info``,
    ``tools``, JSON schemas that the chat template shows, and ``chat_template_kwargs``.

    A row is refused if it is no pair: a response is missing or empty, both are equal, or the two conversations do not
    begin alike.
    """
    return _kind(PAIR_COLUMNS, prompt_key, _pair)


def labelled_rows(prompt_key: str = "prompt") -> Kind:
    """Returns the kind of rows that are responses, each labelled good or bad.

    Each row has a prompt, ``completion`` (a string or chat messages) and ``label``, true or false; the other columns
    are the ones of ``pair_rows``.
    """
    return _kind(LABEL_COLUMNS, prompt_key, _labelled)


def _kind(required: tuple[str, ...], prompt_key: str, parts: Callable[[str, Row, str], JudgedParts]) -> Kind:
    def made(place: str, row: Row, number: int, unused: Counter[str]) -> Judged:
        fields = fields_of(place, row, number, SOURCE)
        if fields["images"]:
            raise DataError(
                f"{place}: the row has images, which are not read beside judged responses; leave the row out"
            )
        prompt, chosen, rejected = parts(place, row, prompt_key)
        truth = "" if row.get("reward_model") is None else ground_truth_of(place, row["reward_model"])
        judged = Judged(prompt, truth, **fields, chosen=chosen, rejected=rejected)
        messages = [response for response, _ in judged.responses if not isinstance(response, str)]
        if any(learned_turns(one)[-1] < len(one) - 1 for one in messages):
            unused[BEHIND] += 1
        return judged

    hint = f"required are {' and '.join(required)}, and data.prompt_key names the prompts' column"
    return Kind(required, (prompt_key, "data_source", "reward_model", *OPTIONAL), made, hint)


def _pair(place: str, row: Row, prompt_key: str) -> JudgedParts:
    for column in PAIR_COLUMNS:
        if row[column] is None:
            other = PAIR_COLUMNS[1 - PAIR_COLUMNS.index(column)]
            raise DataError(f"{place}: {column} is missing, so {other} has no partner; complete or remove the row")
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{place}: chosen and rejected are equal, so neither is preferred; remove the row")
    chosen, rejected = (_response(place, row[column], column) for column in PAIR_COLUMNS)
    if row.get(prompt_key) is None:
        prompt, chosen, rejected = _common_prompt(place, chosen, rejected, prompt_key)
    else:
        prompt = prompt_of(place, row[prompt_key], prompt_key)
        begun, as_well = repeated(prompt, chosen), repeated(prompt, rejected)
        if begun:
            if not as_well or (isinstance(prompt, str) and as_well != begun):
                raise DataError(f"{place}: chosen repeats {prompt_key}, and rejected does not; write both alike")
            prompt = begun if isinstance(prompt, str) else prompt
            chosen, rejected = chosen[len(begun) :], rejected[len(as_well) :]
    for column, response in zip(PAIR_COLUMNS, (chosen, rejected), strict=True):
        _check_response(place, prompt, response, column)
    return prompt, (chosen,), (rejected,)


def _labelled(place: str, row: Row, prompt_key: str) -> JudgedParts:
    label = row["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        raise DataError(f"{place}: label must be true or false, not {label!r:.80}")
    if row.get(prompt_key) is None:
        raise DataError(f"{place}: there is no {prompt_key}; data.prompt_key names the prompts' column")
    prompt = prompt_of(place, row[prompt_key], prompt_key)
    response = _response(place, row["completion"], "completion")
    if begun := repeated(prompt, response):
        prompt, response = begun if isinstance(prompt, str) else prompt, response[len(begun) :]
        if not response:
            raise DataError(f"{place}: completion repeats {prompt_key} and ends with it; add the assistant's turn")
    _check_response(place, prompt, response, "completion")
    return prompt, (response,) if label else (), () if label else (response,)


def _response(place: str, value: Any, column: str) -> Response:
    if value in ([], None) or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{place}: {column} is empty; write a response, or remove the row")
    return prompt_of(place, value, column, None)


def repeated(prompt: Response, response: Response) -> Messages:
    """Returns the messages with which a response repeats its prompt, or its end, or those up to the user's words.

    Example:
        >>> system, user, said = ({"role": role, "content": "a"} for role in ("system", "user", "assistant"))
        >>> repeated((system, user), (user, said)), len(repeated("a", (system, user, said)))
        (({'role': 'user', 'content': 'a'},), 2)
    """
    if isinstance(response, str):
        return ()
    if not isinstance(prompt, str):
        # A turn of the assistant may be another one with the same words.
        ends = (prompt[i:] for i, one in enumerate(prompt) if i == 0 or one["role"] != "assistant")
        return next((end for end in ends if response[: len(end)] == end), ())
    first = next((i for i, message in enumerate(response) if message["role"] == "user"), -1)
    return response[: first + 1] if response[first]["content"] == prompt else ()


def _common_prompt(
    place: str, chosen: Response, rejected: Response, prompt_key: str
) -> tuple[Response, Response, Response]:
    """Splits two conversations into the messages that both begin with and the rest of each."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError(
            f"{place}: there is no {prompt_key}; without it, chosen and rejected must be lists of messages that "
            "begin with the prompt. data.prompt_key names the prompts' column"
        )
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    common = len(list(alike))
    if common == 0:
        raise DataError(
            f"{place}: the conversations chosen and rejected begin differently, so they are no pair of responses to "
            f"one prompt; let both begin with the same messages, or add the column {prompt_key}"
        )
    return chosen[:common], chosen[common:], rejected[common:]


def _check_response(place: str, prompt: Response, response: Response, column: str) -> None:
    if isinstance(response, str):
        return
    if isinstance(prompt, str):
        raise DataError(
            f"{place}: {column} is a list of messages, and the prompt is a string that no user's message in it is; "
            "correct one of them, or write both alike"
        )
    check_turns(place, response, column)
    if response[0]["role"] != "assistant":
        raise DataError(f"{place}: {column} begins with a message of {response[0]['role']!r}, not of the assistant")
