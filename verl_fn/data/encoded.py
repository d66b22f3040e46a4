"""Problems with the lengths of their tokens: read, checked and encoded in parts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from verl_fn.config.algorithms import LearnsFrom
from verl_fn.config.schema import DataConfig
from verl_fn.data.entries import Convert, Kind
from verl_fn.data.examples import encode_rows
from verl_fn.data.files import prompt_lengths, too_long
from verl_fn.data.judged import Judged
from verl_fn.data.notices import IMAGES, Traits, joined, traits_of
from verl_fn.data.rows import Block, DataError
from verl_fn.data.tasks import Problem


@attrs.frozen(eq=False)
class Asked:
    """What is asked of an ``Encoder``.

    Attributes:
        block: some rows.
        file: the number of their file.
        first: the number of the first row, counted over all files.
    """

    block: Block
    file: int
    first: int


@attrs.frozen(eq=False)
class Encoded:
    """Problems of files, or a part of them, with the lengths of their tokens.

    Attributes:
        problems: the problems; of a part that is to be stored, each as bytes.
        prompts: tokens of each prompt, of shape (problems,).
        rows: for each problem, tokens of its longest row, of its rows together, of the longest prompt of a row, and
            of the longest response, of shape (problems, 4); 0 unless its rows are learned from.
        traits: of the problems.
        sizes: the number of problems of each file.
        unused: for each column that is not used, the number of rows with a value in it.
    """

    problems: Sequence[Any]
    prompts: np.ndarray
    rows: np.ndarray
    traits: Traits
    sizes: tuple[int, ...] = ()
    unused: Counter[str] = attrs.field(factory=Counter)

    def __getitem__(self, chosen: Any) -> Encoded:
        """Returns some of the problems, by a slice or a mask."""
        numbers = np.arange(len(self.problems))[chosen]
        traits = self.traits[chosen]
        problems = Chosen(self.problems, numbers, traits)
        return Encoded(problems, self.prompts[chosen], self.rows[chosen], traits)


@attrs.frozen(eq=False)
class Chosen(Sequence[Problem]):
    """Some problems of a sequence.

    Attributes:
        problems: the sequence.
        numbers: the places in it.
        traits: of these problems.

    Example:
        >>> two = [Problem("a", "b"), Problem("c", "d")]
        >>> chosen = Chosen(two, np.array([1]), traits_of(two[1:], None))
        >>> [problem.prompt for problem in chosen], chosen[:5][0].answer, len(chosen)
        (['c'], 'd', 1)
    """

    problems: Sequence[Problem]
    numbers: np.ndarray
    traits: Traits

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self.problems[int(i)] for i in self.numbers[number])
        return self.problems[int(self.numbers[number])]


@attrs.frozen(eq=False)
class Encoder:
    """Checks and encodes the rows of blocks.

    Attributes:
        kinds: the kind of rows of each file.
        end_tokens: as for ``encode_rows``, if rows are learned from.
        judged_only: whether only rows of judged responses are learned from.
        limit: rows of longer prompts are not encoded.
        pack: makes bytes of a problem, if they shall not stay in memory.
    """

    kinds: Sequence[Kind]
    convert: Sequence[Convert]
    tokenizer: Any
    end_tokens: int | Sequence[int] | None = None
    judged_only: bool = False
    limit: int | None = None
    pack: Callable[[Problem], bytes] | None = None

    def __call__(self, asked: Asked) -> Encoded:
        """Returns the problems of a block.

        Raises:
            UserError: a row cannot be used, or cannot be encoded.
        """
        unused: Counter[str] = Counter()
        kind = self.kinds[asked.file]
        problems = list(kind.problems(asked.block, asked.first, self.convert, unused))
        return self.part(problems, asked.file, unused)

    def part(self, problems: Sequence[Problem], file: int = 0, unused: Counter[str] | None = None) -> Encoded:
        """Returns problems with their lengths.

        Raises:
            UserError: a problem cannot be encoded.
        """
        prompts, rows = self.lengths(problems)
        traits = traits_of(problems, self.tokenizer)
        kept = problems if self.pack is None else [self.pack(one) for one in problems]
        return Encoded(kept, prompts, rows, traits, (0,) * file + (len(problems),), unused or Counter())

    def lengths(self, problems: Sequence[Problem]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lengths of problems: what ``Encoded`` has as prompts and rows."""
        prompts = np.array(prompt_lengths(problems, self.tokenizer), np.int32)
        rows = np.zeros((len(problems), 4), np.int32)
        if self.end_tokens is None:
            return prompts, rows
        fits = [self.limit is None or length <= self.limit for length in prompts]
        places = [
            i for i, one in enumerate(problems) if fits[i] and (not self.judged_only or isinstance(one, Judged))
        ]
        encoded = encode_rows([problems[i] for i in places], self.tokenizer, self.end_tokens)
        for i, examples in zip(places, encoded, strict=True):
            lengths = [len(ids) for ids, _ in examples]
            starts = [mask.index(1.0) if 1.0 in mask else len(mask) for _, mask in examples]
            responses = [length - start for length, start in zip(lengths, starts, strict=True)]
            rows[i] = max(lengths), sum(lengths), max(starts), max(responses)
        return prompts, rows


