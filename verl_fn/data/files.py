"""Problems from files in verl's RL columns: they are read, checked, encoded, and served as a stream."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.tokenizer import begun
from verl_fn.data.columns import OPTIONAL, fields_of, ground_truth_of, prompt_of
from verl_fn.data.entries import Kind
from verl_fn.data.images import fill, kept, seen_by
from verl_fn.data.rendering import name_of, prompt_text, token_counts, token_ids
from verl_fn.data.rows import DataError, Row
from verl_fn.data.tasks import Problem
from verl_fn.errors import raised_as
from verl_fn.state import Key, RowImages

BLOCK = 4096  # problems of the stream whose files are drawn together
ROUNDS = 6


@attrs.frozen(eq=False)
class FileData:
    """A source of problems that were read from files.

    Attributes:
        training: the problems of all files, perhaps on disk; empty for a run that only evaluates.
        shuffle: whether every epoch draws a new order of ``training``; otherwise all epochs use the files' order.
        sizes: the number of training problems of each file; without ``weights`` it may be left out.
        weights: one for each file: each has epochs of its own. Without them, all files are one.
        max_prompt: tokens of the longest prompt.
        max_row: tokens of the longest training row (prompt, answer and end token); 0 unless the data's own responses
            are trained on.
        max_group: tokens of the longest training rows that stay together, such as a pair.

    Example:
        >>> data = FileData((Problem("a>", "a"), Problem("b>", "b")), (), shuffle=False)
        >>> [(p.id, p.answer) for p in data.train(Key.from_seed(0), 1, 3)]
        [(1, 'b'), (2, 'a'), (3, 'b')]
    """

    training: Sequence[Problem]
    validation: Sequence[Problem]
    shuffle: bool
    max_prompt: int = 0
    max_row: int = 0
    max_group: int = 0
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def train(self, key: Key, start: int, count: int) -> tuple[Problem, ...]:
        """Returns problems ``start`` to ``start + count`` of the stream that ``key`` names; it repeats the epochs.

        A problem's ``id`` is its place in the stream, so every epoch samples new responses to it.
        """
        if self.weights:
            firsts = [0, *itertools.accumulate(self.sizes)]
            keys = [key.fold_in("file").fold_in(file) for file in range(len(self.sizes))]
            drawn = turns(key.fold_in("files"), start, count, self.weights)
            places = [firsts[i] + self._place(keys[i], number, self.sizes[i]) for i, number in drawn]
        else:
            size = sum(self.sizes) or len(self.training)
            places = [self._place(key, number, size) for number in range(start, start + count)]
        problems = self._problems(key, start, places)
        return tuple(attrs.evolve(problem, id=i) for i, problem in enumerate(problems, start))

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """Returns the first ``count`` problems of the validation files, or all of them for None."""
        return tuple(self.validation[:count])

    def _place(self, key: Key, number: int, size: int) -> int:
        """Returns the place in a file, or in all of them, of a number of the stream."""
        epoch, place = divmod(number, size)
        return permuted(key.fold_in("epoch").fold_in(epoch), size, place) if self.shuffle else place

    def _problems(self, key: Key, start: int, places: Sequence[int]) -> Sequence[Problem]:
        return [self.training[place] for place in places]


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: Any,
    max_length: int | None = None,
    truncation: str = "error",
    images: list[RowImages | None] | None = None,
) -> list[list[int]]:
    """Returns the token ids of each prompt.

    A string is encoded after the tokenizer's bos token, if the tokenizer has one and the string does not begin with
    it. Chat messages go through the tokenizer's chat template, up to the start of the assistant's answer.

    Args:
        truncation: what becomes of longer ones; see ``truncated``. Prompts with images are not cut.
        images: gets what each prompt holds of its images, or None.

    Raises:
        DataError: a prompt is too long and not cut, has characters that the tokenizer does not know, or consists of
            chat messages for which the tokenizer has no template or which its template rejects.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> encode_prompts([Problem("cab", "")], char_tokenizer("abc"))
        [[1, 6, 4, 5]]
    """
    prompts, texts = [], _texts(problems, tokenizer)
    seen = [_filled(texts, i, tokenizer, problem) if problem.images else None for i, problem in enumerate(problems)]
    for problem, ids, shown in zip(problems, token_ids(texts, tokenizer), seen, strict=True):
        ids = begun(ids, tokenizer) if isinstance(problem.prompt, str) else ids
        cuts = truncation != "error" and not problem.images
        _check_prompt(problem, ids, tokenizer, None if cuts else max_length)
        prompts.append(ids if max_length is None else truncated(ids, max_length, truncation))
        if images is not None:
            with named(problem):
                images.append(kept(ids, shown))
    return prompts


def _filled(texts: list[str], number: int, tokenizer: Any, problem: Problem) -> Any:
    """Returns the images of a problem, and writes their tokens into its text."""
    with named(problem):
        seen = seen_by(problem, tokenizer)
        if seen is not None:
            texts[number] = fill([texts[number]], seen, problem)[0]
        return seen


def named(problem: Problem) -> AbstractContextManager[None]:
    """Makes errors about a problem, its template or its images a DataError that begins with the problem's name."""
    return raised_as(DataError, label_of(problem), DataError, ModelError)


