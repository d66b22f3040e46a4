"""Training data from files in verl's RL columns: problems are read, checked, encoded, and served as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from verl_fn.backends.hf.chat import chat_tokens
from verl_fn.backends.hf.config import ModelError
from verl_fn.config.schema import DataConfig
from verl_fn.data.rows import DataError, Row, read_rows
from verl_fn.data.tasks import Problem
from verl_fn.data.truths import truth
from verl_fn.state import Key


@attrs.frozen(eq=False)
class FileData:
    """A source of problems that were read from files.

    Attributes:
        training: the problems of one epoch; empty for a run that only evaluates.
        validation: the held-out problems.
        shuffle: whether every epoch draws a new order of ``training``; otherwise all epochs use the files' order.
        max_prompt: tokens of the longest prompt.
        max_row: tokens of the longest training row (prompt, answer and end token); 0 unless answers are trained on.

    Example:
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
        """Returns problems ``start`` to ``start + count`` of the stream that ``key`` names; it repeats the epochs.

        A problem's ``id`` is its place in the stream, so every epoch samples new responses to it.
        """
        orders: dict[int, Sequence[int]] = {}
        problems = []
        for i in range(start, start + count):
            epoch, place = divmod(i, len(self.training))
            if epoch not in orders:
                orders[epoch] = self._order(key, epoch)
            problems.append(attrs.evolve(self.training[orders[epoch][place]], id=i))
        return tuple(problems)

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """Returns the first ``count`` problems of the validation files, or all of them for None."""
        return self.validation[:count]

    def _order(self, key: Key, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self.training))
        generator = key.fold_in("epoch").fold_in(epoch).generator()
        return torch.randperm(len(self.training), generator=generator).tolist()


def file_data(
    table: DataConfig, tokenizer: Any, say: Callable[[str], None] = print, *, end_token: int | None = None
) -> FileData:
    """Reads the problems of ``data.train_files`` and ``data.val_files``, and checks the length of every prompt.

    All prompts are encoded here, so that a prompt that is too long ends the run before training starts. With
    ``data.filter_overlong_prompts`` such prompts are left out instead.

    Args:
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer.
        say: prints a line; it reports how many prompts were left out.
        end_token: the token that ends answers if the run trains on them; the tokenizer must then be able to encode
            them.

    Raises:
        DataError: a file cannot be used, a prompt is too long, all prompts were left out, or an answer to train on
            has characters that the tokenizer does not know.
    """
    (training, lengths), (validation, validation_lengths) = (
        _short_enough(name, read_problems(files, prompt_key=table.prompt_key), table, tokenizer, say)
        for name, files in (("data.train_files", table.train_files), ("data.val_files", table.val_files))
    )
    max_row = 0
    if end_token is not None and training:
        answers = encode_answers(training, tokenizer, end_token)
        max_row = max(prompt + len(answer) for prompt, answer in zip(lengths, answers, strict=True))
    max_prompt = max((*lengths, *validation_lengths), default=0)
    return FileData(training, validation, table.shuffle, max_prompt, max_row)


def _short_enough(
    key: str, problems: tuple[Problem, ...], table: DataConfig, tokenizer: Any, say: Callable[[str], None]
) -> tuple[tuple[Problem, ...], list[int]]:
    """Returns the problems whose prompts are short enough, and the length of each of these prompts in tokens."""
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


