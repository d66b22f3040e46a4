"""The protocol of rollout engines over Ray actors that share the requests of a call."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import ray

from verl_fn.backends import protocol
from verl_fn.backends.protocol import Capabilities, Ref, WeightSource
from verl_fn.state import Request, Sample

from .cluster import Cluster, Together
from .group import Group
from .remote import RemoteWeights
from .sharing import in_order, shares

PARTS = frozenset({"weights", "cache"})  # of an engine, which can sleep


@attrs.define(eq=False)
class _Publication:
    """A publication, as long as an engine may need its weights again.

    Attributes:
        version: of the weights.
        weights: their handle or value; None once they are gone, and where no engine is restarted: a handle that is
            kept makes the next update copy the parameters.
        refs: for each engine, a reference that is ready when it has the weights.
        copied: whether ``weights`` are a copy of those that the trainer has replaced.
    """

    version: int
    weights: Any
    refs: list[Any]
    copied: bool = False

    def done(self, engine: int | None = None) -> bool:
        """Returns whether an engine has the weights, by default whether all have them."""
        refs = self.refs if engine is None else [self.refs[engine]]
        return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)


class RemoteRollout:
    """``RolloutBackend`` over a component of one or several actors that share the requests of a call.

    Args:
        cluster: has the actors.
        group: the engines.
        component: the name of the engine in each of them.
        max_restarts: how often an engine that dies or hangs is restarted without an answer in between; the cluster
            must have started the group as one that is restarted.
    """

    def __init__(self, cluster: Cluster, group: Group, component: str, max_restarts: int = 0) -> None:
        self._cluster, self._group, self._component = cluster, group, component
        self.capabilities: Capabilities = cluster.get(group.run("attribute", component, "capabilities"))
        self._version: int | None = None
        self._publishing: _Publication | None = None
        self._addresses: list[tuple[str, int]] = []
        # What engines that are restarted need again.
        self._publications: list[_Publication] = []
        # Their level of sleep, and the parts that are awake.
        self._level, self._awake = 0, set(PARTS)
        if max_restarts:
            cluster.restart(group, max_restarts, self)
            cluster.before_update.append(self._keep_weights)

    @property
    def version(self) -> int | None:
        """The version of the engines' weights; None while another is being published."""
        if self._publishing is not None and self._publishing.done():
            publication, self._publishing = self._publishing, None
            try:
                ray.get(publication.refs)
                self._version = publication.version
            except ray.exceptions.RayError:
                # Waiting for the reference raises the error; here it means that the version is unknown.
                self._version = None
        return self._version

    def publish(self, version: int, weights: protocol.Handle[WeightSource]) -> Any:
        """Sends weights from their ranks to every engine, and returns a reference that is ready afterwards.

        The ranks that send run no other call meanwhile, so no update can donate the weights that they send. Engines
        with ``versions_per_token`` receive beside their calls, others after them.
        """
        self._version, idle = None, self._group.idle
        self._forget_older()
        beside = self.capabilities.versions_per_token
        if not isinstance(weights, RemoteWeights):
            refs = self._all("invoke", "publish", (), {}, version, weights, beside=beside)
        else:
            if not self._addresses:
                groups = self._group, weights.group
                listen = [self._listening(engine, *groups) for engine in range(len(self._group.members))]
                self._addresses = self._cluster.get(self._group.scatter("listen", listen))
            weights.backend.send(weights, version, self._addresses)
            refs = self._all("receive", version, beside=beside)
        self._publishing = _Publication(version, weights if self._group.restarts else None, refs)
        if self._group.restarts:
            if idle:
                self._publications.clear()
            self._publications.append(self._publishing)
        return refs if len(refs) > 1 else refs[0]

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        """Returns a reference to the samples; each engine answers its share of the requests."""
        calls = [(self._component, "generate", (), {"version": version}, share) for share in self._shares(requests)]
        parts = self._group.scatter("invoke", calls, draws=True)
        if len(parts) == 1:
            return parts[0]
        return Together(functools.partial(in_order, [request.id for request in requests]), parts)

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """Returns an iterator over the samples, in the order in which they end on any engine."""
        return self._cluster.stream(
            self._group, [(self._component, version, share) for share in self._shares(requests)]
        )

    def _shares(self, requests: Sequence[Request]) -> list[Sequence[Request]]:
        """Returns the requests of each engine; without any, one engine reports what is wrong with that."""
        if len(self._group.members) == 1 or not all(isinstance(request, Request) for request in requests):
            return [requests]
        return list(shares(requests, len(self._group.members))) or [requests]

    def sleep(self, level: int = 2) -> Any:
        """See ``RolloutBackend``."""
        self._level, self._awake = level, set()
        if level > 1:
            self._version = self._publishing = None
            self._publications.clear()
        return self._all("invoke", "sleep", (), {}, level)

    def wake(self, tags: Sequence[str] = ()) -> Any:
        """See ``RolloutBackend``."""
        self._awake |= set(tags) or PARTS
        self._level *= self._awake != PARTS
        return self._all("invoke", "wake", (), {}, tuple(tags))

    def _all(self, method: str, *args: Any, beside: bool = False) -> list[Any]:
        """Calls a method of ``Host`` on every engine, and returns a reference for each; see ``Group.scatter``."""
        return self._group.scatter(method, [(self._component, *args)] * len(self._group.members), beside=beside)

    def _listening(self, engine: int, *groups: Group) -> tuple[Any, ...]:
        """Returns the arguments of ``Host.listen`` for an engine to which a rank of these groups sends."""
        address = self._cluster.address(self._group.members[engine], *groups)
        return self._component, address, self._cluster.secret

    def _forget_older(self) -> None:
        """Drops publications that no engine needs again, since all hold a later one."""
        held = [one for one in self._publications if one.done()]
        self._publications = [one for one in self._publications if one not in held[:-1]]

    def _keep_weights(self, component: str) -> None:
        """Before an update replaces weights, copies those that an engine needs if it is restarted; drops others.

        While requests are open, an engine may need weights that are older than the trainer's.
        """
        self._forget_older()
        for one in self._publications:
            if not isinstance(one.weights, RemoteWeights) or one.weights.component != component:
                continue
            if self._group.idle:
                one.weights = None
            elif not one.copied:
                one.weights, one.copied = one.weights.copied(), True

    def listening(self, engine: int) -> list[tuple[Any, ...]]:
        """See ``restarts.Holder``."""
        if not self._addresses:
            return []
        groups = (one.weights.group for one in self._publications if isinstance(one.weights, RemoteWeights))
        return [("listen", *self._listening(engine, self._group, *groups))]

    def restore(self, engine: int, address: Sequence[Any]) -> Sequence[tuple[Any, ...]] | None:
        """See ``restarts.Holder``."""
        if address:
            self._addresses[engine] = address[0]
        calls: list[tuple[Any, ...]] = []
        open_, needed = [one for one in self._publications if not one.done(engine)], self._draws_first(engine)
        held = [one for one in self._publications if one not in open_][-1:]
        for one in held if needed or not open_ else ():
            if isinstance(one.weights, RemoteWeights):
                one.weights.backend.send(one.weights, one.version, [self._addresses[engine]])
                calls.append(("receive", self._component, one.version))
            elif one.weights is not None:
                calls.append(("invoke", self._component, "publish", (), {}, one.version, one.weights))
            elif needed:
                return None
            else:
                # Whoever draws next publishes weights first, since the version is unknown.
                self._version = self._publishing = None
        if self._level:
            sleep: tuple[Any, ...] = ("invoke", self._component, "sleep", (), {}, self._level)
            wake: tuple[Any, ...] = ("invoke", self._component, "wake", (), {}, tuple(sorted(self._awake)))
            states = [sleep, wake] if self._awake else [sleep]
            # What came while the weights were awake needs them so.
            calls = [*states, *calls] if "weights" in self._awake else [*calls, *states]
        return calls

    def _draws_first(self, engine: int) -> bool:
        """Returns whether an engine has requests to answer with the weights that it has, before others arrive."""
        arriving = {one.refs[engine].task_id() for one in self._publications}
        for call in self._group.calls:
            end = call.open.get(self._group.members[engine])
            if end is not None and not ray.wait([end], timeout=0)[0]:
                if call.draws:
                    return True
                if end.task_id() in arriving:
                    return False
        return False

    def resume(self, engine: int) -> None:
        """See ``restarts.Holder``."""
        for one in self._publications:
            if isinstance(one.weights, RemoteWeights) and not one.done(engine):
                one.weights.backend.send(one.weights, one.version, [self._addresses[engine]])
