"""The protocol of training backends over Ray actors; algorithms use it as they use local backends."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn.backends import protocol
from verl_fn.backends.protocol import Freed, Ref, WeightSource
from verl_fn.state import Batch, DonatedError, Grads, Key, Params, Slots, TrainState, snapshot
from verl_fn.steps import Loss

from .cluster import Cluster
from .group import Group
from .host import Component, Stored

T = TypeVar("T")


@attrs.define(eq=False)
class Value:
    """A value on every rank of a group; the ranks drop it with the last handle to it.

    Attributes:
        id: its number.
        group: the name of the group.
        fate: why handles to it cannot be used any more.
        fields: the handles to its fields that are in use.
    """

    id: int
    group: str
    fate: str | None = None
    fields: weakref.WeakSet[Remote[Any]] = attrs.field(factory=weakref.WeakSet, repr=False)


@attrs.define(eq=False, slots=True, weakref_slot=True)
class Remote(protocol.Remote[T]):
    """An immutable handle to a value, or to a field of one.

    A donated handle raises ``DonatedError``, as the value itself would. A handle to a field stays valid, since the
    field becomes a value of its own before.

    Attributes:
        value: the value.
        path: of the field; empty for all of the value.
    """

    value: Value
    path: str = ""

    @property
    def params(self) -> Remote[Params]:
        """The parameters of a training state."""
        return self._field("params")

    @property
    def base(self) -> Remote[Params]:
        """The parameters that are not trained."""
        return self._field("base")

    def _field(self, name: str) -> Remote[Any]:
        self.open()
        handle: Remote[Any] = Remote(self.value, f"{self.path}.{name}".lstrip("."))
        self.value.fields.add(handle)
        return handle

    def open(self) -> Stored:
        """Returns what the value is on its ranks.

        Raises:
            DonatedError: the value was donated.
        """
        if self.value.fate is not None:
            raise DonatedError(self.value.fate)
        return Stored(self.value.id, self.value.group, self.path)

    def snapshot(self) -> Any:
        """Raises an error that explains how to copy the value on its ranks.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "this is a handle to a value on its ranks, and a snapshot is made there: backend.map(snapshot, value, "
            "keep=True)"
        )


