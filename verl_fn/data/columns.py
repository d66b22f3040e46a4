"""The columns that problems of all kinds share: prompts, chat messages, ground truths and extra information."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from verl_fn.config.schema import TAKEN_BY_TEMPLATES
from verl_fn.data.rows import DataError, Row
from verl_fn.data.truths import truth

Messages: TypeAlias = tuple[Mapping[str, Any], ...]


def prompt_of(place: str, value: Any, column: str, padded: bool) -> str | Messages:
    """Returns a prompt after checking it: a string, or chat messages.

    Args:
        place: the file and row, for error messages.
        value: what the column holds.
        column: its name.
        padded: the file is parquet, which gives a message all keys of its column.

    Raises:
        DataError: it is neither.

    Example:
        >>> prompt_of("a.jsonl, line 1", "2+2?", "prompt", False)
        '2+2?'
    """
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        messages = _without_nulls(value) if padded else value
        # Templates look at the content of every message. Only tool calls can be without.
        return tuple(m if "content" in m else m | {"content": None} for m in messages)
    if value in ("", []):
        raise DataError(f"{place}: {column} is empty")
    raise DataError(
        f"{place}: {column} must be a string or a list of messages with strings as role and content (an "
        f"assistant's message with tool_calls needs no content), not {value!r:.80}"
    )


def check_turns(place: str, messages: Messages, column: str) -> None:
    """Checks that messages to learn from have an assistant's turn, and that none of these is empty.

    Raises:
        DataError: they do not.

    Example:
        >>> check_turns("a.jsonl, line 1", ({"role": "user", "content": "2+2?"},), "messages")
        Traceback (most recent call last):
        verl_fn.data.rows.DataError: a.jsonl, line 1: messages has no message of the assistant to learn from
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(f"{place}: {column} has no message of the assistant to learn from")
    for i in turns:
        if not messages[i]["content"] and not messages[i].get("tool_calls"):
            raise DataError(
                f"{place}: message {i} of {column} is a turn of the assistant without content; write what the model "
                "shall learn to say, or remove the message"
            )


def ground_truth_of(place: str, reward_model: Any) -> str:
    """Returns the ``ground_truth`` in a row's ``reward_model`` as a string.

    Raises:
        DataError: there is none, or it has a type that cannot be used.
    """
    value = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if value is None:
        raise DataError(f"{place}: reward_model has no ground_truth")
    try:
        return truth(value)
    except ValueError as error:
        raise DataError(f"{place}: reward_model.ground_truth {error}") from error


def extra_info_of(place: str, row: Row) -> dict[str, Any]:
    """Returns the ``extra_info`` of a row, with its ``ability`` in it.

    Raises:
        DataError: it is no mapping, or cannot be JSON.
    """
    extra = row.get("extra_info")
    if not isinstance(extra, dict | None):
        raise DataError(f"{place}: extra_info must map names to values, not {extra!r:.80}")
    try:
        # Reward functions get it as JSON.
        json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{place}: extra_info cannot be JSON ({error}); write strings or numbers instead") from error
    ability = {} if row.get("ability") is None else {"ability": row["ability"]}
    return ability | (extra or {})


def template_kwargs_of(place: str, row: Row) -> dict[str, Any]:
    """Returns the ``chat_template_kwargs`` of a row.

    Raises:
        DataError: they are no mapping, or name something that the run decides.

    Example:
        >>> template_kwargs_of("a.jsonl, line 1", {"chat_template_kwargs": {"enable_thinking": False}})
        {'enable_thinking': False}
    """
    kwargs = row.get("chat_template_kwargs")
    if not isinstance(kwargs, dict | None):
        raise DataError(f"{place}: chat_template_kwargs must map names to values, not {kwargs!r:.80}")
    if taken := sorted(TAKEN_BY_TEMPLATES & (kwargs or {}).keys()):
        raise DataError(f"{place}: chat_template_kwargs.{taken[0]} is decided by the run; remove it")
    # Parquet gives each row all keys of the column.
    return {key: _without_nulls(value) for key, value in (kwargs or {}).items() if value is not None}


def source_of(place: str, row: Row, default: str | None = None) -> str:
    """Returns the ``data_source`` of a row.

    Raises:
        DataError: it is no string.
    """
    source = row.get("data_source")
    if source is None and default is not None:
        return default
    if not isinstance(source, str):
        raise DataError(f"{place}: data_source must be a string, not {source!r:.80}")
    return source


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    calls = value["role"] == "assistant" and bool(value.get("tool_calls"))
    return isinstance(value.get("content"), str) or (calls and value.get("content") is None)


def _without_nulls(value: Any) -> Any:
    """Removes keys without a value: parquet gives a message all keys of its column, with null for those it lacked."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
