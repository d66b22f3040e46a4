"""Reading the rows of parquet and JSONL files, with the file and line of everything that is wrong in them."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.parquet as pq

from verl_fn.errors import UserError, closest

Row = dict[str, Any]

OF_KINDS = ("messages", "completion", "chosen", "rejected", "reward_model")
"""Columns by which rows of one kind differ from others."""

ANSWERED = {*OF_KINDS} - {"reward_model"}

FEW, MANY = 64, 1024  # rows that are read together; few of a Parquet file that may have images


class DataError(UserError, ValueError):
    """Raised for data that cannot be trained on; the message names the file and the row."""


@attrs.frozen(eq=False)
class Block:
    """Some rows of a file or a data set, before they are parsed.

    Attributes:
        place: names a row for error messages, with its number behind it.
        rows: lines of JSON, or an Arrow table.
        damage: the start of the error about a part of a table that cannot be read.
        unread: for each column that was not read, the number of rows with a value in it.
    """

    place: str
    numbers: Sequence[int]
    rows: list[str] | pa.RecordBatch | pa.Table
    damage: str = ""
    unread: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen
class Columns:
    """The columns of rows that are read.

    Attributes:
        required: columns that every row must have.
        optional: columns to read if they exist; None for all others.
        others: tells which further columns to read by their names.
        hint: advice to add to the error about a missing column.
    """

    required: Sequence[str] = ()
    optional: Sequence[str] | None = ()
    others: Callable[[str], bool] = lambda name: False
    hint: str = ""

    def has(self, name: str) -> bool:
        """Returns whether a column is read."""
        return self.optional is None or name in self.required or name in self.optional or self.others(name)

    def check(self, place: str, names: Collection[str]) -> None:
        """Checks that all required columns are there.

        Raises:
            DataError: one is not; the message names the most similar column.

        Example:
            >>> Columns(["a"]).check("a.jsonl", ["x", "b"])
            Traceback (most recent call last):
            verl_fn.data.rows.DataError: a.jsonl: there is no column 'a'; its columns are x, b
        """
        for column in self.required:
            if column not in names:
                match = closest(column, [name for name in names if name not in self.required])
                others = [name for name in OF_KINDS if name in names and name not in self.required and not match]
                raise DataError(
                    f"{place}: there is no column {column!r}"
                    + (f" (did you mean {match!r}?)" if match else "")
                    + f"; its columns are {', '.join(names)}"
                    + (f"; {self.hint}" if self.hint else "")
                    + (f"; a row with {others[0]} is for another algorithm or another file" if others else "")
                )


ALL = Columns(optional=None)


def read_blocks(file: str | Path, columns: Columns) -> Iterator[Block]:
    """Yields the rows of a parquet or JSONL file, some at a time; ``block_rows`` parses them.

    Args:
        file: a file that ends in ``.parquet``, ``.jsonl`` or ``.json``.

    Raises:
        DataError: the file cannot be read, has no rows, or is a Parquet file that lacks a column.
    """
    path = Path(file).expanduser()
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{path}: the name of a data file must end in {', '.join(SUFFIXES)}; decompress others (gunzip, unzstd), "
            "and for a data set of the Hugging Face hub, run verl-fn prepare hub:datasets/OWNER/NAME --out FOLDER "
            "first and name the files in it"
        )
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    parquet = path.suffix == ".parquet"
    empty = True
    try:
        for block in _parquet(path, columns) if parquet else _lines(path):
            empty = False
            yield block
    except UnicodeDecodeError as error:
        raise DataError(f"{path} has text that is not UTF-8: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if empty:
        raise DataError(f"{path} has no rows")


def block_rows(block: Block, columns: Columns, unread: Counter[str] | None = None) -> Iterator[tuple[str, Row]]:
    """Yields each row of a block, after the name of its place for error messages.

    Args:
        unread: gets, for each column that is not read, the number of rows with a value in it.

    Raises:
        DataError: a row cannot be parsed, or lacks a column.
    """
    unread = Counter() if unread is None else unread
    unread.update(block.unread)
    if isinstance(block.rows, list):
        for number, line in zip(block.numbers, block.rows, strict=True):
            place = f"{block.place} {number}"
            yield place, _of_line(place, line, columns, unread)
        return
    try:
        rows = arrow_rows(block.rows)
    # A damaged table makes the library raise nearly anything.
    except Exception as error:
        raise DataError(f"{block.damage}: {one_line(error)}") from error
    yield from zip((f"{block.place} {number}" for number in block.numbers), rows, strict=True)


def read_rows(file: str | Path, required: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yields the columns of each row of a file, after the name of its place for error messages.

    Raises:
        DataError: as ``read_blocks`` and ``block_rows``.
    """
    columns = Columns(required)
    for block in read_blocks(file, columns):
        yield from block_rows(block, columns)


