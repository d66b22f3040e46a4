"""The columns that problems of all kinds share: prompts, chat messages, ground truths and extra information."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import Any, TypeAlias

from verl_fn.backends.hf.processor import MARK
from verl_fn.config.schema import TAKEN_BY_TEMPLATES
from verl_fn.data.images import COLUMNS, check_marks, images_in, in_text
from verl_fn.data.rows import DataError, Inexact, Row, check_plain, leaves, parsed, strings

Messages: TypeAlias = tuple[Mapping[str, Any], ...]

MARKS = ("weight", "train", "training", "trainable", "learn", "loss", "loss_mask")
"""Fields of an assistant's message that say whether it is learned."""

BEHIND = "messages after the last turn that is learned"
"""What is counted as not used of rows that have them."""

_LIKE_MARKS = re.compile(
    r"(?<![a-z])(weights?|train(ed|ing|able)?|learn(ed|able)?|loss|mask(ed)?|labels?|grad|supervised?|ignored?|skip(ped)?"
    r"|(in|ex)cluded?)(?![a-z])",
    re.IGNORECASE,
)
# Columns and fields of messages that hold what a model of text cannot take, by a word in their names.
_MEDIA = re.compile(
    r"(?<![a-z])(image|img|picture|photo|screenshot|pixel|video|audio|waveform|multi_?modal)s?(?![a-z])",
    re.IGNORECASE,
)
_WEIGHT = re.compile(
    r"((sample|example|row|loss|train|turn|message|assistant|completion|response)_)?(weight|mask)s?"
    r"|loss|((is|do|to)_)?train(ing|able)?"
)
SYSTEM = ("system", "system_prompt", "system_message", "system_instruction")
_TURNS = {
    **dict.fromkeys(SYSTEM, "a first message of the role system in the prompt"),
    "history": "messages in the prompt",
    **dict.fromkeys(
        ("functions", "available_tools", "tool_schemas", "tool_definitions"), "JSON schemas in the column tools"
    ),
}
# Columns of text to answer about. A prompt that has none of it is seen without.
_TEXTS = ("context", "contexts", "input", "passage", "passages")
FEW_NUMBERS = 16  # sizes, boxes and times; sounds and pictures have more
_NO_NAME = re.compile(r"\s*([-+]?\d+(\.\d+)?|true|false|yes|no|none|null|nan)?\s*", re.IGNORECASE)
WORDS = 3  # of a text; fewer are a title or an answer, which a prompt may have by chance
# How such JSON begins: with a list of objects or one with a name, or with a message. Other text may hold it.
_JSON_MESSAGES = re.compile(
    r"""(\[\s*|\{.*?["'](messages|conversations)["']\s*:\s*\[\s*)\{"""
    r"""|\{(?=\s*["'](role|from|content|value)["']\s*:)""",
    re.DOTALL,
)
_END_OF_FIRST = re.compile(r"""["'\]]\s*\}\s*(,\s*\{|\]?\s*\}?\s*$)""")
_OF_MESSAGE = (
    re.compile(
        r"""["'](role|from)["']\s*:\s*["'](system|developer|user|human|assistant|gpt|model|tool|function|ipython)["']""",
        re.IGNORECASE,
    ),
    re.compile(r"""["'](content|value)["']\s*:"""),
)
_MEDIA_MARK = re.compile(r"<\|?(image|video|audio)(_pad)?\|?>|<start_of_image>|<\|vision_start\|>")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_ELEMENTS = ("<image>", "<video>", "<audio>")  # other marks are special tokens, which a tokenizer reads anywhere
_ELEMENT = re.compile(r"\b(tags?|elements?|html5?)\b", re.IGNORECASE)
_NO_MEDIA = (
    "beside text, only images of the columns images and image are trained on: write them there, or leave the row out"
)


