"""The rows of an entry of ``data.train_files``, a file or a data set, in verl's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from verl_fn.data.rows import DataError, Row, check_columns, column_names, read_rows
from verl_fn.data.sets import Table, is_set, open_set

Entry: TypeAlias = str | Path | Table
"""A file, a data set as ``open_set`` reads it, or an open one."""

Convert: TypeAlias = Callable[[Row], Mapping[str, object] | None]
"""Makes a row of other columns into one of verl's; None for a row that is not its own."""


def entry_rows(
    entry: Entry,
    required: Sequence[str],
    optional: Sequence[str] = (),
    *,
    hint: str = "",
    convert: Sequence[Convert] = (),
) -> Iterator[tuple[str, Row]]:
    """Yields each row of an entry, after the name of its place for error messages.

    Args:
        entry: what is read.
        required: columns that every row must have.
        optional: columns to read where they exist.
        hint: advice to add to the error about a missing column.
        convert: each row becomes what the first of these functions makes of it that does not return None.

    Raises:
        DataError: the entry cannot be read, has no rows, or lacks a column, or a function fails.
    """
    if not convert and isinstance(entry, str | Path) and not is_set(str(entry)):
        yield from read_rows(entry, required, optional, hint=hint)
        return
    for place, row in _raw_rows(entry):
        row = _converted(place, row, convert)
        check_columns(place, list(row), required, hint)
        yield place, {name: row[name] for name in (*required, *optional) if name in row}


def entry_columns(entry: Entry, convert: Sequence[Convert] = ()) -> tuple[str, ...]:
    """Returns the names of an entry's columns after conversion; none for a file that cannot be read.

    ``entry_rows`` reports what is wrong with such a file.

    Raises:
        DataError: a data set cannot be read, or a function fails on the first row.
    """
    if convert:
        first = next(((place, row) for place, row in _raw_rows(entry)), None)
        return () if first is None else tuple(_converted(*first, convert))
    if isinstance(entry, str | Path) and not is_set(str(entry)):
        return column_names(entry)
    return _table(entry).columns


def is_padded(entry: Entry) -> bool:
    """Returns whether messages of an entry have all keys of their column, as Arrow and Parquet store them.

    Example:
        >>> is_padded("a.parquet"), is_padded("a.jsonl")
        (True, False)
    """
    return isinstance(entry, Table) or Path(entry).suffix not in (".jsonl", ".json")


def _raw_rows(entry: Entry) -> Iterator[tuple[str, Row]]:
    if isinstance(entry, str | Path) and not is_set(str(entry)):
        return read_rows(entry, (), None)
    return _table(entry).rows()


def _table(entry: Entry) -> Table:
    return entry if isinstance(entry, Table) else open_set(str(entry))


def _converted(place: str, row: Row, convert: Sequence[Convert]) -> Row:
    for function in convert:
        name = getattr(function, "__name__", repr(function))
        try:
            new = function(row)
        # It is the user's.
        except Exception as error:
            raise DataError(f"{place}: {name} of data.convert failed: {type(error).__name__}: {error}") from error
        if isinstance(new, Mapping):
            return dict(new)
        if new is not None:
            raise DataError(
                f"{place}: {name} of data.convert returned {new!r:.80}; return a dict, or None to leave the row"
            )
    return row
