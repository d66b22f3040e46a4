"""Fields of a batch with any number of entries per row, such as images or the outputs of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .node import Node, node


@node
class Ragged(Node):
    """The entries of all rows, concatenated; a row may have none.

    Attributes:
        values: the entries, ``[N, ...]``.
        offsets: the index of each row's first entry, followed by N, ``[B + 1]``.

    Example:
        >>> images = Ragged.of([torch.zeros(2, 3, 8, 8), [], torch.ones(1, 3, 8, 8)])
        >>> images.counts.tolist(), images.values.shape
        ([2, 0, 1], torch.Size([3, 3, 8, 8]))
    """

    values: Tensor
    offsets: Int[Tensor, " B1"]

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Ragged:
        """Makes a field of the entries of each row: a tensor, an array, or a list of tensors or numbers.

        Raises:
            ValueError: there are no rows, or the entries of two rows have different shapes or dtypes.
        """
        parts = [_entries(row) for row in rows]
        if not parts:
            raise ValueError("a ragged field needs at least one row")
        like = next((part for part in parts if len(part)), parts[0])
        for number, part in enumerate(parts):
            if len(part) and (part.shape[1:] != like.shape[1:] or part.dtype != like.dtype):
                raise ValueError(
                    f"row {number} has entries of shape {list(part.shape[1:])} and {part.dtype}, another row entries "
                    f"of shape {list(like.shape[1:])} and {like.dtype}; all entries of a field must be alike"
                )
        counts = torch.tensor([len(part) for part in parts])
        # A row without entries need not know their shape.
        values = torch.cat([part if len(part) else like[:0] for part in parts])
        return cls(values, offsets_of(counts, torch.zeros(0, dtype=torch.int64)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Int[Tensor, " B"]:
        """The number of entries of each row."""
        return self.offsets.diff().long()

    def rows(self) -> list[Tensor]:
        """Returns the entries of each row, as views."""
        return list(self.values.split(self.counts.tolist()))

    def take(self, rows: Int[Tensor, " b"]) -> Ragged:
        """Returns the entries of the rows with these indices."""
        offsets, entries = entries_of(self.offsets, rows)
        return Ragged(self.values[entries], offsets)


def _entries(row: Any) -> Tensor:
    if isinstance(row, Tensor):
        return row
    of_tensors = isinstance(row, (list, tuple)) and len(row) > 0 and all(isinstance(x, Tensor) for x in row)
    return torch.stack(list(row)) if of_tensors else torch.tensor(row)


def joined_fields(parts: Sequence[Ragged]) -> Ragged:
    """Returns the entries of the rows of all parts, in order."""
    counts = torch.cat([part.counts for part in parts])
    return Ragged(torch.cat([part.values for part in parts]), offsets_of(counts, parts[0].offsets))


def offsets_of(counts: Int[Tensor, " B"], like: Tensor) -> Int[Tensor, " B1"]:
    """Returns the index of each row's first entry, followed by the number of all entries, in the dtype of ``like``.

    Example:
        >>> offsets_of(torch.tensor([2, 0, 1]), torch.zeros(1, dtype=torch.int32)).tolist()
        [0, 2, 2, 3]
    """
    offsets = like.new_zeros(len(counts) + 1)
    offsets[1:] = counts.cumsum(0)
    return offsets


def entries_of(offsets: Int[Tensor, " B1"], rows: Int[Tensor, " b"]) -> tuple[Int[Tensor, " b1"], Int[Tensor, " n"]]:
    """Returns the offsets of the chosen rows among themselves, and the indices of their entries.

    Example:
        >>> [t.tolist() for t in entries_of(torch.tensor([0, 2, 2, 3]), torch.tensor([2, 0]))]
        [[0, 1, 3], [2, 0, 1]]
    """
    counts = offsets.diff().long()[rows]
    chosen = offsets_of(counts, offsets)
    start = torch.repeat_interleave(offsets[:-1].long()[rows] - chosen[:-1].long(), counts)
    return chosen, start + torch.arange(int(chosen[-1]), device=start.device)
