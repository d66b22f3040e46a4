"""What is published: a source of weights, which says what it holds and then gives it bucket by bucket."""

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

    >>> TensorSpec("w", (2, 3), torch.float32).nbytes
    24
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@attrs.frozen(eq=False)
class Chunk:
    """Consecutive rows of one tensor.

    Attributes:
        name: of the tensor.
        start: the first of these rows; a scalar has one row.
        values: the rows.
        checksum: of ``values``, where the receiver asked for it.
    """

    name: str
    start: int
    values: Tensor
    checksum: int | None = None


class WeightSource(Protocol):
    """Weights on their way to a rollout engine.

    The values behind it stay as they are until the last bucket was taken: in one process because values do not
    change, elsewhere because the process that sends takes no other call meanwhile.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What will come, in this order: every tensor once, tied ones under one name."""
        ...

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Returns all tensors, in buckets of at most ``max_bytes`` or of one row.

        The tensors of a bucket may be overwritten when the next one is asked for: copy what is to be kept.

        Args:
            checked: give every chunk its checksum.
        """
        ...
