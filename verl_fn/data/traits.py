"""What notices and checks need to know of many problems, in columns of numbers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from verl_fn.backends.hf.processor import MARK
from verl_fn.data.columns import MARKS
from verl_fn.data.tasks import Problem

# Bits of ``Traits.flags``.
JSON, EMPTY, SPECIAL, SPECIAL_ANSWER, TOOLS, IMAGES = 1, 2, 4, 8, 16, 32

_json = json.JSONEncoder(sort_keys=True, default=repr).encode


@attrs.frozen
class Group:
    """What few problems of a file differ in.

    Attributes:
        data_source: as of the problems.
        fields: names of fields of the messages, without role, content and marks that are followed.
        arguments: names of arguments of the chat template.
    """

    data_source: str
    fields: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Traits:
    """Traits of problems, each a column of numpy.

    Attributes:
        prompts: 64 bits of a digest of each prompt; equal prompts have equal ones.
        flags: bits: ``JSON`` for a prompt that is JSON, ``EMPTY`` for an empty answer, ``SPECIAL`` and
            ``SPECIAL_ANSWER`` for special tokens in prompt and answer, ``TOOLS`` for tools of the row, ``IMAGES`` for
            its images.
        groups: the place in ``names`` of each problem's group.
        names: the groups.

    Example:
        >>> made = traits_of([Problem("a", "", data_source="s"), Problem("a", "b", data_source="s")], None)
        >>> made.count(EMPTY), len(np.unique(made.prompts)), made.names
        (1, 1, (Group(data_source='s', fields=(), arguments=()),))
    """

    prompts: np.ndarray
    flags: np.ndarray
    groups: np.ndarray
    names: tuple[Group, ...]

    def __len__(self) -> int:
        return len(self.flags)

    def __getitem__(self, chosen: Any) -> Traits:
        """Returns the traits of some problems, by a slice, numbers or a mask."""
        return Traits(self.prompts[chosen], self.flags[chosen], self.groups[chosen], self.names)

    def count(self, flags: int) -> int:
        """Returns the number of problems that have one of the flags."""
        return int(np.count_nonzero(self.flags & flags))

    def rows_of(self) -> list[tuple[Group, int]]:
        """Returns each group that occurs with the number of its problems."""
        counts = np.bincount(self.groups, minlength=len(self.names)).tolist()
        return [(group, count) for group, count in zip(self.names, counts, strict=True) if count]


def joined(parts: Sequence[Traits]) -> Traits:
    """Returns the traits of several parts of the problems.

    Example:
        >>> one = traits_of([Problem("a", "b", data_source="s")], None)
        >>> joined([one, one]).rows_of()
        [(Group(data_source='s', fields=(), arguments=()), 2)]
    """
    places: dict[Group, int] = {}
    groups = [
        np.array([places.setdefault(group, len(places)) for group in part.names], np.int32)[part.groups]
        for part in parts
    ]
    return Traits(
        np.concatenate([np.zeros(0, np.uint64), *(part.prompts for part in parts)]),
        np.concatenate([np.zeros(0, np.uint8), *(part.flags for part in parts)]),
        np.concatenate([np.zeros(0, np.int32), *groups]),
        tuple(places),
    )


def traits_of(problems: Sequence[Problem], tokenizer: Any) -> Traits:
    """Returns the traits of problems: the sequence's own ``traits``, or else new ones.

    Args:
        problems: the problems.
        tokenizer: has the special tokens.
    """
    if isinstance(made := getattr(problems, "traits", None), Traits):
        return made
    special = special_pattern(tokenizer)
    places: dict[tuple[str, tuple[str, ...], tuple[str, ...]], int] = {}
    groups = []
    for one in problems:
        group = (one.data_source, tuple(sorted(_fields(one))), tuple(one.chat_template_kwargs))
        groups.append(places.setdefault(group, len(places)))
    prompts = [hashlib.blake2b(_hashable(one), digest_size=8).digest() for one in problems]
    return Traits(
        np.frombuffer(b"".join(prompts), np.uint64),
        np.array([_flags(one, special) for one in problems], np.uint8),
        np.array(groups, np.int32),
        tuple(Group(*group) for group in places),
    )


def special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Returns a pattern of a tokenizer's special tokens; None if it has none."""
    tokens = {} if tokenizer is None else tokenizer.added_tokens_decoder
    special = sorted({str(token) for token in tokens.values() if token.special}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, special))) if special else None


def strings(value: Any) -> list[str]:
    """Returns all strings in a prompt.

    Example:
        >>> strings(({"role": "user", "content": "hi"},))
        ['user', 'hi']
    """
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [string for one in inner for string in strings(one)]


def _flags(problem: Problem, special: re.Pattern[str] | None) -> int:
    flags = JSON if _is_json(problem.prompt) else 0
    flags |= 0 if problem.answer else EMPTY
    flags |= TOOLS if problem.tools else 0
    flags |= IMAGES if problem.images else 0
    if special is not None:
        texts = [text.replace(MARK, "") if problem.images else text for text in strings(problem.prompt)]
        flags |= SPECIAL if any(map(special.search, texts)) else 0
        flags |= SPECIAL_ANSWER if special.search(problem.answer) else 0
    return flags


def _is_json(prompt: Any) -> bool:
    if not isinstance(prompt, str) or not prompt.lstrip().startswith(("{", "[")):
        return False
    try:
        return isinstance(json.loads(prompt), dict | list)
    except (ValueError, RecursionError):
        return False


def _fields(problem: Problem) -> set[str]:
    said: list[Any] = [*getattr(problem, "chosen", ()), *getattr(problem, "rejected", ())]
    parts: list[Any] = [problem.prompt, getattr(problem, "messages", ()), *said]
    messages = [message for part in parts if not isinstance(part, str) for message in part]
    names = {name for message in messages for name in message}
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    followed = MARKS if said or parts[1] else ()
    return (names | {name for call in calls for name in call}) - {"role", "content", "function", "type", *followed}


def _hashable(problem: Problem) -> bytes:
    prompt = problem.prompt
    # A string is never equal to messages, whose JSON begins with "[".
    text = ("'" + prompt if isinstance(prompt, str) else _json(prompt)).encode(errors="surrogatepass")
    return text + b"".join(hashlib.blake2b(image).digest() for image in problem.images)
