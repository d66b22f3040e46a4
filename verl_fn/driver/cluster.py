"""The actors of one run: starts them, waits for them, and reports which one failed or hangs, and why.

The driver asks every member for its progress while it waits. The ranks of a group run the same collectives, several
in each micro-batch. A group hangs if, during a call, no rank starts a collective or reaches another line of its code
for ``ray.timeout`` seconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import attrs
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.utils import _pytree as pytree

from verl_fn import build
from verl_fn.config import ConfigError
from verl_fn.config.schema import DriverConfig
from verl_fn.errors import cause_of
from verl_fn.state import Batch, version_of

from . import processes, ray_private
from .group import (
    NODE_SECONDS,
    START_SECONDS,
    Call,
    Group,
    Member,
    Placement,
    curable,
    death_of,
    of_others,
    unwrapped_error,
)
from .host import Heartbeat, Host
from .ranks import ActorDied, ActorHangs
from .serialization import opened, packed

# How often the driver looks whether a thread of its own has ended, and such a thread whether an engine was restarted
# while others go on.
THREAD_SECONDS, RESTART_SECONDS = 0.02, 1.0
# How long an error of a collective waits for the error or the death of another rank that may have caused it.
GRACE_SECONDS = 10
ANSWER_SECONDS = 5.0
TORCH = str(Path(torch.__file__).parent)


class Cluster:
    """The actors of one run. ``get`` raises an error as soon as any actor fails, dies or hangs.

    An actor counts as hung after ``timeout`` seconds without progress.
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
        # What threads of the driver do; each has an event that is set once it waits for actors.
        self._futures: list[Future[Any]] = []
        self._thread = threading.local()
        self.secret = os.urandom(16)
        self._code: Sequence[str] = ()
        self._stopped = False
        # Why engines were restarted.
        self.reasons: list[str] = []
        # Called with the name of a component before an update of it donates its state.
        self.before_update: list[Callable[[str], None]] = []

    @property
    def members(self) -> dict[str, Member]:
        """All actors by name."""
        return {member.name: member for group in self.groups.values() for member in group.members}

    def reserve(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> None:
        """Reserves bundles of resources for the actors in the Ray cluster, by a placement strategy of Ray."""
        self._place = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
        for _ in range(START_SECONDS):
            if self._stopped:
                raise ActorDied("the run has ended")
            if self._place.wait(1):
                return
        raise ActorDied(
            f"no room for {len(bundles)} processes in {START_SECONDS} s: each asks for {dict(bundles[-1])}, and "
            f"of the resources {ray.available_resources()} are free"
        )

    def start(
        self, groups: Mapping[str, Sequence[Placement]], driver: DriverConfig, ranks: int, code: Sequence[str] = ()
    ) -> None:
        """Starts the actors of all groups together, and checks that they run the driver's code.

        Args:
            groups: the placement of each actor, by the name of its group.
            ranks: how many training processes share the cores of their machine.
            code: references to the user's own objects; every actor must have them.
        """
        self._code = code
        started = {name: [self._spawn(placement) for placement in each] for name, each in groups.items()}
        self.code = build.code_identity(code)
        for name, actors in started.items():
            names = [name] if len(actors) == 1 else [f"{name} rank {i}" for i in range(len(actors))]
            self.groups[name] = Group(name, tuple(map(self._member, names, groups[name], actors)))
            self.groups[name].make("map", build.set_up_process, None, driver, ranks)
        self.finish(*self.groups.values())

    def join(self, group: Group, device: str) -> None:
        """Makes a group's members the ranks of one process group."""
        size, alone = len(group.members), Group(group.name, group.members[:1])
        place = self.get(alone.run("open_store", self.address(group.members[0]), size, self._timeout))
        group.scatter("join", [(place, rank, size, self._timeout, device) for rank in range(size)])
        self.finish(group)

    def address(self, member: Member) -> str:
        """Returns the address where a member listens for others: the loopback device's if all share a machine."""
        if len({other.node for other in self.members.values()}) == 1:
            return "127.0.0.1"
        return next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == member.node)

    def build(self, *components: tuple[Any, ...]) -> None:
        """Makes components in every member of their groups, side by side: each takes seconds to import what it needs.

        Each is a group's name, the component's name, and the function that makes it with its arguments.
        """
        for group, *args in components:
            self.groups[group].make("build", *args)
        self.finish(*self.groups.values())

    def replace(self, group: Group, number: int) -> Member:
        """Starts an actor in the place of a member that has ended, and returns the new member."""
        old = group.members[number]
        new = self._member(old.name, old.placement, self._spawn(old.placement))
        group.members = (*group.members[:number], new, *group.members[number + 1 :])
        return new

    def _spawn(self, placement: Placement) -> tuple[Any, Any]:
        """Starts an actor, and returns its handle and a reference to what it says about itself."""
        actor = ray.remote(num_cpus=0, concurrency_groups={"watch": 1, "ask": 1, "publish": 1})(Host)
        where = PlacementGroupSchedulingStrategy(self._place, placement.bundle)
        if self._stopped:
            raise ActorDied("the run has ended")
        self._hosts.append(actor.options(num_gpus=placement.gpus, scheduling_strategy=where).remote())
        return self._hosts[-1], self._hosts[-1].about.remote(self._code)

    def restarts(self) -> list[str]:
        """Returns why engines were restarted, since the last call of this method."""
        reasons, self.reasons = self.reasons, []
        return reasons

    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        """Calls ``fn`` in a thread, and returns when it waits for actors for the first time, or has ended.

        So it has made all the calls that it makes without a result of others, and they come before later ones.
        """
        future: Future[Any] = Future()
        paused = threading.Event()

        def call() -> None:
            self._thread.paused = paused
            try:
                future.set_result(fn())
            except BaseException as error:
                future.set_exception(error)
            paused.set()

        threading.Thread(target=call, daemon=True).start()
        paused.wait()
        self._futures = [one for one in self._futures if not one.done()] + [future]
        return future

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
        calls = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (Call, Future))]
        if calls:
            self.wait_for(lambda: all(call.done() for call in calls), calls)
        return pytree.tree_map(self._value, value)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, Future):
            return leaf.result()
        if not isinstance(leaf, Call):
            return leaf
        try:
            return leaf.result([opened(ray.get(ref), ref=ref) for ref in map(leaf.results.get, leaf.wanted)])
        except ray.exceptions.RayError as error:
            raise unwrapped_error(error) from None

    def stream(self, call: Call) -> Iterator[Any]:
        """Yields each value of a call of ``Host.stream`` when it has arrived.

        A member that is restarted is asked again, and samples that it gave before are left out.
        """
        given: set[tuple[int, int]] = set()

        def ready() -> list[tuple[int, Any]]:
            return [(number, stream) for number, stream in call.results.items() if stream.next_ready()]

        def finished() -> bool:
            return call.done() and all(stream.is_finished() for stream in call.results.values())

        while not finished():
            self.wait_for(lambda: bool(ready()) or finished(), [call])
            for number, stream in ready():
                try:
                    sample = ray.get(next(stream))
                except StopIteration:
                    continue  # the end of a stream may be ready before Ray reports the stream as finished
                except ray.exceptions.RayError as error:
                    if call.group.restart is None or not curable(error):
                        raise unwrapped_error(error) from None
                    self.wait_for(lambda: call.done() or call.results[number] is not stream, [call])  # noqa: B023
                    continue
                if (name := (sample.request, sample.number)) not in given:
                    given.add(name)
                    yield sample

    def finish(self, *groups: Group) -> None:
        """Waits until every member has ended every call."""
        self.wait_for(lambda: all(group.idle for group in groups))

    def abort(self) -> None:
        """Ends the actors, so that a start of more in another thread fails."""
        self._stopped = True
        if self._hosts and not ray_private.ended():
            for host in list(self._hosts):
                ray.kill(host)

    def stop(self) -> None:
        """Ends the actors and frees their room."""
        self.abort()
        members = list(self.members.values())
        if self._place is not None and not ray_private.ended():
            if members:
                sentinels = list(dict.fromkeys(m.sentinel for m in members))
                ray.wait(sentinels, num_returns=len(sentinels), timeout=NODE_SECONDS)
            # Their calls fail now, and Ray must not end while threads use it.
            wait(self._futures, NODE_SECONDS)
            # Ray's own node ends with this process, and could leave an actor behind that it has not killed yet.
            here = ray.get_runtime_context().get_node_id()
            processes.end(lambda: [m.pid for m in members if m.node == here])
            remove_placement_group(self._place)
        self.groups.clear()
        self._hosts.clear()

    def _member(self, name: str, placement: Placement, started: tuple[Any, Any]) -> Member:
        """Waits until an actor has started, and checks its code."""
        host, ref = started
        try:
            about = ray.get(ref, timeout=START_SECONDS)
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
        if (difference := build.code_difference(self.code, about["identity"], name)) is not None:
            raise ConfigError(difference)
        sentinel = host.watch.options(concurrency_group="watch").remote()
        return Member(name, host, sentinel, about["pid"], about["node"], tuple(about["logs"]), placement)

    def wait_for(self, done: Callable[[], bool], calls: Sequence[Call | Future[Any]] = ()) -> None:
        """Waits until ``done`` returns True, which these calls decide, and watches all actors meanwhile.

        The driver's first thread restarts engines and raises the errors of all actors; others only wait.
        """
        if side := hasattr(self._thread, "paused"):
            self._thread.paused.set()
        while True:
            # Before ``done``, so that what ends from now on wakes the wait below.
            refs = [ref for call in calls if isinstance(call, Call) for ref in call.awaited]
            if not side:
                refs += [end for group in self.groups.values() for end in group.open]
            ended = done()
            if not side and self._deal_with_errors():
                continue
            if ended:
                return
            if not side:
                self._watch_actors(refs, polls=any(isinstance(call, Future) for call in calls))
            elif self._stopped:
                raise ActorDied("the run has ended")
            elif refs:
                ray.wait(list(dict.fromkeys(refs)), timeout=RESTART_SECONDS, fetch_local=False)
            else:
                time.sleep(THREAD_SECONDS)

    def _watch_actors(self, refs: Sequence[Any], *, polls: bool) -> None:
        """Waits until a call has ended, an actor has died or it is time to look at the progress of all."""
        ray_private.require_alive()
        sentinels = {member.sentinel: member for member in self.members.values()}
        seconds = min(self._watch.interval, THREAD_SECONDS) if polls else self._watch.interval
        ready, _ = ray.wait(list(dict.fromkeys([*sentinels, *refs])), timeout=seconds, fetch_local=False)
        if ready and ready[0] in sentinels:
            self.lost(sentinels[ready[0]])
        try:
            self._watch.look(self.groups.values())
        except ActorHangs as error:
            self.lost(error.member, error)

    def lost(self, member: Member, error: Exception | None = None) -> None:
        """Restarts a member that has died, failed or hangs, or raises its own error, or one that says why it died."""
        if self.members.get(member.name) is not member:
            return  # another one was started in its place
        if error is None or isinstance(error, ray.exceptions.RayActorError):
            error = death_of(member)
        elif isinstance(error, ray.exceptions.RayTaskError):
            error = unwrapped_error(error, member.name)
        restart = next(group.restart for group in self.groups.values() if member in group.members)
        if restart is None:
            raise error
        restart(member, error.with_traceback(None))  # as in ``Group._ended``

    def _deal_with_errors(self) -> bool:
        """Raises the error that came first, if any call has failed; returns whether an engine was restarted."""
        errors: dict[Member, Exception] = {}
        deadline, restarted = None, False
        while True:
            for group in self.groups.values():
                group.settle()
                while group.errors:
                    # A restart deals with the others meanwhile.
                    error = group.errors.pop(member := next(iter(group.errors)))
                    if group.restart and curable(error):
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
                break
            time.sleep(0.1)
        for group in self.groups.values() if not own else ():
            failed = {member: cause_of(errors[member]) for member in group.members if member in errors}
            if failed and (missing := absent(group, failed)) is not None:
                raise missing from next(iter(failed.values()))
        # The same error may come later from other ranks, and calls that use what the failed one made fail.
        for call in (call for group in self.groups.values() for call in group.calls):
            call.quiet = True
        member = next(m for m in self.members.values() if m in (own or errors))
        raise unwrapped_error(errors[member], member.name)


