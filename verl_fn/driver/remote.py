"""The protocol of training backends over Ray actors; algorithms use it as they use local backends."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
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


@attrs.define(eq=False, slots=True, weakref_slot=True)
class Remote(protocol.Remote[T]):
    """An immutable handle to a value on every rank of a group; the value is dropped with its last handle.

    A donated handle raises ``DonatedError``, as the value itself would.

    Attributes:
        stored: the number of the value on the ranks.
        fate: why the handle cannot be used any more.
        fields: the field handles of it that are in use.
    """

    stored: Stored
    fate: str | None = None
    fields: weakref.WeakSet[RemoteField[Any]] = attrs.field(factory=weakref.WeakSet, repr=False)

    @property
    def params(self) -> RemoteField[Params]:
        """The parameters of a training state."""
        self.open()
        return self.field("params")

    def field(self, path: str) -> RemoteField[Any]:
        """Returns a handle to a field."""
        handle: RemoteField[Any] = RemoteField(self, path)
        self.fields.add(handle)
        return handle

    def open(self) -> Stored:
        """Returns the number of the value.

        Raises:
            DonatedError: the value was donated.
        """
        if self.fate is not None:
            raise DonatedError(self.fate)
        return self.stored

    def snapshot(self) -> Any:
        """Raises an error that explains how to copy the value on its ranks.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "this is a handle to a value on its ranks, and a snapshot is made there: backend.map(snapshot, value, "
            "keep=True)"
        )


@attrs.define(eq=False, slots=True, weakref_slot=True)
class RemoteField(protocol.Remote[T]):
    """A handle to a field of a remote value, or to all of it where the path is empty; it keeps the value alive.

    It is valid after the value was donated, since the field becomes a value of its own before.
    """

    parent: Remote[Any]
    path: str

    snapshot = Remote.snapshot

    @property
    def base(self) -> RemoteField[Params]:
        """The parameters that are not trained."""
        return self.parent.field(f"{self.path}.base".lstrip("."))

    def open(self) -> Stored:
        """Returns the number of the value and the path of the field."""
        return attrs.evolve(self.parent.open(), field=self.path or None)


