"""Applies an optimizer to the local shards of a state."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from verl_fn.backends.fsdp.sharding import Layout, locals_of, with_specs
from verl_fn.backends.fsdp.torch_private import spec_of
from verl_fn.state import Grads, Metrics, Sum, TrainState, donate, metrics
from verl_fn.steps import Optimizer, apply_update, check_update


def update_shards(
    optimizer: Optimizer, layout: Layout, state: TrainState, grads: Grads, donated: bool
) -> tuple[TrainState, Metrics]:
    """Returns the next state and metrics, as ``steps.apply_update`` does for whole tensors."""
    specs = {name: spec_of(t) for name, t in state.params.items()}
    check_update(optimizer, state, grads)
    copies = 0
    if donated:
        # Donation happens twice: of the DTensors here, and of their local tensors in apply_update.
        state, state_copies = donate(state, "apply_update")
        grads, grads_copies = donate(grads, "apply_update")
        copies = state_copies + grads_copies

    def reduce(total: Tensor) -> Tensor:
        dist.all_reduce(total, group=layout.shard_group)
        return total

    state, grads = locals_of(state), locals_of(grads)
    state, reported = apply_update(optimizer, state, grads, donate_inputs=donated, reduce=reduce)
    return with_specs(state, specs), metrics.merge(reported, {"perf/residency_copies": Sum(copies)})
