"""Groups of actors that run every call together, the calls that have not ended, and what their errors mean."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_fn.backends.protocol import PublicationFailed, StaleWeightsError
from verl_fn.backends.weight_sync import IncompleteWeights
from verl_fn.backends.weight_sync.channel import SenderFailed
from verl_fn.errors import UserError

from .ranks import ActorDied

LOG_TAIL_LINES = 20
NODE_SECONDS, START_SECONDS = 20, 300


@attrs.frozen(eq=False)
class Member:
    """One actor of the run.

    Attributes:
        name: as errors name it.
        host: Ray's handle of the actor.
        sentinel: a reference that is ready when the actor has ended.
        pid: of its process.
        node: the id of its machine.
        logs: the files that hold its output.
    """

    name: str
    host: Any
    sentinel: Any
    pid: int
    node: str
    logs: tuple[str, ...]


@attrs.define(eq=False)
class Call:
    """A call to the first members of a group, which are known by their numbers.

    Attributes:
        method: of ``Host``.
        arguments: of each member.
        draws: whether engines answer requests with it.
        beside: whether it runs beside the calls of requests, not after them.
        results: a reference to the result of each member.
        ends: for members that have not ended it, a reference that is ready when they have.
        again: the members that are to be called again, since they failed and are restarted.
        failed: the members whose error a restart does not cure.
        quiet: whether its errors are not to be raised.
    """

    method: str
    arguments: Sequence[tuple[Any, ...]]
    draws: bool = False
    beside: bool = False
    results: dict[int, Any] = attrs.field(factory=dict)
    ends: dict[int, Any] = attrs.field(factory=dict)
    again: set[int] = attrs.field(factory=set)
    failed: set[int] = attrs.field(factory=set)
    quiet: bool = False

    def done(self, number: int) -> bool:
        """Returns whether a member has ended the call without an error."""
        if number in self.again | self.failed:
            return False
        return number not in self.ends or (is_ready(self.ends[number]) and error_of(self.ends[number]) is None)


class Restarts(Protocol):
    """Restarts members of a group."""

    reasons: list[str]

    def restart(self, member: Member, error: Exception) -> None:
        """Starts another process in the place of a member, or raises the error."""
        ...


class Group:
    """The ranks that hold one set of components, or engines that share work; threads may call them.

    ``run`` calls all members with the same arguments and in the same order, and returns the result of the first.
    ``scatter`` gives each member its own arguments, and returns the call with every member's result.
    ``stream`` does the same with results that come one by one.

    Attributes:
        restarts: restarts members that fail; None if these end the run.
        answered: the names of engines that have answered requests since they were restarted.
    """

    def __init__(self, name: str, members: tuple[Member, ...]) -> None:
        self.name = name
        self.members = members
        self.restarts: Restarts | None = None
        self.answered: set[str] = set()
        self.calls: list[Call] = []
        self.dropped: list[int] = []
        self.one_thread = threading.RLock()

    def run(self, method: str, *args: Any) -> Any:
        """Calls a method of ``Host`` and returns a reference to its result."""
        return self.scatter(method, [args] * len(self.members)).results[0]

    def scatter(
        self, method: str, parts: Sequence[tuple[Any, ...]], *, draws: bool = False, beside: bool = False
    ) -> Call:
        """Calls a method of ``Host`` on the first members, each with its own arguments; see ``Call``."""
        with self.one_thread:
            self._send_drops()
            call = Call(method, parts, draws, beside)
            for number in range(len(parts)):
                self._send(call, number)
            self.calls.append(call)
            return call

    def stream(self, parts: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls ``Host.stream`` on members, by their numbers, each with its own arguments; returns their generators.

        These calls are not made again, since a stream that is drawn again may have another order.
        """
        with self.one_thread:
            self._send_drops()
            streams = {
                i: self.members[i].host.stream.options(num_returns="streaming").remote(*args)
                for i, args in parts.items()
            }
            ends = {i: stream.completed() for i, stream in streams.items()}
            self.calls.append(Call("stream", (), draws=True, ends=ends))
            return streams

    def _send(self, call: Call, number: int) -> None:
        host = self.members[number].host
        run = host.run.options(num_returns=2, concurrency_group="publish" if call.beside else None)
        call.results[number], call.ends[number] = run.remote(call.method, *call.arguments[number])

    @property
    def ends(self) -> list[Any]:
        """References that are ready when all calls have ended."""
        return [end for call in self.calls for end in list(call.ends.values())]

    def ends_of(self, results: Iterable[Any]) -> list[Any]:
        """Returns the ends of the calls that give these results.

        A result may fail a moment before the end of its call, and the ends show which members have failed.
        """
        tasks = {result.task_id() for result in results}
        ends = [end for call in self.calls if call.results for end in list(call.ends.values())]
        return [end for end in ends if end.task_id() in tasks]

    @property
    def idle(self) -> bool:
        """Whether all calls have ended."""
        return all(is_ready(end) for end in self.ends) and not any(call.again for call in self.calls)

    def settle(self) -> dict[Member, Exception]:
        """Removes calls that have ended, and returns the first error of each member that is not quiet."""
        errors: dict[Member, Exception] = {}
        with self.one_thread:
            for call in self.calls:
                for number, end in [(number, end) for number, end in call.ends.items() if is_ready(end)]:
                    self._ended(call, number, error_of(end), errors)
            self.calls = [call for call in self.calls if call.ends or call.again]
        return errors

    def _ended(self, call: Call, number: int, error: Exception | None, errors: dict[Member, Exception]) -> None:
        member = self.members[number]
        del call.ends[number]
        if error is None:
            self.answered |= {member.name} if call.draws else set()
        elif self.restarts and curable(error):
            call.again |= {number} if call.results else set()
            errors.setdefault(member, error)
        else:
            call.failed.add(number)
            if not call.quiet:
                errors.setdefault(member, error)

    def lose(self, member: Member) -> int:
        """Takes the open calls of a member that has ended from it, to be made ``again``; returns its number."""
        number = self.members.index(member)
        with self.one_thread:
            for call in self.calls:
                if number in call.ends and not call.done(number):
                    call.again |= {number} if call.results else set()
                    del call.ends[number]
        return number

    def again(self, number: int) -> None:
        """Makes the calls again that the member with this number had open when it ended."""
        with self.one_thread:
            for call in self.calls:
                if number in call.again:
                    self._send(call, number)
                    call.again.remove(number)

    def failed(self, results: Iterable[Any]) -> bool:
        """Returns whether one of these results is to come from a member that failed and is restarted."""
        wanted = set(results)
        with self.one_thread:
            for call in self.calls if self.restarts else ():
                if wanted & set(call.results.values()):
                    ended = [error_of(end) for end in call.ends.values() if is_ready(end)]
                    if call.again or any(error is not None and curable(error) for error in ended):
                        return True
        return False

    def forget_errors(self) -> None:
        """Makes the calls that have not ended quiet."""
        for call in self.calls:
            call.quiet = True

    def _send_drops(self) -> None:
        # As a call of their own, since a call whose arguments failed never reaches the actor.
        if drops := self.dropped[:]:
            del self.dropped[: len(drops)]
            for member in self.members:
                member.host.drop.remote(drops)


