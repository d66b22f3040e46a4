"""Batches as named tensors, for a safetensors file."""

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
    # Cloned: memory-mapped tensors may be misaligned, and kernels round differently on them.
    tensors = {name: t.clone() for name, t in tensors.items()}

    def fields(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)}

    offsets = fields(OFFSETS)
    ragged = {name: Ragged(values, offsets[name]) for name, values in fields(VALUES).items()}
    tokens, positions, cu_seqlens = (tensors[name] for name in CORE)
    return Batch(tokens, positions, cu_seqlens, fields(TOKEN), fields(ROW), ragged)


def numbered(kind: str, number: int) -> str:
    """Returns the prefix of the tensors of one of several batches in a file; the first needs no number.

    Example:
        >>> numbered("", 0), numbered("", 1), numbered("scored", 1)
        ('', 'call_1/', 'scored/call_1/')
    """
    return "".join(f"{part}/" for part in (kind, f"call_{number}" * (number > 0)) if part)


def batches_in(tensors: Mapping[str, Tensor], kind: str) -> list[Batch]:
    """Returns the batches in a file whose tensors have the prefixes of ``numbered``, in order.

    Raises:
        KeyError: a tensor of one is missing.

    Example:
        >>> tensors = tensors_of(Batch.from_rows([[1]])) | {
        ...     numbered("", 1) + name: t for name, t in tensors_of(Batch.from_rows([[2], [3]])).items()
        ... }
        >>> [len(batch) for batch in batches_in(tensors, "")]
        [1, 2]
    """
    batches: list[Batch] = []
    while True:
        prefix = numbered(kind, len(batches))
        names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
        of_call = {name: tensors[prefix + name] for name in names if not name.startswith("call_")}
        if not of_call:
            return batches
        batches.append(batch_of(of_call))