def prompt_of(place: str, value: Any, column: str, images: int | None = 0, *, counted: bool = True) -> str | Messages:
    """Returns a prompt after checking it: a string, or chat messages.

    Keys of messages without a value are left out, since Parquet gives a message all keys of its column.

    Args:
        images: how many images the row has, of which the prompt shows each; None for a response, which shows none.
        counted: whether messages must show each of the images.

    Raises:
        DataError: it is neither, or a string that holds messages as JSON, or it has videos, sounds, or more or fewer
            images.

    Example:
        >>> prompt_of("a.jsonl, line 1", "2+2?", "prompt")
        '2+2?'
    """
    if isinstance(value, str) and value:
        if _is_json_of_messages(value):
            raise DataError(
                f"{place}: {column} is a string that holds messages as JSON, which would be trained on as text; "
                "write a list of messages (a function of data.convert can, with json.loads)"
            )
        if images:
            check_marks(place, column, value, images)
        if images is not None:
            _check_marks(place, value.replace(MARK, "") if images else value, column)
        return value
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        places = [f"{place}: message {i} of {column}" for i in range(len(value))]
        for name, message in zip(places, value, strict=True):
            _check_media(name, message, images)
        value = [in_text(name, message) for name, message in zip(places, value, strict=True)]
        if all(map(_is_message, value)):
            messages = [_with_calls(*one) for one in zip(places, without_nulls(value), strict=True)]
            # Templates look at the content of every message. Only tool calls can be without.
            whole = tuple(m if "content" in m else {**m, "content": None} for m in messages)
            if images and counted:
                check_marks(place, column, whole, images)
            return whole
    if value in ("", []):
        raise DataError(f"{place}: {column} is empty")
    some = value if isinstance(value, list) else [value]
    # A message by itself is no list of messages.
    bad = next((one for one in some if not (isinstance(one, Mapping) and _is_message(one))), value)
    raise DataError(
        f"{place}: {column} must be a string or a list of messages with strings as role and content (an "
        f"assistant's message with tool_calls needs no content), not {bad!r:.80}"
    )


EXACT = 2**53  # from here on, neighbouring whole numbers are the same float
THINKING = "enable_thinking"
SHOWN = ("tools", "chat_template_kwargs", THINKING, *COLUMNS)
OPTIONAL = ("ability", "extra_info", *SHOWN)


def fields_of(place: str, row: Row, number: int, source: str | None = None) -> dict[str, Any]:
    """Returns the fields of a problem that every kind of row has: its number and place, and its optional columns.

    Args:
        source: the data source of a row that names none; without it, the row must.

    Raises:
        DataError: a column has something else than it must.

    Example:
        >>> fields_of("a.jsonl, line 1", {"ability": "math"}, 0, "mine")
        {'id': 0, 'place': 'a.jsonl, line 1', 'data_source': 'mine', 'extra_info': {'ability': 'math'}, 'tools': (),
        'chat_template_kwargs': {}, 'images': ()}
    """
    named = source if row.get("data_source") is None else row["data_source"]
    if not isinstance(named, str):
        raise DataError(f"{place}: data_source must be a string, not {named!r:.80}")
    return {
        "id": number,
        "place": place,
        "data_source": named,
        "extra_info": extra_info_of(place, row),
        "tools": tools_of(place, row),
        "chat_template_kwargs": template_kwargs_of(place, row),
        "images": images_in(place, row),
    }


def tools_of(place: str, row: Row) -> Messages:
    """Returns the JSON schemas in the column ``tools`` of a row, also from a string of JSON.

    Raises:
        DataError: they are no list of objects.

    Example:
        >>> tools_of("a.jsonl, line 1", {"tools": '[{"name": "add", "description": null}]'})
        ({'name': 'add'},)
    """
    if (tools := parsed(row.get("tools") or None)) is None:
        return ()
    if isinstance(tools, list):
        # Schemas of different shapes cannot share a Parquet column unless each is a string.
        tools = list(map(parsed, tools))
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{place}: tools must be a list of JSON schemas, not {tools!r:.80}")
    return tuple(without_nulls(tools))


def learned_turns(messages: Sequence[Mapping[str, Any]], start: int = 0) -> list[int]:
    """Returns the numbers of the messages to learn from: turns of the assistant that no mark excludes.

    Args:
        start: messages before this one are not learned from.

    Example:
        >>> learned_turns([{"role": "assistant", "weight": 0}, {"role": "user"}, {"role": "assistant"}])
        [2]
    """
    turns = [i for i, message in enumerate(messages) if i >= start and message["role"] == "assistant"]
    return [i for i in turns if all(messages[i].get(name, True) for name in MARKS)]