def encode_prompts(problems: Sequence[Problem], tokenizer: Any, max_length: int | None = None) -> list[list[int]]:
    """Returns the token ids of each prompt.

    A string is encoded after the tokenizer's bos token, if the tokenizer has one. Chat messages go through the
    tokenizer's chat template, up to the start of the assistant's answer.

    Args:
        problems: the problems whose prompts are encoded.
        tokenizer: the model's tokenizer.
        max_length: the longest prompt allowed, in tokens.

    Raises:
        DataError: a prompt is too long, has characters that the tokenizer does not know, or consists of chat
            messages for which the tokenizer has no template or which its template rejects.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> encode_prompts([Problem("cab", "")], char_tokenizer("abc"))
        [[1, 6, 4, 5]]
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    strings = iter(_token_ids([p.prompt for p in problems if isinstance(p.prompt, str)], tokenizer))
    prompts = []
    for problem in problems:
        ids = start + next(strings) if isinstance(problem.prompt, str) else _encode_messages(problem, tokenizer)
        _check_prompt(problem, ids, tokenizer, max_length)
        prompts.append(ids)
    return prompts


def _token_ids(strings: list[str], tokenizer: Any) -> list[list[int]]:
    """Returns the token ids of each string; one call for all takes half the time of a call for each."""
    return tokenizer(strings, add_special_tokens=False)["input_ids"] if strings else []


def _check_prompt(problem: Problem, ids: list[int], tokenizer: Any, max_length: int | None) -> None:
    if not ids:
        raise DataError(f"{_label(problem)}: the tokenizer makes no token of the prompt {problem.prompt!r:.80}")
    if _has_unknown(ids, tokenizer):
        raise DataError(f"the tokenizer does not know every character of the prompt {problem.prompt!r}")
    if max_length is not None and len(ids) > max_length:
        raise DataError(
            f"{_label(problem)}: the prompt has {len(ids)} tokens, more than {max_length}; "
            "raise data.max_prompt_length, or set data.filter_overlong_prompts to leave such prompts out"
        )


def encode_answers(problems: Sequence[Problem], tokenizer: Any, end_token: int) -> list[list[int]]:
    """Returns the token ids of each problem's answer, with the end token.

    Args:
        problems: the problems whose answers are encoded.
        tokenizer: the model's tokenizer.
        end_token: the first of the model's ``end_tokens``, at which sampling stops.

    Raises:
        DataError: an answer has characters that the tokenizer does not know.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> encode_answers([Problem("", "cab")], char_tokenizer("abc"), end_token=2)
        [[6, 4, 5, 2]]
    """
    answers = _token_ids([problem.answer for problem in problems], tokenizer)
    for problem, ids in zip(problems, answers, strict=True):
        if _has_unknown(ids, tokenizer):
            raise DataError(
                f"{_label(problem)}: the tokenizer does not know every character of the answer {problem.answer!r}"
            )
    return [[*ids, end_token] for ids in answers]


def _has_unknown(ids: Sequence[int], tokenizer: Any) -> bool:
    # Byte-level tokenizers can encode every string, and some of them (GPT-2's) use bos or eos as the unknown token.
    return tokenizer.unk_token_id in set(ids) - {tokenizer.bos_token_id, tokenizer.eos_token_id}


def _encode_messages(problem: Problem, tokenizer: Any) -> list[int]:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{_label(problem)}: the prompt is a list of chat messages, and the tokenizer has no chat template; "
            "use string prompts, or a tokenizer folder with chat_template.jinja"
        )
    # A prompt of a string was encoded before.
    assert not isinstance(problem.prompt, str)
    try:
        return chat_tokens(tokenizer, problem.prompt)
    except ModelError as error:
        raise DataError(f"{_label(problem)}: {error}") from error


def _label(problem: Problem) -> str:
    return f"problem {problem.id} of {problem.data_source!r}"


def read_problems(files: Sequence[str | Path], *, prompt_key: str = "prompt") -> tuple[Problem, ...]:
    """Reads the problems of parquet and JSONL files in verl's columns, and numbers them from 0 over all files.

    Each row has ``data_source``, a prompt (chat messages or a string) and ``reward_model`` with its
    ``ground_truth``, which ``truth`` makes a string. ``extra_info`` is optional, and so is ``ability``, which becomes
    a part of ``extra_info``.

    Args:
        files: the files, in order.
        prompt_key: the column of prompts.

    Raises:
        DataError: a file cannot be read, is empty or lacks a column, a row lacks its prompt or ground truth, or a
            value has a type that cannot be used.
    """
    problems: list[Problem] = []
    required, optional = ("data_source", prompt_key, "reward_model"), ("ability", "extra_info")
    hint = f"required are {', '.join(required)}, and data.prompt_key names the prompts' column"
    for file in files:
        padded = Path(file).suffix == ".parquet"
        for place, row in read_rows(file, required, optional, hint=hint):
            problems.append(_problem(place, row, prompt_key, len(problems), padded))
    return tuple(problems)


def _problem(place: str, row: Row, prompt_key: str, number: int, padded: bool) -> Problem:
    source = row["data_source"]
    if not isinstance(source, str):
        raise DataError(f"{place}: data_source must be a string, not {source!r:.80}")
    ability = {} if row.get("ability") is None else {"ability": row["ability"]}
    return Problem(
        prompt=_prompt(place, row[prompt_key], prompt_key, padded),
        answer=_answer(place, row["reward_model"]),
        id=number,
        data_source=source,
        extra_info=ability | _extra_info(place, row.get("extra_info")),
    )


def _extra_info(place: str, extra: Any) -> dict[str, Any]:
    if not isinstance(extra, dict | None):
        raise DataError(f"{place}: extra_info must map names to values, not {extra!r:.80}")
    try:
        # Reward functions get it as JSON.
        json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{place}: extra_info cannot be JSON ({error}); write strings or numbers instead") from error
    return extra or {}


def _prompt(place: str, value: Any, prompt_key: str, padded: bool) -> str | tuple[Mapping[str, Any], ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        messages = _without_nulls(value) if padded else value
        # Templates look at the content of every message. Only tool calls can be without.
        return tuple(m if "content" in m else m | {"content": None} for m in messages)
    raise DataError(
        f"{place}: {prompt_key} must be a string or a list of messages with strings as role and content (an "
        f"assistant's message with tool_calls needs no content), not {value!r:.80}"
    )


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    calls = value["role"] == "assistant" and bool(value.get("tool_calls"))
    return isinstance(value.get("content"), str) or (calls and value.get("content") is None)


def _answer(place: str, reward_model: Any) -> str:
    value = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if value is None:
        raise DataError(f"{place}: reward_model has no ground_truth")
    try:
        return truth(value)
    except ValueError as error:
        raise DataError(f"{place}: reward_model.ground_truth {error}") from error


def _without_nulls(value: Any) -> Any:
    """Removes keys without a value: parquet gives a message all keys of its column, with null for those it lacked."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
