"""Groups of actors that run every call together, the calls that have not ended, and what their errors mean."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_fn.backends.protocol import PublicationFailed, Reference, StaleWeightsError
from verl_fn.backends.weight_sync import IncompleteWeights
from verl_fn.backends.weight_sync.channel import SenderFailed
from verl_fn.errors import UserError, cause_of

from .ranks import ActorDied

LOG_TAIL_LINES = 20
NODE_SECONDS, START_SECONDS = 20, 300


@attrs.frozen
class Placement:
    """The place of an actor: a bundle of the run's placement group, and its share of a GPU there."""

    bundle: int
    gpus: float = 0.0


@attrs.frozen(eq=False)
class Member:
    """One actor of the run.

    Attributes:
        host: Ray's handle of the actor.
        sentinel: a reference that is ready when the actor has ended.
        node: the id of its machine.
        logs: the files that hold its output.
    """

    name: str
    host: Any
    sentinel: Any
    pid: int
    node: str
    logs: tuple[str, ...]
    placement: Placement


@attrs.define(eq=False)
class Call(Reference[Any]):
    """A call to the first members of a group by their numbers; ``Cluster.get`` returns its result.

    Attributes:
        result: makes the result of the members' results.
        wanted: the numbers of the members whose results it takes.
        draws: whether engines answer requests with it.
        publishes: whether it runs beside the calls of requests, not after them.
        results: for each member, a reference to its result, or the stream of its results.
        open: for members that have not ended it, a reference that is ready when they have.
        again: the members that are to be called again, since they failed and are restarted.
        failed: the members whose error a restart does not cure.
        quiet: whether its errors are not to be raised.
    """

    group: Group
    method: str
    arguments: Sequence[tuple[Any, ...]]
    result: Callable[..., Any]
    wanted: range
    draws: bool = False
    publishes: bool = False
    results: dict[int, Any] = attrs.field(factory=dict)
    open: dict[int, Any] = attrs.field(factory=dict)
    again: set[int] = attrs.field(factory=set)
    failed: set[int] = attrs.field(factory=set)
    quiet: bool = False

    def done(self) -> bool:
        """Returns whether the members whose results are wanted have ended it; one that is restarted has not."""
        self.group.settle()
        return not any(number in self.open or number in self.again for number in self.wanted)

    @property
    def awaited(self) -> list[Any]:
        """References and streams of which one is ready when there is news of the call."""
        streams = self.results.values() if self.method == "stream" else ()
        return [*(stream for stream in streams if not stream.is_finished()), *self.open.values()]

    @property
    def succeeded(self) -> bool:
        """Whether all members have ended it without an error."""
        return all(self.succeeded_on(number) for number in range(len(self.arguments)))

    def succeeded_on(self, number: int) -> bool:
        """Returns whether a member has ended the call without an error."""
        self.group.settle()
        return not any(number in members for members in (self.open, self.again, self.failed))


class Group:
    """The ranks that hold one set of components, or engines that share work; threads may call them.

    Attributes:
        restart: starts another process in the place of a member that failed, or raises the error; None if a member
            that fails ends the run.
        restarts: how often each member was restarted since it last answered requests, by its number.
        calls: the calls that have not ended.
        errors: the first error of each member that nobody has dealt with yet.
        dropped: the numbers of values that members are to drop before their next call.
        made: the calls that made the components.
    """

    def __init__(self, name: str, members: tuple[Member, ...]) -> None:
        self.name = name
        self.members = members
        self.restart: Callable[[Member, Exception], None] | None = None
        self.restarts: Counter[int] = Counter()
        self.calls: list[Call] = []
        self.errors: dict[Member, Exception] = {}
        self.dropped: list[int] = []
        self.made: list[tuple[Any, ...]] = []
        self.one_thread = threading.RLock()

    def run(self, method: str, *args: Any) -> Call:
        """Calls a method of ``Host`` on all members with the same arguments; the result is that of the first."""
        return self.scatter(method, [args] * len(self.members), operator.itemgetter(0), first=True)

    def make(self, method: str, *args: Any) -> None:
        """Makes a call as ``run`` does, which a member that is restarted makes again."""
        self.run(method, *args)
        self.made.append((method, *args))

    def scatter(
        self,
        method: str,
        parts: Sequence[tuple[Any, ...]],
        result: Callable[[list[Any]], Any] = list,
        *,
        first: bool = False,
        draws: bool = False,
        publishes: bool = False,
    ) -> Call:
        """Calls a method of ``Host`` on the first members, each with its own arguments; see ``Call``.

        If only the result of the ``first`` member is wanted, the call's result does not wait for the others.
        """
        with self.one_thread:
            # As a call of its own, since a call whose arguments failed never reaches the actor.
            if drops := self.dropped[:]:
                del self.dropped[: len(drops)]
                for member in self.members:
                    member.host.drop.remote(drops)
            call = Call(self, method, parts, result, range(1 if first else len(parts)), draws, publishes)
            for number in range(len(parts)):
                self._send(call, number)
            self.calls.append(call)
            return call

    def _send(self, call: Call, number: int) -> None:
        host, args = self.members[number].host, call.arguments[number]
        if call.method == "stream":
            stream = host.stream.options(num_returns="streaming").remote(*args)
            call.results[number], call.open[number] = stream, stream.completed()
        else:
            run = host.run.options(num_returns=2, concurrency_group="publish" if call.publishes else None)
            call.results[number], call.open[number] = run.remote(call.method, *args)

    @property
    def open(self) -> list[Any]:
        """References of which each is ready when a member has ended a call."""
        with self.one_thread:
            return [end for call in self.calls for end in call.open.values()]

    @property
    def idle(self) -> bool:
        """Whether all calls have ended."""
        self.settle()
        return not self.calls

    def settle(self) -> None:
        """Notes which calls have ended, and the first error of each member."""
        with self.one_thread:
            ends = self.open
            ready = set(ray.wait(ends, num_returns=len(ends), timeout=0, fetch_local=False)[0]) if ends else ()
            for call in self.calls if ready else ():
                for number, end in list(call.open.items()):
                    if end in ready:
                        self._ended(call, number, end)
            self.calls = [call for call in self.calls if call.open or call.again]

    def _ended(self, call: Call, number: int, end: Any) -> None:
        try:
            ray.get(end)
        except ray.exceptions.RayError as error:
            curably = self.restart is not None and curable(error)
            (call.again if curably else call.failed).add(number)
            if curably or not call.quiet:
                # Its traceback would keep values of the callers alive, such as weights, which an update would copy.
                self.errors.setdefault(self.members[number], error.with_traceback(None))
        else:
            if call.draws:
                self.restarts[number] = 0
        # Last, since another thread that sees the call in neither place would take it for ended.
        del call.open[number]

    def lose(self, member: Member) -> int:
        """Takes the open calls of a member that has ended from it, to be made ``again``; returns its number."""
        number = self.members.index(member)
        with self.one_thread:
            self.settle()
            for call in self.calls:
                if number in call.open:
                    call.again.add(number)
                    del call.open[number]
        return number

    def again(self, number: int) -> None:
        """Makes the calls again that the member with this number had open when it ended."""
        with self.one_thread:
            for call in self.calls:
                if number in call.again:
                    self._send(call, number)
                    call.again.remove(number)


