"""Reading the rows of parquet and JSONL files, with the file and line of everything that is wrong in them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_fn.errors import UserError

Row = dict[str, Any]


class DataError(UserError, ValueError):
    """Raised for data that cannot be trained on; the message names the file and the row."""


def read_rows(
    file: str | Path, required: Sequence[str], optional: Sequence[str] = (), *, hint: str = ""
) -> Iterator[tuple[str, Row]]:
    """Yields each row of a parquet or JSONL file, after the name of its place for error messages.

    Args:
        file: a file that ends in ``.parquet``, ``.jsonl`` or ``.json``.
        required: columns to read that every row must have.
        optional: columns to read where they exist.
        hint: advice to add to the error about a missing column.

    Raises:
        DataError: the file cannot be read, has no rows, or lacks a column.
    """
    path = Path(file).expanduser()
    if path.suffix not in _READERS:
        raise DataError(f"{path}: the name of a data file must end in {', '.join(_READERS)}")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    empty = True
    try:
        for place, row in _READERS[path.suffix](path, required, optional, hint):
            empty = False
            yield place, row
    except UnicodeDecodeError as error:
        raise DataError(f"{path} has text that is not UTF-8: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if empty:
        raise DataError(f"{path} has no rows")


def _parquet(path: Path, required: Sequence[str], optional: Sequence[str], hint: str) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            _check_columns(str(path), columns, required, hint)
            for batch in file.iter_batches(columns=[name for name in (*required, *optional) if name in columns]):
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a whole parquet file: {error}") from error


def _json_lines(path: Path, required: Sequence[str], optional: Sequence[str], hint: str) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place} is not JSON, one object a line: {getattr(error, 'msg', error)}") from error
            if not isinstance(row, dict):
                raise DataError(f"{place} is not a JSON object, one a line: {row!r:.80}")
            _check_columns(place, list(row), required, hint)
            row = {name: row[name] for name in (*required, *optional) if name in row}
            if "\\ud" in line.lower():
                _check_characters(place, row)
            yield place, row


def _check_characters(place: str, row: Row) -> None:
    """Rejects half of a surrogate pair, which JSON can write but which no tokenizer can encode."""
    for name, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(
                f"{place}: {name} has {half!a}, half of a character's surrogate pair; write the whole character"
            ) from error


_READERS = {".parquet": _parquet, ".jsonl": _json_lines, ".json": _json_lines}


def _check_columns(place: str, columns: Sequence[str], required: Sequence[str], hint: str) -> None:
    for column in required:
        if column not in columns:
            nearest = difflib.get_close_matches(column, [name for name in columns if name not in required], 1)
            raise DataError(
                f"{place}: there is no column {column!r}"
                + (f" (did you mean {nearest[0]!r}?)" if nearest else "")
                + f"; its columns are {', '.join(columns)}"
                + (f"; {hint}" if hint else "")
            )
