"""Conversations to learn from, whose assistant's turns are found in what the chat template makes of them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from verl_fn.backends.hf.chat import chat_tokens
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
from verl_fn.data.entries import Convert, Entry, entry_rows
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem, Task
from verl_fn.state import Key

MESSAGES = "messages"


@attrs.frozen
class Conversation(Problem):
    """A conversation; its prompt is all before the last turn of the assistant, and that turn is its answer.

    Attributes:
        messages: the conversation up to the last turn of the assistant.
    """

    messages: Messages = ()


def read_conversations(
    files: Sequence[Entry],
    *,
    prompt_key: str = "prompt",
    convert: Sequence[Convert] = (),
    unused: Counter[str] | None = None,
) -> tuple[Conversation, ...]:
    """Reads conversations of files and data sets with a column ``messages``, and numbers them from 0.

    Optional columns are ``data_source``, ``ability``, ``extra_info``, ``tools``, JSON schemas that the chat template
    shows, ``chat_template_kwargs``, and ``reward_model``: sampled answers are judged by its ``ground_truth``, or else
    by the last turn. The messages must begin with the prompt if there is one. Those after the last turn that is
    learned are left out.

    Args:
        files: the files, in order.
        prompt_key: the column of prompts.
        convert: functions that make rows of other columns into these.
        unused: as for ``entry_rows``; it also counts rows with messages that are left out.

    Raises:
        DataError: a file cannot be read, is empty or has no such column, or a conversation has no turn of the
            assistant, begins with one, has one without content, or has another prompt.
    """
    problems: list[Conversation] = []
    optional = (prompt_key, "data_source", "reward_model", *OPTIONAL)
    for file in files:
        for place, row in entry_rows(file, (MESSAGES,), optional, convert=convert, unused=unused):
            value = prompt_of(place, row[MESSAGES], MESSAGES)
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
                _check_prompt(place, prompt_of(place, row[prompt_key], prompt_key), value, prompt_key)
            if unused is not None and value[last + 1 :]:
                unused["messages after the last turn that is learned"] += 1
            judged_by = row.get("reward_model")
            problems.append(
                Conversation(
                    prompt=value[:last],
                    answer=value[last]["content"] or "" if judged_by is None else ground_truth_of(place, judged_by),
                    id=len(problems),
                    data_source=source_of(place, row, MESSAGES),
                    **fields_of(place, row),
                    messages=value[: last + 1],
                )
            )
    return tuple(problems)


def _check_prompt(place: str, prompt: str | Messages, messages: Messages, column: str) -> None:
    """Checks that the messages begin with the prompt: with its messages, or with the user's words."""
    words = next((message["content"] for message in messages if message["role"] == "user"), None)
    if prompt != (words if isinstance(prompt, str) else messages[: len(prompt)]):
        raise DataError(
            f"{place}: {MESSAGES} does not begin with {column}, so it is not clear what is learned; correct or "
            f"remove one of them: the user says {words!r:.80}, and {column} is {prompt!r:.80}"
        )


@attrs.frozen(eq=False)
class TaskDialogues:
    """A generated task whose conversations are learned from; held-out problems are those of the task.

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

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """Returns the task's held-out problems, which an evaluation lets the model talk about."""
        return self.task.held_out(count)

    def _of(self, problem: Problem) -> Conversation:
        assert self.task.dialogue is not None
        messages = self.task.dialogue(problem)
        prompt, answer = messages[:-1], messages[-1]["content"]
        return Conversation(prompt, answer, id=problem.id, data_source=problem.data_source, messages=messages)


def turn_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    end_token: int,
    start: int = 0,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[list[int], list[float]]:
    """Returns the token ids of a conversation, and a mask of those that the assistant says.

    The template renders the conversation up to each turn of the assistant, once without the turn and once with it.
    The mask is 1 from the end of the first rendering to the turn's end token. Tokens after the last one are left out.

    Args:
        tokenizer: has a chat template.
        messages: the conversation.
        end_token: the token that ends a turn.
        start: turns before this message are not learned from.
        chat_template_kwargs, tools: as of ``chat_tokens``.

    Raises:
        DataError: the template changes earlier messages where more follow, or begins a turn otherwise than for
            sampling, or ends it without the end token.
        ModelError: the template fails.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> tokenizer = char_tokenizer("abc>")
        >>> end = "{{ '<eos>' if m['role'] == 'assistant' else '>' }}"
        >>> tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"
        >>> turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "a")]
        >>> turn_tokens(tokenizer, [{"role": role, "content": content} for role, content in turns], 2)
        ([4, 7, 5, 2, 6, 7, 4, 2], [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    """
    render = functools.partial(chat_tokens, tokenizer, tools=tools, chat_template_kwargs=chat_template_kwargs)
    ids, mask, end = list[int](), list[float](), 0
    for i in learned_turns(messages, start):
        before, after = render(messages[:i]), render(messages[: i + 1], generation_prompt=False)
        if before[: len(ids)] != ids:
            raise DataError(
                f"the chat template renders the messages before message {i} otherwise than without it, as templates "
                "do that drop earlier reasoning; make a row of its own of every turn, or use a template that leaves "
                "earlier messages as they are"
            )
        if after[: len(before)] != before:
            raise DataError(
                f"the chat template begins message {i} otherwise than the prompt of an answer "
                "(add_generation_prompt); use a template in which the rendered turn continues that prompt"
            )
        turn = after[len(before) :]
        if end_token not in turn:
            raise DataError(
                f"the chat template does not end message {i} with {tokenizer.convert_ids_to_tokens(end_token)!r}, so "
                "the model would never learn to stop; write that token after the assistant's content in the template"
            )
        said = turn.index(end_token) + 1
        mask += [0.0] * (len(before) - len(ids)) + [1.0] * said + [0.0] * (len(turn) - said)
        ids, end = after, len(before) + said
    return ids[:end], mask[:end]
