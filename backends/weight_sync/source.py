"""A source of weights in this process: specifications, and a function that yields the tensors one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs
import torch
from torch import Tensor

from verl_fn.backends.protocol.weights import BUCKET_BYTES, Chunk, TensorSpec, WeightSource

from .intake import checksum


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Returns the specifications of named tensors; those of sharded ones describe the whole tensor."""
    return tuple(TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items())


@attrs.frozen(eq=False)
class Weights:
    """Weights in this process, a ``WeightSource``.

    Attributes:
        specs: the specifications of the tensors, in the order of ``read``.
        read: returns all tensors by name, one after the other; a sharded one is gathered when it is read.

    Example:
        >>> import torch
        >>> source = Weights.of({"a": torch.ones(4, 2), "b": torch.zeros(())})
        >>> [[(c.name, c.start, len(c.values)) for c in bucket] for bucket in source.buckets(max_bytes=24)]
        [[('a', 0, 3)], [('a', 3, 1), ('b', 0, 1)]]
    """

    specs: tuple[TensorSpec, ...]
    read: Callable[[], Iterable[tuple[str, Tensor]]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Weights:
        """Returns a source of whole tensors."""
        return cls(specs_of(tensors), tensors.items)

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Yields all tensors, in buckets of at most ``max_bytes`` or of one row; see ``WeightSource``."""
        bucket: list[Chunk] = []
        room = max_bytes
        for name, tensor in self.read():
            rows = _rows(tensor)
            start, each = 0, max(1, rows[:1].nbytes)
            while start < len(rows):
                if room < each and bucket:
                    yield tuple(bucket)
                    bucket, room = [], max_bytes
                end = min(len(rows), start + max(1, room // each))
                part = rows[start:end]
                bucket.append(Chunk(name, start, part, checksum(part) if checked else None))
                room -= part.nbytes
                start = end
        if bucket:
            yield tuple(bucket)


def in_dtype(specs: Iterable[TensorSpec], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Returns specifications of the same tensors in another dtype.

    Example:
        >>> in_dtype([TensorSpec("w", (2,), torch.float32)], torch.bfloat16)[0].nbytes
        4
    """
    return tuple(attrs.evolve(spec, dtype=dtype) for spec in specs)


@attrs.frozen(eq=False)
class InDtype:
    """A source whose tensors are converted as they are read, a ``WeightSource``.

    Attributes:
        inner: the source.
        dtype: the dtype of all tensors.
    """

    inner: WeightSource
    dtype: torch.dtype

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The specifications of the converted tensors."""
        return in_dtype(self.inner.specs, self.dtype)

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Yields all tensors, in buckets of at most ``max_bytes`` or of one row; see ``WeightSource``."""
        # A chunk may be larger once it is converted.
        growth = max((self.dtype.itemsize / spec.dtype.itemsize for spec in self.inner.specs), default=1.0)
        for bucket in self.inner.buckets(int(max_bytes / max(1.0, growth))):
            chunks = [(chunk, chunk.values.to(self.dtype)) for chunk in bucket]
            yield tuple(Chunk(c.name, c.start, t, checksum(t) if checked else None) for c, t in chunks)


def _rows(tensor: Tensor) -> Tensor:
    """Returns a tensor as rows; a scalar is one row."""
    return tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
