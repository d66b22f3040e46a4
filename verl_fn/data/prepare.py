"""Parquet files that are written: public, made and drawn questions for ``data.train_files``, and judged answers."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import UInt8
from PIL import Image

from verl_fn.atomic import replaced
from verl_fn.data.converters import gsm8k, math_row
from verl_fn.data.rows import DataError, read_rows
from verl_fn.data.tasks import ARITHMETIC, SQUARES
from verl_fn.errors import raised_as
from verl_fn.state import Key

SPLITS = ("train", "test")
INSTRUCTION = "Answer with only the number."
SIZES = {"train": 2000, "test": 200}
LARGEST = 60  # of the terms of sums and differences
NAMES = ("Ana", "Ben", "Chen", "Dina", "Emil", "Fay")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")
_TEXTS = ("model", "data_source", "row", "prompt", "input", "response", "answer", "ended", "messages")
_TYPES = {
    **dict.fromkeys(_TEXTS, pa.string()),
    **dict.fromkeys(("problem", "sample"), pa.int64()),
    "finished": pa.bool_(),
}
Picture: TypeAlias = UInt8[np.ndarray, "side side 3"]

DRAWN = {"train": 4000, "test": 200}  # fewer rows are learned by heart
SIDE, CELL = 32, 8  # of the picture and of the cells that squares lie in, in pixels
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "yellow": (230, 210, 40)}
MOST = 5  # squares in a picture
# Digits of 3 x 5 points, by their rows.
DIGITS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717")
ALPHABET = "".join(sorted(set("How many squares?Which colour?Which digit?0123456789" + "".join(COLOURS))))
"""The characters of questions and answers, for a tiny model."""


def prepare_gsm8k(source: str | Path, out: str | Path) -> dict[str, int]:
    """Writes ``train.parquet`` and ``test.parquet`` of GSM8K into ``out``, with the same rows as verl's own script.

    Args:
        source: a folder that holds, at any depth, ``train.jsonl`` and ``test.jsonl`` of OpenAI's repository or the
            parquet files of the Hugging Face data set. Its socratic variant is ignored.

    Returns:
        The number of rows in each split.

    Raises:
        DataError: files are missing or lie in several folders, a row has no final answer, or ``out`` cannot be
            written.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    if not source.is_dir():
        raise DataError(f"{source} is not a folder; give the one with GSM8K's raw files")
    return write_splits(out, {split: _gsm8k_rows(source, out, split) for split in SPLITS})


def write_splits(out: str | Path, splits: Mapping[str, list[dict[str, Any]]]) -> dict[str, int]:
    """Writes the rows of each split as ``SPLIT.parquet``; files from before are replaced once all are written.

    Returns:
        The number of rows in each split.

    Raises:
        DataError: ``out`` cannot be written.
    """
    out = Path(out).expanduser()
    with raised_as(DataError, f"{out} cannot be written", OSError), contextlib.ExitStack() as stack:
        out.mkdir(parents=True, exist_ok=True)
        for split, rows in splits.items():
            aside = stack.enter_context(replaced(out / f"{split}.parquet"))
            pq.write_table(pa.Table.from_pylist(rows), aside, write_page_checksum=True)
    return {split: len(rows) for split, rows in splits.items()}


def _gsm8k_rows(source: Path, out: Path, split: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in _gsm8k_files(source, out, split):
        for place, raw in read_rows(file, ("question", "answer")):
            with raised_as(DataError, place, ValueError):
                row = gsm8k(raw)
            assert row is not None  # read_rows has checked that both columns are there
            rows.append(row | {"extra_info": {"split": split, "index": len(rows)} | row["extra_info"]})
    return rows


def _gsm8k_files(source: Path, out: Path, split: str) -> list[Path]:
    target = out / f"{split}.parquet"
    for pattern in (f"{split}.jsonl", f"*{split}*.parquet"):
        candidates = [file for file in source.rglob(pattern) if file.resolve() != target.resolve()]
        files = sorted(file for file in candidates if "socratic" not in str(file.relative_to(source)))
        folders = sorted({str(file.parent) for file in files})
        if len(folders) > 1:
            raise DataError(f"{source} has GSM8K's {split} files more than once; give one of {', '.join(folders)}")
        if files:
            return files
    raise DataError(f"{source} has no {split}.jsonl and no *{split}*.parquet at any depth (other than {target})")


def prepare_arithmetic(out: str | Path, seed: int = 0) -> dict[str, int]:
    """Writes ``train.parquet`` and ``test.parquet`` with questions that differ from each other, also across the two.

    A third of them are sums, a third differences, and a third stories of one sentence with a product.
    ``worked.parquet`` has the training questions with their computation as an answer, for ``sft``.

    Args:
        seed: other seeds give other questions.

    Returns:
        The number of rows in each split.

    Raises:
        DataError: ``out`` cannot be written.
    """
    questions, rows = _questions(seed), {}
    for split, count in SIZES.items():
        chosen = [next(questions) for _ in range(count)]
        rows[split] = [
            _row(ARITHMETIC, f"{question} {INSTRUCTION}", question, str(answer), split, i)
            for i, (question, _, answer) in enumerate(chosen)
        ]
        if split == "train":
            rows["worked"] = [_worked_row(question, worked) for question, worked, _ in chosen]
    return write_splits(out, rows)


def _questions(seed: int) -> Iterator[tuple[str, str, int]]:
    """Yields questions, computations and answers, each question once."""
    draws, seen = Key.from_seed(seed).fold_in(ARITHMETIC).generator(), set()

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draws))

    for i in range(1_000_000):
        kind = i % 3
        if kind == 0:
            a, b = draw(1, LARGEST), draw(1, LARGEST)
            question, answer = f"What is {a} + {b}?", a + b
            worked = f"{a} + {b} = {answer}"
        elif kind == 1:
            a = draw(2, LARGEST)
            b = draw(1, a - 1)
            question, answer = f"What is {a} - {b}?", a - b
            worked = f"{a} - {b} = {answer}"
        else:
            a, bags, each = draw(1, 20), draw(2, 6), draw(2, 6)
            name, thing = NAMES[draw(0, len(NAMES) - 1)], THINGS[draw(0, len(THINGS) - 1)]
            question = (
                f"{name} has {a} {thing} and buys {bags} bags with {each} {thing} each. How many {thing} does {name} "
                "have now?"
            )
            answer = a + bags * each
            worked = f"{bags} * {each} = {bags * each}, {a} + {bags * each} = {answer}"
        if question not in seen:
            seen.add(question)
            yield question, worked, answer