def check_turns(place: str, messages: Messages, column: str) -> None:
    """Checks that messages to learn from have an assistant's turn, and that none of these is empty.

    Raises:
        DataError: they do not, or a message has a mark that cannot be followed.

    Example:
        >>> check_turns("a.jsonl, line 1", ({"role": "user", "content": "2+2?"},), "messages")
        Traceback (most recent call last):
        verl_fn.data.rows.DataError: a.jsonl, line 1: messages has no message of the assistant to learn from; its
        roles are user
    """
    for i, message in enumerate(messages):
        _check_weights(f"{place}: message {i} of {column}", message)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{place}: {column} has no message of the assistant to learn from; its roles are "
            + ", ".join(dict.fromkeys(message["role"] for message in messages))
        )
    turns = learned_turns(messages)
    if not turns:
        raise DataError(
            f"{place}: {column} has no turn of the assistant that is not marked as excluded from learning"
        )
    for i in turns:
        if not (messages[i]["content"] or "").strip() and not messages[i].get("tool_calls"):
            raise DataError(
                f"{place}: message {i} of {column} is a turn of the assistant without content; write what the model "
                "shall learn to say, or remove the message"
            )


def ground_truth_of(place: str, reward_model: Any) -> str:
    """Returns the ``ground_truth`` in a row's ``reward_model`` as a string.

    Raises:
        DataError: there is none, or it has a type that cannot be used.
    """
    if not isinstance(reward_model, Mapping):
        raise DataError(f"{place}: reward_model must be an object with a ground_truth, not {reward_model!r:.80}")
    value = reward_model.get("ground_truth")
    if value is None:
        raise DataError(f"{place}: reward_model has no ground_truth")
    try:
        return truth(value)
    except ValueError as error:
        raise DataError(f"{place}: reward_model.ground_truth {error}") from error


