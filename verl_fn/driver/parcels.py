"""Moves values between processes: each field of a batch by itself, and to each process once.

A batch that a function extends shares its other fields with the batch before. So tensors are put into the object
store one by one, a value travels as its structure with references in place of tensors, and a process keeps the
tensors that it has fetched or made, up to a limit. It knows them by the tensor itself and the number of times that
the tensor was written to: neither an ``id`` nor an address tells a tensor, since both come again after it has died.

The object store is shared memory of each machine. Functions get copies of its tensors, since they could write to
them. A training rank reads its rows from the shared memory itself: it copies the rows that are dealt to it, and no
others.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import attrs
import numpy as np
import ray
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from verl_fn.backends.protocol import Reference
from verl_fn.state import Batch, Sample, pack, unpack, version_of

# Smaller tensors travel inside their value.
SMALL_BYTES = 512
CACHE_BYTES = 2**30
CACHE_RESULTS = 4


@attrs.frozen
class Column:
    """Refers to a tensor in the object store."""

    ref: Any
    dtype: torch.dtype
    shape: tuple[int, ...]


class Columns:
    """The columns that tensors came as, each for as long as its tensor lives and is not written to."""

    def __init__(self) -> None:
        self._by_tensor = WeakTensorKeyDictionary()

    def __setitem__(self, tensor: Tensor, column: Column) -> None:
        self._by_tensor[tensor] = version_of(tensor), column

    def get(self, tensor: Tensor) -> Column | None:
        """Returns the column that has the value of a tensor; None where none has it."""
        version, column = self._by_tensor.get(tensor, (None, None))
        return column if version == version_of(tensor) else None


@attrs.frozen(eq=False)
class Whole:
    """A tensor that travels inside its value, as bytes, which Ray does not copy."""

    stored: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]


@attrs.frozen
class Samples:
    """Replaces a list of samples, whose many small tensors travel as the few large ones of a batch."""

    batch: Batch


@attrs.frozen(eq=False)
class Lazy(Reference[Any]):
    """A result of a function that is applied where the result is used.

    Attributes:
        id: the number of the call; its results are cached under it.
        fn: the function.
        args: values and references.
        kwargs: values.
        number: the number of the result, for a function with several; None for all.
    """

    id: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int | None = None


@attrs.frozen
class Place:
    """The place of an argument in a flat list of arguments."""

    index: int


Argument: TypeAlias = "Place | Lazy"


def flattened(args: Iterable[Any]) -> tuple[tuple[Argument, ...], list[Any]]:
    """Returns arguments as places in a flat list, in which Ray replaces references by their values.

    Example:
        >>> places, flat = flattened([5, Lazy(0, divmod, (7, 5), {}, 1)])
        >>> places[1].args, flat
        ((Place(index=1), Place(index=2)), [5, 7, 5])
    """
    flat: list[Any] = []

    def place(arg: Any) -> Argument:
        if isinstance(arg, Lazy):
            return attrs.evolve(arg, args=tuple(place(inner) for inner in arg.args))
        flat.append(arg)
        return Place(len(flat) - 1)

    return tuple(place(arg) for arg in args), flat


class Parcels:
    """Converts values that travel to and from this process, and caches their tensors; threads may share it.

    Attributes:
        fetched: how often each tensor was fetched, by reference; for tests.
        nbytes: how many bytes were copied from the object store.
    """

    def __init__(self) -> None:
        # With the versions that they were kept at.
        self._tensors: OrderedDict[str, tuple[Tensor, int]] = OrderedDict()
        # The names of the tensors that lie in the object store's memory.
        self._shared: set[str] = set()
        self._results: OrderedDict[tuple[int, bool], tuple[Any, list[int]]] = OrderedDict()
        self._cached_bytes = 0
        self._one_call = threading.RLock()
        self.fetched: Counter[str] = Counter()
        self.nbytes = 0

    def arguments(
        self, places: Iterable[Argument], flat: list[Any], *, shared: bool = False
    ) -> tuple[list[Any], Columns]:
        """Returns the arguments of a call, and the columns that their tensors came as.

        Args:
            places: where the arguments lie in ``flat``.
            flat: values, in which Ray has replaced references.
            shared: leave tensors in the object store's memory, for a call that does not write to them.
        """
        columns = Columns()
        values = [self._in(value, columns, shared=shared) for value in flat]

        def open_(place: Argument) -> Any:
            if isinstance(place, Place):
                return values[place.index]
            # A result may have the tensors of its arguments.
            name = (place.id, shared)
            kept = self._results.get(name)
            if kept is None or kept[1] != _versions(kept[0]):
                made = place.fn(*(open_(inner) for inner in place.args), **place.kwargs)
                result = made if place.number is None else list(made)
                kept = self._results[name] = result, _versions(result)
                while len(self._results) > CACHE_RESULTS:
                    self._results.popitem(last=False)
            return kept[0] if place.number is None else kept[0][place.number]

        return [open_(place) for place in places], columns

    def out(self, value: Any, columns: Columns) -> Any:
        """Returns a result as it travels; tensors of arguments travel as the references that they came as.

        Args:
            value: the result.
            columns: what the tensors of arguments came as; those that were written to since travel as other tensors.
        """
        if isinstance(value, list) and value and all(isinstance(item, Sample) for item in value):
            return Samples(self.out(pack(value), columns))
        return pytree.tree_map(lambda leaf: self._put(leaf, columns), value)

    def whole(self, value: Any) -> Any:
        """Returns a result as it travels with its tensors inside, so that it outlives this process."""
        if isinstance(value, list) and value and all(isinstance(item, Sample) for item in value):
            return Samples(self.whole(pack(value)))

        def inside(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.nbytes < SMALL_BYTES:
                return leaf
            return Whole(_bytes(leaf), leaf.dtype, tuple(leaf.shape))

        return pytree.tree_map(inside, value)

    def value(self, value: Any) -> Any:
        """Returns a value that has travelled in its original form."""
        return self._in(value, Columns())

    def _in(self, value: Any, columns: Columns, *, shared: bool = False) -> Any:
        if isinstance(value, Samples):
            return unpack(self._in(value.batch, columns, shared=shared))
        leaves, structure = pytree.tree_flatten(value)
        wanted = [leaf for leaf in leaves if isinstance(leaf, Column)]
        if not wanted and not any(isinstance(leaf, Whole) for leaf in leaves):
            return value
        by_name = {column.ref.hex(): column for column in wanted}
        with self._one_call:
            tensors = self._fetched(by_name, shared=shared)
        opened = []
        for leaf in leaves:
            if isinstance(leaf, Column):
                tensor = tensors[leaf.ref.hex()]
                columns[tensor] = leaf
                leaf = tensor
            elif isinstance(leaf, Whole):
                leaf = _in_place(leaf.stored).view(leaf.dtype).view(leaf.shape).clone()
                self.nbytes += leaf.nbytes
            opened.append(leaf)
        return pytree.tree_unflatten(opened, structure)

    def _fetched(self, by_name: Mapping[str, Column], *, shared: bool) -> dict[str, Tensor]:
        """Returns the tensors of columns, those that are not cached from the object store."""
        for name in by_name:
            # A function has written to it, and the value of the column is another.
            if name in self._tensors and version_of(self._tensors[name][0]) != self._tensors[name][1]:
                self._drop(name)
        missing = [name for name in by_name if name not in self._tensors]
        for name, stored in zip(missing, ray.get([by_name[name].ref for name in missing]), strict=True):
            column = by_name[name]
            self.fetched[name] += 1
            self._keep(name, _in_place(stored).view(column.dtype).view(column.shape))
            self._shared.add(name)
        for name in by_name:
            if name in self._shared and not shared:
                tensor = self._drop(name).clone()
                self._keep(name, tensor)
                self.nbytes += tensor.nbytes
            self._tensors.move_to_end(name)
        tensors = {name: self._tensors[name][0] for name in by_name}
        self._make_room()
        return tensors

    def _put(self, leaf: Any, columns: Columns) -> Any:
        if not isinstance(leaf, Tensor) or leaf.nbytes < SMALL_BYTES:
            return leaf
        if (column := columns.get(leaf)) is not None:
            return column
        ref = ray.put(_bytes(leaf))
        with self._one_call:
            self._keep(ref.hex(), leaf.detach())
            self._make_room()
        return Column(ref, leaf.dtype, tuple(leaf.shape))

    def _keep(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor, version_of(tensor)
        self._cached_bytes += tensor.nbytes

    def _drop(self, name: str) -> Tensor:
        tensor, _ = self._tensors.pop(name)
        self._shared.discard(name)
        self._cached_bytes -= tensor.nbytes
        return tensor

    def _make_room(self) -> None:
        """Drops the least recently used tensors."""
        while self._cached_bytes > CACHE_BYTES and len(self._tensors) > 1:
            self._drop(next(iter(self._tensors)))


def _versions(value: Any) -> list[int]:
    return [version_of(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _in_place(stored: np.ndarray[Any, Any]) -> Tensor:
    """Returns a tensor in the memory of an array of the object store, which torch cannot mark as read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(stored)
