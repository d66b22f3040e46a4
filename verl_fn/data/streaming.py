"""Problems of data sets whose rows are read when a step needs them."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch

from verl_fn.config.algorithms import LearnsFrom
from verl_fn.config.schema import DataConfig
from verl_fn.data.entries import Entry
from verl_fn.data.examples import encode_rows
from verl_fn.data.files import encode_prompts, label_of
from verl_fn.data.mixing import turns
from verl_fn.data.rows import DataError
from verl_fn.data.sets import Table, is_set, open_set
from verl_fn.data.tasks import MAX_FAILED_DRAWS, Problem
from verl_fn.state import Key

FIRST = 64  # rows of each data set that are checked when a run starts
ROUNDS = 6

Read = Callable[[Sequence[Entry]], tuple[Problem, ...]]
"""Makes the problems of all rows of files and data sets."""


@attrs.frozen(eq=False)
class StreamedData:
    """A source of problems whose rows stay on disk until a step needs them.

    The order is no state: it is computed from the key and the place in the stream, without a list of all rows.

    Attributes:
        tables: the data sets.
        read: makes problems of rows.
        validation: the held-out problems.
        first: the first problems of each data set.
        shuffle: whether every epoch has another order; otherwise it is that of the data sets.
        weights: one for each data set: each has epochs of its own. Without them, all data sets are one.
        max_prompt: tokens that no prompt may exceed.
        max_row: tokens that no training row may exceed; 0 unless the data's own responses are trained on.
        max_group: tokens of the longest training rows that stay together, such as a pair.
        fits: whether each of several problems is short enough; in place of one that is not, another is drawn.
    """

    tables: tuple[Table, ...]
    read: Read
    validation: Sequence[Problem]
    first: tuple[Problem, ...]
    shuffle: bool
    weights: tuple[float, ...] = ()
    max_prompt: int = 0
    max_row: int = 0
    max_group: int = 0
    fits: Callable[[Sequence[Problem]], Sequence[bool]] = lambda problems: [True] * len(problems)

    def train(self, key: Key, start: int, count: int) -> tuple[Problem, ...]:
        """Returns problems ``start`` to ``start + count`` of the stream that ``key`` names; it repeats the epochs.

        Raises:
            DataError: a row cannot be used, or many rows in succession are too long.
        """
        places = self._places(key, start, count)
        problems = dict(enumerate(self._problems(places)))
        unfit = self._unfit(problems.items())
        for attempt in range(MAX_FAILED_DRAWS):
            if not unfit:
                return tuple(attrs.evolve(problems[i], id=start + i) for i in range(count))
            # Of the same data set, so that it keeps its share.
            drawn = [self._instead(key, start + i, attempt, places[i][0]) for i in unfit]
            problems |= zip(unfit, self._problems(drawn), strict=True)
            unfit = self._unfit((i, problems[i]) for i in unfit)
        name = self.tables[places[unfit[0]][0]].name
        raise DataError(f"{name}: {MAX_FAILED_DRAWS} rows in succession are too long; raise data.max_prompt_length")

    def held_out(self, count: int | None) -> tuple[Problem, ...]:
        """Returns the first ``count`` problems of the validation files, or all of them for None."""
        return tuple(self.validation[:count])

    def _places(self, key: Key, start: int, count: int) -> list[tuple[int, int]]:
        """Returns the data set of each problem, and the row in it."""
        sizes = [len(table) for table in self.tables]
        if self.weights:
            drawn = turns(key.fold_in("files"), start, count, self.weights)
            return [
                (table, self._row(key.fold_in("file").fold_in(table), number, sizes[table]))
                for table, number in drawn
            ]
        ends = list(itertools.accumulate(sizes))
        rows = [self._row(key, number, ends[-1]) for number in range(start, start + count)]
        return [(table := bisect.bisect_right(ends, row), row - (ends[table] - sizes[table])) for row in rows]

    def _row(self, key: Key, number: int, size: int) -> int:
        epoch, place = divmod(number, size)
        return permuted(key.fold_in("epoch").fold_in(epoch), size, place) if self.shuffle else place

    def _instead(self, key: Key, number: int, attempt: int, table: int) -> tuple[int, int]:
        generator = key.fold_in("instead").fold_in(number).fold_in(attempt).generator()
        return table, int(torch.randint(len(self.tables[table]), (), generator=generator))

    def _problems(self, places: Sequence[tuple[int, int]]) -> list[Problem]:
        """Reads the rows of places, with one read for each data set; a problem's ``id`` is its row."""
        read: dict[int, Problem] = {}
        for table in {table for table, _ in places}:
            chosen = [(i, row) for i, (of, row) in enumerate(places) if of == table]
            problems = self.read([self.tables[table].take([row for _, row in chosen])])
            read |= {i: attrs.evolve(p, id=row) for (i, row), p in zip(chosen, problems, strict=True)}
        return [read[i] for i in range(len(places))]

    def _unfit(self, problems: Iterable[tuple[int, Problem]]) -> list[int]:
        items = list(problems)
        return [i for (i, _), fits in zip(items, self.fits([p for _, p in items]), strict=True) if not fits]


