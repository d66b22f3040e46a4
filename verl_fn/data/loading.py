"""The problems of a run: read from files or made of a generated task, in the form that its algorithm learns from."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.config import ConfigError
from verl_fn.config.algorithms import LearnsFrom
from verl_fn.config.names import load_object, reasoning_names, verifiers_name
from verl_fn.config.schema import DataConfig
from verl_fn.data.conversations import COMPLETION, MESSAGES, TaskDialogues, completion_rows, conversation_rows
from verl_fn.data.encoded import Encoded, Encoder, longest_prompt, longest_rows, short_enough
from verl_fn.data.entries import Convert, Entry, Kind, entry_columns
from verl_fn.data.files import FileData, problem_rows, read_problems
from verl_fn.data.judged import LABEL_COLUMNS, PAIR_COLUMNS, TaskPairs, labelled_rows, pair_rows
from verl_fn.data.reading import encoded_files
from verl_fn.data.rows import SUFFIXES, DataError
from verl_fn.data.streaming import streamed
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


def kinds_of(
    files: Sequence[Entry],
    learns_from: LearnsFrom,
    *,
    prompt_key: str = "prompt",
    held_out: bool = False,
    convert: Sequence[Convert] = (),
) -> tuple[Kind, ...]:
    """Returns the kind of rows of each file, in the form that an algorithm learns from.

    For ``answers`` files have conversations (with a column ``messages``), prompts and completions (with a column
    ``completion``, and neither ``reward_model`` nor ``label``), or problems in verl's columns. Held-out
    files of ``pairs`` and ``labels`` may have problems in verl's columns as well, whose answers are then sampled. A
    file of pairs gives two labelled responses a row.

    Args:
        files: the files, in order; the columns of the first one say what all of them hold.
        learns_from: what the algorithm learns from.
        prompt_key: the column of prompts.
        held_out: whether they are for evaluation.
        convert: functions that make rows of other columns into verl's, as ``data.convert`` names them.

    Raises:
        DataError: a data set cannot be read, or a function fails on the first row.
    """
    columns = set(entry_columns(files[0], convert)) if files and learns_from != "samples" else set()
    kind = problem_rows(prompt_key)
    if learns_from == "answers" and MESSAGES in columns:
        kind = conversation_rows(prompt_key)
    elif learns_from == "answers" and COMPLETION in columns and not {"reward_model", "label"} & columns:
        kind = completion_rows(prompt_key)
    elif learns_from in ("pairs", "labels"):
        judged = set(PAIR_COLUMNS) <= columns or (learns_from == "labels" and set(LABEL_COLUMNS) <= columns)
        if not held_out or judged or "reward_model" not in columns:
            pairs, labelled = pair_rows(prompt_key), labelled_rows(prompt_key)
            if learns_from == "pairs":
                kind = pairs
            else:
                own = [set(entry_columns(file, convert)) for file in files]
                return tuple(pairs if set(PAIR_COLUMNS) <= names else labelled for names in own)
    return (kind,) * len(files)


def read_files(
    files: Sequence[Entry],
    learns_from: LearnsFrom,
    *,
    prompt_key: str = "prompt",
    held_out: bool = False,
    convert: Sequence[Convert] = (),
    unused: Counter[str] | None = None,
) -> tuple[Problem, ...]:
    """Reads the problems of files and data sets, and numbers them from 0 over all files.

    Args:
        files: the files, in order.
        learns_from: what the algorithm learns from.
        prompt_key: the column of prompts.
        held_out: whether they are for evaluation.
        convert: as for ``kinds_of``.
        unused: gets, for each column that is not used, the number of rows with a value in it.

    Raises:
        DataError: a file cannot be read or lacks a column, or a row cannot be used.
    """
    kinds = kinds_of(files, learns_from, prompt_key=prompt_key, held_out=held_out, convert=convert)
    return read_problems(files, kinds, convert=convert, unused=unused)


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


def _check_files(table: DataConfig) -> None:
    for key in ("train_files", "val_files"):
        for entry in getattr(table, key):
            if Path(str(entry)).suffix in SUFFIXES and not Path(entry).expanduser().is_file():
                raise DataError(f"data.{key}: {entry}: there is no such file")


def file_data(
    table: DataConfig,
    tokenizer: Any,
    say: Callable[[str], None] = print,
    *,
    learns_from: LearnsFrom = "samples",
    end_tokens: int | Sequence[int] | None = None,
) -> FileData:
    """Reads the problems of ``data.train_files`` and ``data.val_files``, and checks the length of every prompt.

    All prompts are encoded here, so that a prompt that is too long ends the run before training starts. With
    ``data.filter_overlong_prompts`` such prompts are left out instead. With ``data.stream`` only the first training
    rows are read and checked here.

    Args:
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer.
        say: prints a line; it reports how many prompts were left out.
        learns_from: what the algorithm learns from.
        end_tokens: the model's, or the first of them, if the run trains on the data's own answers. The tokenizer
            must then be able to encode it.

    Raises:
        DataError: a file cannot be used, a prompt is too long, all prompts were left out, or a response to train on
            has characters that the tokenizer does not know, or cannot be rendered turn by turn.
    """
    _check_files(table)
    convert = converters(table)
    kinds = functools.partial(kinds_of, learns_from=learns_from, prompt_key=table.prompt_key, convert=convert)
    limit = table.max_prompt_length if table.filter_overlong_prompts and end_tokens is not None else None
    encoder = Encoder((), convert, tokenizer, end_tokens, limit=limit)
    of_held_out = attrs.evolve(
        encoder,
        kinds=kinds(table.val_files, held_out=True),
        end_tokens=end_tokens if table.train_files else None,
        # Held-out rows that hold what is learned have a loss.
        judged_only=learns_from != "answers",
    )
    held_out = encoded_files(table.val_files, of_held_out, table.convert)
    _report_unused("data.val_files", held_out.unused, learns_from, say)
    if table.stream and table.train_files:
        return _streamed(table, encoder, held_out, learns_from, say)
    # Without training files, these are weights of the sets that data.task names.
    weights = table.weights if table.train_files else ()
    of_each = [kind for file in table.train_files for kind in kinds([file])] if weights else kinds(table.train_files)
    found = encoded_files(table.train_files, attrs.evolve(encoder, kinds=of_each), table.convert)
    _report_unused("data.train_files", found.unused, learns_from, say)
    training = short_enough("data.train_files", found, table, say, each=bool(weights))
    validation = short_enough("data.val_files", held_out, table, say)
    taught = end_tokens is not None and len(training.problems) > 0
    max_row, max_group = longest_rows([training, validation], learns_from) if taught else (0, 0)
    return FileData(
        training.problems, validation.problems, table.shuffle, longest_prompt([training, validation]), max_row,
        max_group, sizes=training.sizes if weights else (), weights=weights,
    )  # fmt: skip


def _streamed(
    table: DataConfig, encoder: Encoder, held_out: Encoded, learns_from: LearnsFrom, say: Callable[[str], None]
) -> FileData:
    validation = short_enough("data.val_files", held_out, table, say).problems
    unused, told, rows = Counter[str](), set[str](), 0

    def read(files: Sequence[Entry]) -> tuple[Problem, ...]:
        nonlocal rows
        problems = read_files(files, learns_from, prompt_key=table.prompt_key, convert=encoder.convert, unused=unused)
        rows += len(problems)
        if unused.keys() - told:
            _report_unused(f"data.train_files, the first {rows} rows that were read", unused, learns_from, say)
            told.update(unused)
        return problems

    return streamed(table, encoder.tokenizer, read, validation, learns_from, encoder.end_tokens)


def _report_unused(key: str, unused: Counter[str], learns_from: LearnsFrom, say: Callable[[str], None]) -> None:
    """Prints the columns that are not used, with the number of rows that have a value."""
    if columns := [f"{name} ({count} rows)" for name, count in sorted(unused.items()) if count]:
        hint = "; a reward function gets what extra_info holds" if learns_from == "samples" else ""
        say(f"note: {key}: columns that are not used: {', '.join(columns)}{hint}")
