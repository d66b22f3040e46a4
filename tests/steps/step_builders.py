"""Ragged multi-turn batches, given as masks by row, and how to compare per-token results with plain loops."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_fn.state import Batch

MODEST = settings(max_examples=15, deadline=None, derandomize=True)
MULTI_TURN = [[0, 0, 1, 1, 0, 0, 1], [1], [0, 0, 0], [0, 1, 0, 1, 1, 0], [1, 1]]
SEEDS = st.integers(0, 2**16)


def ragged(function):
    """Run with the masks above and with drawn ones: holes, rows of one token, rows with nothing to learn from."""
    masks = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5)
    return MODEST(example(masks=MULTI_TURN, seed=0)(given(masks=masks, seed=SEEDS)(function)))


def pack(masks, seed: int, *names: str, dtype=np.float64, **per_row) -> tuple[Batch, dict[str, list[np.ndarray]]]:
    """A batch with normal random float64 fields of these names, and the same fields as arrays by row."""
    rng = np.random.default_rng(seed)
    fields = {name: [rng.normal(size=len(mask)).astype(dtype) for mask in masks] for name in names}
    tokens = [list(range(len(mask))) for mask in masks]
    return Batch.from_rows(tokens, {"response_mask": [np.float32(m) for m in masks]} | fields, per_row), fields


def rows_of(batch: Batch, name: str) -> list[np.ndarray]:
    return [row.detach().numpy() for row in batch.rows(name)]


def assert_rows(batch: Batch, name: str, expected, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    for got, want in zip(rows_of(batch, name), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def scatter(masks, values) -> list[np.ndarray]:
    """Put each row's values, one an unmasked token, on their tokens; 0 elsewhere."""
    rows = []
    for mask, some in zip(masks, values, strict=True):
        row = np.zeros(len(mask))
        row[np.array(mask, dtype=bool)] = some
        rows.append(row)
    return rows


def chosen(masks, rows) -> list[np.ndarray]:
    """Each row's values on unmasked tokens."""
    return [np.asarray(row)[np.array(mask, dtype=bool)] for mask, row in zip(masks, rows, strict=True)]


def flat(masks, rows) -> np.ndarray:
    return np.concatenate(chosen(masks, rows))
