"""Questions about drawn pictures that need eyes: how many squares there are, of which colour, and which digit."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from jaxtyping import UInt8
from PIL import Image

from verl_fn.data.prepare import write_splits
from verl_fn.data.tasks import SQUARES
from verl_fn.state import Key

Picture: TypeAlias = UInt8[np.ndarray, "side side 3"]

SIZES = {"train": 4000, "test": 200}  # fewer rows are learned by heart
SIDE, CELL = 32, 8  # of the picture and of the cells that squares lie in, in pixels
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "yellow": (230, 210, 40)}
MOST = 5  # squares in a picture
# Digits of 3 x 5 points, by their rows.
DIGITS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717")
ALPHABET = "".join(sorted(set("How many squares?Which colour?Which digit?0123456789" + "".join(COLOURS))))
"""The characters of questions and answers, for a tiny model."""


def prepare_squares(out: str | Path, seed: int = 0) -> dict[str, int]:
    """Writes ``train.parquet`` and ``test.parquet`` with questions about pictures that differ from each other.

    A third ask how many squares there are, a third of which colour they are, and a third which digit is drawn.

    Args:
        out: the folder to write to.
        seed: other seeds give other pictures.

    Returns:
        The number of rows in each split.

    Raises:
        DataError: ``out`` cannot be written.
    """
    drawn, tables = _questions(seed), {}
    for split, count in SIZES.items():
        rows = [_row(*next(drawn), split, i) for i in range(count)]
        tables[split] = pa.Table.from_pylist(rows)
    return write_splits(out, tables)


def _questions(seed: int) -> Iterator[tuple[str, str, bytes]]:
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


def _row(question: str, answer: str, content: bytes, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": SQUARES,
        "prompt": [{"role": "user", "content": f"<image>{question}"}],
        "images": [{"bytes": content, "path": None}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }
