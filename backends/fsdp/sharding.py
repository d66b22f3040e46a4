"""Values whose leaves are shards: DTensors over a mesh, made, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from verl_fn.backends.checkpoint.tensor_file import Part
from verl_fn.backends.fsdp import torch_private
from verl_fn.backends.fsdp.torch_private import Spec, local_of, sharded, spec_of
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.state import Named, Node, tree
from verl_fn.state.node import rebuild

T = TypeVar("T")


@attrs.frozen(eq=False)
class Layout:
    """How the ranks of a process group share the work.

    Attributes:
        mesh: over which parameters are sharded: ``shard``, or ``replicate`` x ``shard``.
        sequence: the ranks that share each row; None where every rank has rows of its own.
        rank, size: of this process and of all.
    """

    mesh: DeviceMesh
    sequence: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, device: str, *, replicate: int = 1, sp: int = 1) -> Layout:
        """Lay out all ranks of the default process group.

        Args:
            replicate: whole copies of the parameters.
            sp: neighbouring ranks that share each row.

        Raises:
            LayoutError: the sizes do not divide the number of ranks.
        """
        size = dist.get_world_size()
        for name, value in (("replicate", replicate), ("sp", sp)):
            if value < 1 or size % value:
                raise LayoutError(f"{name} = {value} does not divide the {size} ranks of this run")
        if replicate == 1:
            mesh = init_device_mesh(device, (size,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(device, (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))
        sequence = None
        if sp > 1:
            neighbours = init_device_mesh(device, (size // sp, sp), mesh_dim_names=("rows", "sequence"))
            sequence = neighbours["sequence"].get_group()
        return cls(mesh, sequence, dist.get_rank(), size)

    @property
    def sp(self) -> int:
        return 1 if self.sequence is None else dist.get_world_size(self.sequence)

    @property
    def shares(self) -> int:
        """Parts that the rows of a batch are dealt into."""
        return self.size // self.sp

    @property
    def share(self) -> int:
        """This rank's part."""
        return self.rank // self.sp

    @property
    def speaks(self) -> bool:
        """Whether this rank tells the metrics of its part; those that share rows all know the same."""
        return self.rank % self.sp == 0

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that together hold every parameter once."""
        return self.mesh["shard"].get_group() if self.mesh.ndim > 1 else self.mesh.get_group()

    def spec(self, shape: torch.Size, dtype: torch.dtype) -> Spec:
        """Returns what a whole tensor of this shape is over the mesh: cut along its first dimension, as FSDP cuts it."""
        placements = (Shard(0),) if self.mesh.ndim == 1 else (Replicate(), Shard(0))
        return torch_private.spec(self.mesh, placements, shape, dtype)

    def bounds(self, rows: int) -> tuple[int, int]:
        """The rows of a tensor that this rank holds."""
        ranks, mine = dist.get_world_size(self.shard_group), dist.get_rank(self.shard_group)
        each = -(-rows // ranks)
        return min(mine * each, rows), min((mine + 1) * each, rows)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse values of another layout.

        Raises:
            LayoutError: they are not shards over this mesh.
        """
        for name, t in tensors.items():
            mesh = spec_of(t).mesh if isinstance(t, DTensor) else None
            if mesh is not self.mesh and mesh != self.mesh:
                theirs = "held as whole tensors" if mesh is None else f"of the layout {_shape(mesh)}"
                raise LayoutError(
                    f"a value {theirs} ({name}) was given to a backend of the layout {_shape(self.mesh)}; save the "
                    "state there and restore it here"
                )

    def part(self, t: Tensor) -> Part:
        """What this rank writes of a tensor: its share of its shard, or all of what every rank has, on the first."""
        if not isinstance(t, DTensor):
            return Part(t.detach().reshape(-1)[: None if self.rank == 0 else 0], 0, t.shape)
        held = local_of(t).reshape(-1)
        first = self.bounds(t.shape[0])[0] * t.shape[1:].numel()
        copies, mine = (1, 0) if self.mesh.ndim == 1 else (self.mesh.size(0), self.mesh.get_local_rank(0))
        start, end = len(held) * mine // copies, len(held) * (mine + 1) // copies
        return Part(held[start:end], first + start, t.shape)

    def shard(self, whole: Tensor, device: torch.device) -> DTensor:
        """Returns this rank's part of a tensor that every rank has."""
        start, end = self.bounds(len(whole))
        return sharded(whole[start:end].to(device, copy=True), self.spec(whole.shape, whole.dtype))


def _shape(mesh: DeviceMesh) -> str:
    """A mesh in words: ``replicate=2, shard=4``."""
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def moved(t: Tensor, device: str | torch.device) -> Tensor:
    """A tensor, or a shard whose local part only, on another device."""
    if not isinstance(t, DTensor):
        return t.to(device)
    local = local_of(t)
    return t if local.device == torch.device(device) else sharded(local.to(device), spec_of(t))


def locals_of(value: T) -> T:
    """The same value with the local part of every shard in its place."""
    return _by_name(lambda _, t: local_of(t), value)


def with_specs(value: T, specs: Mapping[str, Spec]) -> T:
    """The shards of which ``value`` has the local parts; a leaf is told by its name."""
    return _by_name(lambda name, t: sharded(t, specs[name]) if name in specs else t, value)


def check_slots(optimizer: Any, params: Mapping[str, DTensor]) -> None:
    """Refuse an optimizer's state that is not shards of the parameters' shapes, which could be saved and not restored.

    Raises:
        LayoutError: it has other tensors.

    >>> check_slots({"momentum": torch.zeros(8, 4)}, {})
    Traceback (most recent call last):
    verl_fn.backends.hf.ulysses.LayoutError: the optimizer's state has a tensor of shape [8, 4] outside of Slots: ...
    """
    for part in pytree.tree_leaves(optimizer, is_leaf=lambda part: isinstance(part, Named)):
        if isinstance(part, Tensor) and part.ndim:
            raise LayoutError(
                f"the optimizer's state has a tensor of shape {list(part.shape)} outside of Slots: put tensors of the "
                "parameters' shapes into Slots under their names, so that they are sharded as the parameters are"
            )
        for name, t in part.leaves.items() if isinstance(part, Named) else ():
            if name not in params or local_of(t).shape != local_of(params[name]).shape:
                raise LayoutError(
                    f"the optimizer's state for {name} is not of its shape; states that are no such tensors cannot be "
                    "sharded"
                )


def _by_name(fn: Callable[[str, Tensor], Any], value: Any) -> Any:
    """A value with every named tensor replaced. A GPU waits for this, so it is no general walk over trees."""
    if isinstance(value, Named):
        kind = type(value)
        fields = {f.name: getattr(value, f.name) for f in attrs.fields(kind)}
        return rebuild(kind, fields | {"leaves": {name: fn(name, t) for name, t in value.leaves.items()}})
    if isinstance(value, Node):
        return rebuild(type(value), {f.name: _by_name(fn, getattr(value, f.name)) for f in attrs.fields(type(value))})
    if isinstance(value, dict):
        return {name: _by_name(fn, item) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_by_name(fn, item) for item in value)
    return value


def whole_of(value: T) -> T:
    """The same value with whole tensors, on every rank; all ranks must call it together."""
    return tree.map_tensors(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, value)
