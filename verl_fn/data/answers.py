"""Judged answers as Parquet, one row an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_fn.atomic import replaced

_TYPES = {
    "model": pa.string(),
    "data_source": pa.string(),
    "problem": pa.int64(),
    "sample": pa.int64(),
    "prompt": pa.string(),
    "response": pa.string(),
    "answer": pa.string(),
    "score": pa.float64(),
    "acc": pa.float64(),
    "finished": pa.bool_(),
    "ended": pa.string(),
    "messages": pa.string(),
}


def write_answers(file: str | Path, answers: Sequence[Mapping[str, Any]]) -> Path:
    """Writes answers as rows of a Parquet file; a file of before is replaced as a whole.

    Args:
        file: the file; its folder exists.
        answers: the rows. Columns beside the usual ones are numbers; rows that lack one get null there. Messages are
            written as JSON.

    Returns:
        The file.

    Example:
        >>> import tempfile
        >>> answer = {"problem": 0, "sample": 1, "response": "5", "score": 1.0, "acc": None, "reward/length": 1.0}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pq.read_table(write_answers(f"{folder}/answers.parquet", [answer])).to_pylist() == [answer]
        True
    """
    file = Path(file)
    names = list(dict.fromkeys(name for answer in answers for name in answer))
    schema = pa.schema([(name, _TYPES.get(name, pa.float64())) for name in names])
    rows = [a | {"messages": json.dumps(a["messages"])} if a.get("messages") else a for a in map(dict, answers)]
    table = pa.Table.from_pylist(rows, schema)
    with replaced(file) as aside:
        pq.write_table(table, aside, compression="zstd", write_page_checksum=True)
    return file
