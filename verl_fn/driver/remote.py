"""The backend protocols over Ray actors: the algorithm cannot tell them from local ones."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.backends.protocol import Sampling
from verl_fn.state import DonatedError, Key
from verl_fn.steps import Loss

from .host import Stored


@attrs.define(eq=False, slots=True, weakref_slot=True)
class Remote:
    """An immutable handle to a value in an actor. When the last handle goes, so does the value.

    A donated handle raises ``DonatedError``, as the value itself would.
    """

    stored: Stored
    host: Any
    fate: str | None = None

    @property
    def params(self) -> RemoteField:
        """The parameters of a training state."""
        return RemoteField(self, "params")

    def open(self) -> Stored:
        if self.fate is not None:
            raise DonatedError(self.fate)
        return self.stored


@attrs.frozen(eq=False)
class RemoteField:
    """One field of a remote value; it keeps the value alive."""

    parent: Remote
    field: str

    @property
    def host(self) -> Any:
        return self.parent.host

    def open(self) -> Stored:
        return attrs.evolve(self.parent.open(), field=self.field)


class RemoteTrain:
    """``TrainBackend`` over a component of an actor. States and gradients stay there."""

    _numbers = itertools.count()

    def __init__(self, host: Any, component: str, get: Any) -> None:
        self._host, self._component, self._get = host, component, get
        self._dropped: list[int] = []

    def init(self, key: Key) -> Remote:
        return self._keep_one("init", key)

    def load_pretrained(self, folder: str | Path, key: Key) -> Remote:
        return self._keep_one("load_pretrained", str(folder), key)

    def restore(self, folder: str | Path) -> Remote:
        return self._keep_one("restore", str(folder))

    def place(self, state: Remote, *, params: str | None = None, optimizer: str | None = None) -> Remote:
        return self._keep_one("place", state, params=params, optimizer=optimizer)

    def save(self, state: Remote, folder: str | Path) -> None:
        self._get(self._invoke("save", (), state, str(folder)))

    def forward(self, params: RemoteField, batch: Any, needs: Iterable[str] = ("logprobs",)) -> Any:
        return self._invoke("forward", (), params, batch, tuple(needs))

    def forward_backward(self, state: Remote, batch: Any, loss: Loss) -> tuple[Remote, Any]:
        grads = self._new()
        return grads, self._invoke("forward_backward", (grads.stored.id, None), state, batch, loss)

    def apply_update(self, state: Remote, grads: Remote, *, donate: bool = True) -> tuple[Remote, Any]:
        new = self._new()
        metrics = self._invoke("apply_update", (new.stored.id, None), state, grads, donate=donate)
        if donate:
            for value, name in ((state, "TrainState"), (grads, "Grads")):
                value.fate = (
                    f"this remote {name} was donated to apply_update. Use the value that apply_update returned; "
                    f"to keep the old one, pass donate=False."
                )
        return new, metrics

    def named_tensors(self, params: RemoteField) -> Any:
        """A reference to the tensors, which go to the engine without passing through the driver."""
        return self._host.named_tensors.remote(self._component, params.open())

    def _keep_one(self, method: str, *args: Any, **kwargs: Any) -> Remote:
        value = self._new()
        self._get(self._invoke(method, (value.stored.id,), *args, **kwargs))
        return value

    def _new(self) -> Remote:
        value = Remote(Stored(next(self._numbers)), self._host)
        weakref.finalize(value, self._dropped.append, value.stored.id)
        return value

    def _invoke(self, method: str, keep: tuple[int | None, ...], *args: Any, **kwargs: Any) -> Any:
        opened = [a.open() if isinstance(a, (Remote, RemoteField)) else a for a in args]
        drop = self._dropped[:]
        del self._dropped[: len(drop)]
        return self._host.invoke.remote(self._component, method, keep, drop, kwargs, *opened)


class RemoteRollout:
    """``RolloutBackend`` over a component of an actor; batches come back as references."""

    def __init__(self, host: Any, component: str) -> None:
        self._host, self._component = host, component
        self.version: int | None = None

    def publish(self, version: int, named_tensors: Any) -> Any:
        self.version = version
        return self._invoke("publish", version, named_tensors)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: Key, *, ids: Sequence[int] | None = None,
        version: int | None = None,
    ) -> Any:  # fmt: skip
        return self._invoke("generate", prompts, sampling, key, ids=ids, version=version)

    def sleep(self) -> Any:
        self.version = None
        return self._invoke("sleep")

    def wake(self) -> Any:
        return self._invoke("wake")

    def _invoke(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._host.invoke.remote(self._component, method, (), (), kwargs, *args)