class Watch:
    """Checks the progress of groups every ``interval`` seconds, a few times in ``timeout`` seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.interval = min(timeout / 4, 10.0)
        self._next = 0.0
        self._asked: dict[Member, tuple[Any, float]] = {}
        self._heartbeats: dict[Member, Heartbeat] = {}
        self._since: dict[tuple[Member, ...], tuple[list[Heartbeat], float]] = {}

    def look(self, groups: Iterable[Group]) -> None:
        """Reads the answers that came and asks again, if it is time; raises ``ActorHangs`` if a group hangs."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.interval
        for group in groups:
            # Engines don't wait for each other, so each may hang by itself.
            engine = group.restart is not None
            for members in [(m,) for m in group.members] if engine else [group.members]:
                silent = any(self._waited(member, now) > self._timeout for member in members)
                for member in members:
                    if member not in self._asked:
                        self._asked[member] = (ask(member), now)
                still = self._stands_still(members, now, engine=engine)
                if (silent or still) and (error := self._hanging(group.name, members)) is not None:
                    raise error

    def _waited(self, member: Member, now: float) -> float:
        """Returns for how many seconds a member has not answered."""
        if member not in self._asked:
            return 0.0
        ref, since = self._asked[member]
        if not ray.wait([ref], timeout=0)[0]:
            return now - since
        del self._asked[member]
        # A member that has died answers with Ray's error; its sentinel has the reason.
        with contextlib.suppress(ray.exceptions.RayError):
            self._heartbeats[member] = ray.get(ref)
        return 0.0

    def _stands_still(self, members: tuple[Member, ...], now: float, *, engine: bool) -> bool:
        """Returns whether ranks make no progress together, or an engine makes no step while it draws."""
        heartbeats = [self._heartbeats[member] for member in members if member in self._heartbeats]
        if engine:
            # The line where a step waits for its GPU is nearly always the same.
            heartbeats = [attrs.evolve(heartbeat, stack=traceback.StackSummary()) for heartbeat in heartbeats]
        elif len(members) == 1:
            return False
        before, since = self._since.get(members, ([], now))
        waited_for = [heartbeat.steps is not None if engine else heartbeat.busy for heartbeat in heartbeats]
        if heartbeats != before or not any(waited_for):
            since = now
        self._since[members] = (heartbeats, since)
        return now - since > self._timeout

    def _hanging(self, name: str, members: tuple[Member, ...]) -> ActorHangs | None:
        """Returns an error with every rank's stack and the name of a suspect; None if a rank has died.

        The suspect is, in this order: a rank that does not answer, a rank outside any collective, the rank that has
        started the fewest collectives.
        """
        progress = progress_of(members)
        if progress is None:
            return None
        answers = {member: heartbeat for member, heartbeat in progress.items() if heartbeat is not None}
        acting = [member for member, heartbeat in answers.items() if heartbeat.busy and not waits(heartbeat.stack)]
        silent = [member for member in progress if member not in answers]
        suspect = silent[0] if silent else min(acting or answers, key=lambda member: answers[member].collectives)
        return ActorHangs(
            f"{suspect.name} (pid {suspect.pid}) hangs: {name} made no progress for ray.timeout = "
            f"{self._timeout:g} s\n{described(progress)}\nThe same command continues from the last checkpoint. If "
            "this was only slow, raise ray.timeout",
            suspect,
        )


