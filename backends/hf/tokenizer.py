"""The tokenizer of a model's folder, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .chat import with_chat_arguments
from .config import LOCAL, ModelError, read_config, read_json, refused

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json")
GENERATION = "generation_config.json"
END = "eos_token_id"


def read_tokenizer(
    folder: str | Path, chat_template_kwargs: Mapping[str, Any] | None = None, date: str | None = None
) -> Any:
    """Reads the tokenizer of a model's folder.

    Args:
        folder: the folder.
        chat_template_kwargs: arguments of its chat template in every rendering.
        date: the day, as YYYY-MM-DD, that the template prints if it asks for the date; None for the clock's.

    Raises:
        ModelError: the folder has none, or one that cannot be used.
    """
    from transformers import AutoTokenizer

    # Without any of these files transformers makes an empty tokenizer for some architectures.
    if not _has_tokenizer(folder):
        raise ModelError(f"{folder} has no tokenizer that can be read: copy the tokenizer's files into it")
    with refused(f"{folder} has no tokenizer that can be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        _try(tokenizer)
    return with_chat_arguments(tokenizer, chat_template_kwargs or {}, date)


def _has_tokenizer(folder: str | Path) -> bool:
    return any(file for pattern in TOKENIZER_FILES for file in Path(folder).glob(pattern))


def _try(tokenizer: Any) -> None:
    """Calls what runs call, since a damaged file may be read and fail only then."""
    ids = tokenizer.encode("a", add_special_tokens=False)
    tokenizer.batch_decode([ids], skip_special_tokens=True)
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        token = getattr(tokenizer, name)
        if token is not None and type(token) is not int:
            raise ModelError(f"{tokenizer.name_or_path}: the tokenizer has {token!r} as {name}")


def end_tokens(folder: str | Path, tokenizer: Any = None) -> tuple[int, ...]:
    """Returns the tokens that end an answer: sampling stops at any of them, and training teaches the first.

    They are looked up in ``generation_config.json``, then in ``config.json``, then in the tokenizer. The
    tokenizer's own is the first where it is one of several. It is none of them where the files contradict each
    other; ``contradiction`` reports it.

    Args:
        folder: a model folder.
        tokenizer: the folder's, if it was read already.

    Returns:
        The tokens; none where neither the files nor a tokenizer names any.

    Raises:
        ModelError: a file cannot be read, or names something else than tokens of the model.
    """
    named, file = _named(Path(folder))
    if not named and tokenizer is None and _has_tokenizer(folder):
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
        ids: of the answer.
        tokenizer: knows which tokens are white space.
        ends: the model's ``end_tokens``.

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
        f"{tokenizer.convert_ids_to_tokens(named[0])!r} ({named[0]}); answers are trained and sampled to end with "
        f"the latter"
    )


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
