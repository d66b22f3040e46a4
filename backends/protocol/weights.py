"""The protocol of weights to publish: a source that lists its tensors and then yields them bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import attrs
import torch
from torch import Tensor

BUCKET_BYTES = 256 * 2**20


@attrs.frozen
class TensorSpec:
    """The name, shape and dtype of a tensor to publish.

    Example:
        >>> TensorSpec("w", (2, 3), torch.float32).nbytes
        24
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """The number of rows; a scalar has one."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@attrs.frozen(eq=False)
class Chunk:
    """Consecutive rows of one tensor.

    Attributes:
        name: the tensor's name.
        start: the number of the first of these rows; a scalar has one row.
        values: the rows.
        checksum: a hash of ``values``, in the receiver's dtype, where the receiver asked for it.
    """

    name: str
    start: int
    values: Tensor
    checksum: int | None = None


class WeightSource(Protocol):
    """Weights to send to a rollout engine.

    They do not change before the last bucket was taken: values in this process never change, and a process that
    sends weights to another runs no other call meanwhile.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors in the order in which they are sent: each once, tied ones under one name."""
        ...

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Yields all tensors, in buckets of at most ``max_bytes`` or of one row.

        A tensor is cut only if a sender's rows of it exceed the sender's part of a bucket. The tensors of a bucket
        may be overwritten by the next one, so copy what you keep.

        Args:
            max_bytes: the most bytes of a bucket.
            checked: give every chunk its checksum.
        """
        ...
