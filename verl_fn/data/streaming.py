"""Problems of data sets whose rows are read when a step needs them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from verl_fn.config.algorithms import LearnsFrom
from verl_fn.config.schema import DataConfig
from verl_fn.data.entries import Entry
from verl_fn.data.examples import encode_rows
from verl_fn.data.files import FileData, encode_prompts, label_of
from verl_fn.data.hub import Table, is_set, open_set
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import MAX_FAILED_DRAWS, Problem
from verl_fn.state import Key

FIRST = 64  # rows of each data set that are checked when a run starts

Read = Callable[[Sequence[Entry]], tuple[Problem, ...]]
"""Makes the problems of all rows of files and data sets."""


@attrs.frozen(eq=False, kw_only=True)
class StreamedData(FileData):
    """A source of problems whose rows stay on disk until a step needs them; ``training`` has the first ones.

    Attributes:
        tables: the data sets.
        read: makes problems of rows.
        fits: whether each of several problems is short enough; in place of one that is not, another is drawn.
    """

    tables: tuple[Table, ...]
    read: Read
    fits: Fits

    @property
    def first(self) -> Sequence[Problem]:
        """Returns the first problems of each data set."""
        return self.training

    def _problems(self, key: Key, start: int, places: Sequence[int]) -> Sequence[Problem]:
        """Reads the rows of places, and others of the same data sets for those that are too long.

        Raises:
            DataError: a row cannot be used, or many rows in succession are too long.
        """
        ends = list(itertools.accumulate(self.sizes))
        tables = [bisect.bisect_right(ends, place) for place in places]
        rows = [place - ends[table] + self.sizes[table] for place, table in zip(places, tables, strict=True)]
        problems: dict[int, Problem] = {}
        unfit = list(range(len(places)))
        for attempt in range(MAX_FAILED_DRAWS):
            # One read for each data set.
            for table in {tables[i] for i in unfit}:
                chosen = [i for i in unfit if tables[i] == table]
                problems |= zip(chosen, self.read([self.tables[table].take([rows[i] for i in chosen])]), strict=True)
            fits = self.fits([problems[i] for i in unfit])
            if not (unfit := [i for i, short in zip(unfit, fits, strict=True) if not short]):
                return [problems[i] for i in range(len(places))]
            for i in unfit:
                generator = key.fold_in("instead").fold_in(start + i).fold_in(attempt).generator()
                # Of the same data set, so that it keeps its share.
                rows[i] = int(torch.randint(self.sizes[tables[i]], (), generator=generator))
        name = self.tables[tables[unfit[0]]].name
        raise DataError(f"{name}: {MAX_FAILED_DRAWS} rows in succession are too long; raise data.max_prompt_length")


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
        end_tokens: the model's if the run trains on the data's own answers.

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
        training=first,
        validation=validation,
        shuffle=table.shuffle,
        max_prompt=prompt,
        max_row=longest,
        max_group=2 * longest,
        sizes=tuple(map(len, tables)),
        weights=table.weights,
        tables=tables,
        read=read,
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
        end_tokens: the model's if the run trains on the data's own answers; otherwise only prompts count.
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