def truth(value: Any) -> str:
    """Returns a ground truth as a string.

    A string stays as it is. A whole number has no decimal point, whether the file holds 72, 72.0 or
    ``Decimal("72.00")``; any other number has the digits that were written. Everything else becomes JSON, with its
    numbers in this form.

    Raises:
        ValueError: the value is of another type, or a number that would not be the one that was written.

    Example:
        >>> truth("072"), truth(72.0), truth(Decimal("0.50")), truth([3.0, {"unit": "m²"}])
        ('072', '72', '0.5', '[3, {"unit": "m²"}]')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Decimal) and value.is_finite():
        digits = format(value, "f")
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Decimal) and value.is_finite():
        # Only a string could hold all digits of some decimals.
        number = int(value) if value == int(value) else float(value)
        if Decimal(repr(number)) != value:
            raise ValueError(f"has {value}, with too many digits for a number in a list; write strings")
        return number
    if isinstance(value, float) and abs(value) < float("inf") and not isinstance(value, Inexact):
        return int(value) if value.is_integer() and abs(value) < EXACT else value
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, float | Decimal):
        raise ValueError(f"has {value}; it is not finite or was written with more digits; write a string")
    hint = ""
    if isinstance(value, date):
        hint = " (of JSON files in a folder, the package datasets makes dates of text; name the files themselves)"
    raise ValueError(f"has the type {type(value).__name__} ({value!r:.80}); write a string{hint}")


def extra_info_of(place: str, row: Row) -> dict[str, Any]:
    """Returns the ``extra_info`` of a row, with its ``ability`` in it.

    Raises:
        DataError: it is no mapping, or cannot be JSON.
    """
    extra = row.get("extra_info")
    if not isinstance(extra, dict | None):
        raise DataError(f"{place}: extra_info must map names to values, not {extra!r:.80}")
    try:
        if extra:
            json.dumps(extra)  # reward functions get it as JSON
            check_plain(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{place}: extra_info cannot be JSON ({error}); write strings or numbers instead") from error
    ability = {} if row.get("ability") is None else {"ability": row["ability"]}
    return ability | (extra or {})


def template_kwargs_of(place: str, row: Row) -> dict[str, Any]:
    """Returns the ``chat_template_kwargs`` of a row, with its ``enable_thinking``: a column of verl's for answers.

    Raises:
        DataError: they are no mapping, or name something that the run decides; or the column is neither true nor
            false, or theirs is another value.

    Example:
        >>> template_kwargs_of("a.jsonl, line 1", {"chat_template_kwargs": {"enable_thinking": False}})
        {'enable_thinking': False}
    """
    kwargs = {} if row.get("chat_template_kwargs") is None else row["chat_template_kwargs"]
    if not isinstance(kwargs, dict):
        raise DataError(f"{place}: chat_template_kwargs must map names to values, not {kwargs!r:.80}")
    thinks = row.get(THINKING)
    if thinks is not None:
        if thinks not in (0, 1):
            raise DataError(f"{place}: {THINKING} must be true or false, not {thinks!r:.40}")
        if kwargs.get(THINKING) not in (None, thinks):
            raise DataError(
                f"{place}: the column {THINKING} is {thinks!r:.40}, and chat_template_kwargs has "
                f"{kwargs[THINKING]!r:.40}; give one of them"
            )
        kwargs = kwargs | {THINKING: bool(thinks)}
    if taken := sorted(TAKEN_BY_TEMPLATES & kwargs.keys()):
        raise DataError(f"{place}: chat_template_kwargs.{taken[0]} is decided by the run; remove it")
    # Parquet gives each row all keys of the column.
    return {key: without_nulls(value) for key, value in kwargs.items() if value is not None}


@functools.lru_cache(1024)
def is_media(name: str) -> bool:
    """Returns whether a column or a field of a message has a name of images, videos or sounds.

    Example:
        >>> is_media("images"), is_media("image_url"), is_media("imagined")
        (True, True, False)
    """
    return _MEDIA.search(name) is not None


def is_filled(value: Any) -> bool:
    """Returns whether a value holds something: not null, empty, 0 or false, or lists and objects of these.

    Example:
        >>> is_filled([{"bytes": None}, ""]), is_filled([{"bytes": b"x"}])
        (False, True)
    """
    return any(map(bool, leaves(value)))


def is_media_only(name: str) -> bool:
    """Returns whether a name says nothing but that a column has images, videos or sounds.

    Example:
        >>> is_media_only("images"), is_media_only("image_id")
        (True, False)
    """
    return _MEDIA.fullmatch(name) is not None


def holds_media(value: Any) -> bool:
    """Returns whether a value can be images, videos or sounds; a few numbers are counts, places or sizes.

    Example:
        >>> [holds_media(value) for value in ("a.png", {"bytes": b"x"}, 2, "2", "false", [640, 480], {"bytes": None})]
        [True, True, False, False, False, False, False]
    """
    held = [one for one in leaves(value) if not isinstance(one, str | bytes | int | float | None) or one]
    return len(held) > FEW_NUMBERS or any(
        not isinstance(one, int | float) and not (isinstance(one, str) and _NO_NAME.fullmatch(one)) for one in held
    )


def matters(name: str) -> bool:
    """Returns whether something else may be learned without a column that is not used, so that its values count."""
    return is_media(name) or name in _TURNS or name in _TEXTS or _WEIGHT.fullmatch(name) is not None


def check_other(place: str, name: str, value: Any, shown: list[Any]) -> None:
    """Raises DataError for a value of a column that is not used, if something else would be learned without it.

    Args:
        shown: what the model sees of the row.
    """
    remove = "or remove the column (a function of data.convert can)"
    if is_media(name):
        if holds_media(value):
            raise DataError(
                f"{place}: the column {name} has images, videos or sounds, and only images in the columns images and "
                f"image are trained on; write them there, leave such rows out, {remove}"
            )
    elif name in _TURNS:
        if is_filled(value):
            raise DataError(
                f"{place}: the column {name} is not used, so the model would not see it; write "
                f"{_TURNS[name]}, {remove}"
            )
    elif name in _TEXTS:
        seen = "\n".join("".join(text.split()) for text in strings(shown))
        texts = [text.split() for text in strings(value) if text.strip()]
        texts = [words for words in texts if len(words) >= WORDS] or texts
        if texts and not any("".join(words) in seen for words in texts):
            raise DataError(
                f"{place}: the column {name} is not used, and the prompt has nothing of it, so the model would not "
                f"see it; write it into the prompt, {remove}"
            )
    elif _WEIGHT.fullmatch(name) and not _is_one(value):
        instead = "repeat rows or leave them out, set data.weights for whole files"
        if isinstance(value, list):
            instead = 'write "weight": 0 into messages of the assistant that are not to be learned'
        raise DataError(
            f"{place}: the column {name} has {value!r:.40}, and rows have no weights of their own; {instead}, "
            f"{remove}"
        )


def _is_one(weight: Any) -> bool:
    """Returns whether a weight, or each of several, is 1 or nothing."""
    return all(map(_is_one, weight)) if isinstance(weight, list) else weight in (1, "")


def without_nulls(value: Any) -> Any:
    """Returns a value of JSON without the keys that have none.

    Example:
        >>> without_nulls([{"a": None, "b": {"c": None}}])
        [{'b': {}}]
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _is_json_of_messages(text: str) -> bool:
    text = text.lstrip()
    if not (first := _JSON_MESSAGES.match(text)):
        return False
    end = _END_OF_FIRST.search(text, first.end())
    return all(one.search(text, first.end(), end.end() if end else len(text)) for one in _OF_MESSAGE)


