"""The protocol of training backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload, runtime_checkable

from torch import Tensor
from torch.utils import _pytree as pytree

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

    def forward(self, params: Handle[Params], batch: Batch, needs: Iterable[str]) -> Ref[TokenOutputs]:
        """Returns the outputs that ``needs`` names, without gradients.

        They are given for every token with ``response_mask``, or for every row.
        """
        ...

    def forward_backward(
        self, state: Handle[TrainState], batch: Batch, loss: Loss
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
            values: values that this backend made, and any others. The backend itself stands for that of the process
                in which ``fn`` runs.
            keep: leave the result with the workers, as the values are, and return a handle to it.
        """
        ...


@runtime_checkable
class HoldsBuffers(Protocol):
    """A training backend with memory on its device that is no value of anybody, such as copies that compute."""

    def free_buffers(self) -> None:
        """Frees this memory; a later call allocates what it needs, and no result changes."""
        ...


def whole_leaves(backend: TrainBackend, value: object) -> Iterator[tuple[str, object]]:
    """Yields the leaves of a training state, or of a part of one, by path; tensors are whole, one after the other.

    Sharded tensors are gathered through ``backend.named``, so all ranks go through them together. It is for functions
    that run where the value lies: ``backend.map(fn, backend, value)``.

    Example:
        >>> from verl_fn.steps import sgd
        >>> from verl_fn.testing import Mock
        >>> backend = Mock(2, sgd(lambda count: 0.1))
        >>> [path for path, leaf in whole_leaves(backend, backend.init(Key.from_seed(0)))][:3]
        [".params['logits']", ".params['values']", '.scheduler']
    """

    def is_named(part: object) -> bool:
        return isinstance(part, (Params, Grads, Slots))

    for path, part in pytree.tree_flatten_with_path(value, is_leaf=is_named)[0]:
        place = pytree.keystr(path)
        if not isinstance(part, (Params, Grads, Slots)):
            yield place, part
            continue
        named = cast(NamedTensors, backend.named(part))
        for name, t in named.items() if isinstance(named, Mapping) else named:
            yield f"{place}[{name!r}]", t
