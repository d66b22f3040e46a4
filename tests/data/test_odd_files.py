"""Odd and damaged files: each is refused with one line, or gives the ground truths that were written."""

import datetime
import json
import random
import struct
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_fn.data.loading import read_files
from verl_fn.data.rows import DataError

REFUSED = None


def read(file):
    """The ground truths of a file, or None if it is refused with one line that names it."""
    try:
        return [problem.answer for problem in read_files([file], "samples")]
    except DataError as error:
        assert file.name in str(error) and "\n" not in str(error) and len(str(error)) < 1000, error
        return REFUSED


def table(values, kind, **columns):
    truths = pa.array([{"ground_truth": value} for value in values], pa.struct({"ground_truth": kind}))
    rest = {"data_source": ["s"] * len(values), "prompt": ["p"] * len(values)}
    return pa.table(rest | {"reward_model": truths} | columns)


DAY = datetime.date(2024, 2, 29)
COLUMNS = {
    "string": ([pa.string(), pa.large_string(), pa.string_view()], ["072", " 7", "7.0", "é", ""], "same"),
    "category": ([pa.dictionary(pa.int32(), pa.string())], ["a", "b", "a"], "same"),
    "small": ([pa.int8(), pa.uint8(), pa.int16()], [72, 0, 127], ["72", "0", "127"]),
    "whole": (
        [pa.int64(), pa.decimal128(20, 0)],
        [72, -1, 0, 700, -10, 2**62],
        ["72", "-1", "0", "700", "-10", str(2**62)],
    ),
    "unsigned": ([pa.uint64()], [2**64 - 1], [str(2**64 - 1)]),
    "double": ([pa.float64()], [700.0, -0.5, 0.1, 1e22, 0.0], ["700", "-0.5", "0.1", "1e+22", "0"]),
    "single": ([pa.float32()], [72.0, 0.1, 3.14159], ["72", "0.1", "3.14159"]),
    "half": ([pa.float16()], [72.0, 0.5], ["72", "0.5"]),
    "not finite": ([pa.float32(), pa.float64()], [1.0, float("nan")], REFUSED),
    "infinite": ([pa.float32(), pa.float64()], [1.0, -float("inf")], REFUSED),
    "decimal": (
        [pa.decimal128(38, 18), pa.decimal256(60, 18)],
        [Decimal("700.00"), Decimal("0.10"), Decimal(0), Decimal("12345678901234567890.000000000000000001")],
        ["700", "0.1", "0", "12345678901234567890.000000000000000001"],
    ),
    "boolean": ([pa.bool_()], [True, False], ["true", "false"]),
    "list": ([pa.list_(pa.float64()), pa.large_list(pa.float64())], [[3.0, 5.5], []], ["[3, 5.5]", "[]"]),
    "list of singles": ([pa.list_(pa.float32()), pa.list_(pa.float32(), 2)], [[0.1, 2.0]], ["[0.1, 2]"]),
    "list of decimals": ([pa.list_(pa.decimal128(9, 2))], [[Decimal("7.00"), Decimal("0.10")]], ["[7, 0.1]"]),
    "list of long decimals": ([pa.list_(pa.decimal128(38, 18))], [[Decimal("1.000000000000000001")]], REFUSED),
    "list of bytes": ([pa.list_(pa.binary())], [[b"72"]], REFUSED),
    "object": ([pa.struct({"a": pa.int64(), "b": pa.string()})], [{"a": 7, "b": "é"}], ['{"a": 7, "b": "é"}']),
    "map": ([pa.map_(pa.string(), pa.float32())], [[("a", 0.1)], []], ['{"a": 0.1}', "{}"]),
    "map with a key twice": ([pa.map_(pa.string(), pa.int64())], [[("a", 1), ("a", 2)]], REFUSED),
    "map of numbers": ([pa.map_(pa.int64(), pa.int64())], [[(1, 1)]], REFUSED),
    "bytes": ([pa.binary(), pa.large_binary(), pa.binary(2)], [b"72"], REFUSED),
    "date": ([pa.date32(), pa.date64()], [DAY], REFUSED),
    "time": ([pa.time32("s"), pa.time64("us")], [datetime.time(1, 2)], REFUSED),
    "instant": ([pa.timestamp("s"), pa.timestamp("us", "UTC")], [datetime.datetime(2024, 2, 29)], REFUSED),
    "far instant": ([pa.timestamp("s")], [2**50], REFUSED),
    "duration": ([pa.duration("s")], [datetime.timedelta(1)], REFUSED),
    "nothing": ([pa.null(), pa.string(), pa.int64()], [None], REFUSED),
    "missing": ([pa.string()], ["1", None], REFUSED),
}
TYPED = [(name, kind) for name, (kinds, *_) in COLUMNS.items() for kind in kinds]


