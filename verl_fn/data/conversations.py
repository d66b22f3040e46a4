"""Conversations to learn from, whose assistant's turns are found in what the chat template makes of them."""

from __future__ import annotations

from collections import Counter

import attrs

from verl_fn.data.columns import (
    OPTIONAL,
    Messages,
    check_turns,
    fields_of,
    ground_truth_of,
    learned_turns,
    prompt_of,
    source_of,
)
from verl_fn.data.entries import Kind
from verl_fn.data.rows import DataError, Row
from verl_fn.data.tasks import Problem, Task
from verl_fn.state import Key

MESSAGES, COMPLETION = "messages", "completion"
BEHIND = "messages after the last turn that is learned"


@attrs.frozen
class Conversation(Problem):
    """A conversation; its prompt is all before the last turn of the assistant, and that turn is its answer.

    Attributes:
        messages: the conversation up to the last turn of the assistant.
    """

    messages: Messages = ()


def conversation_rows(prompt_key: str = "prompt") -> Kind:
    """Returns the kind of rows with a column ``messages``.

    Optional columns are ``data_source``, ``ability``, ``extra_info``, ``tools``, JSON schemas that the chat template
    shows, ``chat_template_kwargs``, and ``reward_model``: sampled answers are judged by its ``ground_truth``, or else
    by the last turn. The messages must begin with the prompt and end with the ``completion`` if the row has them.
    Messages after the last turn that is learned are left out, and their rows are counted.

    A row is refused if it has no turn of the assistant, begins with one, has one without content, or another prompt.

    Args:
        prompt_key: the column of prompts.
    """

    def make(place: str, row: Row, number: int, unused: Counter[str]) -> Problem:
        fields = fields_of(place, row)
        images = len(fields["images"])
        value = prompt_of(place, row[MESSAGES], MESSAGES, images)
        if isinstance(value, str):
            raise DataError(f"{place}: {MESSAGES} must be a list of messages, not the string {value!r:.80}")
        check_turns(place, value, MESSAGES)
        first, *_, last = (*learned_turns(value)[:1], *learned_turns(value))
        if first == 0:
            raise DataError(
                f"{place}: {MESSAGES} begins with a turn of the assistant; add what it answers, or mark the turn "
                'with "weight": 0'
            )
        if row.get(prompt_key) is not None:
            _check_prompt(place, prompt_of(place, row[prompt_key], prompt_key, images), value, prompt_key)
        if row.get(COMPLETION) not in (None, "", []):
            _check_completion(place, prompt_of(place, row[COMPLETION], COMPLETION), value, last)
        if value[last + 1 :]:
            unused[BEHIND] += 1
        judged_by = row.get("reward_model")
        return Conversation(
            prompt=value[:last],
            answer=value[last]["content"] or "" if judged_by is None else ground_truth_of(place, judged_by),
            id=number,
            data_source=source_of(place, row, MESSAGES),
            **fields,
            messages=value[: last + 1],
        )

    return Kind((MESSAGES,), (prompt_key, COMPLETION, "data_source", "reward_model", *OPTIONAL), make)


def completion_rows(prompt_key: str = "prompt") -> Kind:
    """Returns the kind of rows with prompts and their completions, each a string or chat messages.

    Turns of the assistant in a prompt are not learned. Optional are the columns of ``conversation_rows`` other than
    ``reward_model``.

    Args:
        prompt_key: the column of prompts.
    """
    required = (prompt_key, COMPLETION)

    def make(place: str, row: Row, number: int, unused: Counter[str]) -> Problem:
        common = {"id": number, "data_source": source_of(place, row, COMPLETION), **fields_of(place, row)}
        prompt = prompt_of(place, row[prompt_key], prompt_key, len(common["images"]))
        completion = prompt_of(place, row[COMPLETION], COMPLETION)
        if isinstance(completion, str):
            return Problem(prompt, completion, **common)
        check_turns(place, completion, COMPLETION)
        before: Messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        messages = (*({**m, "weight": 0} if m["role"] == "assistant" else m for m in before), *completion)
        *_, last = learned_turns(messages)
        if messages[last + 1 :]:
            unused[BEHIND] += 1
        answer = messages[last]["content"] or ""
        return Conversation(messages[:last], answer, **common, messages=messages[: last + 1])

    hint = f"required are {' and '.join(required)}, and data.prompt_key names the prompts' column"
    return Kind(required, ("data_source", *OPTIONAL), make, hint)