def assembled(parts: Iterable[Encoded]) -> Encoded:
    """Returns all parts as one."""
    parts = list(parts)
    return Encoded(
        [one for part in parts for one in part.problems],
        np.concatenate([np.zeros(0, np.int32), *(part.prompts for part in parts)]),
        np.concatenate([np.zeros((0, 4), np.int32), *(part.rows for part in parts)]),
        joined([part.traits for part in parts]),
        tuple(map(sum, itertools.zip_longest(*(part.sizes for part in parts), fillvalue=0))),
        sum((part.unused for part in parts), Counter[str]()),
    )


def short_enough(
    key: str, found: Encoded, table: DataConfig, say: Callable[[str], None], *, each: bool = False
) -> Encoded:
    """Returns the problems whose prompts are short enough, with the number of them in each file.

    Args:
        key: the config key that names the problems, for errors.
        say: prints a line; it reports how many prompts were left out or are cut.
        each: report each file by itself.

    Raises:
        DataError: a prompt cannot be used or is too long, or all prompts were left out.
    """
    limit = table.max_prompt_length
    fits = found.prompts <= limit
    uncut = (found.traits.flags & IMAGES > 0) | (table.truncation == "error")
    start, sizes = 0, []
    for size in found.sizes if each else (len(fits),):
        kept = fits[start : start + size]
        long = int((~kept).sum())
        if long and table.filter_overlong_prompts:
            if long == size:
                raise DataError(
                    f"{key}: all {size} prompts are longer than {limit} tokens; raise data.max_prompt_length"
                )
            say(f"{key}: left out {long} of {size} prompts, longer than {limit} tokens")
        elif len(whole := np.flatnonzero(~kept & uncut[start : start + size])):
            first = start + int(whole[0])
            learned = bool(found.rows[first].any())
            raise too_long(found.problems[first], int(found.prompts[first]), limit, learned=learned)
        elif long:
            say(f"{key}: {long} of {size} prompts are cut to {limit} tokens (data.truncation)")
        if not table.filter_overlong_prompts:
            kept[:] = True
        sizes.append(int(kept.sum()))
        start += size
    chosen = found[fits]
    return attrs.evolve(chosen, prompts=np.minimum(chosen.prompts, limit), sizes=tuple(sizes))


def longest_prompt(parts: Sequence[Encoded]) -> int:
    """Returns the tokens of the longest prompt; 0 without any."""
    return max(int(part.prompts.max(initial=0)) for part in parts)


def longest_rows(parts: Sequence[Encoded], learns_from: LearnsFrom) -> tuple[int, int]:
    """Returns the tokens of the longest row, and of the rows that are longest together."""
    longest, together, prompt, response = np.concatenate([part.rows for part in parts]).max(axis=0).tolist()
    if learns_from == "labels":
        # Prompts also come with the responses to others.
        return prompt + response, prompt + response
    # The rows of a conversation need not stay together; the rows of a pair must.
    return longest, together if learns_from == "pairs" else longest