def absent(group: Group, failed: Mapping[Member, Exception]) -> ActorHangs | None:
    """Returns an error for a rank that was missing in a collective that failed; None where none was.

    Such a rank runs the same call and is in no collective.
    """
    running = {group.members[number] for call in group.calls for number in call.open}
    progress = progress_of(member for member in group.members if member in running and member not in failed) or {}
    missing = [m for m, beat in progress.items() if beat is None or (beat.stack and not waits(beat.stack))]
    if not missing:
        return None
    first, error = next(iter(failed.items()))
    return ActorHangs(
        f"{first.name} (pid {first.pid}) failed in a collective: {error}\n{missing[0].name} (pid {missing[0].pid}) "
        f"was not in it\n{described(progress)}\nThe same command continues from the last checkpoint"
    )


def progress_of(members: Iterable[Member]) -> dict[Member, Heartbeat | None] | None:
    """Returns the progress of each member, and None for one that does not answer; None where one has died."""
    asked = {member: ask(member) for member in members}
    ready = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_SECONDS)[0] if asked else []
    try:
        return {member: ray.get(ref) if ref in ready else None for member, ref in asked.items()}
    except ray.exceptions.RayError:
        return None


def described(progress: Mapping[Member, Heartbeat | None]) -> str:
    """Describes where ranks are; those with the same stack share a paragraph."""
    alike: dict[str, list[str]] = {}
    for member, heartbeat in progress.items():
        where = "does not answer"
        if heartbeat is not None:
            state = "waits in a collective" if waits(heartbeat.stack) else "is here"
            lines = "".join(heartbeat.stack.format()).rstrip()
            where = f"{state}:\n{lines}" if lines else "runs no call"
        alike.setdefault(where, []).append(member.name)
    return "\n".join(f"{', '.join(names)} {where}" for where, names in alike.items())


def ask(member: Member) -> Any:
    """Asks a member for its progress beside its current call, and returns a reference to the answer."""
    return member.host.heartbeat.options(concurrency_group="ask").remote()


def waits(stack: traceback.StackSummary) -> bool:
    """Returns whether a thread is in a collective: in torch.distributed, and in nothing of torch that it calls."""
    for line in reversed(stack):
        if line.filename.startswith(f"{TORCH}/distributed"):
            return True
        if not line.filename.startswith(TORCH):
            return False
    return False
