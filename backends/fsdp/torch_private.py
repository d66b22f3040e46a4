"""Every private name of PyTorch that sharding uses, in one file; written for version 2.11.

FSDP2 has no public way to point its modules at other shards, to read which tensor belongs to which parameter, or to
return to its idle state after a pass that failed. A test lists every name that is used here and looks it up, so that
another version of PyTorch fails with the name that it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

Spec: TypeAlias = DTensorSpec
Group: TypeAlias = Any  # FSDP's record of the parameters that are gathered together
Place: TypeAlias = Any  # FSDP's record of one parameter


def spec(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype) -> Spec:
    """Returns how a contiguous tensor is sharded over a mesh."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def of_dtype(spec: Spec, dtype: torch.dtype) -> Spec:
    """Returns the sharding of a tensor of the same shape and another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def sharded(local: Tensor, spec: Spec) -> DTensor:
    """Returns the sharded tensor whose local part is ``local``, without the cost of PyTorch's dispatcher."""
    return DTensor(local, spec, requires_grad=False)


def parameter(t: Tensor, trained: bool) -> nn.Parameter:
    """Returns a sharded tensor as a parameter, as ``nn.Parameter`` does, without the cost of PyTorch's dispatcher."""
    tensor = DTensor(local_of(t), spec_of(t), requires_grad=trained)
    tensor._is_param = True  # by which `isinstance(tensor, nn.Parameter)` holds
    return tensor  # type: ignore[return-value]


def local_of(t: Tensor) -> Tensor:
    """Returns this rank's part of a tensor: its shard, or the tensor itself where that is not sharded."""
    return t._local_tensor if isinstance(t, DTensor) else t


def spec_of(t: Tensor) -> Spec:
    """Returns how a sharded tensor is sharded."""
    assert isinstance(t, DTensor)
    return t._spec


def groups_of(root: nn.Module) -> list[Group]:
    """Returns FSDP's groups of parameters, in the order of the modules that it was applied to."""
    groups = (state._fsdp_param_group for state in _states(root))
    return [group for group in groups if group is not None]


def places_of(group: Group) -> list[Place]:
    """Returns the records of the parameters of a group."""
    return list(group.fsdp_params)


def owners_of(place: Place) -> list[tuple[nn.Module, str]]:
    """Returns the modules that have this parameter, several for a tied one, with its name in each."""
    info = place._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def point(place: Place, at: nn.Parameter) -> None:
    """Makes FSDP gather the shards of ``at`` and accumulate gradients in it."""
    place._setattr_on_modules(at)
    place.reset_sharded_param()


def let_go(place: Place, empty: nn.Parameter, nothing: Tensor) -> None:
    """Makes FSDP forget the shards that it was pointed at, so that they can be donated."""
    place._setattr_on_modules(empty)
    place.sharded_param = empty
    place._sharded_param_data = nothing


def reduce_in(group: Group, dtype: torch.dtype) -> None:
    """Sets the dtype of sums over ranks, whose results are fp32; FSDP sets it once, by what its first pass trains."""
    group._orig_dtype, group._reduce_dtype = torch.float32, dtype


def drop_gathered(group: Group) -> None:
    """Drops gathered parameters, since the next call may be given other shards."""
    group.reshard()


def reset(root: nn.Module) -> None:
    """Returns FSDP to its idle state after a pass that did not end.

    After a pass that stops between two hooks, FSDP would neither gather nor reduce in the next one. This clears all
    state of a pass, and drops every gathered parameter and unfinished gradient.
    """
    for state in _states(root):
        idle = type(state._training_state).IDLE
        state._training_state = idle
        context, comm = state._state_ctx, state._comm_ctx
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        context.is_last_backward = True
        if hasattr(comm, "post_forward_order"):
            _settle(comm)
        group = state._fsdp_param_group
        if group is not None:
            _reset_group(group, idle)


def _settle(comm: Any) -> None:
    """Makes the compute stream wait for FSDP's own streams, and drops the tensors that they were to hand over."""
    current = comm.device_handle.current_stream()
    for name in ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"):
        current.wait_stream(getattr(comm, name))
    comm.post_forward_order.clear()
    comm.all_gather_state = comm.reduce_scatter_state = None


def _reset_group(group: Group, idle: Any) -> None:
    pending = group._all_gather_result
    if pending is not None and isinstance(pending.all_gather_work, Work):
        pending.all_gather_work.wait()
    group._all_gather_result = None
    group._post_forward_indices.clear()
    group._post_reduce_event = group._reshard_after_forward_event = None
    group._all_reduce_state = group._partial_reduce_output = None
    group._training_state = idle
    for place in group.fsdp_params:
        place.unsharded_accumulated_grad = None
        if (gathered := getattr(place, "_unsharded_param", None)) is not None:
            gathered.grad = None
    group.reshard()


def _states(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield module._get_fsdp_state()