class RemoteTrain:
    """``TrainBackend`` over a component of a group's ranks, where states and gradients stay, each rank's part."""

    _numbers = itertools.count()

    def __init__(self, cluster: Cluster, group: Group, component: str) -> None:
        self._cluster, self._group, self._component = cluster, group, component

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

    def save(self, state: Remote[TrainState], folder: str | Path) -> None:
        self._invoke("save", (), state, str(folder))
        self._cluster.finish(self._group)

    def forward(self, params: protocol.Remote[Params], batch: Batch, needs: Iterable[str] = ("logprobs",)) -> Any:
        return self._compute("forward", (), params, batch, tuple(needs))

    def forward_backward(self, state: Remote[TrainState], batch: Batch, loss: Loss) -> tuple[Remote[Grads], Any]:
        grads = self._new()
        return grads, self._compute("forward_backward", (grads.stored.id, None), state, batch, loss)

    def apply_update(
        self, state: Remote[TrainState], grads: Remote[Grads], *, donate: bool = True
    ) -> tuple[Remote[TrainState], Any]:
        if donate:
            for prepare in self._cluster.before_update:
                prepare(self._component)
            self._keep_fields(state)
        new = self._new()
        metrics = self._invoke("apply_update", (new.stored.id, None), state, grads, donate=donate)
        if donate:
            # Before the call has ended, since only the ranks know whether it failed before it used the values.
            for value, name in ((state, "TrainState"), (grads, "Grads")):
                value.fate = (
                    f"this remote {name} was donated to apply_update, also if that has failed. Use the value that "
                    "apply_update returned, or restore a checkpoint if it failed; to keep the old one, pass "
                    "donate=False."
                )
        return new, metrics

    def _keep_fields(self, state: Remote[TrainState]) -> None:
        """Makes values of their own of the fields in use, so that donation copies the tensors that they share."""
        values: dict[str, Remote[Any]] = {}
        for field in list(state.fields):
            if field.path not in values:
                values[field.path] = self.map(operator.attrgetter(field.path), state, keep=True)
            field.parent, field.path = values[field.path], ""

    def map(self, fn: Callable[..., Any], *values: Any, keep: bool = False) -> Any:
        """Applies ``fn`` to every rank's part of ``values``.

        All ranks run it together, so it may gather whole tensors from shards.

        Returns:
            A handle to the results if ``keep``, else a reference to the result of the first rank.
        """
        inside = pytree.tree_leaves([value for value in values if not isinstance(value, (Remote, RemoteField))])
        if any(isinstance(leaf, (Remote, RemoteField)) for leaf in inside):
            raise TypeError("map opens handles that are arguments of their own, not those inside lists or dicts")
        opened = [self._opened(value) for value in values]
        if not keep:
            return self._group.run("map", fn, None, *opened)
        value = self._new()
        self._group.run("map", fn, value.stored.id, *opened)
        return value

    def named(self, value: protocol.Remote[Params | Grads | Slots]) -> Ref[dict[str, Tensor]]:
        """Returns a reference to whole tensors by name, on the CPU: to compare or export them, not to publish."""
        named: Ref[dict[str, Tensor]] = self._group.run("named", self._component, self._opened(value))
        return named

    def weights(self, params: protocol.Remote[Params]) -> RemoteWeights:
        """Returns a handle to the weights; ``RemoteRollout.publish`` sends them directly to the engine."""
        self._opened(params)
        return RemoteWeights(self, params)

    def send(self, weights: RemoteWeights, version: int, addresses: Sequence[tuple[str, int]]) -> None:
        """Sends weights from their ranks to the engines at these addresses."""
        stored = self._opened(weights.params)
        self._group.run("send", self._component, stored, version, list(addresses), self._cluster.secret)

    def _keep_one(self, method: str, *args: Any, **kwargs: Any) -> Remote[Any]:
        value = self._new()
        self._invoke(method, (value.stored.id,), *args, **kwargs)
        self._cluster.finish(self._group)
        return value

    def _new(self) -> Remote[Any]:
        value: Remote[Any] = Remote(Stored(next(self._numbers), self._group.name))
        weakref.finalize(value, self._group.dropped.append, value.stored.id)
        return value

    def _invoke(self, method: str, keep: tuple[int | None, ...], *args: Any, **kwargs: Any) -> Any:
        return self._group.run("invoke", self._component, method, keep, kwargs, *map(self._opened, args))

    def _compute(self, method: str, keep: tuple[int | None, ...], *args: Any) -> Any:
        """Calls a method that only reads its batch: each rank copies its own rows."""
        return self._group.run("compute", self._component, method, keep, {}, *map(self._opened, args))

    def _opened(self, value: Any) -> Any:
        if value is self:
            return Component(self._component)
        if isinstance(value, Batch):
            return self._cluster.stored(value)
        if not isinstance(value, (Remote, RemoteField)):
            return value
        stored = value.open()
        if stored.group != self._group.name:
            raise Freed(
                f"this value lies on the ranks of {stored.group}, and {self._component} is on those of "
                f"{self._group.name}: save the state that it belongs to, and restore it there"
            )
        return stored


@attrs.frozen(eq=False)
class RemoteWeights(protocol.Remote[WeightSource]):
    """A handle to weights on the ranks of a group.

    Attributes:
        backend: the training backend that has the weights.
        params: the handle of the parameters, kept so that they stay alive.
    """

    backend: RemoteTrain
    params: protocol.Remote[Params]

    @property
    def component(self) -> str:
        """The name of the training backend."""
        return self.backend._component

    @property
    def group(self) -> Group:
        """The ranks."""
        return self.backend._group

    def copied(self) -> RemoteWeights:
        """Returns a handle to a copy of the weights; an update does not change it."""
        copy: Remote[Params] = self.backend.map(snapshot, self.params, keep=True)
        return RemoteWeights(self.backend, copy)
