"""The actors of one run: starts them, waits for them, and reports which one failed and why."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from . import build, identity, processes, ray_private
from .group import (
    NODE_SECONDS,
    START_SECONDS,
    Call,
    Group,
    Member,
    cause_of,
    curable,
    death_of,
    of_others,
    unwrapped_error,
)
from .host import Host
from .parcels import opened, packed
from .ranks import ActorDied, ActorHangs
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
    """A result that is made of the results of a call's members, also after some of them were called again.

    Attributes:
        call: the call.
        fn: makes it.
    """

    call: Call
    fn: Callable[..., Any]


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
    """The actors of one run. ``get`` raises an error as soon as any actor fails, dies or hangs.

    Args:
        timeout: seconds without progress after which an actor counts as hung.
    """

    def __init__(self, timeout: float) -> None:
        self.groups: dict[str, Group] = {}
        self.code: dict[str, str] = {}
        self._timeout = timeout
        self._watch = Watch(timeout)
        self._place: Any = None
        self._hosts: list[Any] = []
        # The batches in the object store, with the versions of their tensors.
        self._stored: weakref.WeakKeyDictionary[Batch, tuple[list[int], Any]] = weakref.WeakKeyDictionary()
        self._beside: list[Beside] = []
        self.secret = os.urandom(16)
        self._code: Sequence[str] = ()
        self._seats: dict[str, Sequence[Seat]] = {}
        # The calls that made the parts of each group.
        self.made: dict[str, list[tuple[Any, ...]]] = {}
        self._stopped = False
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
            raise ActorDied(
                f"no room for {len(bundles)} processes in {START_SECONDS} s: each asks for {dict(bundles[-1])}, and "
                f"of the resources {ray.available_resources()} are free"
            )

    def start(
        self,
        seats: Mapping[str, Sequence[Seat]],
        driver: DriverConfig,
        ranks: int,
        code: Sequence[str] = (),
    ) -> None:
        """Starts the actors of all groups together.

        Args:
            seats: the seat of each actor, by the name of its group.
            driver: the config's settings of processes.
            ranks: how many training processes share the cores of their machine.
            code: references to the user's own objects; every actor must have them.

        Raises:
            ActorDied: an actor did not start.
            ConfigError: an actor runs other code than the driver.
        """
        self._code, self._seats = code, dict(seats)
        hosts = {name: [self._spawn(seat) for seat in places] for name, places in seats.items()}
        for name, members in hosts.items():
            names = [name] if len(members) == 1 else [f"{name} rank {i}" for i in range(len(members))]
            started = [(one, host, host.about.remote(code)) for one, host in zip(names, members, strict=True)]
            self.groups[name] = Group(name, tuple(self._member(*one) for one in started))
            self.made[name] = [("map", build.set_up_process, None, driver, ranks)]
            self.groups[name].run(*self.made[name][0])
        self.finish(*self.groups.values())

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

    def build(self, *components: tuple[Any, ...]) -> None:
        """Makes components in every member of their groups, side by side: each takes seconds to import what it needs.

        Args:
            components: for each, the group's name, the component's name, and the function that makes it with its
                arguments.
        """
        for group, *args in components:
            self.groups[group].run("build", *args)
            self.made[group].append(("build", *args))
        self.finish(*self.groups.values())

    def replace(self, group: Group, number: int) -> Member:
        """Starts an actor in the place of a member that has ended, and returns the new member."""
        host, name = self._spawn(self._seats[group.name][number]), group.members[number].name
        new = self._member(name, host, host.about.remote(self._code))
        group.members = (*group.members[:number], new, *group.members[number + 1 :])
        return new

    def _spawn(self, seat: Seat) -> Any:
        actor = ray.remote(num_cpus=0, concurrency_groups={"watch": 1, "ask": 1, "publish": 1})(Host)
        where = PlacementGroupSchedulingStrategy(self._place, seat.bundle)
        self._hosts.append(actor.options(num_gpus=seat.gpus, scheduling_strategy=where).remote())
        return self._hosts[-1]

    def restarts(self) -> list[str]:
        """Returns why engines were restarted, since the last call of this method."""
        restarts = [group.restarts for group in self.groups.values() if group.restarts is not None]
        reasons = [reason for one in restarts for reason in one.reasons]
        for one in restarts:
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

    def get(self, value: Any) -> Any:
        """Waits for everything that ``value`` refers to, and returns it with what the references refer to.

        Raises:
            ActorDied: any actor ended meanwhile.
            ActorHangs: an actor makes no progress while others wait for it.
            Exception: a call to any actor failed; the error is the call's own.
        """
        leaves = pytree.tree_leaves(value)
        calls = [leaf for leaf in leaves if isinstance(leaf, Beside)]

        def refs() -> list[Any]:
            parts = [leaf.call.results.values() if isinstance(leaf, Together) else [leaf] for leaf in leaves]
            return [part for several in parts for part in several if isinstance(part, ray.ObjectRef)]

        if calls or refs():
            self.wait_for(refs, calls=calls)
        return pytree.tree_map(self._value, value)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, ray.ObjectRef):
            return opened(self._fetch(leaf), ref=leaf)
        if isinstance(leaf, Together):
            return leaf.fn(*map(self._value, leaf.call.results.values()))
        if not isinstance(leaf, Beside):
            return leaf
        if leaf.error is not None:
            raise leaf.error
        return leaf.result

    def stream(self, group: Group, parts: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Calls ``Host.stream`` on members of a group, and yields each value when it has arrived.

        A member that was restarted is asked again, and samples that it gave before are left out.
        """
        streams, given = group.stream(dict(enumerate(parts))), set[tuple[int, int]]()
        members = list(group.members)
        while streams:
            self.wait_for(lambda: list(streams.values()), some=True)  # noqa: B023
            for i, stream in list(streams.items()):
                while stream.next_ready():
                    try:
                        ref = next(stream)
                        sample = ray.get(ref)
                    except StopIteration:
                        # The end of a stream may be ready before Ray reports the stream as finished.
                        break
                    except ray.exceptions.RayError as error:
                        if not group.restarts or not curable(error):
                            self._fetch(ref)
                        self._await_restart(group, members[i], error)
                        members[i] = group.members[i]
                        streams |= group.stream({i: parts[i]})
                        break
                    if (name := (sample.request, sample.number)) not in given:
                        given.add(name)
                        yield sample
                if streams[i] is stream and stream.is_finished():
                    del streams[i]

    def _await_restart(self, group: Group, member: Member, error: Exception) -> None:
        """Waits until an engine that has failed was restarted."""
        while member in group.members:
            if getattr(Beside.current, "call", None) is None:
                self.lost(member, error)
            self._pause()

    def _pause(self) -> None:
        """Lets a thread of the driver wait a moment for its first thread.

        Raises:
            ActorDied: the run has ended.
        """
        if self._stopped:
            raise ActorDied("the run has ended")
        time.sleep(THREAD_SECONDS)

    def finish(self, *groups: Group) -> None:
        """Waits until every member has ended every call."""
        self.wait_for(lambda: [end for group in groups for end in group.ends])

    def stop(self) -> None:
        """Ends the actors and frees their room."""
        members, self._stopped = list(self.members.values()), True
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
            here = ray.get_runtime_context().get_node_id()
            processes.end(lambda: [m.pid for m in members if m.node == here])
            if self._place is not None:
                remove_placement_group(self._place)
        self.groups.clear()
        self._hosts.clear()

    def _member(self, name: str, host: Any, about_ref: Any) -> Member:
        """Waits until an actor has started, and checks its code."""
        try:
            about = ray.get(about_ref, timeout=START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise ActorDied(
                f"{name} did not start in {START_SECONDS} s. If ray.runtime_env sets py_executable, it must run "
                "`-c 'import ray'`"
            ) from None
        except ray.exceptions.RayError as error:
            raise ActorDied(
                f"{name} did not start: {error}\nIf it cannot import a module, install it on every node, add its "
                "folder to PYTHONPATH, or send it with the run: py_modules or working_dir in the file of "
                "ray.runtime_env"
            ) from None
        self.code = self.code or identity.identity(self._code)
        if (difference := identity.difference(self.code, about["identity"], name)) is not None:
            raise ConfigError(difference)
        sentinel = host.watch.options(concurrency_group="watch").remote()
        return Member(name, host, sentinel, about["pid"], about["node"], tuple(about["logs"]))

    def wait_for(self, wanted: Callable[[], list[Any]], some: bool = False, calls: Sequence[Beside] = ()) -> None:
        """Waits until what ``wanted`` returns is ready, or some of it is, and watches all actors meanwhile.

        Args:
            wanted: returns references and streams; others after an engine was restarted.
            some: whether one of them is enough.
            calls: calls of other threads that must have ended too.
        """
        if (own := getattr(Beside.current, "call", None)) is not None:
            own.paused.set()
            # The driver's first thread watches the actors and restarts engines, and its errors come first.
            while True:
                refs = wanted()
                awaited = self._with_ends(refs, some)
                ray.wait(awaited, num_returns=1 if some else len(awaited), fetch_local=False)
                if some or (refs == wanted() and not any(group.failed(refs) for group in self.groups.values())):
                    return
                self._pause()
        while True:
            refs = self._with_ends(wanted(), some)
            ready = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0] if refs else []
            running = any(call.thread.is_alive() for call in calls)
            if self._settle():
                continue
            if (len(ready) == len(refs) or (some and ready)) and not running:
                return
            ray_private.require_alive()
            sentinels = {member.sentinel: member for member in self.members.values()}
            ends = [end for group in self.groups.values() for end in group.ends]
            awaited = list(dict.fromkeys([*sentinels, *ends, *(ref for ref in refs if ref not in ready)]))
            seconds = min(self._watch.interval, THREAD_SECONDS) if running else self._watch.interval
            ready, _ = ray.wait(awaited, timeout=seconds, fetch_local=False)
            if ready and ready[0] in sentinels:
                self.lost(sentinels[ready[0]])
            try:
                self._watch.look(self.groups.values())
            except ActorHangs as error:
                self.lost(error.member, error)

    def _with_ends(self, refs: list[Any], some: bool) -> list[Any]:
        """Returns references, and the ends of their calls where all are waited for."""
        ends = [] if some else [end for group in self.groups.values() for end in group.ends_of(refs)]
        return list(dict.fromkeys([*refs, *ends]))

    def lost(self, member: Member, error: Exception | None = None) -> None:
        """Restarts a member that has died, failed or hangs.

        Raises:
            Exception: it cannot be restarted; the error is its own, or says why it died.
        """
        if self.members.get(member.name) is not member:
            return  # another one was started in its place
        if error is not None:
            error = error.with_traceback(None)  # as in ``error_of``
        if error is None or isinstance(error, ray.exceptions.RayActorError):
            error = death_of(member)
        elif isinstance(error, ray.exceptions.RayTaskError):
            error = unwrapped_error(error, member.name)
        restarts = next(group.restarts for group in self.groups.values() if member in group.members)
        if restarts is None:
            raise error
        restarts.restart(member, error)

    def _settle(self) -> bool:
        """Raises the error that came first, if any call has failed; returns whether an engine was restarted."""
        errors: dict[Member, Exception] = {}
        deadline, restarted = None, False
        while True:
            for group in self.groups.values():
                for member, error in group.settle().items():
                    if group.restarts and curable(error):
                        self.lost(member, error)
                        restarted = True
                    else:
                        errors.setdefault(member, error)
            if not errors:
                return restarted
            for member in self.members.values():
                if ray.wait([member.sentinel], timeout=0)[0]:
                    self.lost(member)
            own = {member: error for member, error in errors.items() if not of_others(error)}
            deadline = deadline or time.monotonic() + GRACE_SECONDS
            if own or time.monotonic() > deadline:
                for group in self.groups.values() if not own else ():
                    failed = {member: cause_of(errors[member]) for member in group.members if member in errors}
                    if failed and (absent := self._watch.absent(group, failed)) is not None:
                        raise absent from next(iter(failed.values()))
                # The same error may come later from other ranks, and calls that use what the failed one made fail.
                for group in self.groups.values():
                    group.forget_errors()
                member = next(m for m in self.members.values() if m in (own or errors))
                raise unwrapped_error(errors[member], member.name)
            time.sleep(0.1)

    def _fetch(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            raise unwrapped_error(error) from None
