"""Batches as named tensors, which a safetensors file holds."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verl_fn.state import Batch, Ragged
from verl_fn.state.batch import CORE

TOKEN, ROW, VALUES, OFFSETS = "token.", "row.", "ragged_values.", "ragged_offsets."


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Returns the tensors of a batch by name, each with memory of its own.

    Example:
        >>> list(tensors_of(Batch.from_rows([[1]], per_row={"score": [0.5]})))
        ['tokens', 'positions', 'cu_seqlens', 'row.score']
    """
    tensors = {name: batch[name] for name in CORE}
    tensors |= {f"{TOKEN}{name}": t for name, t in batch.per_token.items()}
    tensors |= {f"{ROW}{name}": t for name, t in batch.per_row.items()}
    for name, field in batch.ragged.items():
        tensors |= {f"{VALUES}{name}": field.values, f"{OFFSETS}{name}": field.offsets}
    # A file takes no tensors that share memory, as fields of one batch may.
    return {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}


def batch_of(tensors: Mapping[str, Tensor]) -> Batch:
    """Returns the batch whose tensors ``tensors_of`` gave.

    Raises:
        KeyError: one is missing.

    Example:
        >>> batch_of(tensors_of(Batch.from_rows([[1, 2]], per_row={"score": [0.5]})))["score"].tolist()
        [0.5]
    """
    # Copies: what a file gave may lie where kernels round otherwise.
    tensors = {name: t.clone() for name, t in tensors.items()}

    def fields(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)}

    offsets = fields(OFFSETS)
    ragged = {name: Ragged(values, offsets[name]) for name, values in fields(VALUES).items()}
    tokens, positions, cu_seqlens = (tensors[name] for name in CORE)
    return Batch(tokens, positions, cu_seqlens, fields(TOKEN), fields(ROW), ragged)
