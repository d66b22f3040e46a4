"""The actors of one run: starts them, waits for them, and reports which one failed and why."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.utils import _pytree as pytree

from verl_fn.backends.protocol import Reference
from verl_fn.config import ConfigError
from verl_fn.config.schema import DriverConfig
from verl_fn.state import Batch, version_of

from . import identity, ray_private
from .errors import ActorDied, ActorHangs
from .failures import NODE_SECONDS, cause_of, death_of, not_started, of_others, unwrapped_error
from .group import Group, Member
from .host import Host
from .parcels import opened, packed
from .processes import await_end
from .restarts import START_SECONDS, Holder, Restarts
from .watch import Watch

# How often the driver looks whether a thread of its own has ended.
THREAD_SECONDS = 0.02
# How long an error of a collective waits for the error or the death of another rank that may have caused it.
GRACE_SECONDS = 10


@attrs.frozen
class Seat:
    """The place of an actor: a bundle of the run's placement group, and its share of a GPU there."""

    bundle: int
    gpus: float = 0.0


@attrs.frozen(eq=False)
class Together(Reference[Any]):
    """A result that is made of several members' results.

    Attributes:
        fn: makes it.
        parts: references to the results.
    """

    fn: Callable[..., Any]
    parts: Sequence[Any]


class Beside(Reference[Any]):
    """A call that a thread of the driver makes. Its result is fetched like that of an actor's call.

    Args:
        fn: makes the call.
    """

    current: ClassVar[threading.local] = threading.local()

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn = fn
        self.result: Any = None
        self.error: BaseException | None = None
        # Set when the call has ended, or waits for actors.
        self.paused = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        Beside.current.call = self
        try:
            self.result = self._fn()
        except BaseException as error:
            self.error = error
        self.paused.set()