def _worked_row(question: str, worked: str) -> dict[str, Any]:
    asked = {"role": "user", "content": f"{question} {INSTRUCTION}"}
    return {"data_source": ARITHMETIC, "messages": [asked, {"role": "assistant", "content": worked}]}


def _row(source: str, prompt: str, question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    extra = {"split": split, "index": index, "answer": answer, "question": question}
    return math_row(source, prompt, answer, extra)


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
    rows = [
        a | {"messages": json.dumps(a["messages"])} if a.get("messages") is not None else a
        for a in map(dict, answers)
    ]
    table = pa.Table.from_pylist(rows, schema)
    with replaced(file) as aside:
        pq.write_table(table, aside, compression="zstd", write_page_checksum=True)
    return file


def prepare_squares(out: str | Path, seed: int = 0, rows: Mapping[str, int] = DRAWN) -> dict[str, int]:
    """Writes ``train.parquet`` and ``test.parquet`` with questions about pictures that differ from each other.

    A third ask how many squares there are, a third of which colour they are, and a third which digit is drawn.

    Args:
        seed: other seeds give other pictures.
        rows: how many each split has.

    Returns:
        The number of rows in each split.

    Raises:
        DataError: ``out`` cannot be written.
    """
    drawn, splits = _questions_about_squares(seed), {}
    for split, count in rows.items():
        splits[split] = [
            {"data_source": SQUARES, "prompt": (), "images": [{"bytes": content, "path": None}]}  # in this order
            | _row(SQUARES, f"<image>{question}", question, answer, split, i)
            | {"ability": "vision"}
            for i, (question, answer, content) in enumerate(itertools.islice(drawn, count))
        ]
    return write_splits(out, splits)


def _questions_about_squares(seed: int) -> Iterator[tuple[str, str, bytes]]:
    """Yields questions, answers and pictures, each picture once."""
    seen: set[bytes] = set()
    key = Key.from_seed(seed).fold_in(SQUARES)
    for i in range(1_000_000):
        dice = np.random.default_rng(key.fold_in(i).seed())
        colour = str(dice.choice(list(COLOURS)))
        if i % 3 < 2:
            count = int(dice.integers(1, MOST + 1))
            question, answer = ("How many squares?", str(count)) if i % 3 == 0 else ("Which colour?", colour)
            picture = squares(count, colour, dice)
        else:
            digit = int(dice.integers(10))
            question, answer, picture = "Which digit?", str(digit), drawn_digit(digit, colour, dice)
        if (content := png(picture)) not in seen:
            seen.add(content)
            yield question, answer, content


def squares(count: int, colour: str, dice: np.random.Generator) -> Picture:
    """Returns a picture of so many squares of a colour, each in a cell of its own, on a noisy ground.

    Example:
        >>> squares(3, "red", np.random.default_rng(0)).shape
        (32, 32, 3)
    """
    picture = _ground(dice)
    cells = SIDE // CELL
    for cell in dice.choice(cells * cells, count, replace=False).tolist():
        size = int(dice.integers(4, CELL - 1))
        top, left = (CELL * place + int(dice.integers(0, CELL - size + 1)) for place in divmod(cell, cells))
        picture[top : top + size, left : left + size] = COLOURS[colour]
    return picture


def drawn_digit(digit: int, colour: str, dice: np.random.Generator) -> Picture:
    """Returns a picture of a digit in a colour, somewhere on a noisy ground, in whole points."""
    picture, scale = _ground(dice), 6
    points = np.array([[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in DIGITS[digit]], bool)
    shape = np.kron(points, np.ones((scale, scale), bool))
    top, left = (scale * int(dice.integers(0, (SIDE - length) // scale + 1)) for length in shape.shape)
    picture[top : top + shape.shape[0], left : left + shape.shape[1]][shape] = COLOURS[colour]
    return picture


def _ground(dice: np.random.Generator) -> Picture:
    return dice.integers(0, 40, (SIDE, SIDE, 3), dtype=np.uint8)


def png(picture: Picture) -> bytes:
    """Returns a picture as a PNG file."""
    written = io.BytesIO()
    Image.fromarray(picture).save(written, "PNG")
    return written.getvalue()
