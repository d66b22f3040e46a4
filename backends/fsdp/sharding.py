"""Values whose leaves are shards: DTensors over a mesh, also of a model folder, their local parts and whole tensors.

Where the folder's files name and shape tensors as the model does, all ranks read at once, each its own rows
(``FolderWeights``). For any other folder, and for random weights (one sequence of draws), the first rank makes the
whole model and sends it block by block, so the others never hold more than a block beside their shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from verl_fn.backends.agreement import agreed, readable_weights
from verl_fn.backends.fsdp import torch_private
from verl_fn.backends.fsdp.torch_private import Spec, local_of, sharded, spec_of
from verl_fn.backends.hf.skeleton import Hollow
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.hf.weights import THREADS
from verl_fn.backends.protocol import TensorSpec
from verl_fn.backends.tensor_file import Span
from verl_fn.backends.weight_sync import Cut
from verl_fn.state import Named, tree
from verl_fn.state.ownership import opened, with_leaves

T = TypeVar("T")
Model: TypeAlias = Callable[[], tuple[Any, dict[str, Tensor]]]
"""Makes a whole model as ``hf.folder.build`` does, without adapters: its skeleton and its parameters."""
BLOCK = 64 * 2**20  # bytes that are sent at once


@attrs.frozen(eq=False)
class Layout:
    """How the ranks of a process group share the work.

    Attributes:
        mesh: the ranks that parameters are sharded over: ``shard``, or ``replicate`` x ``shard``.
        sequence: the ranks that share each row; None where every rank has rows of its own.
        rank: the number of this process.
        size: how many processes there are.
    """

    mesh: DeviceMesh
    sequence: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, device: str, *, replicate: int = 1, sp: int = 1) -> Layout:
        """Returns the layout of all ranks of the default process group, and makes its groups the first time.

        Args:
            replicate: how many copies of the parameters there are.
            sp: how many neighbouring ranks share each row.

        Raises:
            LayoutError: the sizes do not divide the number of ranks.
        """
        size = dist.get_world_size()
        for name, value in (("replicate", replicate), ("sp", sp)):
            if value < 1 or size % value:
                raise LayoutError(f"{name} = {value} does not divide the {size} ranks of this run")
        if (made := _MADE.get((device, replicate, sp, dist.group.WORLD))) is not None:
            return made
        if replicate == 1:
            mesh = init_device_mesh(device, (size,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(device, (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))
        sequence = None
        if sp > 1:
            neighbours = init_device_mesh(device, (size // sp, sp), mesh_dim_names=("rows", "sequence"))
            sequence = neighbours["sequence"].get_group()
        made = _MADE[device, replicate, sp, dist.group.WORLD] = cls(mesh, sequence, dist.get_rank(), size)
        return made

    @property
    def sp(self) -> int:
        """How many ranks share each row."""
        return 1 if self.sequence is None else dist.get_world_size(self.sequence)

    @property
    def shares(self) -> int:
        """How many parts the rows of a batch are dealt into."""
        return self.size // self.sp

    @property
    def share(self) -> int:
        """The number of this rank's part."""
        return self.rank // self.sp

    @property
    def answering(self) -> range:
        """For each part, a rank that computes its outputs; ranks that share rows have the same ones."""
        return range(0, self.size, self.sp)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that together hold one copy of every parameter."""
        return self.mesh["shard"].get_group() if self.mesh.ndim > 1 else self.mesh.get_group()

    def spec(self, shape: torch.Size, dtype: torch.dtype) -> Spec:
        """Returns how a tensor of this shape is sharded over the mesh: along its first dimension, as FSDP does."""
        placements = (Shard(0),) if self.mesh.ndim == 1 else (Replicate(), Shard(0))
        return torch_private.spec(self.mesh, placements, shape, dtype)

    def bounds(self, rows: int) -> tuple[int, int]:
        """Returns the first row that this rank holds of a tensor with ``rows`` rows, and the one after its last."""
        ranks, number = dist.get_world_size(self.shard_group), dist.get_rank(self.shard_group)
        each = -(-rows // ranks)
        return min(number * each, rows), min((number + 1) * each, rows)

    @property
    def copies(self) -> tuple[int, int]:
        """How many ranks hold a copy of each shard, and the number of this rank among them."""
        return (1, 0) if self.mesh.ndim == 1 else (self.mesh.size(0), self.mesh.get_local_rank(0))

    def published(self, specs: Iterable[TensorSpec]) -> Cut:
        """Returns the rows that this rank publishes; ranks that hold copies of a shard each publish a part of it."""
        shards, copies = dist.get_world_size(self.shard_group), self.copies[0]

        def edges(rows: int) -> tuple[int, ...]:
            each = -(-rows // shards)
            starts = [min(i * each, rows) for i in range(shards + 1)]
            return *(a + (b - a) * i // copies for a, b in itertools.pairwise(starts) for i in range(copies)), rows

        number = dist.get_rank(self.shard_group) * copies + self.copies[1]
        return Cut(number, {spec.name: edges(spec.rows) for spec in specs})

    def sent(self, t: Tensor) -> Tensor:
        """Returns the rows of a tensor that this rank publishes."""
        local, (copies, copy) = local_of(t), self.copies
        return local[len(local) * copy // copies : len(local) * (copy + 1) // copies]

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises LayoutError for tensors that are not shards over this mesh."""
        for name, t in tensors.items():
            mesh = spec_of(t).mesh if isinstance(t, DTensor) else None
            if mesh is not self.mesh and mesh != self.mesh:
                kind = "held as whole tensors" if mesh is None else f"of the layout {_shape(mesh)}"
                raise LayoutError(
                    f"a value {kind} ({name}) was given to a backend of the layout {_shape(self.mesh)}; save the "
                    "state there and restore it here"
                )

    def wholes(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors by name; all ranks go through them together.

        Small neighbours of one dtype and device are gathered at once: a collective takes longer than their bytes.
        """

        def kind(item: tuple[str, Tensor]) -> Any:
            name, t = item
            small = isinstance(t, DTensor) and t.nbytes <= SMALL_BYTES
            return (t.dtype, local_of(t).device) if small else name

        for _, neighbours in itertools.groupby(tensors.items(), kind):
            pairs = list(neighbours)
            for start in range(0, len(pairs), SMALL_COUNT):
                bucket = dict(pairs[start : start + SMALL_COUNT])
                parts = list(bucket.values())
                yield from zip(bucket, self._gathered(parts) if len(parts) > 1 else [whole(parts[0])], strict=True)

    def _gathered(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields whole tensors of one dtype and device, gathered by one collective."""
        ranks = dist.get_world_size(self.shard_group)
        sizes = [-(-len(t) // ranks) * t.shape[1:].numel() for t in parts]
        own = torch.zeros(sum(sizes), dtype=parts[0].dtype, device=local_of(parts[0]).device)
        for room, t in zip(own.split(sizes), parts, strict=True):
            local = local_of(t).reshape(-1)
            room[: len(local)] = local
        by_rank = own.new_empty(ranks, len(own))
        dist.all_gather_into_tensor(by_rank.view(-1), own, group=self.shard_group)
        for rows, t in zip(by_rank.split(sizes, dim=1), parts, strict=True):
            # `reshape` would leave a single element its stride, with which it cannot be viewed as bytes.
            yield rows.contiguous().view(-1)[: t.numel()].view(t.shape)

    def part(self, t: Tensor) -> Span:
        """Returns the elements of a tensor that this rank writes into a checkpoint.

        Ranks that hold copies of a shard each write a part of it. The first rank writes tensors that all ranks have.
        """
        if not isinstance(t, DTensor):
            return Span(t.detach().reshape(-1)[: None if self.rank == 0 else 0], 0, t.shape)
        elements = local_of(t).reshape(-1)
        first = self.bounds(t.shape[0])[0] * t.shape[1:].numel()
        copies, copy = self.copies
        start, end = len(elements) * copy // copies, len(elements) * (copy + 1) // copies
        return Span(elements[start:end], first + start, t.shape)

    def shard(self, whole: Tensor, device: torch.device) -> DTensor:
        """Returns this rank's shard of a tensor that every rank has."""
        start, end = self.bounds(len(whole))
        return sharded(whole[start:end].to(device, copy=True), self.spec(whole.shape, whole.dtype))


SMALL_BYTES, SMALL_COUNT = 2**16, 64
"""Whole tensors of at most so many bytes are gathered together, and at most so many of them."""

_MADE: dict[Any, Layout] = {}
"""The layouts of this process: the models of all roles share process groups, whose buffers take memory of the GPU."""


def _shape(mesh: DeviceMesh) -> str:
    """Describes a mesh, such as ``replicate=2, shard=4``."""
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def moved(t: Tensor, device: str | torch.device) -> Tensor:
    """Returns a tensor on another device; of a sharded one, only the local part is moved."""
    if not isinstance(t, DTensor):
        return t.to(device)
    local = local_of(t)
    return t if local.device == torch.device(device) else sharded(local.to(device), spec_of(t))


def locals_of(value: T) -> T:
    """Returns the same value with every sharded tensor replaced by its local part."""
    return _by_name(lambda _, t: local_of(t), value)


def with_specs(value: T, specs: Mapping[str, Spec]) -> T:
    """Returns the same value with every local part replaced by its sharded tensor.

    Args:
        value: a value of local parts.
        specs: how each parameter is sharded, by name.
    """
    return _by_name(
        lambda name, t: sharded(t, torch_private.of_dtype(specs[name], t.dtype)) if name in specs else t, value
    )


def check_slots(optimizer: Any, params: Mapping[str, Tensor]) -> None:
    """Raises an error for an optimizer's state that could be saved but not restored.

    Raises:
        LayoutError: a tensor of the state is not a shard of a parameter's shape.

    Example:
        >>> check_slots({"momentum": torch.zeros(8, 4)}, {})
        Traceback (most recent call last):
        verl_fn.backends.hf.ulysses.LayoutError: the optimizer's state has a tensor of shape [8, 4] ...
    """
    for part in pytree.tree_leaves(optimizer, is_leaf=lambda part: isinstance(part, Named)):
        if isinstance(part, Tensor) and part.ndim:
            raise LayoutError(
                f"the optimizer's state has a tensor of shape {list(part.shape)} outside of Slots: put tensors of "
                "the parameters' shapes into Slots under their names, so that they are sharded as the parameters are"
            )
        for name, t in part.leaves.items() if isinstance(part, Named) else ():
            if name not in params or local_of(t).shape != local_of(params[name]).shape:
                raise LayoutError(
                    f"the optimizer's state for {name} has another shape than the parameter, so it cannot be sharded "
                    "as the parameter is"
                )


def _by_name(fn: Callable[[str, Tensor], Any], value: Any) -> Any:
    """Returns a value with every named tensor replaced.

    A GPU waits for this, so it handles only the nodes of states; this is faster than a general walk over trees.
    """
    if isinstance(value, Named):
        return with_leaves(value, ((name, fn(name, t)) for name, t in value.leaves.items()))
    if (inside := opened(value)) is not None:
        return inside[1](_by_name(fn, part) for part in inside[0])
    return value


def whole_of(value: T) -> T:
    """Returns the same value with whole tensors, on every rank; all ranks call it together."""
    return tree.map_tensors(whole, value)


def whole(t: Tensor) -> Tensor:
    """Returns a whole tensor; all ranks gather a sharded one together."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def read_shards(
    folder: str | Path, make: Model, model: Hollow, layout: Layout, device: torch.device
) -> dict[str, Tensor]:
    """Returns this rank's shards of the weights in ``folder``; all ranks call it together.

    Args:
        make: loads the whole model.
        model: the model without its weights.

    Raises:
        ModelError: the folder does not hold the weights of this model.
        LayoutError: ranks read different weights.
    """
    weights = readable_weights(folder, model)
    if weights is None:
        return sent_by_first(make, model, layout, device)

    def rows(name: str, into: Tensor) -> None:
        start, end = layout.bounds(weights.shapes[name][0])
        weights.read(name, start, end, into)

    with agreed():
        return _filled(model, layout, device, rows, THREADS)


def sent_by_first(make: Model, model: Hollow, layout: Layout, device: torch.device) -> dict[str, Tensor]:
    """Returns this rank's shards of the weights that the first rank makes; all ranks call it together."""
    whole: dict[str, Tensor] = {}
    with agreed():
        if layout.rank == 0:
            whole = make()[1]

    def rows(name: str, into: Tensor) -> None:
        shape = model.shapes[name].shape
        start, end = layout.bounds(shape[0])
        full = whole.pop(name, None)
        each = max(1, BLOCK // max(1, 4 * shape[1:].numel()))
        for first in range(0, shape[0], each):
            last = min(first + each, shape[0])
            block = torch.empty(last - first, *shape[1:], dtype=into.dtype)
            if full is not None:
                block.copy_(full[first:last])
            if layout.size > 1:
                dist.broadcast(block, 0)
            low, high = max(first, start), min(last, end)
            if low < high:
                into[low - start : high - start] = block[low - first : high - first]

    return _filled(model, layout, device, rows)


def _filled(
    model: Hollow, layout: Layout, device: torch.device, rows: Callable[[str, Tensor], None], threads: int = 1
) -> dict[str, Tensor]:
    def one(name: str) -> Tensor:
        t = model.shapes[name]
        start, end = layout.bounds(t.shape[0])
        local = torch.empty(end - start, *t.shape[1:], dtype=t.dtype)
        rows(name, local)
        return local.to(device)

    names = [name for name in model.shapes if name not in model.adapters]
    with ThreadPoolExecutor(threads, "verl_fn weights") as pool:
        locals_ = dict(zip(names, pool.map(one, names), strict=True))
    return {
        name: layout.shard(model.adapters[name], device)
        if name in model.adapters
        else sharded(locals_[name], layout.spec(t.shape, t.dtype))
        for name, t in model.shapes.items()
    }
