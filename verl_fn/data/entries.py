"""The rows of an entry of ``data.train_files``, a file or a data set, in verl's columns."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeGuard

import attrs

from verl_fn.data.columns import check_other, is_media, matters
from verl_fn.data.hub import Table, is_set, open_set
from verl_fn.data.rows import (
    ALL,
    Block,
    Columns,
    DataError,
    Row,
    block_rows,
    check_plain,
    column_names,
    has_inexact,
    parsed,
    read_blocks,
)
from verl_fn.data.tasks import Problem

Entry: TypeAlias = str | Path | Table
"""A file, a data set as ``open_set`` reads it, or an open one."""

Convert: TypeAlias = Callable[[Row], Mapping[str, object] | None]
"""Makes a row of other columns into one of verl's; None for a row that is not its own."""


OBJECTS = ("reward_model", "extra_info", "chat_template_kwargs")
"""Columns of objects, or of strings of JSON that hold objects."""

DIGITS = "digits of numbers that a float does not keep (a string keeps them)"
ABILITY = "ability, beside another one in extra_info"
MOST_NAMED = 3  # entries of a run; more are shards, or too many to read


@attrs.frozen
class Kind(Columns):
    """A kind of rows: their columns, and the problem that a row becomes.

    Of files, also the columns are read without which something else would be learned.

    Attributes:
        make: makes a problem of the place of a row, for error messages, the row, its number among all rows, and
            counts of what is left out.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    make: Callable[[str, Row, int, Counter[str]], Problem]
    hint: str = ""
    others: Callable[[str], bool] = matters

    def blocks(self, entry: Entry, convert: Sequence[Convert] = ()) -> Iterator[Block]:
        """Yields the rows of an entry, some at a time; ``problems`` makes problems of them.

        Raises:
            DataError: the entry cannot be read, has no rows, or lacks a column.
        """
        if _is_file(entry) and not convert:
            return read_blocks(entry, self)
        return _raw_blocks(entry)

    def problems(
        self, block: Block, first: int, convert: Sequence[Convert] = (), unused: Counter[str] | None = None
    ) -> Iterator[Problem]:
        """Yields the problem of each row of a block.

        Args:
            first: the number of the first one.
            convert: each row becomes what the first of these functions makes of it that does not return None.
            unused: gets, for each other column or field of ``reward_model``, the number of rows with a value.

        Raises:
            DataError: a row cannot be used, a function fails, or another column has a value without which something
                else would be learned.
        """
        unused = Counter() if unused is None else unused
        wanted = (*self.required, *self.optional)
        rows: Iterator[tuple[str, Row]]
        if convert:
            rows = ((place, _converted(place, row, convert)) for place, row in block_rows(block, ALL))
        else:
            rows = block_rows(block, self, unused)
        for number, (place, row) in enumerate(rows, first):
            self.check(place, row)
            # pandas and Python write NaN into JSON for what is missing.
            missing = [name for name, value in row.items() if type(value) is float and value != value]
            if missing := [name for name in missing if name not in self.required]:
                row = row | dict.fromkeys(missing)
            row = row | {name: parsed(row[name]) for name in OBJECTS if name in row and name in wanted}
            for name, value in row.items():
                if name not in wanted and value is not None:
                    check_other(place, name, value, [row[n] for n in wanted if n in row and n not in OBJECTS])
                    unused[name] += 1
            if "reward_model" in wanted and isinstance(row.get("reward_model"), Mapping):
                for name, value in row["reward_model"].items():
                    if value is not None and name not in ("ground_truth", "style"):
                        unused[f"reward_model.{name}"] += 1
            used = {name: row[name] for name in wanted if name in row}
            if convert:
                _check_made(place, used)
            ability, extra = row.get("ability"), row.get("extra_info")
            if ability is not None and isinstance(extra, Mapping) and extra.get("ability", ability) != ability:
                unused[ABILITY] += 1
            if has_inexact(used):
                unused[DIGITS] += 1
            yield self.make(place, used, number, unused)


def entry_columns(entry: Entry, convert: Sequence[Convert] = ()) -> tuple[str, ...]:
    """Returns the names of an entry's columns after conversion; none for a file that cannot be read.

    ``Kind.blocks`` reports what is wrong with such a file.

    Raises:
        DataError: a data set cannot be read, or a function fails on the first row.
    """
    if convert:
        block = next(_raw_blocks(entry))
        # Making objects of the others would take most of the time.
        first = attrs.evolve(block, numbers=block.numbers[:1], rows=block.rows[:1])
        ((place, row),) = block_rows(first, ALL)
        return tuple(_converted(place, row, convert))
    return column_names(entry) if _is_file(entry) else _table(entry).columns


def _is_file(entry: Entry) -> TypeGuard[str | Path]:
    return isinstance(entry, str | Path) and not is_set(str(entry))


def _raw_blocks(entry: Entry) -> Iterator[Block]:
    """Yields the rows with all their columns, few at a time if these may have images."""
    return read_blocks(entry, attrs.evolve(ALL, others=is_media)) if _is_file(entry) else _table(entry).blocks()


def _table(entry: Entry) -> Table:
    return entry if isinstance(entry, Table) else open_set(str(entry))


def _converted(place: str, row: Row, convert: Sequence[Convert]) -> Row:
    for function in convert:
        name = getattr(function, "__name__", repr(function))
        given = copy.deepcopy(row)
        try:
            new = function(given)
        # It is the user's.
        except (Exception, SystemExit) as error:
            raise DataError(f"{place}: {name} of data.convert failed: {type(error).__name__}: {error}") from error
        if isinstance(new, Mapping):
            return dict(new)
        if new is not None:
            raise DataError(
                f"{place}: {name} of data.convert returned {new!r:.80}; return a dict, or None to leave the row"
            )
        if changed := [key for key in {**row, **given} if row.get(key, place) != given.get(key, place)]:
            raise DataError(
                f"{place}: {name} of data.convert changed {', '.join(map(repr, changed))} in its row and returned "
                "None, which leaves a row as it was; return the row"
            )
    return row


def _check_made(place: str, row: Row) -> None:
    """Checks what functions of ``data.convert`` have made of a row; images may be of any kind.

    Raises:
        DataError: a column has what no file of JSON can have.
    """
    for column, value in row.items():
        try:
            if not is_media(column):
                check_plain(value)
        except (TypeError, UnicodeEncodeError, RecursionError) as error:
            raise DataError(f"{place}: {column}, as data.convert made it, is no value of JSON: {error}") from error


def entry_name(entry: str) -> str:
    """Returns the name of a file, or of a data set with its configuration and split.

    Example:
        >>> entry_name("/data/sums.jsonl"), entry_name("hub:datasets/openai/gsm8k@740312a#main/train")
        ('sums.jsonl', 'gsm8k@740312a#main/train')
    """
    address, number_sign, part = entry.partition("#")
    return Path(address).name + number_sign + part


def entry_names(entries: Sequence[str]) -> str:
    """Returns the names of files and data sets, or of the first one and the number of the others if there are many.

    Example:
        >>> entry_names(["a.jsonl", "/data/b.jsonl"]), entry_names([f"/data/{i}-of-64.parquet" for i in range(64)])
        ('a.jsonl, b.jsonl', '0-of-64.parquet and 63 more')
    """
    if len(entries) > MOST_NAMED:
        return f"{entry_name(entries[0])} and {len(entries) - 1:,} more"
    return ", ".join(map(entry_name, entries))