def _is_message(value: Mapping[str, Any]) -> bool:
    if not isinstance(value.get("role"), str):
        return False
    calls = value["role"] == "assistant" and bool(value.get("tool_calls"))
    return isinstance(value.get("content"), str) or (calls and value.get("content") is None)


def _with_calls(place: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message with its tool calls as objects, also of a string of JSON; without the key if there are none.

    Raises:
        DataError: they are no calls of functions.
    """
    calls = without_nulls(parsed(message.get("tool_calls")))
    if calls and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise DataError(
            f"{place}: tool_calls must be a list of objects with the name of a function and its arguments, an object "
            f"or a string, not {calls!r:.80}"
        )
    rest = {key: inner for key, inner in message.items() if key != "tool_calls"}
    return rest | {"tool_calls": calls} if calls else rest


def _is_call(call: Any) -> bool:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return False
    return isinstance(inner.get("arguments", ""), str | Mapping)


def _check_media(place: str, message: Mapping[str, Any], images: int | None) -> None:
    content = message.get("content")
    if isinstance(content, list) and not images:
        kinds = {str(part.get("type", "")) for part in content if isinstance(part, Mapping)}
        keys = {key for part in content if isinstance(part, Mapping) for key, inner in part.items() if inner}
        if any(map(is_media, (*kinds, *keys))):
            raise DataError(f"{place} has parts of the type {', '.join(sorted(kinds))}; {_NO_MEDIA}")
    for key, value in message.items():
        if is_media(key) and holds_media(value):
            raise DataError(f"{place} has the field {key}; {_NO_MEDIA}")
    if isinstance(content, str) and message.get("role") != "assistant":
        _check_marks(place, content.replace(MARK, "") if images else content, "its content")


def _check_marks(place: str, text: str, what: str) -> None:
    """Raises DataError for the mark of an image, video or sound that is no element in a text about HTML or XML.

    An element stands in backticks or has its closing tag in the text. HTML's <video> and <audio> may also stand in a
    line with the word tag, element or HTML.

    Example:
        >>> _check_marks("a.jsonl, line 1", "What is `<image>`? What does the <video> tag do?", "prompt")
    """
    if not _MEDIA_MARK.search(text):
        return
    closed = [mark for mark in _ELEMENTS if mark.replace("<", "</") in text]
    for line, elements in ((text, _ELEMENTS), *((line, closed) for line in _CODE.sub("", text).splitlines())):
        elements = [*elements, *_ELEMENTS[1:]] if _ELEMENT.search(line) else elements
        if bad := next((mark[0] for mark in _MEDIA_MARK.finditer(line) if mark[0] not in elements), ""):
            raise DataError(
                f"{place}: {what} has the mark {bad} of an image, video or sound; {_NO_MEDIA}; write an element of "
                "HTML or XML in backticks"
            )


def _check_weights(place: str, message: Mapping[str, Any]) -> None:
    for name, value in message.items():
        if name not in MARKS:
            if _LIKE_MARKS.search(name):
                raise DataError(
                    f"{place} has the field {name}, which is not understood; mark a turn that is not learned with "
                    '"weight": 0, and remove other fields of this kind'
                )
        elif value not in (0, 1):
            raise DataError(
                f"{place} has {name} {value!r:.40}; write 1 or true for a turn to learn, and 0 or false for others"
            )
        elif value and message["role"] != "assistant":
            raise DataError(
                f"{place} is marked with {name} {value!r}, and only what the assistant says is learned; remove the "
                f"mark from messages of the role {message['role']}"
            )