def curable(error: Exception) -> bool:
    """Returns whether an engine that is made again may not have this error, such as its death or too little memory.

    Errors that a user has caused, or the process that sends weights, come again.

    Example:
        >>> curable(MemoryError()), curable(ValueError("prompt 0 is empty"))
        (True, False)
        >>> curable(RuntimeError("the engine has died")), curable(RecursionError("maximum recursion depth exceeded"))
        (True, False)
    """
    if isinstance(error, ray.exceptions.RayActorError):
        return True
    error = cause_of(error)
    if isinstance(error, (IncompleteWeights, PublicationFailed, MemoryError)):
        return not isinstance(error, SenderFailed)
    own = isinstance(error, (UserError, StaleWeightsError, NotImplementedError, RecursionError))
    return isinstance(error, RuntimeError) and not own


def death_of(member: Member) -> ActorDied:
    """Returns an error about a member that has ended, with the end of its log."""
    try:
        ray.get(member.sentinel)
        reason = "it returned"
    except ray.exceptions.ActorUnavailableError:
        reason = "its process ended"
    except ray.exceptions.RayError as error:
        reason = str(error)
    tail = ["(its log cannot be read)"]
    with contextlib.suppress(ray.exceptions.RayError):
        if member.node == ray.get_runtime_context().get_node_id():
            tail = tails_of(member.logs)
        else:
            tail = ray.get(on_node(member.node, tails_of, member.logs), timeout=NODE_SECONDS)
    end = "\n  ".join(tail)
    return ActorDied(
        f"{member.name} (pid {member.pid}) died: {reason}\nits log ends:\n  {end}\n"
        "The same command continues from the last checkpoint"
    )


def of_others(error: Exception) -> bool:
    """Returns whether an error only means that another rank failed."""
    import torch.distributed as dist

    if isinstance(error, ray.exceptions.RayActorError):
        return True
    cause = cause_of(error)
    message = str(cause).lower()
    return isinstance(cause, dist.DistError) or "gloo" in message or "nccl" in message


def unwrapped_error(error: Exception, name: str = "") -> Exception:
    """Returns a worker's error with its own class."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return ActorDied(f"{name}: {error}" if name else str(error))
    # Ray's class of an OSError has no ``errno``, and all of the traceback as its message.
    unwrapped = error.cause if isinstance(error.cause, (UserError, OSError)) else error.as_instanceof_cause()
    if name:
        unwrapped.add_note(f"raised in {name}")
    return unwrapped


def on_node(node: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a worker on a node of the cluster, and returns a reference to its result."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(fn).options(scheduling_strategy=there).remote(*args)


def tails_of(logs: Sequence[str]) -> list[str]:
    """Returns the last lines of log files, without Ray's own marks."""
    tails = []
    for log in logs:
        with contextlib.suppress(OSError):
            lines = Path(log).read_text(errors="replace").splitlines()
            tails += [line for line in lines if not line.startswith(":")][-LOG_TAIL_LINES:]
    return tails or ["(empty)"]
