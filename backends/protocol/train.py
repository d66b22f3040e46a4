"""What a training backend promises."""

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
    """Pure functions over training state. The laws that they obey are in ``verl_fn.testing``."""

    def init(self, key: Key) -> Handle[TrainState]:
        """A state with random parameters drawn from ``key``."""
        ...

    def load_pretrained(self, folder: str | Path, key: Key) -> Handle[TrainState]:
        """A fresh state around the parameters of a Hugging Face folder."""
        ...

    def forward(self, params: Handle[Params], batch: Ref[Batch], needs: Iterable[str]) -> Ref[TokenOutputs]:
        """What ``needs`` names, for every token with ``response_mask`` or for every row, without gradients."""
        ...

    def forward_backward(
        self, state: Handle[TrainState], batch: Ref[Batch], loss: Loss
    ) -> tuple[Handle[Grads], Ref[Metrics]]:
        """The gradient of the sum of the loss's weighted values, and its metrics, with the total as ``loss``."""
        ...

    def apply_update(
        self, state: Handle[TrainState], grads: Handle[Grads], *, donate: bool = True
    ) -> tuple[Handle[TrainState], Ref[Metrics]]:
        """The next state; ``state`` and ``grads`` are donated unless ``donate`` is off."""
        ...

    def place(
        self, state: Handle[TrainState], *, params: str | None = None, optimizer: str | None = None
    ) -> Handle[TrainState]:
        """The same state with parameters or optimizer tree on another device."""
        ...

    def save(self, state: Handle[TrainState], folder: str | Path) -> None:
        """Write the state; the folder is then also a Hugging Face model folder."""
        ...

    def restore(self, folder: str | Path) -> Handle[TrainState]:
        """The state that ``save`` wrote, bitwise."""
        ...

    def named(self, value: Handle[Params] | Handle[Grads] | Handle[Slots]) -> Ref[NamedTensors]:
        """Whole tensors under canonical names, to compare, edit or export; a sharded one is gathered when it is read.

        ``dict(named)`` holds all of them at once; where values lie on several ranks, all of them read it together.
        """
        ...

    def weights(self, params: Handle[Params]) -> Handle[WeightSource]:
        """These parameters for ``RolloutBackend.publish``, adapters merged in."""
        ...

    @overload
    def map(self, fn: Callable[P, T], *values: object, keep: Literal[True]) -> Handle[T]: ...
    @overload
    def map(self, fn: Callable[P, T], *values: object, keep: Literal[False] = False) -> Ref[T]: ...
    def map(self, fn: Callable[P, T], *values: object, keep: bool = False) -> Handle[T] | Ref[T]:
        """``fn(*values)`` where the values lie, on every shard: to compare, edit, add or digest them.

        Where values stay with their workers, so does the result of ``fn`` with ``keep``; else it is returned.
        """
        ...
