"""The problems of a run, in the form that its algorithm learns from.

They are read from files, at once or when a step needs them, or made of a generated task or of Reasoning Gym.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from verl_fn.config import ConfigError
from verl_fn.config.algorithms import LearnsFrom
from verl_fn.config.names import load_object, reasoning_names, verifiers_name
from verl_fn.config.schema import DataConfig
from verl_fn.data.columns import truth
from verl_fn.data.encoded import Encoded, Encoder, longest_prompt, longest_rows, short_enough
from verl_fn.data.entries import Convert, Entry, Kind, entry_columns
from verl_fn.data.examples import COMPLETION, MESSAGES, TaskDialogues, completion_rows, conversation_rows
from verl_fn.data.files import FileData, encode_prompts, label_of, problem_rows, too_long
from verl_fn.data.hub import Table, is_set, open_set
from verl_fn.data.judged import LABEL_COLUMNS, PAIR_COLUMNS, TaskPairs, labelled_rows, pair_rows
from verl_fn.data.reading import encoded_files
from verl_fn.data.rows import SUFFIXES, DataError
from verl_fn.data.tasks import MAX_FAILED_DRAWS, TASKS, Problem, Source, different, is_held_out
from verl_fn.scores import SOURCE, reasoning_question
from verl_fn.state import Key

INSTRUCTION = "Give the final answer between <answer> and </answer>."
OF_ANSWERS = (
    ", or messages, or prompt and completion (without reward_model and label); "
    "verl_fn.data.converters:sharegpt in data.convert reads conversations"
)
FIRST = 64  # rows of each data set that are checked when a run starts


def generated(table: DataConfig, tokenizer: Any, learns_from: LearnsFrom) -> Source:
    """Returns the task that ``data.task`` names, as a source of what an algorithm learns from.

    Raises:
        DataError: sets of Reasoning Gym cannot be used, or the algorithm learns from given responses.

    Example:
        >>> generated(DataConfig(task="count"), None, "pairs").held_out(1)[0].chosen
        ('a',)
    """
    if not reasoning_names(table.task) and not verifiers_name(table.task):
        task = TASKS[table.task]
        if learns_from == "answers" and task.dialogue is not None:
            return TaskDialogues(task)
        return TaskPairs(task) if learns_from in ("pairs", "labels") else task
    if learns_from != "samples":
        raise DataError(
            f"data.task = {table.task} gives questions to sample responses to, and this algorithm learns from given "
            f"{learns_from}; set data.train_files, or an algorithm that samples, such as algorithm.name=grpo"
        )

    return reasoning_data(table, tokenizer)


def row_kind(
    file: Entry,
    learns_from: LearnsFrom,
    *,
    prompt_key: str = "prompt",
    held_out: bool = False,
    convert: Sequence[Convert] = (),
) -> Kind:
    """Returns the kind of a file's rows, as its columns say, in the form that an algorithm learns from.

    For ``answers`` files have conversations (with a column ``messages``), prompts and completions (with a column
    ``completion``, and neither ``reward_model`` nor ``label``), or problems in verl's columns. Held-out
    files of ``pairs`` and ``labels`` may have problems in verl's columns as well, whose answers are then sampled. A
    file of pairs gives two labelled responses a row.

    Args:
        convert: functions that make rows of other columns into verl's, as ``data.convert`` names them.

    Raises:
        DataError: a data set cannot be read, or a function fails on the first row.
    """
    if learns_from == "samples":
        return problem_rows(prompt_key)
    columns = set(entry_columns(file, convert))
    if learns_from == "answers":
        if MESSAGES in columns:
            return conversation_rows(prompt_key)
        if COMPLETION in columns and not {"reward_model", "label"} & columns:
            return completion_rows(prompt_key)
        return problem_rows(prompt_key, OF_ANSWERS)
    pairs = set(PAIR_COLUMNS) <= columns
    judged = pairs or (learns_from == "labels" and set(LABEL_COLUMNS) <= columns)
    # One of these columns without the others is a mistake, and no prompt to answer.
    if held_out and "reward_model" in columns and not judged and not columns & {*PAIR_COLUMNS, *LABEL_COLUMNS}:
        return problem_rows(prompt_key)
    return pair_rows(prompt_key) if pairs or learns_from == "pairs" else labelled_rows(prompt_key)


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
        unused: gets, for each column that is not used, the number of rows with a value in it.

    Raises:
        DataError: a file cannot be read or lacks a column, or a row cannot be used.
    """
    problems: list[Problem] = []
    for file in files:
        kind = row_kind(file, learns_from, prompt_key=prompt_key, held_out=held_out, convert=convert)
        for block in kind.blocks(file, convert):
            problems += kind.problems(block, len(problems), convert, unused)
    return tuple(problems)


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


