"""Training data from files in verl's RL columns: read, checked, encoded, and as an endless stream of problems."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from verl_fn.config.schema import DataConfig
from verl_fn.data.tasks import Problem
from verl_fn.errors import UserError
from verl_fn.state import Key

Row = dict[str, Any]


class DataError(UserError, ValueError):
    """Data that cannot be trained on; the message names the file and the row."""


@attrs.frozen(eq=False)
class FileData:
    """A source of problems that were read from files.

    Attributes:
        training: the problems of an epoch; none where only the held-out ones are asked for.
        validation: the held-out problems.
        shuffle: another order of ``training`` in every epoch; otherwise the files' order in all.
        max_prompt: tokens of the longest prompt.
        max_row: tokens of the longest training row, prompt, answer and end token, where answers are trained on.

    >>> data = FileData((Problem("a>", "a"), Problem("b>", "b")), (), shuffle=False)
    >>> [(p.id, p.answer) for p in data.train(Key.from_seed(0), 1, 3)]
    [(1, 'b'), (2, 'a'), (3, 'b')]
    """

    training: tuple[Problem, ...]
    validation: tuple[Problem, ...]
    shuffle: bool
    max_prompt: int = 0
    max_row: int = 0

    def train(self, key: Key, start: int, count: int) -> tuple[Problem, ...]:
        """Problems ``start`` to ``start + count`` of the endless stream that ``key`` names, epoch after epoch.

        A problem's ``id`` is its place in the stream, so its responses are sampled anew in every epoch.
        """
        orders: dict[int, Sequence[int]] = {}
        found = []
        for i in range(start, start + count):
            epoch, place = divmod(i, len(self.training))
            if epoch not in orders:
                orders[epoch] = self._order(key, epoch)
            found.append(attrs.evolve(self.training[orders[epoch][place]], id=i))
        return tuple(found)

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """The first ``count`` problems of the validation files, which may be none; all of them for None."""
        return self.validation[:count]

    def _order(self, key: Key, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self.training))
        generator = key.fold_in("epoch").fold_in(epoch).generator()
        return torch.randperm(len(self.training), generator=generator).tolist()


def file_data(
    d: DataConfig, tokenizer: Any, say: Callable[[str], None] = print, *, answers: bool = False
) -> FileData:
    """The problems of ``data.train_files`` and ``data.val_files``, with every prompt's length checked.

    Prompts are encoded here once, so that a long one ends the run before it trains, not in the middle. With
    ``data.filter_overlong_prompts`` such prompts are left out instead, and ``say`` gets how many.

    Args:
        answers: whether answers are trained on, and so must be encodable.

    Raises:
        DataError: a file cannot be used, a prompt is too long, the filter leaves nothing, or an answer that is to
            be trained on has characters that the tokenizer does not know.
    """
    (training, a), (validation, b) = (
        _fitting(name, read_problems(files, prompt_key=d.prompt_key), d, tokenizer, say)
        for name, files in (("data.train_files", d.train_files), ("data.val_files", d.val_files))
    )
    row = 0
    if answers and training:
        row = max(prompt + len(answer) for prompt, answer in zip(a, encode_answers(training, tokenizer), strict=True))
    return FileData(training, validation, d.shuffle, max((*a, *b), default=0), row)


def _fitting(
    name: str, problems: tuple[Problem, ...], d: DataConfig, tokenizer: Any, say: Callable[[str], None]
) -> tuple[tuple[Problem, ...], list[int]]:
    """The problems that are short enough, and the tokens of the prompt of each."""
    prompts = encode_prompts(problems, tokenizer, None if d.filter_overlong_prompts else d.max_prompt_length)
    fitting = [len(ids) <= d.max_prompt_length for ids in prompts]
    kept = tuple(p for p, fits in zip(problems, fitting, strict=True) if fits)
    if problems and not kept:
        raise DataError(
            f"{name}: all {len(problems)} prompts are longer than {d.max_prompt_length} tokens; "
            "raise data.max_prompt_length"
        )
    if len(kept) < len(problems):
        left_out = len(problems) - len(kept)
        say(f"{name}: left out {left_out} of {len(problems)} prompts, longer than {d.max_prompt_length} tokens")
    return kept, [len(ids) for ids in prompts if len(ids) <= d.max_prompt_length]


def encode_prompts(problems: Sequence[Problem], tokenizer: Any, max_length: int | None = None) -> list[list[int]]:
    """Token ids of each prompt.

    A text comes after the tokenizer's bos token, where it has one. Chat messages go through the tokenizer's chat
    template, up to where the assistant answers.

    Args:
        max_length: the longest prompt allowed, in tokens.

    Raises:
        DataError: a prompt is too long, has characters that the tokenizer does not know, or is of chat messages
            that the tokenizer has no template for or whose template refuses them.

    >>> from verl_fn.backends.hf.new_model import char_tokenizer
    >>> encode_prompts([Problem("cab", "")], char_tokenizer("abc"))
    [[1, 6, 4, 5]]
    """
    return [_encode(problem, tokenizer, max_length) for problem in problems]


def _encode(problem: Problem, tokenizer: Any, max_length: int | None) -> list[int]:
    if isinstance(problem.prompt, str):
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids = start + tokenizer.encode(problem.prompt, add_special_tokens=False)
    else:
        ids = _encode_messages(problem, tokenizer)
    if _has_unknown(ids, tokenizer):
        raise DataError(f"the tokenizer does not know every character of the prompt {problem.prompt!r}")
    if max_length is not None and len(ids) > max_length:
        raise DataError(
            f"{_name(problem)}: the prompt has {len(ids)} tokens, more than {max_length}; "
            "raise data.max_prompt_length, or set data.filter_overlong_prompts to leave such prompts out"
        )
    return ids


def encode_answers(problems: Sequence[Problem], tokenizer: Any) -> list[list[int]]:
    """Token ids of each problem's answer, the end token included.

    Raises:
        DataError: an answer has characters that the tokenizer does not know.

    >>> from verl_fn.backends.hf.new_model import char_tokenizer
    >>> encode_answers([Problem("", "cab")], char_tokenizer("abc"))
    [[6, 4, 5, 2]]
    """
    answers = [tokenizer.encode(problem.answer, add_special_tokens=False) for problem in problems]
    for problem, ids in zip(problems, answers, strict=True):
        if _has_unknown(ids, tokenizer):
            raise DataError(
                f"{_name(problem)}: the tokenizer does not know every character of the answer {problem.answer!r}"
            )
    return [[*ids, tokenizer.eos_token_id] for ids in answers]


def _has_unknown(ids: Sequence[int], tokenizer: Any) -> bool:
    # Byte-level tokenizers know every text, and some of them (GPT-2's) name their bos or eos as unk.
    return tokenizer.unk_token_id in set(ids) - {tokenizer.bos_token_id, tokenizer.eos_token_id}


def _encode_messages(problem: Problem, tokenizer: Any) -> list[int]:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{_name(problem)}: the prompt is of chat messages, and the tokenizer has no chat template; "
            "give text prompts, or a tokenizer folder with chat_template.jinja"
        )
    try:
        return tokenizer.apply_chat_template(
            list(problem.prompt), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise DataError(f"{_name(problem)}: the tokenizer's chat template failed on the prompt: {error}") from error


def _name(problem: Problem) -> str:
    return f"problem {problem.id} of {problem.data_source!r}"


def read_problems(files: Sequence[str | Path], *, prompt_key: str = "prompt") -> tuple[Problem, ...]:
    """The rows of parquet and JSONL files in verl's columns, numbered from 0 over all files.

    The columns are ``data_source``, the prompt (chat messages or a text), ``reward_model`` with its
    ``ground_truth``, and where there are any ``ability``, which joins ``extra_info``, and ``extra_info``.

    Args:
        prompt_key: the column of prompts.

    Raises:
        DataError: a file cannot be read, is empty or lacks a column, or a row lacks its prompt or ground truth.
    """
    problems: list[Problem] = []
    needed, more = ("data_source", prompt_key, "reward_model"), ("ability", "extra_info")
    hint = f"needed are {', '.join(needed)}, and data.prompt_key names the prompts' column"
    for file in files:
        for place, row in read_rows(file, needed, more, hint=hint):
            problems.append(_problem(place, row, prompt_key, len(problems)))
    return tuple(problems)


def _problem(place: str, row: Row, prompt_key: str, number: int) -> Problem:
    source, extra = row["data_source"], row.get("extra_info")
    if not isinstance(source, str):
        raise DataError(f"{place}: data_source must be a text, not {source!r:.80}")
    if not isinstance(extra, Mapping | None):
        raise DataError(f"{place}: extra_info must hold named values, not {extra!r:.80}")
    ability = {} if row.get("ability") is None else {"ability": row["ability"]}
    return Problem(
        prompt=_prompt(place, row[prompt_key], prompt_key),
        answer=_answer(place, row["reward_model"]),
        id=number,
        data_source=source,
        extra_info=_without_nulls(extra or {}) | ability,
    )


def _prompt(place: str, value: Any, prompt_key: str) -> str | tuple[Mapping[str, str], ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return tuple(_without_nulls(value))
    raise DataError(
        f"{place}: {prompt_key} must be a text or a list of messages with a text as role and content, "
        f"not {value!r:.80}"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _answer(place: str, reward_model: Any) -> str:
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if truth is None:
        raise DataError(f"{place}: reward_model has no ground_truth")
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)


def _without_nulls(value: Any) -> Any:
    """Parquet gives every struct of a column all keys that any row has; those a row did not have are null."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def read_rows(
    file: str | Path, needed: Sequence[str], more: Sequence[str] = (), *, hint: str = ""
) -> Iterator[tuple[str, Row]]:
    """Each row of a parquet or JSONL file, after the words for its place in messages.

    Args:
        needed: columns to read, which must be there.
        more: columns to read where they are there.
        hint: what to say of a column that is not there.

    Raises:
        DataError: the file cannot be read, has no rows, or lacks a column.
    """
    path = Path(file).expanduser()
    if path.suffix not in _READERS:
        raise DataError(f"{path}: the name of a data file must end in {', '.join(_READERS)}")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    empty = True
    try:
        for place, row in _READERS[path.suffix](path, needed, more, hint):
            empty = False
            yield place, row
    except UnicodeDecodeError as error:
        raise DataError(f"{path} has text that is not UTF-8: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if empty:
        raise DataError(f"{path} has no rows")


def _parquet(path: Path, needed: Sequence[str], more: Sequence[str], hint: str) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_columns(str(path), names, needed, hint)
            for batch in file.iter_batches(columns=[name for name in (*needed, *more) if name in names]):
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a whole parquet file: {error}") from error


def _json_lines(path: Path, needed: Sequence[str], more: Sequence[str], hint: str) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place} is not JSON, one object a line: {getattr(error, 'msg', error)}") from error
            if not isinstance(row, dict):
                raise DataError(f"{place} is not a JSON object, one a line: {row!r:.80}")
            _check_columns(place, list(row), needed, hint)
            row = {name: row[name] for name in (*needed, *more) if name in row}
            if "\\ud" in line.lower():
                _check_characters(place, row)
            yield place, row


def _check_characters(place: str, row: Row) -> None:
    """JSON can write one half of a surrogate pair, which is no character: no tokenizer takes it."""
    for name, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(
                f"{place}: {name} has {half!a}, half of a character's surrogate pair; write the whole character"
            ) from error


_READERS = {".parquet": _parquet, ".jsonl": _json_lines, ".json": _json_lines}


def _check_columns(place: str, names: Sequence[str], needed: Sequence[str], hint: str) -> None:
    for column in needed:
        if column not in names:
            near = difflib.get_close_matches(column, [name for name in names if name not in needed], 1)
            raise DataError(
                f"{place}: there is no column {column!r}"
                + (f" (did you mean {near[0]!r}?)" if near else "")
                + f"; its columns are {', '.join(names)}"
                + (f"; {hint}" if hint else "")
            )