def column_names(file: str | Path) -> tuple[str, ...]:
    """Returns the names of a file's columns, of a JSONL file those of its first row; none if it cannot be read.

    ``read_rows`` reports what is wrong with such a file.
    """
    path = Path(file).expanduser()
    try:
        if path.suffix == ".parquet":
            return tuple(pq.read_schema(path).names)
        with path.open(encoding="utf-8-sig") as lines:
            row = json.loads(next(line for line in lines if line.strip()))
        return tuple(row) if isinstance(row, dict) else ()
    except (OSError, ValueError, StopIteration, RecursionError, pa.ArrowException):
        return ()


def count_rows(files: Sequence[str | Path]) -> int | None:
    """Returns the number of rows of all files together; None if one of them cannot be read.

    ``read_rows`` reports what is wrong with such a file.
    """
    count = 0
    for path in (Path(file).expanduser() for file in files):
        try:
            if path.suffix == ".parquet":
                count += pq.read_metadata(path).num_rows
            else:
                with path.open("rb") as lines:
                    count += sum(bool(line.strip()) for line in lines)
        except (OSError, pa.ArrowException):
            return None
    return count


def sources_in(files: Sequence[str | Path]) -> list[str]:
    """Returns the data sources of the rows of files that ask for an answer and hold none, in the order of names.

    What cannot be read has none; ``read_rows`` reports what is wrong with it.
    """
    found: set[Any] = set()
    for path in (Path(file).expanduser() for file in files):
        with contextlib.suppress(OSError, ValueError, TypeError, pa.ArrowException):
            if path.suffix == ".parquet":
                if not ANSWERED.intersection(pq.read_schema(path).names):
                    found |= {*pq.read_table(path, columns=["data_source"])["data_source"].unique().to_pylist()}
                continue
            with path.open("rb") as lines:
                for row in (json.loads(line) for line in lines if line.strip()):
                    if isinstance(row, dict) and not row.keys() & ANSWERED:
                        found.add(row.get("data_source"))
    return sorted(source for source in found if isinstance(source, str))