def prompt_lengths(problems: Sequence[Problem], tokenizer: Any) -> list[int]:
    """Returns the number of tokens of each prompt, as ``encode_prompts`` encodes it, in less time.

    Raises:
        DataError: as ``encode_prompts``.
    """
    strings = any(isinstance(problem.prompt, str) for problem in problems)
    shown = any(problem.images for problem in problems)
    if shown or _unknown(tokenizer) is not None or (strings and tokenizer.bos_token_id is not None):
        return list(map(len, encode_prompts(problems, tokenizer)))
    counts = token_counts(_texts(problems, tokenizer), tokenizer)
    for problem, count in zip(problems, counts, strict=True):
        if not count:
            _check_prompt(problem, [], tokenizer, None)
    return counts


def _texts(problems: Sequence[Problem], tokenizer: Any) -> list[str]:
    texts = []
    for problem in problems:
        with named(problem):
            texts.append(_plain(problem) if isinstance(problem.prompt, str) else prompt_text(tokenizer, problem))
    return texts


def _plain(problem: Problem) -> str:
    """Returns a prompt that is a string, after looking that it has the row's tools, since no template shows them."""
    assert isinstance(problem.prompt, str)
    for tool in problem.tools:
        if not re.search(rf"(?<!\w){re.escape(name_of(tool))}(?!\w)", problem.prompt):
            raise DataError(
                "the prompt is a string that no chat template renders, and it does not name the row's tool "
                f"{name_of(tool)!r}, so the model would not see it; write the prompt as messages, or remove the "
                "column tools (a function of data.convert can)"
            )
    return problem.prompt


def truncated(ids: list[int], max_length: int, side: str) -> list[int]:
    """Cuts the ids of a prompt to a length.

    Args:
        side: where it is cut: ``left`` keeps the end, ``right`` the start, and ``middle`` half of both.

    Example:
        >>> [truncated([1, 2, 3, 4, 5, 6], 3, side) for side in ("left", "right", "middle")]
        [[4, 5, 6], [1, 2, 3], [1, 5, 6]]

    Source: ``data.truncation`` of verl, with the same tokens kept.
    """
    if len(ids) <= max_length:
        return ids
    start = {"left": 0, "middle": max_length // 2}.get(side, max_length)
    return ids[:start] + ids[len(ids) - max_length + start :]


def _check_prompt(problem: Problem, ids: list[int], tokenizer: Any, max_length: int | None) -> None:
    if not ids:
        raise DataError(f"{label_of(problem)}: the tokenizer makes no token of the prompt {problem.prompt!r:.80}")
    if has_unknown(ids, tokenizer):
        raise DataError(f"{label_of(problem)}: {describe_unknown('prompt', problem.prompt, tokenizer)}")
    if max_length is not None and len(ids) > max_length:
        raise too_long(problem, len(ids), max_length)


def too_long(problem: Problem, tokens: int, max_length: int, *, learned: bool = False) -> DataError:
    """Returns the error about a prompt that has too many tokens.

    Args:
        learned: whether the row is learned from; such a row is never cut, nor is one with images.
    """
    uncut = learned or bool(problem.images)
    return DataError(
        f"{label_of(problem)}: the prompt has {tokens} tokens, more than {max_length}; raise data.max_prompt_length"
        + (" or" if uncut else ",")
        + " set data.filter_overlong_prompts to leave such prompts out"
        + ("" if uncut else ", or cut them by data.truncation")
    )


def has_unknown(ids: Sequence[int], tokenizer: Any) -> bool:
    """Returns whether token ids contain the unknown token: it stands for characters that are lost."""
    unknown = _unknown(tokenizer)
    return unknown is not None and unknown in ids


def _unknown(tokenizer: Any) -> int | None:
    # Byte-level tokenizers can encode every string, and some of them (GPT-2's) use bos or eos as the unknown token.
    unknown: int | None = tokenizer.unk_token_id
    return None if unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id) else unknown