class Cluster:
    """The actors of one run. ``get`` and ``wait`` raise an error as soon as any actor fails, dies or hangs.

    Args:
        timeout: seconds without progress after which an actor counts as hung.
    """

    def __init__(self, timeout: float) -> None:
        self.groups: dict[str, Group] = {}
        self.code: identity.Identity | None = None
        self._timeout = timeout
        self._watch = Watch(timeout)
        self._place: Any = None
        self._hosts: list[Any] = []
        # The batches in the object store, with the versions of their tensors.
        self._stored: weakref.WeakKeyDictionary[Batch, tuple[list[int], Any]] = weakref.WeakKeyDictionary()
        self._beside: list[Beside] = []
        self.secret = os.urandom(16)
        self._code: Sequence[str] = ()
        self._made: dict[str, list[tuple[Any, ...]]] = {}
        self._restarts: list[Restarts] = []
        # Called with the name of a component before an update of it donates its state.
        self.before_update: list[Callable[[str], None]] = []

    @property
    def members(self) -> dict[str, Member]:
        """All actors by name."""
        return {member.name: member for group in self.groups.values() for member in group.members}

    def reserve(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> None:
        """Reserves room for the actors in the Ray cluster.

        Args:
            bundles: the resources of each bundle.
            strategy: Ray's placement strategy.

        Raises:
            ActorDied: others use the room.
        """
        self._place = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
        if not self._place.wait(START_SECONDS):
            free = {name: count for name, count in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise ActorDied(
                f"no room for {len(bundles)} processes in {START_SECONDS} s: each asks for "
                f"{dict(bundles[-1])}, and of the cluster's resources {free} are free"
            )

    def start(
        self,
        seats: Mapping[str, Sequence[Seat]],
        driver: DriverConfig,
        ranks: int,
        code: Sequence[str] = (),
        restarted: Sequence[str] = (),
    ) -> None:
        """Starts the actors of all groups together.

        Args:
            seats: the seat of each actor, by the name of its group.
            driver: the config's settings of processes.
            ranks: how many training processes share the cores of their machine.
            code: references to the user's own objects; every actor must have them.
            restarted: the groups whose actors Ray starts again when they end; see ``restart``.

        Raises:
            ActorDied: an actor did not start.
            ConfigError: an actor runs other code than the driver.
        """
        actor = ray.remote(num_cpus=0, concurrency_groups={"watch": 1, "ask": 1, "restore": 1, "publish": 1})(Host)
        self._code = code
        hosts: dict[str, list[Any]] = {name: [] for name in seats}
        for name, places in seats.items():
            again = name in restarted
            options = {"max_restarts": -1, "max_task_retries": -1} if again else {}
            for seat in places:
                where = PlacementGroupSchedulingStrategy(self._place, seat.bundle)
                one = actor.options(num_gpus=seat.gpus, scheduling_strategy=where, **options)
                hosts[name].append(one.remote(again))
                self._hosts.append(hosts[name][-1])
        for name, members in hosts.items():
            names = [name] if len(members) == 1 else [f"{name} rank {i}" for i in range(len(members))]
            started = [(one, host, host.about.remote(code)) for one, host in zip(names, members, strict=True)]
            self.groups[name] = Group(name, tuple(self._member(*one) for one in started))
            self._made[name] = [("set_up", driver, ranks)]
        self._on_all([(group, "set_up", driver, ranks) for group in self.groups.values()])

    def join(self, group: Group, device: str) -> None:
        """Makes a group's members the ranks of one process group."""
        address = self.address(group.members[0], group)
        size = len(group.members)
        alone = Group(group.name, group.members[:1])
        place = self._fetch(alone.run("open_store", address, size, self._timeout))
        group.scatter("join", [(place, rank, size, self._timeout, device) for rank in range(size)])
        self.finish(group)

    def address(self, member: Member, *groups: Group) -> str:
        """Returns the address where a member listens for groups: the loopback device's if all share a machine."""
        nodes = {member.node} | {other.node for group in groups for other in group.members}
        if len(nodes) == 1:
            return "127.0.0.1"
        return next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == member.node)

    def build(self, group: str, component: str, factory: Callable[..., Any], *args: Any) -> None:
        """Makes a component in every member of a group."""
        self.build_all([(group, component, factory, *args)])

    def build_all(self, components: Iterable[tuple[Any, ...]]) -> None:
        """Makes components side by side: each process takes seconds to import what it needs.

        Args:
            components: the arguments of ``build`` for each.
        """
        calls = [(group, ("build", *args)) for group, *args in components]
        self._on_all([(self.groups[group], *call) for group, call in calls])
        for group, call in calls:
            self._made[group].append(call)

    def restart(self, group: Group, limit: int, holder: Holder) -> None:
        """Restarts members of a group that die or hang, from now on, in place of raising an error.

        Args:
            group: has no other calls than those of ``holder``; Ray starts its actors again.
            limit: the most restarts of an engine that answers nothing in between.
            holder: has the weights of the engines.
        """
        group.restarts = True
        made = self._made[group.name]
        self._restarts.append(Restarts(group, limit, made, self._code, self._member, holder))

    def restarts(self) -> list[str]:
        """Returns why engines were restarted, since the last call of this method."""
        reasons = [reason for one in self._restarts for reason in one.reasons]
        for one in self._restarts:
            one.reasons.clear()
        return reasons

    def beside(self, fn: Callable[[], Any]) -> Beside:
        """Calls ``fn`` in a thread, and returns when it waits for actors for the first time, or has ended.

        So it has made all the calls that it makes without a result of others, and they come before later ones.
        """
        call = Beside(fn)
        self._beside = [one for one in self._beside if one.thread.is_alive()] + [call]
        call.thread.start()
        call.paused.wait()
        return call

    def stored(self, batch: Batch) -> Any:
        """Returns a reference to a batch in the object store, where it is written once for all roles and ranks."""
        versions = [version_of(leaf) for leaf in pytree.tree_leaves(batch)]
        before, ref = self._stored.get(batch, (None, None))
        if before != versions:
            ref = ray.put(packed(batch))
            self._stored[batch] = versions, ref
        return ref

    def wait(self, value: Any) -> Any:
        """Waits until everything that ``value`` refers to is ready, and returns ``value``.

        Raises:
            ActorDied: any actor ended meanwhile.
            ActorHangs: an actor makes no progress while others wait for it.
            Exception: a call to any actor failed; the error is the call's own.
        """
        leaves = pytree.tree_leaves(value)
        calls = [leaf for leaf in leaves if isinstance(leaf, Beside)]
        refs = [leaf for leaf in leaves if isinstance(leaf, ray.ObjectRef)]
        refs += [part for leaf in leaves if isinstance(leaf, Together) for part in leaf.parts]
        if refs or calls:
            self._until(lambda: list(refs), calls=calls)
        return value

    def get(self, value: Any) -> Any:
        """Returns ``value`` with every reference replaced by what it refers to."""
        self.wait(value)
        return pytree.tree_map(self._value, value)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, ray.ObjectRef):
            return opened(self._fetch(leaf), ref=leaf)
        if isinstance(leaf, Together):
            return leaf.fn(*map(self._value, leaf.parts))
        if not isinstance(leaf, Beside):
            return leaf
        if leaf.error is not None:
            raise leaf.error
        return leaf.result

    def stream(self, group: Group, parts: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Calls ``Host.stream`` on members of a group, and yields each value when it has arrived.

        A member that was restarted is asked again, and samples that it gave before are left out.
        """
        streams = group.stream(dict(enumerate(parts)))
        given: set[tuple[int, int]] = set()
        while streams:
            self._until(lambda: list(streams.values()), some=True)  # noqa: B023
            for i, stream in list(streams.items()):
                while stream.next_ready():
                    try:
                        ref = next(stream)
                        sample = ray.get(ref)
                    except StopIteration:
                        # The end of a stream may be ready before Ray reports the stream as finished.
                        break
                    except ray.exceptions.RayActorError:
                        if not group.restarts:
                            self._fetch(ref)
                        streams |= group.stream({i: parts[i]})
                        break
                    except ray.exceptions.RayTaskError:
                        self._fetch(ref)
                    if (name := (sample.request, sample.number)) not in given:
                        given.add(name)
                        yield sample
                if streams[i] is stream and stream.is_finished():
                    del streams[i]

    def finish(self, group: Group) -> None:
        """Waits until every member has ended every call."""
        self._until(lambda: group.ends)

    def stop(self) -> None:
        """Ends the actors and frees their room."""
        members = self.members.values()
        if ray_private.alive():
            for host in self._hosts:
                ray.kill(host)
            if members:
                sentinels = list(dict.fromkeys(m.sentinel for m in members))
                ray.wait(sentinels, num_returns=len(sentinels), timeout=NODE_SECONDS)
            # Their calls fail now, and Ray must not end while threads use it.
            for call in self._beside:
                call.thread.join(NODE_SECONDS)
            # Ray's own node ends with this process, and could leave an actor behind that it has not killed yet.
            await_end(m.pid for m in members if m.pid and m.node == ray.get_runtime_context().get_node_id())
            if self._place is not None:
                remove_placement_group(self._place)
        self.groups.clear()
        self._hosts.clear()

    def _on_all(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Calls a method on each group with its own arguments, and waits for all of them."""
        for group, method, *args in calls:
            group.run(method, *args)
        for group, *_ in calls:
            self.finish(group)

    def _member(self, name: str, host: Any, about_ref: Any) -> Member:
        """Waits until an actor has started, and checks its code."""
        try:
            about = ray.get(about_ref, timeout=START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise not_started(name, START_SECONDS) from None
        except ray.exceptions.RayError as error:
            found = re.search(r"No module named '([^']+)'", str(error))
            module = found[1] if found else "verl_fn"
            raise ActorDied(
                f"{name} did not start: {error}\nIf it cannot import {module}, install it on every node, add its "
                "folder to PYTHONPATH, or send it with the run: py_modules or working_dir in the file of "
                "ray.runtime_env"
            ) from None
        self.code = self.code or identity.identity(self._code)
        if (difference := identity.difference(self.code, about["identity"], name)) is not None:
            raise ConfigError(difference)
        sentinel = host.watch.options(concurrency_group="watch", max_task_retries=0).remote()
        return Member(name, host, sentinel, about["pid"], about["node"], tuple(about["logs"]))

    def _until(self, wanted: Callable[[], list[Any]], some: bool = False, calls: Sequence[Beside] = ()) -> None:
        """Waits until what ``wanted`` returns is ready, or some of it is, and watches all actors meanwhile.

        Args:
            wanted: returns references and streams.
            some: whether one of them is enough.
            calls: calls of other threads that must have ended too.
        """
        if (own := getattr(Beside.current, "call", None)) is not None:
            own.paused.set()
            # The driver's first thread watches the actors, and its errors come first.
            refs = self._with_ends(wanted(), some)
            ray.wait(refs, num_returns=1 if some else len(refs), fetch_local=False)
            return
        while True:
            for one in self._restarts:
                one.advance()
            sentinels = {member.sentinel: member for member in self.members.values() if member.pid}
            refs = self._with_ends(wanted(), some)
            ready = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0] if refs else []
            running = any(call.thread.is_alive() for call in calls)
            self._settle()
            if (len(ready) == len(refs) or (some and ready)) and not running:
                return
            ray_private.require_alive()
            ends = [end for group in self.groups.values() for end in group.ends]
            ends += [ref for one in self._restarts for ref in one.refs]
            awaited = list(dict.fromkeys([*sentinels, *ends, *(ref for ref in refs if ref not in ready)]))
            seconds = min(self._watch.interval, THREAD_SECONDS) if running else self._watch.interval
            ready, _ = ray.wait(awaited, timeout=seconds, fetch_local=False)
            if ready and ready[0] in sentinels:
                self._lost(sentinels[ready[0]], None)
            try:
                self._watch.look(self.groups.values())
            except ActorHangs as error:
                self._lost(error.member, error)

    def _with_ends(self, refs: list[Any], some: bool) -> list[Any]:
        """Returns references, and the ends of their calls where all are waited for."""
        ends = [] if some else [end for group in self.groups.values() for end in group.ends_of(refs)]
        return list(dict.fromkeys([*refs, *ends]))

    def _lost(self, member: Member, error: Exception | None) -> None:
        """Restarts a member that has died or hangs.

        Raises:
            Exception: it cannot be restarted; the error is ``error``, or says why it died.
        """
        error = error or death_of(member)
        for one in self._restarts:
            if one.has(member):
                one.begin(member, error)
                return
        raise error

    def _settle(self) -> None:
        """Raises the error that came first, if any call has failed."""
        errors: dict[Member, Exception] = {}
        deadline = None
        while True:
            for group in self.groups.values():
                errors = group.settle() | errors
            if not errors:
                return
            for member in self.members.values():
                if member.pid and ray.wait([member.sentinel], timeout=0)[0]:
                    self._lost(member, None)
            own = {member: error for member, error in errors.items() if not of_others(error)}
            deadline = deadline or time.monotonic() + GRACE_SECONDS
            if own or time.monotonic() > deadline:
                for group in self.groups.values() if not own else ():
                    failed = {member: cause_of(errors[member]) for member in group.members if member in errors}
                    if failed and (absent := self._watch.absent(group, failed)) is not None:
                        raise absent from next(iter(failed.values()))
                self._forget_errors()
                member = next(m for m in self.members.values() if m in (own or errors))
                raise unwrapped_error(errors[member], member.name)
            time.sleep(0.1)

    def _forget_errors(self) -> None:
        """Raises no error of the calls that were made so far again: an error of one of them was raised already.

        The same error may come later from other ranks, and calls that use what the failed one made fail too.
        """
        for group in self.groups.values():
            group.forget_errors()

    def _fetch(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            for member in self.members.values():
                if ray.wait([member.sentinel], timeout=1.0)[0]:
                    raise death_of(member) from None
            raise ActorDied(str(error)) from None
        except ray.exceptions.RayTaskError as error:
            raise unwrapped_error(error) from None
