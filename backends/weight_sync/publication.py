"""Publications of weights: the source of their tensors, and checks that each row arrives exactly once."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from verl_fn.backends.protocol import BUCKET_BYTES, Chunk, TensorSpec, WeightSource
from verl_fn.backends.tensor_file import checksum
from verl_fn.errors import UserError
from verl_fn.state import Params, version_of

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
        kept: the same weights with the frozen ones apart; None if nothing is frozen.
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
    kept: Apart | None = None
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
            rows = tensor.detach().reshape(tensor.shape or (1,))
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
        >>> [spec.name for spec in first.whole.specs], [spec.name for spec in first.changing.specs]
        (['m.weight', 'm.lora_A.weight'], ['m.lora_A.weight'])
        >>> first.identify() == second.identify()
        True
    """
    if not adapters:
        return None

    def source(tensors: Mapping[str, Tensor]) -> Weights:
        specs = specs_of(tensors)
        return Weights(specs, lambda: ((name, rows(t)) for name, t in tensors.items()), cut(specs))

    return Apart(source({**base, **adapters}), source(adapters), functools.partial(identity_of, base, local))


def keeping(
    source: Callable[[Params], Weights],
    params: Params,
    frozen: Collection[str],
    *,
    local: Callable[[Tensor], Tensor] = lambda t: t,
) -> Weights:
    """Returns a source of all weights, from which an engine that has the frozen ones can take the others only.

    Args:
        source: returns the source of some parameters.
        frozen: the names of the frozen ones; without any, engines take all weights each time.
        local: returns what this process holds of a tensor, to identify it.

    Example:
        >>> import torch
        >>> params = Params({"tower": torch.ones(2), "text": torch.zeros(2)})
        >>> kept = keeping(Weights.of, params, ["tower"])
        >>> [spec.name for spec in kept.specs], [spec.name for spec in kept.kept.changing.specs]
        (['tower', 'text'], ['text'])
    """
    whole, inside = source(params), {name: t for name, t in params.items() if name in frozen}
    if not inside:
        return whole
    others = attrs.evolve(params, leaves={name: t for name, t in params.items() if name not in inside})
    return attrs.evolve(whole, kept=Apart(whole, source(others), functools.partial(identity_of, inside, local)))


def identity_of(tensors: Mapping[str, Tensor], local: Callable[[Tensor], Tensor] = lambda t: t) -> str:
    """Returns a string that differs if the tensors differ in what this process holds of them."""
    held = [(name, t.dtype, tuple(t.shape), _checksum(t, local(t))) for name, t in tensors.items()]
    return hashlib.sha256(repr(held).encode()).hexdigest()


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


@attrs.frozen(eq=False)
class Apart:
    """Weights of which an engine keeps the frozen ones: a model and its adapters, or a model with a frozen tower.

    Attributes:
        whole: all weights.
        changing: only the ones that are not frozen, for an engine that has the others.
        identify: returns a string that differs if the frozen weights differ.
    """

    whole: WeightSource
    changing: WeightSource
    identify: Callable[[], str]


def form_of(source: WeightSource, name: str) -> Apart | None:
    """Returns a source with its frozen weights apart (``kept``) or its adapters (``apart``); None without any."""
    form: Apart | None = getattr(source, name, None)
    return form


class IncompleteWeights(UserError, RuntimeError):
    """A publication lacked rows, repeated rows, or gave other values than were sent."""


def check_specs(specs: Iterable[TensorSpec], wanted: Mapping[str, Sequence[int]], model: object) -> None:
    """Raises an error for weights that are not a model's, before any of them is read.

    Args:
        specs: the specifications of the weights.
        wanted: the model's shapes by name.
        model: names the model in errors.

    Raises:
        ValueError: a name is missing, unknown or given twice, or a shape differs.
    """
    seen: set[str] = set()
    for spec in specs:
        if spec.name not in wanted:
            raise ValueError(f"published tensor {spec.name!r} is no parameter of {model}")
        if spec.name in seen:
            raise ValueError(f"tensor {spec.name!r} is published twice")
        if tuple(spec.shape) != tuple(wanted[spec.name]):
            raise ValueError(
                f"published tensor {spec.name!r} has shape {tuple(spec.shape)}; "
                f"the model's has {tuple(wanted[spec.name])}"
            )
        seen.add(spec.name)
    if missing := [name for name in wanted if name not in seen]:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ValueError(f"these parameters were not published: {shown}")


def receive(
    source: WeightSource, write: Callable[[Chunk], None], *, max_bytes: int = BUCKET_BYTES, checked: bool = False
) -> None:
    """Passes every chunk of a source to ``write``, and checks that every row of every tensor arrives exactly once.

    Args:
        write: copies a chunk.
        max_bytes: the most bytes of a bucket.
        checked: compare checksums too, for which both sides read all weights once more.

    Raises:
        IncompleteWeights: rows are missing, arrive twice or out of order, or a checksum differs.

    Example:
        >>> from verl_fn.backends.weight_sync import Weights
        >>> place = torch.zeros(3)
        >>> def write(chunk):
        ...     place[chunk.start : chunk.start + len(chunk.values)] = chunk.values
        >>> receive(Weights.of({"a": torch.ones(3)}), write, checked=True)
        >>> place
        tensor([1., 1., 1.])
    """
    for bucket in arriving(source, max_bytes=max_bytes, checked=checked):
        for chunk in bucket:
            write(chunk)


