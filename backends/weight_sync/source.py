"""A source of weights in this process: specifications, and a function that yields the tensors one after the other."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from verl_fn.backends.protocol import BUCKET_BYTES, Chunk, TensorSpec, WeightSource
from verl_fn.state import version_of

from .intake import Cut, checksum

# Versions and checksums of tensors that are alive; the weights that adapters are added to rarely change in a run.
_CHECKSUMS = WeakTensorKeyDictionary()
# bf16 has 8 bits of the 24 that fp32 has.
PARTS = 3


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Returns the specifications of named tensors; for a sharded one, of the whole tensor."""
    return tuple(TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items())


def in_parts(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns buffers as they are published: as three parts, whose sum has the bits of fp32 in any dtype of weights.

    Engines get tensors in the dtype of their weights. An expert's bias decides between experts that are close, so it
    is not rounded to bf16.

    Example:
        >>> import torch
        >>> parts = in_parts({"bias": torch.tensor([0.1, 1 / 3])})["bias"]
        >>> parts.shape, torch.equal(whole_of_parts(parts.bfloat16()), torch.tensor([0.1, 1 / 3]))
        (torch.Size([3, 2]), True)
    """

    def parts(b: Tensor) -> Tensor:
        rest, three = b.detach().float(), []
        for _ in range(PARTS):
            three.append(rest.bfloat16().float())
            rest = rest - three[-1]
        return torch.stack(three)

    return {name: parts(b) for name, b in buffers.items()}


def whole_of_parts(parts: Tensor) -> Tensor:
    """Returns the buffer that was published in these parts, in fp32."""
    first, second, third = parts.float()
    return first + (second + third)


@attrs.frozen(eq=False)
class Weights:
    """Weights in this process, a ``WeightSource``.

    Attributes:
        specs: the specifications of the whole tensors, in the order of ``read``.
        read: returns all tensors by name, one after the other; a sharded one is gathered when it is read.
        cut: the rows that ``read`` returns; None where it returns whole tensors.
        held: the rows that this rank holds, to send without gathering; None if one rank sends all.
        apart: the same model with its adapters not merged; None for a model without adapters.
        frozen: the names of tensors that are a state's own and that no update writes: an engine of this process can
            compute with them without a copy.

    Example:
        >>> import torch
        >>> source = Weights.of({"a": torch.ones(4, 2), "b": torch.zeros(())})
        >>> [[(c.name, c.start, len(c.values)) for c in bucket] for bucket in source.buckets(max_bytes=24)]
        [[('a', 0, 3)], [('a', 3, 1), ('b', 0, 1)]]

        The second of two senders has the last two rows of ``a``. Its first bucket is empty, since both senders end
        their buckets at the same rows.

        >>> edges = {"a": (0, 2, 4), "b": (0, 1, 1)}
        >>> tensors = {"a": torch.ones(2, 2), "b": torch.zeros(0)}
        >>> second = Weights(source.specs, tensors.items, Cut(1, edges))
        >>> [[(c.name, c.start, len(c.values)) for c in bucket] for bucket in second.buckets(max_bytes=24)]
        [[], [('a', 2, 1)], [('a', 3, 1)]]
    """

    specs: tuple[TensorSpec, ...]
    read: Callable[[], Iterable[tuple[str, Tensor]]]
    cut: Cut | None = None
    held: Weights | None = None
    apart: Apart | None = None
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Weights:
        """Returns a source of whole tensors."""
        return cls(specs_of(tensors), tensors.items)

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Yields all tensors, in buckets of at most ``max_bytes`` or of one row; see ``WeightSource``.

        Where several senders have the rows, each may fill an equal part of these bytes. All end their buckets at the
        same rows, so that none waits for another one that is further on. So a sender's bucket may be empty.
        """
        number, of = (0, 1) if self.cut is None else (self.cut.number, self.cut.of)
        size = max_bytes // of
        bucket: list[Chunk] = []
        room = [size] * of
        for name, tensor in self.read():
            rows = _rows(tensor)
            each = max(1, math.prod(rows.shape[1:]) * rows.element_size())
            edges = (0, len(rows)) if self.cut is None else self.cut.edges[name]
            parts = [(last - first) * each for first, last in itertools.pairwise(edges)]
            fits = all(part <= size for part in parts)
            if fits and any(part > free for part, free in zip(parts, room, strict=False)):
                # Rather than cut a tensor, for which an engine may need memory of its own.
                yield tuple(bucket)
                bucket, room = [], [size] * of
            for sender, (first, last) in enumerate(itertools.pairwise(edges)):
                start = first
                while start < last:
                    if room[sender] < each and room[sender] < size:
                        yield tuple(bucket)
                        bucket, room = [], [size] * of
                    end = min(last, start + max(1, room[sender] // each))
                    if sender == number:
                        part = rows[start - first : end - first]
                        bucket.append(Chunk(name, start, part, checksum(part) if checked else None))
                    room[sender] -= (end - start) * each
                    start = end
        if min(room) < size:
            yield tuple(bucket)


def apart(
    base: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    *,
    rows: Callable[[Tensor], Tensor] = lambda t: t,
    cut: Callable[[tuple[TensorSpec, ...]], Cut | None] = lambda specs: None,
    local: Callable[[Tensor], Tensor] = lambda t: t,
) -> Apart | None:
    """Returns the sources of a model and its adapters; None for a model without adapters.

    Args:
        base: the model's tensors without adapters.
        adapters: the tensors of the adapters.
        rows: returns the rows of a tensor to send.
        cut: returns which rows these are, of several senders.
        local: returns what this process holds of a tensor, to identify it.

    Example:
        >>> import torch
        >>> base = {"m.weight": torch.ones(2, 2)}
        >>> first, second = (apart(base, {"m.lora_A.weight": torch.full((1, 2), x)}) for x in (1.0, 2.0))
        >>> [spec.name for spec in first.whole.specs], [spec.name for spec in first.adapters.specs]
        (['m.weight', 'm.lora_A.weight'], ['m.lora_A.weight'])
        >>> first.identify() == second.identify()
        True
    """
    if not adapters:
        return None

    def source(tensors: Mapping[str, Tensor]) -> Weights:
        specs = specs_of(tensors)
        return Weights(specs, lambda: ((name, rows(t)) for name, t in tensors.items()), cut(specs))

    def identify() -> str:
        held = [(name, t.dtype, tuple(t.shape), _checksum(t, local(t))) for name, t in base.items()]
        return hashlib.sha256(repr(held).encode()).hexdigest()

    return Apart(source({**base, **adapters}), source(adapters), identify)


def _checksum(t: Tensor, part: Tensor) -> int:
    """Returns the checksum of the part of a tensor that this process holds."""
    # Writes to a sharded tensor and writes to its shard are counted each by itself.
    now = version_of(t), version_of(part)
    version, value = _CHECKSUMS.get(t, (None, 0))
    if version != now:
        value = checksum(part)
        _CHECKSUMS[t] = now, value
    return int(value)


def in_dtype(specs: Iterable[TensorSpec], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Returns specifications of the same tensors in another dtype.

    Example:
        >>> in_dtype([TensorSpec("w", (2,), torch.float32)], torch.bfloat16)[0].nbytes
        4
    """
    return tuple(attrs.evolve(spec, dtype=dtype) for spec in specs)


def _rows(tensor: Tensor) -> Tensor:
    """Returns a tensor as rows; a scalar is one row."""
    return tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()


@attrs.frozen(eq=False)
class Apart:
    """A model and its adapters, not merged.

    Attributes:
        whole: the model without adapters, followed by the adapters.
        adapters: only the adapters, for an engine that has the model.
        identify: returns a string that differs where the model without adapters differs.
    """

    whole: WeightSource
    adapters: WeightSource
    identify: Callable[[], str]


def apart_of(source: WeightSource) -> Apart | None:
    """Returns the unmerged form of a source; None where it has no adapters."""
    unmerged: Apart | None = getattr(source, "apart", None)
    return unmerged