@pytest.mark.parametrize(("name", "kind"), TYPED, ids=lambda part: str(part))
def test_columns_of_every_type(tmp_path, name, kind):
    _, values, expected = COLUMNS[name]
    pq.write_table(table(values, kind), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == (values if expected == "same" else expected)


LINES = [
    ("72", "72"), ("72.0", "72"), ("7.2e1", "72"), ("-0.0", "0"), ("0.10", "0.1"), ("1e22", "1e+22"),
    ("9007199254740993", "9007199254740993"), ("9007199254740993.0", REFUSED), ("1e400", REFUSED),
    ("1e99999999999999999999", REFUSED), ("0.1000000000000000000001", REFUSED), ("NaN", REFUSED),
    ("-Infinity", REFUSED), ("9" * 5000, REFUSED), ("null", REFUSED), ("true", "true"), ('"72.0"', "72.0"),
    ('"\\u00e9"', "é"), ('"\\ud83d\\ude00"', "😀"), ('"\\ud83d"', REFUSED), ('"\\uDE00"', REFUSED),
    ('"\\uD83D\\uDE00"', "😀"), ('"\x01"', REFUSED), ("072", REFUSED),
    ("+72", REFUSED), ("72,", REFUSED), ("'72'", REFUSED), ("", REFUSED), ("[1, 2.0, \"3\"]", '[1, 2, "3"]'),
    ("[0.1000000000000000000001]", REFUSED), ("[NaN]", REFUSED), ('{"a": 1, "a": 2}', REFUSED),
    ('{"a": {"b": 1, "b": 1}}', REFUSED), ('{"a": null}', '{"a": null}'), ("[" * 100_000, REFUSED),
    ("[" * 500 + "]" * 500, "[" * 500 + "]" * 500), ("{}", "{}"), ("[]", "[]"), ('""', ""), ("1 2", REFUSED),
    ('72, "ground_truth": "73"', REFUSED), ('72}, "reward_model": {"ground_truth": 73', REFUSED),
    ('72}, "prompt": "q", "x": {', REFUSED),
]  # fmt: skip


@pytest.mark.parametrize(("written", "expected"), LINES, ids=lambda part: str(part)[:30])
def test_lines_of_every_form(tmp_path, written, expected):
    line = f'{{"data_source": "s", "prompt": "p", "reward_model": {{"ground_truth": {written}}}}}'
    (tmp_path / "a.jsonl").write_text(line, encoding="utf-8")
    assert read(tmp_path / "a.jsonl") == (REFUSED if expected is REFUSED else [expected])


def test_columns_and_fields_that_are_there_twice(tmp_path):
    file, one = tmp_path / "a.parquet", table(["1"], pa.string())
    for name in ("data_source", "prompt", "reward_model"):
        pq.write_table(one.append_column(name, one[name]), file)
        assert read(file) is REFUSED
    truths = pa.StructArray.from_arrays([pa.array(["1"]), pa.array(["2"])], ["ground_truth", "ground_truth"])
    pq.write_table(one.set_column(2, "reward_model", truths), file)
    assert read(file) is REFUSED
    pq.write_table(one.append_column("other", one["prompt"]).append_column("other", one["prompt"]), file)
    assert read(file) == ["1"]


WHOLE = [str(i * 37 % 1000) for i in range(300)]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """A file whose pages have checksums, as ``prepare`` writes them."""
    file = tmp_path_factory.mktemp("whole") / "whole.parquet"
    pq.write_table(table(WHOLE, pa.string()), file, write_page_checksum=True)
    assert read(file) == WHOLE
    return file.read_bytes()


def damaged(content, rng):
    """Changes bytes, in the pages or in the footer, cuts, zeroes, doubles or swaps a part."""
    content, kind = bytearray(content), rng.choice(["bits", "cut", "zeros", "noise", "twice", "gone"])
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice([1, 8, 64, 512]))
    if kind == "bits":
        for _ in range(rng.choice([1, 3])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        content = content[:start]
    elif kind == "zeros":
        content[start:end] = bytes(end - start)
    elif kind == "noise":
        content[start:end] = rng.randbytes(end - start)
    elif kind == "twice":
        content[start:start] = content[start:end]
    else:
        del content[start:end]
    return bytes(content)


@pytest.mark.parametrize("seed", range(15))
def test_damaged_parquet_is_refused_or_whole(tmp_path, parquet, seed):
    rng = random.Random(seed)
    for i in range(10):
        file = tmp_path / f"{i}.parquet"
        file.write_bytes(damaged(parquet, rng))
        assert read(file) in (REFUSED, WHOLE), (seed, i)


@pytest.mark.parametrize("seed", range(5))
def test_damaged_lines_are_refused_or_whole(tmp_path, seed):
    rng = random.Random(seed)
    rows = ({"data_source": "s", "prompt": "p", "reward_model": {"ground_truth": int(truth)}} for truth in WHOLE)
    content = "\n".join(map(json.dumps, rows)).encode()
    for i in range(10):
        file, start = tmp_path / f"{i}.jsonl", rng.randrange(len(content))
        garbage = rng.choice([b"\x00", b"\xff", b"}", b"{", b'"', b"\n\n", b"\\", b"[", struct.pack("d", 0.1)])
        file.write_bytes(content[:start] + garbage + content[start:])
        assert read(file) in (REFUSED, WHOLE), (seed, i)
        file.write_bytes(content[:start])
        whole_lines = content[:start].count(b"\n") + content[:start].endswith(b"}}")
        assert read(file) in (REFUSED, WHOLE[:whole_lines]), (seed, i)
