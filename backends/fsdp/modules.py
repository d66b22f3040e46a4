"""FSDP's modules around a skeleton: they own no parameters, and point at the shards of a state during a call."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from verl_fn.backends.fsdp import torch_private
from verl_fn.backends.fsdp.sharding import Layout, moved
from verl_fn.backends.fsdp.torch_private import Place, local_of, parameter, sharded, spec_of
from verl_fn.backends.hf.folder import ModelError
from verl_fn.backends.hf.lora import canonical
from verl_fn.backends.hf.skeleton import Skeleton, compile_layer


class ShardedModules:
    """Shards a skeleton layer by layer.

    Args:
        skeleton: on the meta device.
        shapes: every parameter by canonical name, on the meta device.
        reduce_dtype: in which gradients are summed over ranks.
        reshard: drop a layer's gathered parameters after each use; otherwise they stay for the whole call.

    Raises:
        ModelError: the model has no list of layers to shard by.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        shapes: Mapping[str, Tensor],
        layout: Layout,
        device: torch.device,
        *,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        reshard: bool,
        compile: bool,
        folder: Path,
    ) -> None:
        self.reduce_dtype = reduce_dtype
        self.skeleton = skeleton
        self.layout = layout
        self.device = device
        self.shapes = shapes
        self._wrap(dtype, reshard, compile, folder)
        self._groups = torch_private.groups_of(skeleton)
        names = {id(m): name for name, m in skeleton.model.named_modules(remove_duplicate=False)}
        places = (place for group in self._groups for place in torch_private.places_of(group))
        self._places: dict[str, Place] = {_name_of(place, names, shapes): place for place in places}
        specs = {name: layout.spec(t.shape, t.dtype) for name, t in shapes.items()}
        empty = {name: sharded(torch.empty(0, device="meta"), spec) for name, spec in specs.items()}
        self._empty = {name: parameter(t, False) for name, t in empty.items()}

    @contextlib.contextmanager
    def pointing_at(
        self, leaves: Mapping[str, Tensor], trained: Collection[str]
    ) -> Iterator[dict[str, nn.Parameter]]:
        """Points FSDP's modules at these shards, and yields the parameters in which gradients accumulate.

        FSDP is idle afterwards and holds none of the shards, also after an error.

        Args:
            leaves: the shards of every parameter, by canonical name.

        Raises:
            ValueError: this model has other names or shapes, or freezes a parameter of ``trained``.
        """
        self._check(leaves, trained)
        pointed = {}
        try:
            for group in self._groups:
                torch_private.reduce_in(group, self.reduce_dtype)
            for name, place in self._places.items():
                pointed[name] = parameter(self._ready(name, leaves[name]), name in trained)
                torch_private.point(place, pointed[name])
            yield pointed
        except BaseException:
            torch_private.reset(self.skeleton)
            raise
        finally:
            nothing = torch.empty(0, device=self.device)
            for group in self._groups:
                torch_private.drop_gathered(group)
            for name, place in self._places.items():
                torch_private.let_go(place, self._empty[name], nothing)

    def reduce_gradients(self, at_once: bool) -> None:
        """Sets whether the next backward pass sums gradients over ranks, or keeps them for a later pass that does.

        With one rank there is nothing to sum, so gradients are never kept.
        """
        root: nn.Module = self.skeleton
        assert isinstance(root, FSDPModule)  # `fully_shard` changed its class
        root.set_requires_gradient_sync(at_once or self.layout.size == 1)

    def _ready(self, name: str, leaf: Tensor) -> Tensor:
        """Returns a leaf on this device; FSDP has fixed the dtype of each parameter since its first call."""
        leaf, wanted = moved(leaf, self.device), self.shapes[name]
        if leaf.dtype == wanted.dtype:
            return leaf
        return sharded(local_of(leaf).to(wanted.dtype), self.layout.spec(wanted.shape, wanted.dtype))

    def _check(self, leaves: Mapping[str, Tensor], trained: Collection[str]) -> None:
        if leaves.keys() != self._places.keys():
            differing = sorted(leaves.keys() ^ self._places.keys())
            raise ValueError(f"the state's parameters are not this model's: {differing[:5]}")
        self.layout.check(leaves)
        if others := [name for name, t in leaves.items() if t.shape != self.shapes[name].shape]:
            raise ValueError(f"the state's parameters have other shapes than this model's: {others[:5]}")
        if narrow := [name for name in leaves if name in trained and self.shapes[name].dtype != torch.float32]:
            raise ValueError(
                f"{len(narrow)} trainable parameters, such as {narrow[0]}, are frozen in this backend's model and "
                "lie in its compute dtype; leave params.trainable as the backend made it"
            )

    def _wrap(self, dtype: torch.dtype, reshard: bool, compile: bool, folder: Path) -> None:
        model = self.skeleton.model
        layers = self.skeleton.layers
        if not layers:
            raise ModelError(f"{folder}: {type(model).__name__} has no list of layers to shard by")
        mesh = self.layout.mesh
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=self.reduce_dtype
        )
        for layer in layers:
            if compile:
                compile_layer(layer)
        for layer in (*layers, *self.skeleton.tower_layers):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        # The root's own parameters stay gathered until its backward pass, since the output layer is used without
        # calling its module.
        fully_shard(self.skeleton, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in self.skeleton.modules():
            if isinstance(module, FSDPModule):
                if self.layout.size > 1:
                    # Gradients of all ranks' rows are summed; the weights of the batch hold every denominator.
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
                module.set_reshard_after_backward(reshard)


def gradient(of: nn.Parameter, like: Tensor) -> Tensor:
    """Returns the accumulated gradient, sharded as ``like``; zeros where the loss doesn't depend on the parameter."""
    if of.grad is None:
        return torch.zeros_like(like, dtype=torch.float32)
    local = local_of(of.grad)
    # The same memory, without autograd's reference to the buffer of all gradients of a layer: it would keep that
    # buffer alive.
    plain = local.new_empty(0).set_(local.untyped_storage(), local.storage_offset(), local.size(), local.stride())
    return sharded(plain, spec_of(like))


def _name_of(place: Place, names: Mapping[int, str], params: Collection[str]) -> str:
    """Returns the canonical name of a parameter, of the several that a tied one has."""
    owners = torch_private.owners_of(place)
    candidates = [canonical(f"{names[id(module)]}.{name}".lstrip(".")) for module, name in owners]
    return next(name for name in candidates if name in params)
