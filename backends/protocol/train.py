"""The protocol of training backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from torch import Tensor

from verl_fn.state import Batch, Grads, Key, Metrics, Params, Slots, TokenOutputs, TrainState
from verl_fn.steps import Loss

from .handles import Handle, Ref
from .weights import WeightSource

P = ParamSpec("P")
T = TypeVar("T")


NamedTensors: TypeAlias = Mapping[str, Tensor] | Iterator[tuple[str, Tensor]]


class TrainBackend(Protocol):
    """Pure functions of training states. ``verl_fn.testing`` checks the laws that they obey."""

    def init(self, key: Key) -> Handle[TrainState]:
        """Returns a state with random parameters drawn from ``key``."""
        ...

    def load_pretrained(self, folder: str | Path, key: Key) -> Handle[TrainState]:
        """Returns a fresh state with the weights of a Hugging Face folder."""
        ...

    def forward(self, params: Handle[Params], batch: Ref[Batch], needs: Iterable[str]) -> Ref[TokenOutputs]:
        """Returns the outputs that ``needs`` names, without gradients.

        They are given for every token with ``response_mask``, or for every row.
        """
        ...

    def forward_backward(
        self, state: Handle[TrainState], batch: Ref[Batch], loss: Loss
    ) -> tuple[Handle[Grads], Ref[Metrics]]:
        """Returns the gradients of the loss's weighted sum over the batch, and metrics with the sum as ``loss``."""
        ...

    def apply_update(
        self, state: Handle[TrainState], grads: Handle[Grads], *, donate: bool = True
    ) -> tuple[Handle[TrainState], Ref[Metrics]]:
        """Returns the next state and metrics; ``state`` and ``grads`` are donated unless ``donate`` is False."""
        ...

    def place(
        self, state: Handle[TrainState], *, params: str | None = None, optimizer: str | None = None
    ) -> Handle[TrainState]:
        """Returns the same state with the parameters or the optimizer tree on another device."""
        ...

    def save(self, state: Handle[TrainState], folder: str | Path) -> None:
        """Writes the state into ``folder``, which is then also a Hugging Face model folder."""
        ...

    def restore(self, folder: str | Path) -> Handle[TrainState]:
        """Returns the state that ``save`` wrote, bitwise."""
        ...

    def named(self, value: Handle[Params] | Handle[Grads] | Handle[Slots]) -> Ref[NamedTensors]:
        """Returns whole tensors by canonical name, to compare, edit or export them.

        A sharded tensor is gathered when it is read, and all ranks read together. ``dict(named)`` holds all tensors
        at once.
        """
        ...

    def weights(self, params: Handle[Params]) -> Handle[WeightSource]:
        """Returns the parameters for ``RolloutBackend.publish``, adapters merged in."""
        ...

    @overload
    def map(self, fn: Callable[P, T], *values: object, keep: Literal[True]) -> Handle[T]: ...
    @overload
    def map(self, fn: Callable[P, T], *values: object, keep: Literal[False] = False) -> Ref[T]: ...
    def map(self, fn: Callable[P, T], *values: object, keep: bool = False) -> Handle[T] | Ref[T]:
        """Applies ``fn`` to values where they lie, on every shard: to compare, edit, add or hash them.

        Args:
            fn: takes the values, or each rank's shards of them.
            values: values that this backend made, and any others.
            keep: leave the result with the workers, as the values are, and return a handle to it.
        """
        ...