def _check_prompt(place: str, prompt: str | Messages, messages: Messages, column: str) -> None:
    """Checks that the messages begin with the prompt: with its messages, or with the user's words."""
    words = next((message["content"] for message in messages if message["role"] == "user"), None)
    if prompt != (words if isinstance(prompt, str) else messages[: len(prompt)]):
        raise DataError(
            f"{place}: {MESSAGES} does not begin with {column}, so it is not clear what is learned; correct or "
            f"remove one of them: the user says {words!r:.80}, and {column} is {prompt!r:.80}"
        )


def _check_completion(place: str, completion: str | Messages, messages: Messages, last: int) -> None:
    """Checks that the messages end with the completion, or with its words; space and an end token are no difference.

    Args:
        place: of the row.
        completion: as the row has it.
        messages: all of the row.
        last: the number of the last one that is learned.
    """
    if isinstance(completion, str):
        rest = completion.strip().removeprefix(said := str(messages[last]["content"]).strip())
        agrees = completion.strip().startswith(said) and (not rest or (rest[0] + rest[-1] == "<>"))
    else:
        turns = [(m["role"], str(m["content"]).strip()) for m in completion]
        ends = (messages, messages[: last + 1])
        agrees = turns in [[(m["role"], str(m["content"]).strip()) for m in end[-len(turns) :]] for end in ends]
    if not agrees:
        raise DataError(
            f"{place}: {MESSAGES} does not end with {COMPLETION}, so it is not clear what is learned; correct or "
            f"remove one of them: the assistant says {messages[last]['content']!r:.80}, and {COMPLETION} is "
            f"{completion!r:.80}"
        )


@attrs.frozen(eq=False)
class TaskDialogues:
    """A generated task whose conversations are learned from; held-out problems are the task's.

    Attributes:
        task: has a ``dialogue``.
        max_row: tokens of the longest conversation, with a line break, end or begin token for each message.

    Example:
        >>> from verl_fn.data.tasks import TASKS
        >>> problem = TaskDialogues(TASKS["calculator"]).train(Key.from_seed(0), 0, 1)[0]
        >>> [message["content"] for message in problem.messages]
        ['78*97', '=78*97', '7566', '7566']
    """

    task: Task

    @property
    def max_prompt(self) -> int:
        """Returns the length of the task's longest prompt."""
        return self.task.max_prompt

    @property
    def max_row(self) -> int:
        """Returns the tokens of the longest conversation: the most messages of 64, each as long as the longest."""
        longest = max(self.task.max_prompt, self.task.max_answer) + 2
        return max(len(one.messages) for one in self.train(Key.from_seed(0), 0, 64)) * longest

    def train(self, key: Key, start: int, count: int) -> tuple[Conversation, ...]:
        """Returns the conversations of the task's problems ``start`` to ``start + count``."""
        return tuple(self._of(problem) for problem in self.task.train(key, start, count))

    def held_out(self, count: int | None) -> tuple[Conversation, ...]:
        """Returns the task's held-out problems with conversations; an evaluation lets the model talk about them."""
        problems = self.task.held_out(count)
        return tuple(
            attrs.evolve(self._of(problem), prompt=problem.prompt, answer=problem.answer) for problem in problems
        )

    def _of(self, problem: Problem) -> Conversation:
        assert self.task.dialogue is not None
        messages = self.task.dialogue(problem)
        prompt, answer = messages[:-1], messages[-1]["content"]
        return Conversation(prompt, answer, id=problem.id, data_source=problem.data_source, messages=messages)
