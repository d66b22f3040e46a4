"""The problems of a run: read from files or made of a generated task, in the form that its algorithm learns from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.config.roles import LearnsFrom
from verl_fn.config.schema import DataConfig
from verl_fn.config.tasks import reasoning_names, verifiers_name
from verl_fn.data.conversations import MESSAGES, TaskDialogues, read_conversations
from verl_fn.data.examples import encode_examples
from verl_fn.data.files import FileData, encode_prompts, read_problems
from verl_fn.data.judged import Judged, TaskPairs
from verl_fn.data.judged_files import LABEL_COLUMNS, PAIR_COLUMNS, read_labelled, read_pairs
from verl_fn.data.rows import DataError, column_names
from verl_fn.data.tasks import TASKS, Problem, Source, Task


def task_data(task: Task, learns_from: LearnsFrom) -> Source:
    """Returns a generated task as a source of what an algorithm learns from.

    Example:
        >>> from verl_fn.data.tasks import TASKS
        >>> task_data(TASKS["count"], "pairs").held_out(1)[0].chosen
        ('a',)
    """
    if learns_from == "answers" and task.dialogue is not None:
        return TaskDialogues(task)
    return TaskPairs(task) if learns_from in ("pairs", "labels") else task


def generated(table: DataConfig, tokenizer: Any, learns_from: LearnsFrom) -> Source:
    """Returns the task that ``data.task`` names, as a source of what an algorithm learns from.

    Args:
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer.
        learns_from: what the algorithm learns from.

    Raises:
        DataError: sets of Reasoning Gym cannot be used, or the algorithm learns from given responses.
    """
    if not reasoning_names(table.task) and not verifiers_name(table.task):
        return task_data(TASKS[table.task], learns_from)
    if learns_from != "samples":
        raise DataError(
            f"data.task = {table.task} gives questions to sample responses to, and this algorithm learns from given "
            f"{learns_from}; set data.train_files, or an algorithm that samples, such as algorithm.name=grpo"
        )
    from .reasoning import reasoning_data

    return reasoning_data(table, tokenizer)


def read_files(
    files: Sequence[str | Path], learns_from: LearnsFrom, *, prompt_key: str = "prompt", held_out: bool = False
) -> tuple[Problem, ...]:
    """Reads the problems of files in the form that an algorithm learns from.

    For ``answers`` files have conversations (a column ``messages``) or problems in verl's columns. Held-out files of
    ``pairs`` and ``labels`` may have problems in verl's columns as well, whose answers are then sampled.

    Args:
        files: the files, in order; the columns of the first one say what all of them hold.
        learns_from: what the algorithm learns from.
        prompt_key: the column of prompts.
        held_out: whether they are for evaluation.

    Raises:
        DataError: a file cannot be read or lacks a column, or a row cannot be used.
    """
    if not files or learns_from == "samples":
        return read_problems(files, prompt_key=prompt_key)
    columns = set(column_names(files[0]))
    if learns_from == "answers":
        if MESSAGES in columns and prompt_key not in columns:
            return read_conversations(files)
        return read_problems(files, prompt_key=prompt_key)
    judged = set(PAIR_COLUMNS) <= columns or (learns_from == "labels" and set(LABEL_COLUMNS) <= columns)
    if held_out and not judged and "reward_model" in columns:
        return read_problems(files, prompt_key=prompt_key)
    read = read_pairs if learns_from == "pairs" else read_labelled
    return read(files, prompt_key=prompt_key)


def file_data(
    table: DataConfig,
    tokenizer: Any,
    say: Callable[[str], None] = print,
    *,
    learns_from: LearnsFrom = "samples",
    end_token: int | None = None,
) -> FileData:
    """Reads the problems of ``data.train_files`` and ``data.val_files``, and checks the length of every prompt.

    All prompts are encoded here, so that a prompt that is too long ends the run before training starts. With
    ``data.filter_overlong_prompts`` such prompts are left out instead.

    Args:
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer.
        say: prints a line; it reports how many prompts were left out.
        learns_from: what the algorithm learns from.
        end_token: the token that ends answers if the run trains on the data's own; the tokenizer must then be able to
            encode them.

    Raises:
        DataError: a file cannot be used, a prompt is too long, all prompts were left out, or a response to train on
            has characters that the tokenizer does not know, or cannot be rendered turn by turn.
    """
    # Without training files, these are weights of the sets that data.task names.
    weights = table.weights if table.train_files else ()
    parts = [
        short_enough("data.train_files", problems, table, tokenizer, say)
        for problems in _read_parts(table, learns_from, bool(weights))
    ]
    training, lengths = (tuple(itertools.chain(*column)) for column in zip(*parts, strict=True))
    held_out = read_files(table.val_files, learns_from, prompt_key=table.prompt_key, held_out=True)
    validation, validation_lengths = short_enough("data.val_files", held_out, table, tokenizer, say)
    data = FileData(
        training,
        validation,
        table.shuffle,
        max((*lengths, *validation_lengths), default=0),
        sizes=tuple(len(problems) for problems, _ in parts) if weights else (),
        weights=weights,
    )
    if end_token is None or not training:
        return data
    max_row, max_group = _longest(training, learns_from, tokenizer, end_token)
    return attrs.evolve(data, max_row=max_row, max_group=max_group)


def _read_parts(table: DataConfig, learns_from: LearnsFrom, each: bool) -> list[tuple[Problem, ...]]:
    """Returns the training problems of all files together, or of each file."""
    if not each:
        return [read_files(table.train_files, learns_from, prompt_key=table.prompt_key)]
    parts, first = [], 0
    for file in table.train_files:
        problems = read_files([file], learns_from, prompt_key=table.prompt_key)
        parts.append(tuple(attrs.evolve(problem, id=first + problem.id) for problem in problems))
        first += len(problems)
    return parts


def _longest(problems: Sequence[Problem], learns_from: LearnsFrom, tokenizer: Any, end_token: int) -> tuple[int, int]:
    """Returns the tokens of the longest row, and of the rows that are longest together."""
    examples = encode_examples(problems, tokenizer, end_token)
    lengths = [len(ids) for ids, _ in examples]
    if learns_from == "labels":
        # Prompts also come with the responses to others.
        prompts = [mask.index(1.0) for _, mask in examples]
        longest = max(prompts) + max(length - prompt for length, prompt in zip(lengths, prompts, strict=True))
        return longest, longest
    counts = [len(problem.responses) if isinstance(problem, Judged) else 1 for problem in problems]
    groups, start = [], 0
    for count in counts:
        groups.append(sum(lengths[start : start + count]))
        start += count
    return max(lengths), max(groups)


def short_enough(
    key: str, problems: tuple[Problem, ...], table: DataConfig, tokenizer: Any, say: Callable[[str], None]
) -> tuple[tuple[Problem, ...], list[int]]:
    """Returns the problems whose prompts are short enough, and the length of each of these prompts in tokens.

    Args:
        key: the config key that names the problems, for errors.
        problems: the problems of one kind.
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer.
        say: prints a line; it reports how many prompts were left out.

    Raises:
        DataError: a prompt cannot be used or is too long, or all prompts were left out.
    """
    limit = table.max_prompt_length
    prompts = encode_prompts(problems, tokenizer, None if table.filter_overlong_prompts else limit)
    pairs = [(problem, len(ids)) for problem, ids in zip(problems, prompts, strict=True) if len(ids) <= limit]
    if problems and not pairs:
        raise DataError(
            f"{key}: all {len(problems)} prompts are longer than {limit} tokens; raise data.max_prompt_length"
        )
    if len(pairs) < len(problems):
        left_out = len(problems) - len(pairs)
        say(f"{key}: left out {left_out} of {len(problems)} prompts, longer than {limit} tokens")
    return tuple(problem for problem, _ in pairs), [length for _, length in pairs]
