"""The problems of a run: read from files or made of a generated task, in the form that its algorithm learns from."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from verl_fn.config import ConfigError
from verl_fn.config.algorithms import LearnsFrom
from verl_fn.config.names import load_object, reasoning_names, verifiers_name
from verl_fn.config.schema import DataConfig
from verl_fn.data.conversations import (
    COMPLETION,
    MESSAGES,
    TaskDialogues,
    read_completions,
    read_conversations,
)
from verl_fn.data.entries import Convert, Entry, entry_columns
from verl_fn.data.examples import encode_rows
from verl_fn.data.files import FileData, encode_prompts, read_problems
from verl_fn.data.judged import Judged, TaskPairs
from verl_fn.data.judged_files import LABEL_COLUMNS, PAIR_COLUMNS, read_labelled, read_pairs
from verl_fn.data.lengths import counted
from verl_fn.data.rows import DataError
from verl_fn.data.streaming import Read, StreamedData, streamed
from verl_fn.data.tasks import TASKS, Problem, Source, Task

CHUNK = 4096  # problems that are encoded together


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
    files: Sequence[Entry],
    learns_from: LearnsFrom,
    *,
    prompt_key: str = "prompt",
    held_out: bool = False,
    convert: Sequence[Convert] = (),
    unused: Counter[str] | None = None,
) -> tuple[Problem, ...]:
    """Reads the problems of files and data sets in the form that an algorithm learns from.

    For ``answers`` files have conversations (with a column ``messages``), prompts and completions (with a column
    ``completion``, and neither ``reward_model`` nor ``label``), or problems in verl's columns. Held-out
    files of ``pairs`` and ``labels`` may have problems in verl's columns as well, whose answers are then sampled.

    Args:
        files: the files, in order; the columns of the first one say what all of them hold.
        learns_from: what the algorithm learns from.
        prompt_key: the column of prompts.
        held_out: whether they are for evaluation.
        convert: functions that make rows of other columns into verl's, as ``data.convert`` names them.
        unused: gets, for each column that is not used, the number of rows with a value in it.

    Raises:
        DataError: a file cannot be read or lacks a column, or a row cannot be used.
    """
    read: Callable[..., tuple[Problem, ...]] = read_problems
    columns = set(entry_columns(files[0], convert)) if files and learns_from != "samples" else set()
    if learns_from == "answers" and MESSAGES in columns:
        read = read_conversations
    elif learns_from == "answers" and COMPLETION in columns and not {"reward_model", "label"} & columns:
        read = read_completions
    elif learns_from in ("pairs", "labels"):
        judged = set(PAIR_COLUMNS) <= columns or (learns_from == "labels" and set(LABEL_COLUMNS) <= columns)
        if not held_out or judged or "reward_model" not in columns:
            read = read_pairs if learns_from == "pairs" else read_labelled
    return read(files, prompt_key=prompt_key, convert=convert, unused=unused)


def converters(table: DataConfig) -> tuple[Convert, ...]:
    """Imports the functions that ``data.convert`` names.

    Raises:
        ConfigError: one cannot be imported, or is no function.

    Example:
        >>> converters(DataConfig(convert=("verl_fn.data.converters:math",)))[0].__name__
        'math'
    """
    functions = []
    for name in table.convert:
        functions.append(load_object(name, "data.convert"))
        if not callable(functions[-1]):
            raise ConfigError(f"data.convert: {name} is {functions[-1]!r:.80}; name a function")
    return tuple(functions)


def file_data(
    table: DataConfig,
    tokenizer: Any,
    say: Callable[[str], None] = print,
    *,
    learns_from: LearnsFrom = "samples",
    end_tokens: int | Sequence[int] | None = None,
) -> FileData | StreamedData:
    """Reads the problems of ``data.train_files`` and ``data.val_files``, and checks the length of every prompt.

    All prompts are encoded here, so that a prompt that is too long ends the run before training starts. With
    ``data.filter_overlong_prompts`` such prompts are left out instead. With ``data.stream`` only the first training
    rows are read and checked here.

    Args:
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer.
        say: prints a line; it reports how many prompts were left out.
        learns_from: what the algorithm learns from.
        end_tokens: those of the model, or the first of them, if the run trains on the data's own answers, which the
            tokenizer must then be able to encode.

    Raises:
        DataError: a file cannot be used, a prompt is too long, all prompts were left out, or a response to train on
            has characters that the tokenizer does not know, or cannot be rendered turn by turn.
    """
    convert = converters(table)
    unused: Counter[str] = Counter()
    read = functools.partial(
        read_files, learns_from=learns_from, prompt_key=table.prompt_key, convert=convert, unused=unused
    )
    held_out = read(table.val_files, held_out=True)
    _report_unused("data.val_files", unused, say)
    if table.stream and table.train_files:
        validation, _ = short_enough("data.val_files", held_out, table, tokenizer, say)
        source = streamed(table, tokenizer, read, validation, learns_from, end_tokens)
        _report_unused("data.train_files, first rows", unused, say)
        return source
    # Without training files, these are weights of the sets that data.task names.
    weights = table.weights if table.train_files else ()
    problems = _read_parts(table.train_files, bool(weights), read)
    _report_unused("data.train_files", unused, say)
    parts = [short_enough("data.train_files", part, table, tokenizer, say) for part in problems]
    training, lengths = (tuple(itertools.chain(*column)) for column in zip(*parts, strict=True))
    validation, validation_lengths = short_enough("data.val_files", held_out, table, tokenizer, say)
    data = FileData(
        training,
        validation,
        table.shuffle,
        max((*lengths, *validation_lengths), default=0),
        sizes=tuple(len(problems) for problems, _ in parts) if weights else (),
        weights=weights,
    )
    if end_tokens is None or not training:
        return data
    # Held-out rows that hold what is learned have a loss.
    of_kind = (*training, *(p for p in validation if learns_from == "answers" or isinstance(p, Judged)))
    count = functools.partial(_longest, of_kind, learns_from, tokenizer, end_tokens)
    max_row, max_group = counted(f"rows of {learns_from}, ended by {end_tokens}", of_kind, tokenizer, count)
    return attrs.evolve(data, max_row=max_row, max_group=max_group)


def _report_unused(key: str, unused: Counter[str], say: Callable[[str], None]) -> None:
    """Prints the columns that are not used, with the number of rows that have a value, and clears the counts."""
    if columns := [f"{name} ({count} rows)" for name, count in sorted(unused.items()) if count]:
        say(f"note: {key}: columns that are not used: {', '.join(columns)}")
    unused.clear()


def _read_parts(files: Sequence[str], each: bool, read: Read) -> list[tuple[Problem, ...]]:
    """Returns the training problems of all files together, or of each file."""
    if not each:
        return [read(files)]
    parts, first = [], 0
    for file in files:
        problems = read([file])
        parts.append(tuple(attrs.evolve(problem, id=first + problem.id) for problem in problems))
        first += len(problems)
    return parts


def _longest(
    problems: Sequence[Problem], learns_from: LearnsFrom, tokenizer: Any, end_tokens: int | Sequence[int]
) -> tuple[int, int]:
    """Returns the tokens of the longest row, and of the rows that are longest together."""
    lengths: list[list[int]] = []
    prompts: list[int] = []
    for some in _chunks(problems):
        rows = encode_rows(some, tokenizer, end_tokens)
        lengths += ([len(ids) for ids, _ in examples] for examples in rows)
        if learns_from == "labels":
            prompts += (mask.index(1.0) for examples in rows for _, mask in examples)
    longest = max(itertools.chain.from_iterable(lengths))
    if learns_from == "labels":
        # Prompts also come with the responses to others.
        together = max(prompts) + max(
            length - prompt for length, prompt in zip(itertools.chain.from_iterable(lengths), prompts, strict=True)
        )
        return together, together
    # The rows of a conversation need not stay together, those of a pair must.
    return longest, max(map(sum, lengths)) if learns_from == "pairs" else longest


def _chunks(problems: Sequence[Problem]) -> Iterator[Sequence[Problem]]:
    """Yields so many problems at a time that the tokens of all of them never lie in memory together."""
    return (problems[start : start + CHUNK] for start in range(0, len(problems), CHUNK))


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
    cuts = table.truncation != "error" and not table.filter_overlong_prompts
    longest = None if table.filter_overlong_prompts or cuts else limit

    def count() -> list[int]:
        return [len(ids) for some in _chunks(problems) for ids in encode_prompts(some, tokenizer, longest)]

    lengths = counted("prompts", problems, tokenizer, count)
    if longest is not None and max(lengths, default=0) > longest:
        count()  # which names the prompt
    if cuts and (long := sum(length > limit for length in lengths)):
        say(f"{key}: {long} of {len(problems)} prompts are cut to {limit} tokens (data.truncation)")
        return tuple(problems), [min(length, limit) for length in lengths]
    pairs = [(problem, length) for problem, length in zip(problems, lengths, strict=True) if length <= limit]
    if problems and not pairs:
        raise DataError(
            f"{key}: all {len(problems)} prompts are longer than {limit} tokens; raise data.max_prompt_length"
        )
    if len(pairs) < len(problems):
        left_out = len(problems) - len(pairs)
        say(f"{key}: left out {left_out} of {len(problems)} prompts, longer than {limit} tokens")
    return tuple(problem for problem, _ in pairs), [length for _, length in pairs]