class RemoteTrain:
    """``TrainBackend`` over a component of a group's ranks, where states and gradients stay, each rank's part."""

    _numbers = itertools.count()

    def __init__(self, cluster: Cluster, group: Group, component: str) -> None:
        self._cluster, self.group, self.component = cluster, group, component

    def init(self, key: Key) -> Remote[TrainState]:
        return self._keep_one("init", key)

    def load_pretrained(self, folder: str | Path, key: Key) -> Remote[TrainState]:
        return self._keep_one("load_pretrained", str(folder), key)

    def restore(self, folder: str | Path) -> Remote[TrainState]:
        return self._keep_one("restore", str(folder))

    def place(
        self, state: Remote[TrainState], *, params: str | None = None, optimizer: str | None = None
    ) -> Remote[TrainState]:
        return self._keep_one("place", state, params=params, optimizer=optimizer)

    def save(self, state: Remote[TrainState], folder: str | Path, *, later: bool = False) -> None:
        self._invoke("save", (), state, str(folder), **({"later": True} if later else {}))
        self._cluster.finish(self.group)

    def saved(self) -> None:
        self._invoke("saved", ())
        self._cluster.finish(self.group)

    def forward(self, params: protocol.Remote[Params], batch: Batch, needs: Iterable[str] = ("logprobs",)) -> Any:
        return self._invoke("forward", (), params, batch, tuple(needs))

    def forward_backward(self, state: Remote[TrainState], batch: Batch, loss: Loss) -> tuple[Remote[Grads], Any]:
        grads = self._new()
        return grads, self._invoke("forward_backward", (grads.value.id, None), state, batch, loss)

    def apply_update(
        self, state: Remote[TrainState], grads: Remote[Grads], *, donate: bool = True
    ) -> tuple[Remote[TrainState], Any]:
        if donate:
            for prepare in self._cluster.before_update:
                prepare(self.component)
            self._keep_fields(state)
        new = self._new()
        metrics = self._invoke("apply_update", (new.value.id, None), state, grads, donate=donate)
        if donate:
            # Before the call has ended, since only the ranks know whether it failed before it used the values.
            for value, name in ((state, "TrainState"), (grads, "Grads")):
                value.value.fate = (
                    f"this remote {name} was donated to apply_update, also if that has failed. Use the value that "
                    "apply_update returned, or restore a checkpoint if it failed; to keep the old one, pass "
                    "donate=False."
                )
        return new, metrics

    def _keep_fields(self, state: Remote[TrainState]) -> None:
        """Makes values of their own of the fields in use, so that donation copies the tensors that they share."""
        values: dict[str, Remote[Any]] = {}
        for field in list(state.value.fields):
            if field.path not in values:
                values[field.path] = self.map(operator.attrgetter(field.path), state, keep=True)
            field.value, field.path = values[field.path].value, ""

    def map(self, fn: Callable[..., Any], *values: Any, keep: bool = False) -> Any:
        """Applies ``fn`` to every rank's part of ``values``.

        All ranks run it together, so it may gather whole tensors from shards.

        Returns:
            A handle to the results if ``keep``, else a reference to the result of the first rank.
        """
        inside = pytree.tree_leaves([value for value in values if not isinstance(value, Remote)])
        if any(isinstance(leaf, Remote) for leaf in inside):
            raise TypeError("map opens handles that are arguments of their own, not those inside lists or dicts")
        opened = [self._opened(value) for value in values]
        if not keep:
            return self.group.run("map", fn, None, *opened)
        value = self._new()
        self.group.run("map", fn, value.value.id, *opened)
        return value

    def named(self, value: protocol.Remote[Params | Grads | Slots]) -> Ref[dict[str, Tensor]]:
        """Returns a reference to whole tensors by name, on the CPU: to compare or export them, not to publish."""
        named: Ref[dict[str, Tensor]] = self.map(_named, self, value)
        return named

    def weights(self, params: protocol.Remote[Params]) -> RemoteWeights:
        """Returns a handle to the weights; ``RemoteRollout.publish`` sends them directly to the engine."""
        self._opened(params)
        return RemoteWeights(self, params)

    def send(self, weights: RemoteWeights, version: int, addresses: Sequence[tuple[str, int]]) -> None:
        """Sends weights from their ranks to the engines at these addresses."""
        stored = self._opened(weights.params)
        self.group.run("send", self.component, stored, version, list(addresses), self._cluster.secret)

    def _keep_one(self, method: str, *args: Any, **kwargs: Any) -> Remote[Any]:
        value = self._new()
        self._invoke(method, (value.value.id,), *args, **kwargs)
        self._cluster.finish(self.group)
        return value

    def _new(self) -> Remote[Any]:
        value = Value(next(self._numbers), self.group.name)
        weakref.finalize(value, self.group.dropped.append, value.id)
        return Remote(value)

    def _invoke(self, method: str, keep: tuple[int | None, ...], *args: Any, **kwargs: Any) -> Any:
        return self.group.run("invoke", self.component, method, keep, kwargs, *map(self._opened, args))

    def _opened(self, value: Any) -> Any:
        if value is self:
            return Component(self.component)
        if isinstance(value, Batch):
            return self._cluster.stored(value)
        if not isinstance(value, Remote):
            return value
        stored = value.open()
        if stored.group != self.group.name:
            raise Freed(
                f"this value lies on the ranks of {stored.group}, and {self.component} is on those of "
                f"{self.group.name}: save the state that it belongs to, and restore it there"
            )
        return stored


def _named(backend: Any, value: Any) -> dict[str, Tensor]:
    """Returns whole tensors by name, on the CPU; all ranks gather them together."""
    tensors = backend.named(value)
    return {name: t.cpu() for name, t in (tensors.items() if isinstance(tensors, Mapping) else tensors)}


@attrs.frozen(eq=False)
class RemoteWeights(protocol.Remote[WeightSource]):
    """A handle to weights on the ranks of a group.

    Attributes:
        backend: the training backend that has the weights.
        params: the handle of the parameters, kept so that they stay alive.
    """

    backend: RemoteTrain
    params: protocol.Remote[Params]

    def copied(self) -> RemoteWeights:
        """Returns a handle to a copy of the weights; an update does not change it."""
        copy: Remote[Params] = self.backend.map(snapshot, self.params, keep=True)
        return RemoteWeights(self.backend, copy)
