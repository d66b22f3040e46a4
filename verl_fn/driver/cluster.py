"""The actors of one run: starts them, waits for them, and reports which one failed and why."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from torch.utils import _pytree as pytree

from verl_fn.backends.protocol import is_where_used
from verl_fn.config import ConfigError
from verl_fn.config.schema import DriverConfig
from verl_fn.errors import UserError

from . import identity, ray_private
from .errors import ActorDied
from .group import Group, Member
from .host import Host
from .parcels import Lazy, Parcels
from .processes import await_end
from .watch import Watch

LOG_TAIL_LINES = 20
START_SECONDS = 300
NODE_SECONDS = 20
# How long an error of a collective waits for the error or the death of another rank that may have caused it.
GRACE_SECONDS = 10


@attrs.frozen
class Seat:
    """The place of an actor: a bundle of the run's placement group, and its share of a GPU there."""

    bundle: int
    gpus: float = 0.0


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
        self._parcels = Parcels()
        self._lazy = itertools.count()
        self.secret = os.urandom(16)

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
        self, seats: Mapping[str, Sequence[Seat]], driver: DriverConfig, ranks: int, code: Sequence[str] = ()
    ) -> None:
        """Starts the actors of all groups together.

        Args:
            seats: the seat of each actor, by the name of its group.
            driver: the config's settings of processes.
            ranks: how many training processes share the cores of their machine.
            code: references to the user's own objects, which every actor must have.

        Raises:
            ActorDied: an actor did not start.
            ConfigError: an actor runs other code than the driver.
        """
        actor = ray.remote(num_cpus=0, concurrency_groups={"watch": 1, "ask": 1})(Host)
        hosts: dict[str, list[Any]] = {name: [] for name in seats}
        for name, places in seats.items():
            for seat in places:
                where = PlacementGroupSchedulingStrategy(self._place, seat.bundle)
                hosts[name].append(actor.options(num_gpus=seat.gpus, scheduling_strategy=where).remote())
                self._hosts.append(hosts[name][-1])
        for name, members in hosts.items():
            names = [name] if len(members) == 1 else [f"{name} rank {i}" for i in range(len(members))]
            started = [(one, host, host.about.remote(code)) for one, host in zip(names, members, strict=True)]
            self.groups[name] = Group(name, tuple(self._member(*one, code) for one in started))
        for group in self.groups.values():
            self._run(group, "set_up", driver, ranks)

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
        self._run(self.groups[group], "build", component, factory, *args)

    def call(self, fn: Callable[..., Any], *args: Any, returns: int | None = None, **kwargs: Any) -> Any:
        """Applies a function to values or references, in the actor for batches or where its results are used."""
        if is_where_used(fn):
            lazy = Lazy(next(self._lazy), fn, args, kwargs)
            return lazy if returns is None else [attrs.evolve(lazy, number=i) for i in range(returns)]
        result = self.groups["data"].run("call", fn, kwargs, returns is not None, *args, returns=returns or 1)
        return [result] if returns == 1 else result

    def joined(self, parts: Sequence[Any]) -> Any:
        """Returns a reference to the concatenation of lists, which is made where it is used."""
        return parts[0] if len(parts) == 1 else Lazy(next(self._lazy), _chained, tuple(parts), {})

    def wait(self, value: Any) -> Any:
        """Waits until everything that ``value`` refers to is ready, and returns ``value``.

        Raises:
            ActorDied: any actor ended meanwhile.
            ActorHangs: an actor makes no progress while others wait for it.
            Exception: a call to any actor failed; the error is the call's own.
        """
        self._until(lambda: list(_references(value)))
        return value

    def get(self, value: Any) -> Any:
        """Returns ``value`` with every reference replaced by what it refers to."""
        self.wait(value)
        return pytree.tree_map(self._value, value)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, Lazy):
            result = leaf.fn(*(self._value(arg) for arg in leaf.args), **leaf.kwargs)
            return result if leaf.number is None else list(result)[leaf.number]
        return self._parcels.value(self._fetch(leaf)) if isinstance(leaf, ray.ObjectRef) else leaf

    def stream(self, group: Group, parts: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Calls ``Host.stream`` on members of a group, and yields a reference to each value when it has arrived."""
        streams = group.stream(parts)
        while streams:
            self._until(lambda: list(streams), some=True)
            for stream in list(streams):
                while stream.next_ready():
                    yield next(stream)
                if stream.is_finished():
                    streams.remove(stream)

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
                ray.wait([m.sentinel for m in members], num_returns=len(members), timeout=NODE_SECONDS)
            # Ray's own node ends with this process, and could leave an actor behind that it has not killed yet.
            await_end(m.pid for m in members if m.node == ray.get_runtime_context().get_node_id())
            if self._place is not None:
                remove_placement_group(self._place)
        self.groups.clear()
        self._hosts.clear()

    def _run(self, group: Group, method: str, *args: Any) -> None:
        group.run(method, *args)
        self.finish(group)

    def _member(self, name: str, host: Any, about_ref: Any, code: Sequence[str]) -> Member:
        """Waits until an actor has started, and checks its code."""
        try:
            about = ray.get(about_ref, timeout=START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise ActorDied(f"{name} did not start in {START_SECONDS} s") from None
        except ray.exceptions.RayError as error:
            raise ActorDied(
                f"{name} did not start: {error}\nIf it cannot import verl_fn, install it on every node, or send "
                "it with the run: py_modules or working_dir in the file of ray.runtime_env"
            ) from None
        self.code = self.code or identity.identity(code)
        if (difference := identity.difference(self.code, about["identity"], name)) is not None:
            raise ConfigError(difference)
        sentinel = host.watch.options(concurrency_group="watch").remote()
        return Member(name, host, sentinel, about["pid"], about["node"], tuple(about["logs"]))

    def _until(self, wanted: Callable[[], list[Any]], some: bool = False) -> None:
        """Waits until what ``wanted`` returns is ready, or some of it is, and watches all actors meanwhile.

        Args:
            wanted: returns references and streams.
            some: whether one of them is enough.
        """
        sentinels = {member.sentinel: member for member in self.members.values()}
        while True:
            refs = wanted()
            if not some:
                refs += [end for group in self.groups.values() for end in group.ends_of(refs)]
            refs = list(dict.fromkeys(refs))
            ready = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0] if refs else []
            self._settle()
            if len(ready) == len(refs) or (some and ready):
                return
            ray_private.require_alive()
            ends = [end for group in self.groups.values() for end in group.ends]
            awaited = list(dict.fromkeys([*sentinels, *ends, *(ref for ref in refs if ref not in ready)]))
            ready, _ = ray.wait(awaited, timeout=self._watch.interval, fetch_local=False)
            if ready and ready[0] in sentinels:
                raise self._died(sentinels[ready[0]])
            self._watch.look(self.groups.values())

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
                if ray.wait([member.sentinel], timeout=0)[0]:
                    raise self._died(member)
            own = {member: error for member, error in errors.items() if not _of_others(error)}
            deadline = deadline or time.monotonic() + GRACE_SECONDS
            if own or time.monotonic() > deadline:
                for group in self.groups.values() if not own else ():
                    failed = {member: _cause(errors[member]) for member in group.members if member in errors}
                    if failed and (absent := self._watch.absent(group, failed)) is not None:
                        raise absent from next(iter(failed.values()))
                self._forget_errors()
                member = next(m for m in self.members.values() if m in (own or errors))
                raise _unwrapped(errors[member], member.name)
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
                    raise self._died(member) from None
            raise ActorDied(str(error)) from None
        except ray.exceptions.RayTaskError as error:
            raise _unwrapped(error) from None

    def _died(self, member: Member) -> ActorDied:
        try:
            ray.get(member.sentinel)
            reason = "it returned"
        except ray.exceptions.RayError as error:
            reason = str(error)
        tail = _on_node(member.node, _tails, member.logs) or ["(its log cannot be read)"]
        end = "\n  ".join(tail)
        return ActorDied(
            f"{member.name} (pid {member.pid}) died: {reason}\nits log ends:\n  {end}\n"
            "The same command continues from the last checkpoint"
        )


def _references(value: Any) -> Iterator[Any]:
    """Yields all of Ray's references in a value, also those in the arguments of lazy results."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Lazy):
            yield from _references(leaf.args)
        elif isinstance(leaf, ray.ObjectRef):
            yield leaf


def _chained(*parts: Sequence[Any]) -> list[Any]:
    return [item for part in parts for item in part]


def _of_others(error: Exception) -> bool:
    """Returns whether an error only means that another rank failed."""
    import torch.distributed as dist

    if isinstance(error, ray.exceptions.RayActorError):
        return True
    cause = _cause(error)
    message = str(cause).lower()
    return isinstance(cause, dist.DistError) or "gloo" in message or "nccl" in message


def _cause(error: Exception) -> Exception:
    """Returns what a worker raised, without Ray's traceback around it."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error


def _unwrapped(error: Exception, name: str = "") -> Exception:
    """Returns a worker's error with its own class."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return ActorDied(f"{name}: {error}")
    unwrapped = error.cause if isinstance(error.cause, UserError) else error.as_instanceof_cause()
    if name:
        unwrapped.add_note(f"raised in {name}")
    return unwrapped


def _on_node(node: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Returns ``fn(*args)``, applied on a node of the cluster; None where that node does not answer."""
    if node == ray.get_runtime_context().get_node_id():
        return fn(*args)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    with contextlib.suppress(ray.exceptions.RayError):
        task = ray.remote(num_cpus=0, max_retries=0)(fn).options(scheduling_strategy=there)
        return ray.get(task.remote(*args), timeout=NODE_SECONDS)
    return None


def _tails(logs: Sequence[str]) -> list[str]:
    """Returns the last lines of log files, without Ray's own marks."""
    tails = []
    for log in logs:
        with contextlib.suppress(OSError):
            lines = Path(log).read_text(errors="replace").splitlines()
            tails += [line for line in lines if not line.startswith(":")][-LOG_TAIL_LINES:]
    return tails or ["(empty)"]
