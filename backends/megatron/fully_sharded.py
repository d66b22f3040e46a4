"""Megatron-FSDP in place of Megatron's DDP: ranks divide the parameters that compute, too, layer by layer.

Megatron-FSDP gathers the parameters of a layer for its forward and for its backward pass, and divides gradients as
soon as they are there. A state is what it is with DDP: the elements of each parameter that a rank owns, in fp32. Here
Megatron-FSDP decides which these are, and holds its own copy of them only in the compute dtype.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, nn

from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.megatron.layout import Layout, Sizes
from verl_fn.backends.megatron.shards import Piece

SETTINGS = {
    "use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params", "overlap_grad_reduce": True,
    "overlap_param_gather": True, "megatron_fsdp_main_params_dtype": None,
    "megatron_fsdp_main_grads_dtype": torch.float32, "megatron_fsdp_grad_comm_dtype": torch.float32,
}  # fmt: skip
"""Fields of Megatron's ``DistributedDataParallelConfig``. Masters belong to states, so Megatron-FSDP has none."""


def check_fully_sharded(sizes: Sizes, *, adapters: bool, updates_by: str) -> None:
    """Raises an error for what does not go together with Megatron-FSDP, or was not tried with it.

    Raises:
        LayoutError: it is asked for.

    Example:
        >>> check_fully_sharded(Sizes(tp=2), adapters=False, updates_by="verl_fn")
        Traceback (most recent call last):
        verl_fn.backends.hf.ulysses.LayoutError: Megatron-FSDP was not tried with tp = 2: set it to 1, or turn ...
    """
    if sizes.pp > 1:
        problem = f"has no pipeline parallelism, and pp = {sizes.pp}: set it to 1"
    elif sizes.tp > 1:
        problem = f"was not tried with tp = {sizes.tp}: set it to 1"
    elif adapters:
        problem = "was not tried with adapters: train all parameters"
    elif updates_by != "verl_fn":
        problem = "was not tried with Megatron's own optimizer: let verl_fn compute updates"
    else:
        return
    raise LayoutError(f"Megatron-FSDP {problem}, or turn Megatron-FSDP off")


def unwrapped(ddp: Any) -> Any:
    """Returns the model inside, with the parameters that compute in place of Megatron-FSDP's DTensors.

    Args:
        ddp: Megatron's ``FullyShardedDataParallel``.
    """
    for _, param in ddp.param_and_grad_buffer.optimizer_named_parameters:
        # Megatron-FSDP gives them gradients in fp32, and expects masters in fp32 where it has none here.
        param.grad_dtype = None
    ddp.module._replace_param_with_raw_if_needed()
    return ddp.module.module


@attrs.frozen(eq=False)
class _Sharded(Piece):
    """The elements of one parameter that a rank owns of Megatron-FSDP's buffers.

    Attributes:
        buffers: Megatron-FSDP's group of parameters.
        number: of the parameter in this group.
    """

    buffers: Any
    number: int

    @property
    def weight(self) -> Tensor:
        """The elements in the buffer of parameters."""
        return self.buffers.model_weight_buffer.get_item(self.number, only_shard=True)

    @property
    def gradient(self) -> Tensor:
        """The elements in the buffer of gradients."""
        return self.buffers.main_grad_buffer.get_item(self.number, only_shard=True)


def sharded_pieces(ddp: Any, layout: Layout) -> dict[nn.Parameter, Piece]:
    """Returns the pieces of this rank: empty for parameters of which it owns nothing.

    Args:
        ddp: Megatron's ``FullyShardedDataParallel``.
        layout: how ranks share the model.
    """
    pieces: dict[nn.Parameter, Piece] = {}
    for group in ddp.param_and_grad_buffer.parameter_groups:
        ranks = layout.groups.expt_dp if group.is_expert_param else layout.groups.dp_cp
        for number, param in enumerate(group.params):
            start, stop = group.main_grad_buffer._get_item_slice_in_shard(number)
            pieces[param] = _Sharded(param, start, stop, (start, stop), False, ranks, group, number)
    return pieces