def check_files(table: DataConfig) -> None:
    """Checks that each entry has a name, and that files exist.

    Raises:
        DataError: one has none, or does not.
    """
    for key in ("train_files", "val_files"):
        for entry in getattr(table, key):
            if not str(entry).strip():
                raise DataError(f"data.{key} has an empty name of a file; 'data.{key}=[]' names none")
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
        say: prints a line; it reports how many prompts were left out.
        end_tokens: the model's, or the first of them, if the run trains on the data's own answers. The tokenizer
            must then be able to encode it.

    Raises:
        DataError: a file cannot be used, a prompt is too long, all prompts were left out, or a response to train on
            has characters that the tokenizer does not know, or cannot be rendered turn by turn.
    """
    check_files(table)
    convert = converters(table)
    kind = functools.partial(row_kind, learns_from=learns_from, prompt_key=table.prompt_key, convert=convert)
    limit = table.max_prompt_length if table.filter_overlong_prompts and end_tokens is not None else None
    encoder = Encoder((), convert, tokenizer, end_tokens, limit=limit)
    of_held_out = attrs.evolve(
        encoder,
        kinds=tuple(kind(file, held_out=True) for file in table.val_files),
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
    of_training = attrs.evolve(encoder, kinds=tuple(map(kind, table.train_files)))
    found = encoded_files(table.train_files, of_training, table.convert)
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
) -> StreamedData:
    """Opens the data sets of ``data.train_files``, and checks the first rows of each."""
    validation = short_enough("data.val_files", held_out, table, say).problems
    if files := [entry for entry in table.train_files if not is_set(entry)]:
        raise DataError(
            f"data.stream: {files[0]} is a file, and only data sets of the package datasets are read row by row; "
            "name FOLDER#SPLIT or hub:datasets/OWNER/NAME@COMMIT#SPLIT, or leave data.stream out"
        )
    tables = tuple(map(open_set, table.train_files))
    unused, told, rows = Counter[str](), set[str](), 0

    def read(files: Sequence[Entry]) -> tuple[Problem, ...]:
        nonlocal rows
        problems = read_files(files, learns_from, prompt_key=table.prompt_key, convert=encoder.convert, unused=unused)
        rows += len(problems)
        if unused.keys() - told:
            _report_unused(f"data.train_files, the first {rows} rows that were read", unused, learns_from, say)
            told.update(unused)
        return problems

    first = tuple(problem for one in tables for problem in read([one.take(range(min(FIRST, len(one))))]))
    fits = functools.partial(_fit, table, encoder)
    fits(first)
    prompt, response = table.max_prompt_length, table.max_response_length
    # KTO puts responses behind the prompts of others.
    longest = prompt + response + (prompt if learns_from == "labels" else 0) if encoder.end_tokens is not None else 0
    return StreamedData(
        first, validation, table.shuffle, prompt, longest, 2 * longest, tuple(map(len, tables)), table.weights,
        tables=tables, read=read, fits=fits,
    )  # fmt: skip


def _fit(table: DataConfig, encoder: Encoder, problems: Sequence[Problem]) -> list[bool]:
    """Returns whether each problem is short enough.

    Raises:
        DataError: one is not, and longer ones are not left out; or it cannot be encoded.
    """
    limit, longest = table.max_prompt_length, table.max_prompt_length + table.max_response_length
    prompts, rows = encoder.lengths(problems)
    if table.filter_overlong_prompts:
        short: list[bool] = ((prompts <= limit) & (rows[:, 0] <= longest)).tolist()
        return short
    for problem, prompt, row in zip(problems, prompts.tolist(), rows[:, 0].tolist(), strict=True):
        if prompt > limit and (table.truncation == "error" or problem.images):
            raise too_long(problem, prompt, limit, learned=row > 0)
        if row > longest:
            raise DataError(
                f"{label_of(problem)}: prompt and response have {row} tokens, and data.stream allows {longest}, the "
                "sum of data.max_prompt_length and data.max_response_length; raise one of them, or set "
                "data.filter_overlong_prompts to draw another row"
            )
    return [True] * len(problems)


def _report_unused(key: str, unused: Counter[str], learns_from: LearnsFrom, say: Callable[[str], None]) -> None:
    """Prints the columns that are not used, with the number of rows that have a value."""
    if columns := [f"{name} ({count} rows)" for name, count in sorted(unused.items()) if count]:
        hint = "; a reward function gets what extra_info holds" if learns_from == "samples" else ""
        say(f"note: {key}: columns that are not used: {', '.join(columns)}{hint}")


@attrs.frozen(eq=False)
class ReasoningSets:
    """Sets of Reasoning Gym: a source of problems whose prompts are a user's messages.

    The package makes a question from a seed that is drawn here, and a problem keeps it in ``extra_info`` with the
    options. One question in eight is held out, by its text.

    Attributes:
        weights: the share of each set among problems, up to a common factor.
        options: of each set by its name; sets without options have the package's defaults.
        max_prompt: tokens that no prompt may exceed.
        fits: whether a problem's prompt is short enough; another one is drawn where it is not.
    """

    names: Sequence[str]
    weights: Sequence[float]
    options: Mapping[str, Mapping[str, Any]]
    max_prompt: int
    fits: Callable[[Problem], bool] = lambda problem: True

    def train(self, key: Key, start: int, count: int) -> tuple[Problem, ...]:
        """Returns training problems ``start`` to ``start + count`` of the stream that ``key`` names.

        Raises:
            DataError: a set makes no question that can be used.
        """
        return tuple(self._draw(key.fold_in("train").fold_in(i), i, False) for i in range(start, start + count))

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """Returns up to ``count`` different problems that no training stream contains, the same for every run.

        Raises:
            DataError: a set makes no question that can be used.
        """
        draw, key = functools.partial(self._draw, held_out=True), Key.from_seed(0).fold_in("held-out")
        return different(count, key, draw, lambda problem: problem.extra_info["question"])

    def _draw(self, key: Key, number: int, held_out: bool) -> Problem:
        rng = random.Random(key.seed())
        # The set stays the same until a question can be used: a set with many unusable ones keeps its share.
        name = rng.choices(self.names, self.weights)[0]
        options = self.options.get(name, {})
        for _ in range(MAX_FAILED_DRAWS):
            seed = rng.getrandbits(31)
            made = reasoning_question(name, seed, options)
            if is_held_out(made["question"]) != held_out:
                continue
            problem = Problem(
                prompt=({"role": "user", "content": f"{made['question']}\n\n{INSTRUCTION}"},),
                answer="" if made["answer"] is None else truth(made["answer"]),
                id=number,
                data_source=f"{SOURCE}{name}",
                extra_info={"seed": seed, "options": dict(options), "question": made["question"]},
            )
            if self.fits(problem):
                return problem
        kind = "held-out" if held_out else "training"
        raise DataError(
            f"data.task: of {MAX_FAILED_DRAWS} questions of {name} none can be a {kind} problem: the set has too few "
            "different questions, or all prompts are too long; change data.task_options or data.max_prompt_length"
        )


def reasoning_data(table: DataConfig, tokenizer: Any) -> ReasoningSets:
    """Returns the sets that ``data.task`` names as a source, after making a question of each.

    Raises:
        DataError: the package is not installed, has no such set or refuses its options, or the tokenizer has no chat
            template.
    """
    names = reasoning_names(table.task)
    source = ReasoningSets(
        names, table.weights or (1.0,) * len(names), table.task_options, table.max_prompt_length,
        lambda problem: not table.filter_overlong_prompts
        or len(encode_prompts([problem], tokenizer)[0]) <= table.max_prompt_length,
    )  # fmt: skip
    for name in names:
        options = source.options.get(name, {})
        try:
            reasoning_question(name, 0, options)
        except ImportError as error:
            raise DataError(f"data.task: {error}") from error
        # Sets check their options by assertions, and some fail later than that.
        except Exception as error:
            raise DataError(
                f"data.task: Reasoning Gym makes no question of {name} with data.task_options.{name} = "
                f"{dict(options)}: {type(error).__name__}: {error}"
            ) from error
    encode_prompts(source.train(Key.from_seed(0), 0, 1), tokenizer)
    return source


@attrs.frozen(eq=False, kw_only=True)
class StreamedData(FileData):
    """A source of problems whose rows stay on disk until a step needs them; ``training`` has the first ones.

    Attributes:
        read: makes problems of rows.
        fits: whether each of several problems is short enough; in place of one that is not, another is drawn.
    """

    tables: tuple[Table, ...]
    read: Callable[[Sequence[Entry]], tuple[Problem, ...]]
    fits: Callable[[Sequence[Problem]], list[bool]]

    def _problems(self, key: Key, start: int, places: Sequence[int]) -> Sequence[Problem]:
        """Reads the rows of places, and others of the same data sets for those that are too long.

        Raises:
            DataError: a row cannot be used, or many rows in succession are too long.
        """
        ends = list(itertools.accumulate(self.sizes))
        tables = [bisect.bisect_right(ends, place) for place in places]
        rows = [place - ends[table] + self.sizes[table] for place, table in zip(places, tables, strict=True)]
        problems: dict[int, Problem] = {}
        unfit = list(range(len(places)))
        for attempt in range(MAX_FAILED_DRAWS):
            # One read for each data set.
            for table in {tables[i] for i in unfit}:
                chosen = [i for i in unfit if tables[i] == table]
                problems |= zip(chosen, self.read([self.tables[table].take([rows[i] for i in chosen])]), strict=True)
            fits = self.fits([problems[i] for i in unfit])
            if not (unfit := [i for i, short in zip(unfit, fits, strict=True) if not short]):
                return [problems[i] for i in range(len(places))]
            for i in unfit:
                generator = key.fold_in("instead").fold_in(start + i).fold_in(attempt).generator()
                # Of the same data set, so that it keeps its share.
                rows[i] = int(torch.randint(self.sizes[tables[i]], (), generator=generator))
        name = self.tables[tables[unfit[0]]].name
        raise DataError(f"{name}: {MAX_FAILED_DRAWS} rows in succession are too long; raise data.max_prompt_length")