def streamed(
    table: DataConfig,
    tokenizer: Any,
    read: Read,
    validation: Sequence[Problem],
    learns_from: LearnsFrom,
    end_tokens: int | Sequence[int] | None,
) -> StreamedData:
    """Opens the data sets of ``data.train_files``, and checks the first rows of each.

    Args:
        table: the config's ``[data]`` table.
        tokenizer: the model's tokenizer.
        read: makes problems of rows.
        validation: the held-out problems.
        learns_from: what the algorithm learns from.
        end_tokens: those of the model if the run trains on the data's own answers.

    Raises:
        DataError: an entry is a file, or a data set or one of the first rows cannot be used.
    """
    if files := [entry for entry in table.train_files if not is_set(entry)]:
        raise DataError(
            f"data.stream: {files[0]} is a file, and only data sets of the package datasets are read row by row; "
            "name FOLDER#SPLIT or hub:datasets/OWNER/NAME@COMMIT#SPLIT, or leave data.stream out"
        )
    tables = tuple(map(open_set, table.train_files))
    first = tuple(problem for one in tables for problem in read([one.take(range(min(FIRST, len(one))))]))
    prompt, response = table.max_prompt_length, table.max_response_length
    fits = Fits(prompt, prompt + response, table.filter_overlong_prompts, tokenizer, end_tokens, table.truncation)
    fits(first)
    # KTO puts responses behind the prompts of others.
    longest = 0 if end_tokens is None else prompt + response + (prompt if learns_from == "labels" else 0)
    return StreamedData(
        tables,
        read,
        validation,
        first,
        table.shuffle,
        table.weights,
        max_prompt=prompt,
        max_row=longest,
        max_group=2 * longest,
        fits=fits,
    )


@attrs.frozen(eq=False)
class Fits:
    """Tells which problems are short enough; where longer ones are not left out, they are errors.

    Attributes:
        max_prompt: tokens that no prompt may exceed.
        max_row: tokens that no training row may exceed.
        leave_out: whether longer ones are left out.
        tokenizer: the model's tokenizer.
        end_tokens: those of the model if the run trains on the data's own answers; otherwise only prompts count.
        truncation: how longer prompts are cut, if they are not left out.
    """

    max_prompt: int
    max_row: int
    leave_out: bool
    tokenizer: Any
    end_tokens: int | Sequence[int] | None
    truncation: str = "error"

    def __call__(self, problems: Sequence[Problem]) -> list[bool]:
        """Returns whether each problem is short enough.

        Raises:
            DataError: one is not, and longer ones are not left out; or it cannot be encoded.
        """
        limit = None if self.leave_out else self.max_prompt
        prompts = encode_prompts(problems, self.tokenizer, limit, self.truncation)
        fits = [len(ids) <= self.max_prompt for ids in prompts]
        if self.end_tokens is None:
            return fits
        rows = encode_rows(problems, self.tokenizer, self.end_tokens)
        for i, (problem, examples) in enumerate(zip(problems, rows, strict=True)):
            longest = max(len(ids) for ids, _ in examples)
            if longest > self.max_row and not self.leave_out:
                raise DataError(
                    f"{label_of(problem)}: prompt and response have {longest} tokens, and data.stream allows "
                    f"{self.max_row}, the sum of data.max_prompt_length and data.max_response_length; raise one of "
                    "them, or set data.filter_overlong_prompts to draw another row"
                )
            fits[i] = fits[i] and longest <= self.max_row
        return fits


def permuted(key: Key, size: int, place: int) -> int:
    """Returns the number at a place of a permutation of ``0`` to ``size - 1``, which is never written down.

    A Feistel network permutes the numbers of an even count of bits; where it leaves the range, it is applied again.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 4 (cycle walking).

    Args:
        key: names the permutation.
        size: of the range.
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
