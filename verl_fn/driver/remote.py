"""The protocols of training backends and rollout engines over Ray actors; algorithms use them as they use local ones.

Engines share the requests of a call. One that dies, hangs or lacks memory gets a new process and the weights that it
held, and the calls that it had open are made again. Draws depend on keys and places alone, so the answers are those
that the old process would have given.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import ray
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn.backends import protocol
from verl_fn.backends.protocol import Capabilities, Freed, Ref, WeightSource
from verl_fn.errors import in_one_line
from verl_fn.state import Batch, DonatedError, Grads, Key, Params, Request, Sample, Slots, TrainState, snapshot
from verl_fn.state.guards import expect
from verl_fn.state.split import balance
from verl_fn.steps import Loss, Optimizer

from .cluster import Cluster
from .group import START_SECONDS, Call, Group, Member, curable, unwrapped_error
from .host import Component, Stored

T = TypeVar("T")
PARTS = frozenset({"weights", "cache"})  # of an engine, which can sleep


@attrs.define(eq=False, slots=True, weakref_slot=True)
class Remote(protocol.Remote[T]):
    """An immutable handle to a value on every rank of a group; the ranks drop the value with its handle.

    A donated handle raises ``DonatedError``, as the value itself would. A field is a value of its own, so a handle to
    it stays valid, and donation copies the tensors that both share.

    Attributes:
        backend: made the value.
        fate: why the handle cannot be used any more.
    """

    backend: RemoteTrain
    id: int = attrs.field(factory=itertools.count().__next__)
    fate: str | None = None

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, self.backend.group.dropped.append, self.id)

    @property
    def params(self) -> Remote[Params]:
        """The parameters of a training state."""
        return cast(Remote[Params], self.backend.map(operator.attrgetter("params"), self, keep=True))

    @property
    def base(self) -> Remote[Params]:
        """The parameters that are not trained."""
        return cast(Remote[Params], self.backend.map(operator.attrgetter("base"), self, keep=True))

    def open(self) -> Stored:
        """Returns what the value is on its ranks, unless it was donated."""
        if self.fate is not None:
            raise DonatedError(self.fate)
        return Stored(self.id)

    def snapshot(self) -> Any:
        """Raises an error that explains how to copy the value on its ranks."""
        raise TypeError("a snapshot of a handle is made on its ranks: backend.map(snapshot, value, keep=True)")


class RemoteTrain:
    """``TrainBackend`` over a component of a group's ranks, where states and gradients stay, each rank's part."""

    def __init__(self, cluster: Cluster, group: Group, component: str) -> None:
        self._cluster, self.group, self.component = cluster, group, component

    def init(self, key: Key) -> Remote[TrainState]:
        return self._keep_one("init", key)

    def load_pretrained(self, folder: str | Path | None = None, key: Key | None = None) -> Remote[TrainState]:
        return self._keep_one("load_pretrained", folder and str(folder), key)

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
        grads: Remote[Grads] = Remote(self)
        return grads, self._invoke("forward_backward", (grads.id, None), state, batch, loss)

    def apply_update(
        self, state: Remote[TrainState], grads: Remote[Grads], *, donate: bool = True, optimizer: Any = None
    ) -> tuple[Remote[TrainState], Any]:
        if optimizer is not None:
            expect("apply_update", Optimizer, optimizer)
        given = {} if optimizer is None else {"optimizer": optimizer}
        if donate:
            for prepare in self._cluster.before_update:
                prepare(self.component)
        new: Remote[TrainState] = Remote(self)
        metrics = self._invoke("apply_update", (new.id, None), state, grads, donate=donate, **given)
        if donate:
            # Before the call has ended, since only the ranks know whether it failed before it used the values.
            for value, name in ((state, "TrainState"), (grads, "Grads")):
                value.fate = (
                    f"this remote {name} was donated to apply_update, also if that has failed. Use what apply_update "
                    "returned, or restore a checkpoint if it failed; to keep the old one, pass donate=False."
                )
        return new, metrics

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
        value: Remote[Any] = Remote(self)
        self.group.run("map", fn, value.id, *opened)
        return value

    def named(self, value: protocol.Remote[Params | Grads | Slots]) -> Ref[dict[str, Tensor]]:
        """Returns a reference to whole tensors by name, on the CPU: to compare or export them, not to publish."""
        return cast(Ref[dict[str, Tensor]], self.map(_named, self, value))

    def weights(self, params: protocol.Remote[Params]) -> RemoteWeights:
        """Returns a handle to the weights; ``RemoteRollout.publish`` sends them directly to the engine."""
        self._opened(params)
        return RemoteWeights(self, params)

    def send(self, weights: RemoteWeights, version: int, addresses: Sequence[tuple[str, int]]) -> None:
        """Sends weights from their ranks to the engines at these addresses."""
        stored = self._opened(weights.params)
        self.group.run("send", self.component, stored, version, list(addresses), self._cluster.secret)

    def _keep_one(self, method: str, *args: Any, **kwargs: Any) -> Remote[Any]:
        value: Remote[Any] = Remote(self)
        self._invoke(method, (value.id,), *args, **kwargs)
        self._cluster.finish(self.group)
        return value

    def _invoke(self, method: str, keep: tuple[int | None, ...], *args: Any, **kwargs: Any) -> Any:
        return self.group.run("invoke", self.component, method, keep, kwargs, *map(self._opened, args))

    def _opened(self, value: Any) -> Any:
        if value is self:
            return Component(self.component)
        if isinstance(value, Batch):
            return self._cluster.stored(value)
        if not isinstance(value, Remote):
            return value
        if value.backend.group is not self.group:
            raise Freed(
                f"this value lies on the ranks of {value.backend.group.name}, and {self.component} is on those of "
                f"{self.group.name}: save the state that it belongs to, and restore it there"
            )
        return value.open()


def _named(backend: Any, value: Any) -> dict[str, Tensor]:
    """Returns whole tensors by name, on the CPU; all ranks gather them together."""
    tensors = backend.named(value)
    return {name: t.cpu() for name, t in (tensors.items() if isinstance(tensors, Mapping) else tensors)}


@attrs.frozen(eq=False)
class RemoteWeights(protocol.Remote[WeightSource]):
    """A handle to weights on the ranks of a group; with ``params``, the parameters stay alive."""

    backend: RemoteTrain
    params: protocol.Remote[Params]


@attrs.define(eq=False)
class _Past:
    """A call that has changed the state of engines, as long as an engine that is restarted needs it again.

    Attributes:
        version: of the weights that it publishes; None if it publishes none.
        weights: their handle, if ranks send them; None once the ranks have dropped them.
        copied: whether ``weights`` is a copy of weights that the trainer has replaced.
    """

    call: Call
    version: int | None = None
    weights: RemoteWeights | None = None
    copied: bool = False


class RemoteRollout:
    """``RolloutBackend`` over a component of one or several actors that share the requests of a call.

    An engine that fails is restarted at most ``max_restarts`` times without an answer in between.
    """

    def __init__(self, cluster: Cluster, group: Group, component: str, max_restarts: int = 0) -> None:
        self._cluster, self._group, self._component = cluster, group, component
        self.capabilities: Capabilities = cluster.get(
            group.run("map", operator.attrgetter("capabilities"), None, Component(component))
        )
        self._published: _Past | None = None
        # Where each engine waits for weights.
        listen = [self._listening(number) for number in range(len(group.members))]
        self._addresses: list[tuple[str, int]] = cluster.get(group.scatter("listen", listen))
        # In order. Empty if engines are not restarted: a handle that is kept makes the next update copy parameters.
        self._past: list[_Past] = []
        self._awake = set(PARTS)
        self._limit = max_restarts
        if max_restarts:
            group.restart = self.restart
            cluster.before_update.append(self._keep_weights)

    @property
    def version(self) -> int | None:
        """The version of the engines' weights; None while another is being published."""
        published = self._published
        return published.version if published is not None and published.call.succeeded else None

    def publish(self, version: int, weights: protocol.Handle[WeightSource]) -> Any:
        """Sends weights from their ranks to every engine, and returns a reference that is ready afterwards.

        The ranks that send run no other call meanwhile, so no update can donate the weights that they send. Engines
        with ``versions_per_token`` receive beside their calls, others after them.
        """
        remote = weights if isinstance(weights, RemoteWeights) else None
        self._forget_older(also_held=self._group.idle)
        beside = self.capabilities.versions_per_token
        # Another thread restarts an engine before or after this, and after it knows what to send again.
        with self._group.one_thread:
            if remote is not None:
                remote.backend.send(remote, version, self._addresses)
                call = self._scatter("receive", version, publishes=beside)
            else:
                call = self._scatter("invoke", "publish", (), {}, version, weights, publishes=beside)
            self._published = _Past(call, version, remote if self._group.restart else None)
            return self._remember(self._published)

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        """Returns a reference to the samples; each engine answers its share of the requests."""
        calls = [(self._component, "generate", (), {"version": version}, share) for share in self._shares(requests)]
        if len(calls) == 1:
            return self._group.scatter("invoke", calls, operator.itemgetter(0), draws=True)
        place = {request.id: place for place, request in enumerate(requests)}

        def in_order(parts: Sequence[list[Sample]]) -> list[Sample]:
            return sorted(itertools.chain.from_iterable(parts), key=lambda sample: place[sample.request])

        return self._group.scatter("invoke", calls, in_order, draws=True)

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """Returns an iterator over the samples, in the order in which they end on any engine."""
        parts = [(self._component, version, share) for share in self._shares(requests)]
        return self._cluster.stream(self._group.scatter("stream", parts, draws=True))

    def _shares(self, requests: Sequence[Request]) -> list[Sequence[Request]]:
        """Divides requests so that engines have about as many tokens to compute; one engine gets a call without any.

        A request counts its prompt once and the longest responses that it allows.
        """
        engines = len(self._group.members)
        if engines == 1 or not all(isinstance(request, Request) for request in requests):
            return [requests]
        lengths = [len(r.prompt) + r.sampling.n * r.sampling.max_tokens for r in requests]
        return [[requests[i] for i in sorted(share)] for share in balance(lengths, engines) if share] or [requests]

    def sleep(self, level: int = 2) -> Any:
        self._awake = set()
        if level > 1:
            self._published, self._past = None, []
        return self._remember(_Past(self._scatter("invoke", "sleep", (), {}, level)))

    def wake(self, tags: Sequence[str] = ()) -> Any:
        call = self._remember(_Past(self._scatter("invoke", "wake", (), {}, tuple(tags))))
        self._awake |= set(tags) or PARTS
        if self._awake == PARTS:
            self._past = [one for one in self._past if one.version is not None]
        return call

    def _remember(self, one: _Past) -> Call:
        if self._group.restart is not None:
            self._past.append(one)
        return one.call

    def _scatter(self, method: str, *args: Any, publishes: bool = False) -> Call:
        return self._group.scatter(method, [(self._component, *args)] * len(self._group.members), publishes=publishes)

    def _listening(self, number: int) -> tuple[Any, ...]:
        return self._component, self._cluster.address(self._group.members[number]), self._cluster.secret

    def _forget_older(self, *, also_held: bool = False) -> None:
        """Drops publications that no engine needs again: all but the last that all engines hold, or that one too."""
        held = [one for one in self._past if one.version is not None and one.call.succeeded]
        self._past = [one for one in self._past if one not in (held if also_held else held[:-1])]

    def _keep_weights(self, component: str) -> None:
        """Before an update replaces weights, copies those that an engine needs if it is restarted; drops others.

        While requests are open, an engine may need weights that are older than the trainer's.
        """
        self._forget_older()
        for one in self._past:
            if one.weights is None or one.weights.backend.component != component:
                continue
            if self._group.idle:
                one.weights = None
            elif not one.copied:
                copy = one.weights.backend.map(snapshot, one.weights.params, keep=True)
                one.weights, one.copied = RemoteWeights(one.weights.backend, copy), True

    def restart(self, member: Member, error: Exception) -> None:
        """Restarts an engine that has failed, ended or hangs, and makes its open calls again.

        If it fails during its restart, another restart within this one has replaced it when this one goes on. If it
        was restarted as often as allowed, ``error`` is raised.
        """
        self._count(member, error)
        ray.kill(member.host)
        ray.wait([member.sentinel], timeout=START_SECONDS)
        # Calls of other threads wait, so that none comes to the new engine before its weights.
        with self._group.one_thread:
            number = self._group.lose(member)
            new = self._cluster.replace(self._group, number)
            results = self._made(new, [*self._group.made, ("listen", *self._listening(number))])
            if results is None:
                return
            self._addresses[number] = results[-1]
            if self._made(new, self._restored(number)) is None:
                return
            self._group.again(number)
            for one in self._past:
                if one.weights is not None and not one.call.succeeded_on(number):
                    self._send_again(one, number)

    def _restored(self, number: int) -> list[tuple[Any, ...]]:
        """Returns the calls by which a new engine gets back to where the old one was; ranks send it its weights."""
        past = [one for one in self._past if one.call.succeeded_on(number)]
        held, last = ([one for one in some if one.version is not None][-1:] for some in (past, self._past))
        calls: list[tuple[Any, ...]] = []
        for one in past:
            if one.call.method == "receive" and one in held:
                if one.weights is None:
                    # Nobody has them, so whoever draws next publishes others.
                    if held == last:
                        self._published = None
                    continue
                self._send_again(one, number)
            if one.version is None or one in held:
                calls.append((one.call.method, *one.call.arguments[number]))
        return calls

    def _send_again(self, one: _Past, number: int) -> None:
        assert one.weights is not None and one.version is not None
        one.weights.backend.send(one.weights, one.version, [self._addresses[number]])

    def _count(self, member: Member, error: Exception) -> None:
        name, number = member.name, self._group.members.index(member)
        if self._group.restarts[number] >= self._limit:
            error.add_note(
                f"it was restarted {self._limit} times (rollout.max_restarts) and answered nothing in between"
            )
            raise error
        self._group.restarts[number] += 1
        said = in_one_line(error)
        said = said if said.startswith(name) else f"{name} failed: {said}"
        count = f"{self._group.restarts[number]} of {self._limit} times in a row"
        self._cluster.reasons.append(f"{said}; it was restarted, {count}")

    def _made(self, member: Member, calls: Sequence[tuple[Any, ...]]) -> list[Any] | None:
        """Makes calls in a new process and returns their results; None if it ended and another one was started."""
        alone = Group(member.name, (member,))
        made = [alone.run(*call) for call in calls]
        self._cluster.wait_for(lambda: alone.idle or member not in self._group.members, made)
        try:
            return [ray.get(call.results[0]) for call in made] if member in self._group.members else None
        except ray.exceptions.RayError as error:
            if not curable(error):
                raise unwrapped_error(error, member.name) from None
            self._cluster.lost(member, error)
            return None
