"""The form in which values travel between processes: tensors as arrays in Ray's object store, without a copy.

The object store is memory that the processes of a machine share. The driver copies what it fetches from there, since
its functions may write to it. A training rank reads a batch from the shared memory itself, and copies only the rows
that it computes on. The experts of each token (``routed_experts``) can be larger than all other fields together, so
the driver holds a ``Distant`` tensor in their place.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import attrs
import numpy as np
import ray
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn.state import Sample, pack, unpack

# Smaller tensors travel as they are, from the CPU: the driver may have no GPU.
SMALL_BYTES = 512
DISTANT = "routed_experts"


@attrs.frozen(eq=False)
class Array:
    """A tensor as it travels: its bytes, which Ray does not copy, its dtype and its shape."""

    stored: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Array:
        """Returns the array of a tensor, in the tensor's own memory if that is contiguous and on the CPU."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return cls(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> Tensor:
        """Returns the tensor in the memory of the object store, where nobody may write to it."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(self.stored).view(self.dtype).view(self.shape)


@attrs.frozen(eq=False)
class Samples:
    """A list of samples as it travels: the few large tensors of one batch in place of many small ones."""

    batch: Any


@attrs.frozen(eq=False)
class Leaf:
    """A tensor of ``size`` rows in the object store: the reference to a value, and its number among the leaves."""

    ref: Any
    number: int
    size: int

    def tensor(self) -> Tensor:
        """Returns the tensor in the memory of the object store."""
        value = ray.get(self.ref)
        leaves = pytree.tree_leaves(value.batch if isinstance(value, Samples) else value)
        return cast(Tensor, leaves[self.number].tensor())


class Distant(Tensor):
    """Rows of tensors in the object store. To select, split or join rows fetches nothing; any other use does.

    Attributes:
        stored: the tensors that have the rows.
        numbers: of the rows, counted through all of these tensors, ``[T]``.
    """

    stored: tuple[Leaf, ...]
    numbers: Tensor

    def __new__(
        cls, stored: tuple[Leaf, ...], numbers: Tensor, dtype: torch.dtype, width: tuple[int, ...]
    ) -> Distant:
        """Makes rows of tensors with this dtype, of which each row has the shape ``width``."""
        one: Distant = Tensor._make_wrapper_subclass(cls, (len(numbers), *width), dtype=dtype)
        one.stored, one.numbers = stored, numbers
        return one

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's shows the numbers, which are elsewhere
        return f"Distant(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Distant, (self.stored, self.numbers, self.dtype, tuple(self.shape[1:]))

    # Results of torch's functions are what ``__torch_dispatch__`` returns.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's stubs lack it

    def whole(self) -> Tensor:
        """Fetches the rows, and returns them as a tensor of their own."""
        rows = torch.empty(self.shape, dtype=self.dtype)
        start = 0
        for leaf in self.stored:
            own = (self.numbers >= start) & (self.numbers < start + leaf.size)
            if bool(own.any()):
                rows[own] = leaf.tensor()[self.numbers[own] - start]
            start += leaf.size
        return rows

    def _at(self, numbers: Tensor) -> Distant:
        return Distant(self.stored, numbers, self.dtype, tuple(self.shape[1:]))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stubs lack it
        first, aten = args[0], torch.ops.aten
        if func is aten.detach.default:
            return first._at(first.numbers)
        if func is aten.index.Tensor and isinstance(first, Distant) and len(args[1]) == 1:
            return first._at(first.numbers[args[1][0]])
        if func is aten.slice.Tensor and args[1:2] in ((), (0,)):
            return first._at(func(first.numbers, *args[1:]))
        if func is aten.split_with_sizes.default and args[2:] in ((), (0,)):
            return [first._at(part) for part in func(first.numbers, *args[1:])]
        if func is aten.cat.default and args[1:] in ((), (0,)) and all(isinstance(part, Distant) for part in first):
            return _joined(first)
        args, kwargs = pytree.tree_map_only(Distant, Distant.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def _joined(parts: Sequence[Distant]) -> Distant:
    """Returns the rows of all parts; parts of the same tensors refer to them once."""
    starts: dict[tuple[Leaf, ...], int] = {}
    stored: tuple[Leaf, ...] = ()
    for part in parts:
        if part.stored not in starts:
            starts[part.stored] = sum(leaf.size for leaf in stored)
            stored += part.stored
    numbers = torch.cat([part.numbers + starts[part.stored] for part in parts])
    return Distant(stored, numbers, parts[0].dtype, tuple(parts[0].shape[1:]))


def packed(value: Any) -> Any:
    """Returns a value as it travels."""
    if isinstance(value, list) and value and all(isinstance(item, Sample) for item in value):
        return Samples(packed(pack(value)))

    def array(leaf: Any) -> Any:
        whole = isinstance(leaf, Tensor) and not isinstance(leaf, Distant)
        return leaf if not whole else leaf.detach().cpu() if leaf.nbytes < SMALL_BYTES else Array.of(leaf)

    return pytree.tree_map(array, value)


def opened(value: Any, *, shared: bool = False, ref: Any = None) -> Any:
    """Returns a value that has travelled in its original form.

    Args:
        shared: leave tensors in the memory of the object store, for a call that does not write to them.
        ref: the reference to ``value``: leave ``routed_experts`` where they are, and return ``Distant`` ones.
    """
    if isinstance(value, Samples):
        return unpack(opened(value.batch, shared=shared, ref=ref))

    def tensor(number: int, path: Any, leaf: Any) -> Any:
        if isinstance(leaf, Array) and ref is not None and DISTANT in pytree.keystr(path):
            size, *width = leaf.shape
            return Distant((Leaf(ref, number, size),), torch.arange(size), leaf.dtype, tuple(width))
        if isinstance(leaf, Array):
            return leaf.tensor() if shared else leaf.tensor().clone()
        return leaf.whole() if isinstance(leaf, Distant) else leaf

    pairs, structure = pytree.tree_flatten_with_path(value)
    return pytree.tree_unflatten([tensor(number, *pair) for number, pair in enumerate(pairs)], structure)