def _parquet(path: Path, columns: Columns) -> Iterator[Block]:
    number, damage = 0, f"{path} cannot be read as parquet (at row {{}})"
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            columns.check(str(path), schema.names)
            names = list(filter(columns.has, schema.names))
            rest = [name for name in schema.names if name not in names and schema.names.count(name) == 1]
            if twice := [name for name in names if schema.names.count(name) > 1]:
                raise DataError(f"{path} has several columns {twice[0]!r}; leave one")
            # These columns may hold images, many of which at once would not fit into memory.
            heavy = any(map(columns.others, names))
            for batch in file.iter_batches(FEW if heavy else MANY, columns=[*names, *rest]):
                unread = {name: len(batch) - batch.column(name).null_count for name in rest}
                numbers = range(number, number + len(batch))
                yield Block(f"{path}, row", numbers, batch.select(names), damage.format(number), unread)
                number += len(batch)
    except (DataError, GeneratorExit):
        raise
    # A damaged file makes the library raise nearly anything.
    except Exception as error:
        raise DataError(f"{damage.format(number)}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Returns the start of an error's message in one line."""
    return f"{' '.join(str(error).split()):.300}"


def arrow_rows(batch: pa.RecordBatch | pa.Table) -> list[Row]:
    """Returns the rows of a part of an Arrow table.

    A class label of the package datasets is its name, and a value of Arrow's type JSON is what it holds.

    Example:
        >>> arrow_rows(pa.table({"a": pa.array([0.1], pa.float32())}))
        [{'a': 0.1}]
    """
    kinds = {field.name: field.type for field in batch.schema}
    narrow = {name: kind for name, kind in kinds.items() if re.search(r"\b(half)?float\b|arrow\.json", str(kind))}
    labels = {name: feature for name, feature in _features(batch.schema).items() if name in kinds}
    rows = batch.to_pylist(maps_as_pydicts="strict")
    if narrow:
        rows = [row | {name: _shortest(row[name], kind) for name, kind in narrow.items()} for row in rows]
    return [row | {name: _named(row[name], of) for name, of in labels.items()} for row in rows] if labels else rows


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Returns the columns with class labels, as the package datasets describes them in a schema."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        # Of a response that is good or bad, the label is 1 or 0 whatever the names are.
        return {name: of for name, of in features.items() if '"ClassLabel"' in json.dumps(of) and name != "label"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _named(value: Any, feature: Any) -> Any:
    """Replaces the numbers of class labels by their names; -1 stands for no label.

    A description may be older than the values, so what is no number of a label stays.

    Example:
        >>> _named({"a": [1, -1]}, {"a": {"_type": "List", "feature": {"_type": "ClassLabel", "names": ["x", "y"]}}})
        {'a': ['y', None]}
    """
    if isinstance(feature, list) and feature:
        feature = {"_type": "List", "feature": feature[0]}
    if not isinstance(feature, dict):
        return value
    # Without a type these are the fields of an object.
    inner = feature.get("feature") if isinstance(feature.get("_type"), str) else None
    if isinstance(value, list) and inner is not None:
        return [_named(one, inner) for one in value]
    if isinstance(value, dict):
        # Older versions describe an object of lists as a list of objects.
        of = {name: [one] for name, one in inner.items()} if isinstance(inner, dict) else feature
        return {name: _named(one, of.get(name)) for name, one in value.items()}
    if feature.get("_type") != "ClassLabel" or type(value) is not int:
        return value
    names = feature.get("names") or ()
    return names[value] if 0 <= value < len(names) else None if value == -1 else value


def _shortest(value: Any, kind: pa.DataType) -> Any:
    """Replaces numbers of 16 and 32 bits by those with the digits that were written, and JSON by what it holds.

    Example:
        >>> _shortest({"a": [0.10000000149011612]}, pa.struct({"a": pa.list_(pa.float32())}))
        {'a': [0.1]}
    """
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return _JSON.decode(value)
    if pa.types.is_float32(kind) or pa.types.is_float16(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if pa.types.is_struct(kind):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return {key: _shortest(inner, kind.item_type) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shortest(inner, kind.value_type) for inner in value]
    return value


def _lines(path: Path) -> Iterator[Block]:
    with path.open(encoding="utf-8-sig") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        while some := list(itertools.islice(lines, MANY)):
            yield Block(f"{path}, line", [number for number, _ in some], [line for _, line in some])


def _of_line(place: str, line: str, columns: Columns, unread: Counter[str]) -> Row:
    try:
        row = _JSON.decode(line)
    except (ValueError, RecursionError) as error:
        objects, of_list = "; of objects over several lines, jq -c .", "; of a list over several lines, jq -c '.[]'"
        spread = {"{": objects, "[": of_list, "[{": of_list}.get(line.strip(), "")
        spread += " FILE makes such lines" * bool(spread)
        raise DataError(f"{place} is not JSON, one object a line: {getattr(error, 'msg', error)}{spread}") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{place} is not a JSON object, one a line: {row!r:.80}; of a file with one list, jq -c '.[]' FILE makes "
            "such lines"
        )
    columns.check(place, row)
    kept = {}
    for name, value in row.items():
        if columns.has(name):
            kept[name] = value
        elif value is not None:
            unread[name] += 1
    if "\\ud" in line.lower():
        _check_characters(place, kept)
    return kept


class Inexact(float):
    """A number that was written with more digits than a float has."""


def has_inexact(value: Any) -> bool:
    """Returns whether a value is or holds a number that was written with more digits than a float has.

    Example:
        >>> has_inexact(parsed('{"a": [0.1, 1e400]}')), has_inexact(parsed('{"a": [0.1, 12345678901234567890]}'))
        (True, False)
    """
    left = [value]
    while left:  # for each row, so without `leaves`
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif isinstance(one, Inexact):
            return True
    return False


def leaves(value: Any) -> Iterator[Any]:
    """Yields the values in lists and objects that are neither, in their order; any other value itself.

    Example:
        >>> list(leaves({"a": [1, "b"], "c": {"d": None}}))
        [1, 'b', None]
    """
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            one = [*one.values()]
        if isinstance(one, list | tuple):
            left += reversed(one)
        else:
            yield one


def strings(value: Any) -> list[str]:
    """Returns all strings in a value.

    Example:
        >>> strings(({"role": "user", "content": "hi"},))
        ['user', 'hi']
    """
    return [one for one in leaves(value) if isinstance(one, str)]


def _float(written: str) -> float:
    value = float(written)
    try:
        exact = Decimal(written) == Decimal(repr(value))
    except ArithmeticError:  # an exponent beyond all limits
        exact = False
    return value if exact else Inexact(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return values


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float)


def parsed(value: Any) -> Any:
    """Returns what a string of JSON holds; anything else, also another string, as it is.

    Objects of different shapes cannot share a Parquet column unless each is a string.

    Example:
        >>> parsed('{"a": 1}'), parsed({"a": 1}), parsed("a")
        ({'a': 1}, {'a': 1}, 'a')
    """
    if not isinstance(value, str):
        return value
    try:
        return _JSON.decode(value)
    except (ValueError, RecursionError):
        return value


def check_plain(value: Any) -> None:
    """Checks keys, characters and arrays in a value that is to be JSON, as a file of JSON has them.

    Raises:
        TypeError: a key is no string, and JSON would turn it into one; or there is an array of numpy.
        UnicodeEncodeError: there is half of a character's surrogate pair.

    Example:
        >>> check_plain({"a": [{1: 2}]})
        Traceback (most recent call last):
        TypeError: the key 1 is no string
    """
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {bad[0]!r} is no string")
        check_plain([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            check_plain(one)
    elif hasattr(value, "__array__") and not isinstance(value, float):
        raise TypeError(f"{value!r:.80} is of numpy; make a number, a string or a list of it")


def _check_characters(place: str, row: Row) -> None:
    """Rejects half of a surrogate pair: JSON can write it, but no tokenizer can encode it."""
    for name, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(
                f"{place}: {name} has {half!a}, half of a character's surrogate pair; write the whole character"
            ) from error


SUFFIXES = (".parquet", ".jsonl", ".json")
