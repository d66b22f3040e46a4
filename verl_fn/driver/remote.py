"""The backend protocols over Ray actors: the algorithm cannot tell them from local ones."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import ray
from torch.utils import _pytree as pytree

from verl_fn.algorithms.workers import Freed
from verl_fn.backends.protocol import Sampling
from verl_fn.state import DonatedError, Key
from verl_fn.steps import Loss

from .cluster import Cluster
from .group import Group
from .host import Stored


@attrs.define(eq=False, slots=True, weakref_slot=True)
class Remote:
    """An immutable handle to a value on every rank of a group. When the last handle goes, so does the value.

    A donated handle raises ``DonatedError``, as the value itself would.

    Attributes:
        fate: why it cannot be used any more.
        fields: those of its fields that somebody holds.
    """

    stored: Stored
    fate: str | None = None
    fields: weakref.WeakSet[RemoteField] = attrs.field(factory=weakref.WeakSet, repr=False)

    @property
    def params(self) -> RemoteField:
        """The parameters of a training state."""
        self.open()
        return self.field("params")

    def field(self, path: str) -> RemoteField:
        found = RemoteField(self, path)
        self.fields.add(found)
        return found

    def open(self) -> Stored:
        if self.fate is not None:
            raise DonatedError(self.fate)
        return self.stored

    def snapshot(self) -> Any:
        """Refused: a copy is made where the value lies.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "this is a handle to a value on its ranks, and a snapshot is made there: backend.map(snapshot, value, "
            "keep=True)"
        )


@attrs.define(eq=False, slots=True, weakref_slot=True)
class RemoteField:
    """One field of a remote value, or all of it where the path is empty; it keeps the value alive.

    It means what it meant also after the value was donated: then it has become a value of its own.
    """

    parent: Remote
    path: str

    snapshot = Remote.snapshot

    @property
    def base(self) -> RemoteField:
        """The parameters that are not trained."""
        return self.parent.field(f"{self.path}.base".lstrip("."))

    def open(self) -> Stored:
        return attrs.evolve(self.parent.open(), field=self.path or None)


class RemoteTrain:
    """``TrainBackend`` over a component of a group's ranks. States and gradients stay there, each rank's part."""

    _numbers = itertools.count()

    def __init__(self, cluster: Cluster, group: Group, component: str) -> None:
        self._cluster, self._group, self._component = cluster, group, component

    def init(self, key: Key) -> Remote:
        return self._keep_one("init", key)

    def load_pretrained(self, folder: str | Path, key: Key) -> Remote:
        return self._keep_one("load_pretrained", str(folder), key)

    def restore(self, folder: str | Path) -> Remote:
        return self._keep_one("restore", str(folder))

    def place(self, state: Remote, *, params: str | None = None, optimizer: str | None = None) -> Remote:
        return self._keep_one("place", state, params=params, optimizer=optimizer)

    def save(self, state: Remote, folder: str | Path) -> None:
        self._invoke("save", (), state, str(folder))
        self._cluster.finish(self._group)

    def forward(self, params: RemoteField | Remote, batch: Any, needs: Iterable[str] = ("logprobs",)) -> Any:
        return self._invoke("forward", (), params, batch, tuple(needs))

    def forward_backward(self, state: Remote, batch: Any, loss: Loss) -> tuple[Remote, Any]:
        grads = self._new()
        return grads, self._invoke("forward_backward", (grads.stored.id, None), state, batch, loss)

    def apply_update(self, state: Remote, grads: Remote, *, donate: bool = True) -> tuple[Remote, Any]:
        if donate:
            self._keep_fields(state)
        new = self._new()
        metrics = self._invoke("apply_update", (new.stored.id, None), state, grads, donate=donate)
        if donate:
            # At once: whether the ranks refuse the call before they spend anything is known only later.
            for value, name in ((state, "TrainState"), (grads, "Grads")):
                value.fate = (
                    f"this remote {name} was donated to apply_update, also if that has failed. Use the value that "
                    "apply_update returned, or restore a checkpoint if it failed; to keep the old one, pass "
                    "donate=False."
                )
        return new, metrics

    def _keep_fields(self, state: Remote) -> None:
        """Make values of their own of the fields that are held, so that donation copies what they share with it."""
        kept: dict[str, Remote] = {}
        for field in list(state.fields):
            if field.path not in kept:
                kept[field.path] = self.map(operator.attrgetter(field.path), state, keep=True)
            field.parent, field.path = kept[field.path], ""

    def map(self, fn: Callable[..., Any], *values: Any, keep: bool = False) -> Any:
        """``fn`` of every rank's part of ``values``: a handle if ``keep``, else a reference to the first rank's result.

        Where the parts are shards, ``fn`` may put them together (``full_tensor``): all ranks run it at once.
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

    def named_tensors(self, params: RemoteField | Remote) -> Any:
        """A reference to the tensors, which go to the engine without passing through the driver."""
        return self._group.run("named_tensors", self._component, self._opened(params))

    def _keep_one(self, method: str, *args: Any, **kwargs: Any) -> Remote:
        value = self._new()
        self._invoke(method, (value.stored.id,), *args, **kwargs)
        self._cluster.finish(self._group)
        return value

    def _new(self) -> Remote:
        value = Remote(Stored(next(self._numbers), self._group.name))
        weakref.finalize(value, self._group.dropped.append, value.stored.id)
        return value

    def _invoke(self, method: str, keep: tuple[int | None, ...], *args: Any, **kwargs: Any) -> Any:
        return self._group.run("invoke", self._component, method, keep, kwargs, *map(self._opened, args))

    def _opened(self, value: Any) -> Any:
        if not isinstance(value, (Remote, RemoteField)):
            return value
        stored = value.open()
        if stored.group != self._group.name:
            raise Freed(
                f"this value lies on the ranks of {stored.group}, and {self._component} is on those of "
                f"{self._group.name}: save the state that it belongs to, and restore it there"
            )
        return stored


class RemoteRollout:
    """``RolloutBackend`` over a component of an actor; batches come back as references."""

    def __init__(self, group: Group, component: str) -> None:
        self._group, self._component = group, component
        self._version: int | None = None
        self._publishing: tuple[int, Any] | None = None

    @property
    def version(self) -> int | None:
        """The version that the engine is known to hold; None while another is on its way."""
        if self._publishing is not None:
            version, ref = self._publishing
            if ray.wait([ref], timeout=0)[0]:
                self._publishing = None
                try:
                    ray.get(ref)
                    self._version = version
                except ray.exceptions.RayError:
                    # Whoever waits for the reference is told; here it only means that nothing is known.
                    self._version = None
        return self._version

    def publish(self, version: int, named_tensors: Any) -> Any:
        self._version = None
        ref = self._invoke("publish", version, named_tensors)
        self._publishing = version, ref
        return ref

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: Key, *, ids: Sequence[int] | None = None,
        version: int | None = None,
    ) -> Any:  # fmt: skip
        return self._invoke("generate", prompts, sampling, key, ids=ids, version=version)

    def sleep(self) -> Any:
        self._version = self._publishing = None
        return self._invoke("sleep")

    def wake(self) -> Any:
        return self._invoke("wake")

    def _invoke(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._group.run("invoke", self._component, method, (), kwargs, *args)