def arriving(
    source: WeightSource, *, max_bytes: int = BUCKET_BYTES, checked: bool = False
) -> Iterator[tuple[Chunk, ...]]:
    """Yields the buckets of a source, checked as ``receive`` does; only its end shows that nothing is missing.

    Raises:
        IncompleteWeights: as ``receive``.
    """
    specs = {spec.name: spec for spec in source.specs}
    done = dict.fromkeys(specs, 0)
    for bucket in source.buckets(max_bytes, checked=checked):
        for chunk in bucket:
            spec, rows = specs.get(chunk.name), chunk.values.shape[0]
            if spec is None:
                raise IncompleteWeights(f"{chunk.name!r} arrived, but it was not announced")
            _check_chunk(chunk, spec, done[chunk.name], rows)
            if checked and checksum(chunk.values) != chunk.checksum:
                raise IncompleteWeights(
                    f"rows {chunk.start} to {chunk.start + rows} of {chunk.name!r} differ from what was sent"
                )
            done[chunk.name] += rows
        yield bucket
    if short := [spec for spec in specs.values() if done[spec.name] < spec.rows]:
        first, others = short[0], len(short) - 1
        raise IncompleteWeights(
            f"the publication ended early: {first.name!r} has {done[first.name]} of {first.rows} rows"
            + (f", and {others} more tensors are not whole" if others else "")
        )


def _check_chunk(chunk: Chunk, spec: TensorSpec, done: int, rows: int) -> None:
    """Raises an error for a chunk that is not the next of its tensor.

    Args:
        spec: announces its tensor.
        done: how many rows of the tensor have arrived.
        rows: how many rows the chunk has.
    """
    name, end, values = chunk.name, chunk.start + rows, chunk.values
    if chunk.start != done or end > spec.rows:
        raise IncompleteWeights(
            f"rows {chunk.start} to {end} of {name!r} arrived after {done} of its {spec.rows} rows: a bucket was "
            "lost or sent twice"
        )
    if values.shape[1:] != spec.shape[1:] or values.dtype != spec.dtype:
        raise IncompleteWeights(
            f"{name!r} was announced as {spec.dtype} rows of shape {spec.shape[1:]}, and arrived as "
            f"{values.dtype} of {tuple(values.shape[1:])}"
        )


@attrs.frozen
class Cut:
    """The rows that one sender sends, where several send a publication together.

    Attributes:
        number: the number of the sender.
        edges: by name, the first row of each sender, in the order of their numbers, and the number of rows.

    Example:
        >>> Cut(1, {"w": (0, 3, 5)}).rows("w")
        (3, 5)
    """

    number: int
    edges: Mapping[str, tuple[int, ...]]

    @property
    def of(self) -> int:
        """How many senders there are."""
        return max((len(edges) for edges in self.edges.values()), default=2) - 1

    def rows(self, name: str) -> tuple[int, int]:
        """Returns the first row of a tensor that this sender has, and the one after its last."""
        edges = self.edges.get(name, (0,) * (self.number + 2))
        return edges[self.number], edges[self.number + 1]


def check_cuts(specs: Iterable[TensorSpec], cuts: Sequence[Cut]) -> None:
    """Raises an error unless the senders of a publication together send each row of each tensor once.

    Args:
        cuts: what each sender sends.

    Raises:
        IncompleteWeights: a sender is missing or there twice, or the senders' rows are not all rows once.

    Example:
        >>> import torch
        >>> edges = {"w": (0, 5, 7)}
        >>> check_cuts([TensorSpec("w", (8, 2), torch.float32)], [Cut(0, edges), Cut(1, edges)])
        Traceback (most recent call last):
        verl_fn.backends.weight_sync.publication.IncompleteWeights: the ranks send rows (0, 5, 7) of 'w', but ...
    """
    if any(cut.edges != cuts[0].edges for cut in cuts):
        raise IncompleteWeights("ranks disagree about the rows that each of them sends")
    if (numbers := sorted(cut.number for cut in cuts)) != list(range(len(cuts))):
        raise IncompleteWeights(f"weights came from the ranks {numbers}, not from each of 0 to {len(cuts) - 1} once")
    for spec in specs:
        edges = cuts[0].edges.get(spec.name, ())
        whole = len(edges) == len(cuts) + 1 and (edges[0], edges[-1]) == (0, spec.rows)
        if not whole or list(edges) != sorted(edges):
            raise IncompleteWeights(f"the ranks send rows {edges} of {spec.name!r}, but it has {spec.rows} rows")
