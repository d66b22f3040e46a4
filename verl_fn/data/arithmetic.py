"""Made questions of arithmetic in verl's columns, easy enough for a small pretrained model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from verl_fn.data.prepare import write_splits
from verl_fn.data.tasks import ARITHMETIC
from verl_fn.state import Key

INSTRUCTION = "Answer with only the number."
SIZES = {"train": 2000, "test": 200}
LARGEST = 60  # of the terms of sums and differences
NAMES = ("Ana", "Ben", "Chen", "Dina", "Emil", "Fay")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")


def prepare_arithmetic(out: str | Path, seed: int = 0) -> dict[str, int]:
    """Writes ``train.parquet`` and ``test.parquet`` with questions that differ from each other, also across the two.

    A third of them are sums, a third differences, and a third stories of one sentence with a product.

    Args:
        out: the folder to write to.
        seed: other seeds give other questions.

    Returns:
        The number of rows in each split.

    Raises:
        DataError: ``out`` cannot be written.
    """
    questions, rows = _questions(seed), {}
    for split, count in SIZES.items():
        chosen = [next(questions) for _ in range(count)]
        rows[split] = pa.Table.from_pylist(
            [_row(question, answer, split, i) for i, (question, answer) in enumerate(chosen)]
        )
    return write_splits(out, rows)


def _questions(seed: int) -> Iterator[tuple[str, int]]:
    """Yields questions and answers, each question once."""
    draws, seen = Key.from_seed(seed).fold_in(ARITHMETIC).generator(), set()

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draws))

    for i in range(1_000_000):
        kind = i % 3
        if kind == 0:
            a, b = draw(1, LARGEST), draw(1, LARGEST)
            question, answer = f"What is {a} + {b}?", a + b
        elif kind == 1:
            a = draw(2, LARGEST)
            b = draw(1, a - 1)
            question, answer = f"What is {a} - {b}?", a - b
        else:
            a, bags, each = draw(1, 20), draw(2, 6), draw(2, 6)
            name, thing = NAMES[draw(0, len(NAMES) - 1)], THINGS[draw(0, len(THINGS) - 1)]
            question = (
                f"{name} has {a} {thing} and buys {bags} bags with {each} {thing} each. How many {thing} does {name} "
                "have now?"
            )
            answer = a + bags * each
        if question not in seen:
            seen.add(question)
            yield question, answer


def _row(question: str, answer: int, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": ARITHMETIC,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index, "answer": str(answer), "question": question},
    }
