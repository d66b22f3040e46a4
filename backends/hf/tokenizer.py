"""The tokenizer of a model's folder, the tokens that end an answer, and its chat template.

A chat template is a program of the model's folder; it may fail.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jinja2

from .config import LOCAL, ModelError, read_config, read_json, reason, refused

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json")
GENERATION = "generation_config.json"
END = "eos_token_id"

# The attribute of a tokenizer that has the arguments of its template.
ARGUMENTS = "chat_arguments"
_PARTS = "reads_parts"


def read_tokenizer(
    folder: str | Path, chat_template_kwargs: Mapping[str, Any] | None = None, date: str | None = None
) -> Any:
    """Reads the tokenizer of a model's folder.

    Args:
        chat_template_kwargs: arguments of its chat template in every rendering.
        date: the day, as YYYY-MM-DD, that the template prints if it asks for the date; None for the clock's.

    Raises:
        ModelError: the folder has none, or one that cannot be used.
    """
    from transformers import AutoTokenizer

    # Without any of these files transformers makes an empty tokenizer for some architectures.
    if not has_tokenizer(folder):
        raise ModelError(
            f"{folder} has no tokenizer that can be read: copy the tokenizer's files into it. "
            "To plan for another machine (--check --gpus N --gpu-memory GIB), config.json is enough"
        )
    with refused(f"{folder} has no tokenizer that can be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        if tokenizer.chat_template is None and (file := Path(folder) / "chat_template.json").is_file():
            # Where processors of images had their template before tokenizers did.
            tokenizer.chat_template = json.loads(file.read_text("utf-8"))["chat_template"]
        _try(tokenizer)
        _name_unknown(tokenizer)
    return with_chat_arguments(tokenizer, chat_template_kwargs or {}, date)


def has_tokenizer(folder: str | Path) -> bool:
    """Returns whether a folder has the files of a tokenizer."""
    return any(file for pattern in TOKENIZER_FILES for file in Path(folder).glob(pattern))


def _try(tokenizer: Any) -> None:
    """Calls what runs call, since a damaged file may be read and fail only then."""
    ids = tokenizer.encode("a", add_special_tokens=False)
    tokenizer.batch_decode([ids], skip_special_tokens=True)
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        token = getattr(tokenizer, name)
        if token is not None and type(token) is not int:
            raise ModelError(f"{tokenizer.name_or_path}: the tokenizer has {token!r} as {name}")


def _name_unknown(tokenizer: Any) -> None:
    """Gives a tokenizer the unknown token of its model if its settings name none: its characters are lost."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.unk_token is not None:
        return
    token = getattr(backend.model, "unk_token", None)
    if type(backend.model).__name__ == "Unigram":
        number = json.loads(backend.to_str())["model"].get("unk_id")
        token = None if number is None else backend.id_to_token(number)
    if token is not None and backend.token_to_id(token) is not None:
        tokenizer.unk_token = token


def end_tokens(folder: str | Path, tokenizer: Any = None) -> tuple[int, ...]:
    """Returns the tokens that end an answer: sampling stops at any of them, and training teaches the first.

    They are looked up in ``generation_config.json``, then in ``config.json``, then in the tokenizer. The
    tokenizer's own is the first where it is one of several. It is none of them where the files contradict each
    other; ``contradiction`` reports it.

    Returns:
        The tokens; none where neither the files nor a tokenizer names any.

    Raises:
        ModelError: a file cannot be read, or names something else than tokens of the model.
    """
    named, file = _named(Path(folder))
    if not named and tokenizer is None and has_tokenizer(folder):
        tokenizer = read_tokenizer(folder)
    own = None if tokenizer is None else tokenizer.eos_token_id
    if not named:
        named, file = () if own is None else (own,), "its tokenizer"
    size = read_config(folder).get_text_config().vocab_size
    if outside := [token for token in named if not 0 <= token < size]:
        raise ModelError(
            f"{folder}: {file} has {outside[0]} as {END}, which is none of the model's {size} tokens; give it the "
            f"id of the token that ends an answer"
        )
    return (own, *(token for token in named if token != own)) if own in named else named


def begun(ids: list[int], tokenizer: Any) -> list[int]:
    """Returns token ids that begin with the tokenizer's bos token, if it has one; a template's text may do already.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> begun([4], char_tokenizer("ab")), begun([1, 4], char_tokenizer("ab"))
        ([1, 4], [1, 4])
    """
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def ended(ids: list[int], tokenizer: Any, ends: Sequence[int]) -> list[int]:
    """Returns token ids of an answer that end with an end token: the first one is added unless there is one.

    White space after an end token, as templates write it, is left out, and so are further end tokens.

    Args:
        tokenizer: knows which tokens are white space.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> tokenizer = char_tokenizer("ab ")
        >>> ended([5], tokenizer, [2, 3]), ended([5, 3, 6, 2], tokenizer, [2, 3]), ended([5, 4], tokenizer, [2, 3])
        ([5, 2], [5, 3], [5, 4, 2])
    """
    whole, last = ids, len(ids)
    while last and (ids[last - 1] in ends or not tokenizer.decode(ids[last - 1]).strip()):
        last -= 1
        if ids[last] in ends:
            whole = ids[: last + 1]
    return whole if whole and whole[-1] in ends else [*ids, ends[0]]


def contradiction(folder: str | Path, tokenizer: Any) -> str | None:
    """Returns a line about a folder whose files and tokenizer name different end tokens; None where they agree."""
    named, file = _named(Path(folder))
    own = tokenizer.eos_token_id
    if not named or own is None or own in named:
        return None
    return (
        f"the tokenizer of {folder} ends texts with {tokenizer.eos_token!r} ({own}), and {file} ends answers with "
        f"{_token(tokenizer, named[0])}; answers are trained and sampled to end with the latter"
    )


def _token(tokenizer: Any, number: int) -> str:
    token = tokenizer.convert_ids_to_tokens(number)
    return f"{number}, a token that the tokenizer does not have" if token is None else f"{token!r} ({number})"


def _named(folder: Path) -> tuple[tuple[int, ...], str]:
    """Returns the end tokens that the folder's files name, and the file that names them.

    The files themselves are read, since transformers fills in a default of the architecture.
    """
    for name in (GENERATION, "config.json"):
        if not (folder / name).is_file():
            continue
        content = read_json(folder / name)
        inner = content.get("text_config")
        value = content.get(END, inner.get(END) if isinstance(inner, dict) else None)
        if value is None or value == []:
            continue
        tokens = value if isinstance(value, list) else [value]
        if any(type(token) is not int for token in tokens):
            raise ModelError(
                f"{folder / name} has {value!r:.80} as {END}; it must be a token's id, or a list of them"
            )
        return tuple(dict.fromkeys(tokens)), name
    return (), ""


@attrs.frozen
class Clock:
    """The function ``strftime_now`` of chat templates on a given day, at midnight.

    Attributes:
        date: the day as YYYY-MM-DD.

    Example:
        >>> Clock("2026-01-02")("%d %b %Y")
        '02 Jan 2026'
    """

    date: str

    def __call__(self, format: str) -> str:
        return datetime.datetime.fromisoformat(self.date).strftime(format)


def with_chat_arguments(tokenizer: Any, chat_template_kwargs: Mapping[str, Any], date: str | None) -> Any:
    """Gives a tokenizer the arguments with which ``chat_texts`` renders its chat template.

    Args:
        chat_template_kwargs: variables of the template.
        date: the day, as YYYY-MM-DD, that the template prints if it asks for the date; None for the clock's.

    Returns:
        The tokenizer.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> tokenizer = char_tokenizer("ab>")
        >>> tokenizer.chat_template = "{{ messages[0].content }}{{ '>' if thinking }}"
        >>> asked = [([{"role": "user", "content": "ba"}], True)]
        >>> chat_texts(with_chat_arguments(tokenizer, {"thinking": True}, None), asked)
        ['ba>']
    """
    clock = {} if date is None else {"strftime_now": Clock(date)}
    setattr(tokenizer, ARGUMENTS, {**chat_template_kwargs, **clock})
    return tokenizer


def template_text(tokenizer: Any) -> str:
    """Returns the source of a tokenizer's chat templates; empty without one."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def check_template(tokenizer: Any) -> None:
    """Raises ModelError unless a chat template renders the same messages to the same text each time.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> tokenizer = char_tokenizer("ab")
        >>> tokenizer.chat_template = "{{ ['a', 'b'] | random }}"
        >>> check_template(tokenizer)
        Traceback (most recent call last):
        verl_fn.backends.hf.config.ModelError: the chat template draws random text with 'random', so that the same
        prompt has other tokens in each rendering; write the text into the template, or take it from
        data.chat_template_kwargs
    """
    # Of what Jinja offers beside the template's arguments, only these and the clock differ between renderings.
    if drawn := re.search(r"\|\s*(random)\b|\b(lipsum)\b", template_text(tokenizer)):
        raise ModelError(
            f"the chat template draws random text with {drawn[1] or drawn[2]!r}, so that the same prompt has other "
            "tokens in each rendering; write the text into the template, or take it from data.chat_template_kwargs"
        )


def chat_texts(
    tokenizer: Any,
    conversations: Sequence[tuple[Sequence[Mapping[str, Any]], bool]],
    tools: Sequence[Mapping[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Returns the texts of several conversations.

    Args:
        conversations: the messages of each, and whether the assistant's answer is begun; otherwise the text ends with
            the last message.
        tools: JSON schemas of the functions that the assistant can call.
        chat_template_kwargs: arguments of the template; they replace arguments of ``with_chat_arguments``.

    Raises:
        ModelError: the template fails on these messages.

    Example:
        >>> from verl_fn.backends.hf.new_model import CHAT_TEMPLATE, char_tokenizer
        >>> tokenizer = char_tokenizer("ab\\n")
        >>> tokenizer.chat_template = CHAT_TEMPLATE
        >>> chat_texts(tokenizer, [([{"role": "user", "content": "ba"}], True)])
        ['<bos>ba\\n']
    """
    arguments = {**getattr(tokenizer, ARGUMENTS, {}), **(chat_template_kwargs or {})}
    if _reads_parts(tokenizer):
        conversations = [([_in_parts(m) for m in messages], begun) for messages, begun in conversations]
    try:
        return [
            tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **arguments,
            )
            for messages, generation_prompt in conversations
        ]
    # A template can raise an error of any class.
    except Exception as error:
        why = str(error) if isinstance(error, jinja2.TemplateError) else reason(error)
        raise ModelError(f"the tokenizer's chat template failed on the prompt: {why}") from error


def _reads_parts(tokenizer: Any) -> bool:
    """Returns whether the chat template shows a content only as parts, as the template of SmolVLM does."""
    template, reads = getattr(tokenizer, _PARTS, (None, False))
    if template != tokenizer.chat_template:
        message, reads = {"role": "user", "content": "abc"}, False
        with contextlib.suppress(Exception):  # what a template refuses is said of the rows
            texts = [tokenizer.apply_chat_template([m], tokenize=False) for m in (message, _in_parts(message))]
            reads = "abc" not in texts[0] and "abc" in texts[1]
        setattr(tokenizer, _PARTS, (tokenizer.chat_template, reads))
    return reads


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