def describe_unknown(what: str, text: Any, tokenizer: Any) -> str:
    """Returns an error message that names the first characters of a text that the tokenizer does not know.

    Args:
        text: a string, or chat messages.

    Example:
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> describe_unknown("prompt", "cab!", char_tokenizer("abc"))
        "the tokenizer does not know every character of the prompt 'cab!': it lacks '!'"
    """
    parts = [text] if isinstance(text, str) else [message.get("content") or "" for message in text]
    characters = sorted(set().union(*parts))
    encoded = zip(characters, token_ids(characters, tokenizer), strict=True)
    lost = [character for character, ids in encoded if has_unknown(ids, tokenizer)]
    lacks = f": it lacks {', '.join(map(repr, lost[:10]))}" if lost else ""
    if not lost and not isinstance(text, str):
        lacks = ": it lacks one that the chat template adds to the messages"
    shown = f"{text!r:.80}" + "..." * (len(repr(text)) > 80)
    return f"the tokenizer does not know every character of the {what} {shown}{lacks}"


def label_of(problem: Problem) -> str:
    """Returns a problem's name in error messages: its file and row, or its number."""
    return problem.place or f"problem {problem.id} of {problem.data_source!r}"


def problem_rows(prompt_key: str = "prompt", others: str = "") -> Kind:
    """Returns the kind of rows in verl's columns.

    Each row has ``data_source``, a prompt (chat messages or a string) and ``reward_model`` with its
    ``ground_truth``, which ``truth`` makes a string. Optional are ``extra_info``, ``ability``, which becomes a part
    of it, ``tools``, JSON schemas that the chat template shows, ``chat_template_kwargs``, and ``images`` or
    ``image``, of which the prompt shows each by a mark ``<image>`` or a part of the type image.

    Args:
        others: which other columns the rows might have, for the error about a missing one.
    """

    def make(place: str, row: Row, number: int, unused: Counter[str]) -> Problem:
        fields = fields_of(place, row, number)
        return Problem(
            prompt=prompt_of(place, row[prompt_key], prompt_key, len(fields["images"])),
            answer=ground_truth_of(place, row["reward_model"]),
            **fields,
        )

    required = ("data_source", prompt_key, "reward_model")
    hint = (
        f"required are {', '.join(required)}{others}; data.prompt_key names the prompts' column, and functions of "
        "data.convert make these columns of others"
    )
    return Kind(required, OPTIONAL, make, hint)


def turns(key: Key, start: int, count: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Returns the source of problems ``start`` to ``start + count`` of a stream, and their numbers within it.

    Each problem's source is drawn by the weights. So the stream is a function of the key, and its problems of one
    source are numbered without a gap, wherever it is entered.

    Args:
        weights: of the sources, above 0.

    Example:
        >>> key = Key.from_seed(0)
        >>> turns(key, 0, 4, [1.0, 1.0])
        [(1, 0), (0, 0), (0, 1), (1, 1)]
        >>> turns(key, 5000, 3, [1.0, 1.0]) == turns(key, 0, 5003, [1.0, 1.0])[5000:]
        True
    """
    shares, numbers = torch.tensor(weights, dtype=torch.float64), torch.zeros(len(weights), dtype=torch.int64)
    first, rest = divmod(start, BLOCK)
    for block in range(first):
        numbers += _drawn(key, block, shares).bincount(minlength=len(weights))
    drawn = torch.cat([_drawn(key, block, shares) for block in range(first, (start + count) // BLOCK + 1)])
    of_stream = []
    counters = numbers.tolist()
    for source in drawn[: rest + count].tolist():
        of_stream.append((source, counters[source]))
        counters[source] += 1
    return of_stream[rest:]


def _drawn(key: Key, block: int, shares: Tensor) -> Tensor:
    return torch.multinomial(shares, BLOCK, replacement=True, generator=key.fold_in(block).generator())


def permuted(key: Key, size: int, place: int) -> int:
    """Returns the number at a place of a permutation of ``0`` to ``size - 1``; it is never written down.

    A Feistel network permutes the numbers of an even count of bits; where it leaves the range, it is applied again.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 4 (cycle walking).

    Args:
        place: below ``size``.

    Example:
        >>> sorted(permuted(Key.from_seed(0), 5, place) for place in range(5))
        [0, 1, 2, 3, 4]
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, secret = (1 << half) - 1, key.bits.to_bytes(16, "little")
    while True:
        left, right = place >> half, place & mask
        for number in range(ROUNDS):
            digest = hashlib.blake2b(number.to_bytes(1) + right.to_bytes(8, "little"), digest_size=8, key=secret)
            left, right = right, left ^ (int.from_bytes(digest.digest(), "little") & mask)
        place = left << half | right
        if place < size:
            return place
