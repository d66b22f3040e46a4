"""The protocol of rollout engines over Ray actors, which share the requests of a call, and their restarts.

An engine that dies, hangs or lacks memory gets a new process and the weights that it held, and the calls that it had
open are made again. Draws depend on keys and places alone, so the answers are those that the old process would have
given.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import ray

from verl_fn.backends import protocol
from verl_fn.backends.protocol import Capabilities, Ref, WeightSource
from verl_fn.state import Request, Sample

from .cluster import Cluster, Together
from .group import START_SECONDS, Call, Group, Member, curable, unwrapped_error
from .host import Component
from .remote import RemoteWeights

PARTS = frozenset({"weights", "cache"})  # of an engine, which can sleep


@attrs.define(eq=False)
class _Publication:
    """A publication, as long as an engine may need its weights again.

    Attributes:
        version: of the weights.
        weights: their handle or value; None once they are gone, and where no engine is restarted: a handle that is
            kept makes the next update copy the parameters.
        call: by which engines get the weights.
        copied: whether ``weights`` are a copy of those that the trainer has replaced.
    """

    version: int
    weights: Any
    call: Call
    copied: bool = False

    def done(self) -> bool:
        """Returns whether all engines have the weights."""
        return all(self.call.done(engine) for engine in self.call.results)


class RemoteRollout:
    """``RolloutBackend`` over a component of one or several actors that share the requests of a call.

    Args:
        cluster: has the actors.
        group: the engines.
        component: the name of the engine in each of them.
        max_restarts: how often an engine that fails is restarted without an answer in between.

    Attributes:
        reasons: why engines were restarted, since the driver asked last.
    """

    def __init__(self, cluster: Cluster, group: Group, component: str, max_restarts: int = 0) -> None:
        self._cluster, self._group, self._component = cluster, group, component
        self.capabilities: Capabilities = cluster.get(
            group.run("map", operator.attrgetter("capabilities"), None, Component(component))
        )
        self._version: int | None = None
        self._publishing: _Publication | None = None
        self._addresses: list[tuple[str, int]] = []
        # What engines that are restarted need again.
        self._publications: list[_Publication] = []
        # Their level of sleep, and the parts that are awake.
        self._level, self._awake = 0, set(PARTS)
        self.reasons, self._limit, self._counts = list[str](), max_restarts, Counter[str]()
        if max_restarts:
            group.restarts = self
            cluster.before_update.append(self._keep_weights)

    @property
    def version(self) -> int | None:
        """The version of the engines' weights; None while another is being published."""
        if self._publishing is not None and self._publishing.done():
            self._version, self._publishing = self._publishing.version, None
        return self._version

    def publish(self, version: int, weights: protocol.Handle[WeightSource]) -> Any:
        """Sends weights from their ranks to every engine, and returns a reference that is ready afterwards.

        The ranks that send run no other call meanwhile, so no update can donate the weights that they send. Engines
        with ``versions_per_token`` receive beside their calls, others after them.
        """
        self._version, idle = None, self._group.idle
        self._forget_older()
        beside = self.capabilities.versions_per_token
        if isinstance(weights, RemoteWeights) and not self._addresses:
            groups = self._group, weights.backend.group
            listen = [self._listening(engine, *groups) for engine in range(len(self._group.members))]
            self._addresses = self._cluster.get(_all(self._group.scatter("listen", listen)))
        # Another thread restarts an engine before or after this, and after it knows what to send again.
        with self._group.one_thread:
            if isinstance(weights, RemoteWeights):
                weights.backend.send(weights, version, self._addresses)
                call = self._scatter("receive", version, beside=beside)
            else:
                call = self._scatter("invoke", "publish", (), {}, version, weights, beside=beside)
            self._publishing = _Publication(version, weights if self._group.restarts else None, call)
            if self._group.restarts:
                if idle:
                    self._publications.clear()
                self._publications.append(self._publishing)
        return _all(call)

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        """Returns a reference to the samples; each engine answers its share of the requests."""
        calls = [(self._component, "generate", (), {"version": version}, share) for share in self._shares(requests)]
        call = self._group.scatter("invoke", calls, draws=True)
        if len(calls) == 1:
            return Together(call, lambda samples: samples)
        return Together(call, functools.partial(in_order, [request.id for request in requests]))

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
        return _all(self._scatter("invoke", "sleep", (), {}, level))

    def wake(self, tags: Sequence[str] = ()) -> Any:
        """See ``RolloutBackend``."""
        self._awake |= set(tags) or PARTS
        self._level *= self._awake != PARTS
        return _all(self._scatter("invoke", "wake", (), {}, tuple(tags)))

    def _scatter(self, method: str, *args: Any, beside: bool = False) -> Call:
        """Calls a method of ``Host`` on every engine; see ``Group.scatter``."""
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
            if not isinstance(one.weights, RemoteWeights) or one.weights.backend.component != component:
                continue
            if self._group.idle:
                one.weights = None
            elif not one.copied:
                one.weights, one.copied = one.weights.copied(), True

    def restart(self, member: Member, error: Exception) -> None:
        """Restarts an engine that has failed, ended or hangs, and makes its open calls again.

        If it fails during its restart, another restart within this one has replaced it when this one goes on.

        Raises:
            Exception: ``error``, if it was restarted as often as allowed.
        """
        self._count(member.name, error)
        ray.kill(member.host)
        ray.wait([member.sentinel], timeout=START_SECONDS)
        # Calls of other threads wait, so that none comes to the new engine before its weights.
        with self._group.one_thread:
            self._replace(member)

    def _replace(self, member: Member) -> None:
        number = self._group.lose(member)
        new = self._cluster.replace(self._group, number)
        made = self._cluster.made[self._group.name]
        results = self._made(new, [*made, *self._listening_calls(number)])
        if results is None or self._made(new, self._restored(number, results[len(made) :])) is None:
            return
        self._group.again(number)
        for one in self._publications:
            if isinstance(one.weights, RemoteWeights) and not one.call.done(number):
                one.weights.backend.send(one.weights, one.version, [self._addresses[number]])

    def _count(self, name: str, error: Exception) -> None:
        """Raises the error if it does not allow another restart."""
        if name in self._group.answered:
            self._group.answered.remove(name)
            self._counts[name] = 0
        if self._counts[name] >= self._limit:
            error.add_note(
                f"it was restarted {self._limit} times (rollout.max_restarts) and answered nothing in between"
            )
            raise error
        self._counts[name] += 1
        # Ray's own text of a worker's error begins with a traceback.
        cause = getattr(error, "cause", error)
        first, *_ = str(cause).splitlines() or [""]
        said = first if first.startswith(name) else f"{name} failed: {type(cause).__name__}: {first}"
        self.reasons.append(f"{said}; it was restarted, {self._counts[name]} of {self._limit} times in a row")

    def _made(self, member: Member, calls: Sequence[tuple[Any, ...]]) -> list[Any] | None:
        """Makes calls in a new process and returns their results; None if it ended and another one was started."""
        made = [member.host.run.options(num_returns=2).remote(*call) for call in calls]
        ends = [end for _, end in made]
        self._cluster.wait_for(lambda: ends if member in self._group.members else [])
        try:
            return [ray.get(result) for result, _ in made] if member in self._group.members else None
        except ray.exceptions.RayError as error:
            if not curable(error):
                raise unwrapped_error(error, member.name) from None
            self._cluster.lost(member, error)
            return None

    def _listening_calls(self, engine: int) -> list[tuple[Any, ...]]:
        """Returns the calls by which an engine that was started again listens for weights."""
        if not self._addresses:
            return []
        groups = (one.weights.backend.group for one in self._publications if isinstance(one.weights, RemoteWeights))
        return [("listen", *self._listening(engine, self._group, *groups))]

    def _restored(self, engine: int, address: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        """Sends an engine the weights that it held, and returns the calls by which it gets back to where it was."""
        if address:
            self._addresses[engine] = address[0]
        calls: list[tuple[Any, ...]] = []
        for one in [one for one in self._publications if one.call.done(engine)][-1:]:
            if isinstance(one.weights, RemoteWeights):
                one.weights.backend.send(one.weights, one.version, [self._addresses[engine]])
                calls.append(("receive", self._component, one.version))
            elif one.weights is not None:
                calls.append(("invoke", self._component, "publish", (), {}, one.version, one.weights))
            elif one is self._publications[-1]:
                # Whoever draws next publishes weights first, since the version is unknown.
                self._version = self._publishing = None
        if self._level:
            sleep: tuple[Any, ...] = ("invoke", self._component, "sleep", (), {}, self._level)
            wake: tuple[Any, ...] = ("invoke", self._component, "wake", (), {}, tuple(sorted(self._awake)))
            states = [sleep, wake] if self._awake else [sleep]
            # What came while the weights were awake needs them so.
            calls = [*states, *calls] if "weights" in self._awake else [*calls, *states]
        return calls


def _all(call: Call) -> Together:
    """Returns a reference to the results of all engines."""
    return Together(call, lambda *results: list(results))


def shares(requests: Sequence[Request], engines: int) -> list[list[Request]]:
    """Divides requests among engines, so that all have about as many tokens to compute.

    The rule depends only on the requests: the longest request first, each goes to the engine with the fewest tokens
    so far. A request counts its prompt once and the longest responses that it allows. Engines without any request are
    left out.

    Example:
        >>> from verl_fn.state import Key, Sampling, requests_for
        >>> asked = requests_for([[1] * 9, [1] * 4, [1] * 5, [1] * 2], Sampling(1), Key.from_seed(0))
        >>> [[r.id for r in share] for share in shares(asked, 2)]
        [[0, 3], [1, 2]]
    """
    lengths = [len(r.prompt) + r.sampling.n * r.sampling.max_tokens for r in requests]
    loads, engine_of = [0] * engines, [0] * len(requests)
    for i in sorted(range(len(requests)), key=lambda i: -lengths[i]):
        engine = loads.index(min(loads))
        loads[engine] += lengths[i]
        engine_of[i] = engine
    divided = [[r for r, engine in zip(requests, engine_of, strict=True) if engine == e] for e in range(engines)]
    return [share for share in divided if share]


def in_order(ids: Sequence[int], *parts: Iterable[Sample]) -> list[Sample]:
    """Returns the samples of all engines in the order of the requests with these ids.

    The samples of a request keep their order.
    """
    places = {request: place for place, request in enumerate(ids)}
    return sorted((sample for part in parts for sample in part), key=lambda sample: places[sample.request])