def is_ready(ref: Any) -> bool:
    """Returns whether a reference is ready."""
    return bool(ray.wait([ref], timeout=0, fetch_local=False)[0])


def error_of(end: Any) -> Exception | None:
    """Returns the error of a call that has ended; None if it has none."""
    try:
        ray.get(end)
    except ray.exceptions.RayError as error:
        # Its traceback would keep the callers' values alive, such as weights, which an update would then copy.
        return error.with_traceback(None)
    return None


def cause_of(error: Exception) -> Exception:
    """Returns what a worker raised, without Ray's traceback around it."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error


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
    tail = on_node(member.node, tails_of, member.logs) or ["(its log cannot be read)"]
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
    unwrapped = error.cause if isinstance(error.cause, UserError) else error.as_instanceof_cause()
    if name:
        unwrapped.add_note(f"raised in {name}")
    return unwrapped


def on_node(node: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Returns ``fn(*args)``, applied on a node of the cluster; None where that node does not answer."""
    if node == ray.get_runtime_context().get_node_id():
        return fn(*args)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    with contextlib.suppress(ray.exceptions.RayError):
        task = ray.remote(num_cpus=0, max_retries=0)(fn).options(scheduling_strategy=there)
        return ray.get(task.remote(*args), timeout=NODE_SECONDS)
    return None


def tails_of(logs: Sequence[str]) -> list[str]:
    """Returns the last lines of log files, without Ray's own marks."""
    tails = []
    for log in logs:
        with contextlib.suppress(OSError):
            lines = Path(log).read_text(errors="replace").splitlines()
            tails += [line for line in lines if not line.startswith(":")][-LOG_TAIL_LINES:]
    return tails or ["(empty)"]
