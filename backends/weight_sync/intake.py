"""Checks of a publication, also by several senders: every row of every tensor arrives exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from verl_fn.backends.protocol import BUCKET_BYTES, Chunk, TensorSpec, WeightSource
from verl_fn.errors import UserError

# Layout of a checksum: bytes of a word, words of a row and of a slice, and an odd multiplier that mixes bits.
WORD, WIDTH, SLICE = 8, 1024, 2**18
MULTIPLIER = 6364136223846793005


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
        source: the weights.
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
        chunk: the chunk.
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


def checksum(values: Tensor, dtype: torch.dtype | None = None) -> int:
    """Returns a 64-bit hash of a tensor's bytes; it also changes if rows or elements are swapped.

    Args:
        values: the tensor.
        dtype: hash the tensor as if it were converted; None for its own dtype.

    Example:
        >>> a = torch.arange(6.0)
        >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(a.flip(0))
        (True, False)
        >>> checksum(a, torch.bfloat16) == checksum(a.bfloat16())
        True
    """
    flat = values.detach().reshape(-1)
    dtype = dtype or flat.dtype
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    # Slice by slice, since converting and mixing copy the elements.
    for part in flat.split(SLICE * WORD // dtype.itemsize):
        data = part.to(dtype).contiguous().view(torch.uint8)
        if data.storage_offset() % WORD:
            data = data.clone()  # words have to be aligned
        end = len(data) // WORD * WORD
        total = total * MULTIPLIER + _of_slice(data[:end].view(torch.int64)) + _weighted(data[end:].long())
    return int(total)


def _of_slice(words: Tensor) -> Tensor:
    # Sums overflow, and an even weight loses the highest bits of a word: they go into the lower ones too.
    mixed = (words >> 32).mul_(MULTIPLIER).add_(words)
    rows = mixed[: len(mixed) // WIDTH * WIDTH].view(-1, WIDTH)
    return _weighted(rows.sum(0)) + 31 * _weighted(rows.sum(1)) + 961 * _weighted(mixed[rows.numel() :])


def _weighted(numbers: Tensor) -> Tensor:
    places = torch.arange(1, len(numbers) + 1, device=numbers.device)
    return (numbers * (places * 2654435761 + 12345)).sum()


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
        specs: the tensors.
        cuts: what each sender sends.

    Raises:
        IncompleteWeights: a sender is missing or there twice, or the senders' rows are not all rows once.

    Example:
        >>> import torch
        >>> edges = {"w": (0, 5, 7)}
        >>> check_cuts([TensorSpec("w", (8, 2), torch.float32)], [Cut(0, edges), Cut(1, edges)])
        Traceback (most recent call last):
        verl_fn.backends.weight_sync.intake.IncompleteWeights: the ranks send rows (0, 5, 7) of 'w', but it has 8 rows
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
