"""The memory of Megatron's model on a device. It holds no state: it is freed between calls and allocated again.

Parameters that compute are copies of the masters of a state, and gradients are copied out of their buffer. So nothing
is saved where this memory is freed. Tensors keep their storages, of which the size becomes 0, as in Megatron's own
``offload_grad_buffers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
from torch import Tensor


@attrs.frozen(eq=False)
class Buffers:
    """The storages of a model's parameters and gradients.

    Attributes:
        weights: a tensor of each storage of parameters, and the bytes of the storage.
        gradients: the same of gradients.
    """

    weights: list[tuple[Tensor, int]]
    gradients: list[tuple[Tensor, int]]

    @classmethod
    def of(cls, ddp: Any, owns: Callable[[Tensor], bool] = lambda p: True) -> Buffers:
        """Returns the storages of a model, whose memory is allocated.

        What Megatron-FSDP keeps gathered is not among them.

        Args:
            ddp: Megatron's ``DistributedDataParallel`` or ``FullyShardedDataParallel``.
            owns: whether the memory of a parameter is the model's, and not a state's.
        """
        if ddp.ddp_config.use_megatron_fsdp:
            groups = ddp.param_and_grad_buffer.parameter_groups
            grads = [group.main_grad_buffer for group in groups]
            weights = [group.model_weight_buffer for group in groups]
            return cls(*(_storages(b.data for b in part if b is not None) for part in (weights, grads)))
        flat = (*ddp.buffers, *ddp.expert_parallel_buffers)
        # Frozen parameters are in no buffer.
        return cls(
            _storages(p.data for p in ddp.module.parameters() if owns(p)), _storages(b.grad_data for b in flat)
        )

    @property
    def nbytes(self) -> int:
        """The bytes that are allocated."""
        return sum(t.untyped_storage().nbytes() for t, _ in (*self.weights, *self.gradients))

    def free(self) -> None:
        """Frees all of them."""
        _resize((t, 0) for t, _ in self.weights)
        self.free_gradients()

    def free_gradients(self) -> None:
        """Frees the buffers of gradients."""
        _resize((t, 0) for t, _ in self.gradients)

    def allocate_weights(self) -> None:
        """Allocates the buffers of parameters, with any values, unless they are allocated."""
        _resize(self.weights)

    def allocate_gradients(self) -> None:
        """Allocates the buffers of gradients, with any values, unless they are allocated."""
        _resize(self.gradients)


def _storages(tensors: Iterable[Tensor | None]) -> list[tuple[Tensor, int]]:
    by_address = {t.untyped_storage().data_ptr(): t.detach() for t in tensors if t is not None and t.numel()}
    return [(t, t.untyped_storage().nbytes()) for t in by_address.values()]


def _resize(sizes: Iterable[tuple[Tensor, int]]) -> None:
    for t, nbytes in sizes:
        storage = t.untyped_storage()
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)
