"""Values that several tests of the state package start from."""

import torch
from hypothesis import settings

from verl_fn.state import Batch, Buffers, Grads, Key, Params, Slots, TrainState, Weighted

MODEST = settings(max_examples=20, deadline=None, derandomize=True)


def train_state(step: int = 7) -> TrainState:
    """Two parameters, one of them frozen, a nested optimizer tree and a buffer, without other references."""
    return TrainState(
        params=Params(
            {"embed.weight": torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), "head.weight": torch.full((2,), 0.5)},
            trainable=frozenset({"head.weight"}),
            buffers=Buffers({"router.bias": torch.tensor([1.0, -1.0])}),
        ),
        optimizer={
            "count": 4,
            "averages": (Slots({"head.weight": torch.ones(2)}), [torch.zeros(2)]),
            "seen": Weighted(torch.tensor([3.0]), 2.0),
        },
        scheduler=5,
        rng=Key.from_seed(11),
        step=step,
    )


def grads() -> Grads:
    return Grads({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])})


def batch_of(lengths: list[int]) -> Batch:
    """Rows of these lengths whose tokens are all different, with one field of each kind."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    rows = [list(range(start, start + n)) for start, n in zip(starts, lengths, strict=True)]
    return Batch.from_rows(
        rows,
        per_token={"weight": [[0.5 * token for token in row] for row in rows]},
        per_row={"score": [10.0 * i for i in range(len(rows))]},
    )
