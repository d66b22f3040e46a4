"""Groups of actors that run every call together, and the calls that have not ended."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import ray


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
    """A call to a group that has not ended.

    Attributes:
        open: for each member that has not ended it, a reference that is ready when it has.
        streams: whether its results come one by one before it ends.
        quiet: whether its errors are not to be raised.
        draws: whether engines answer requests with it.
    """

    open: dict[Member, Any]
    streams: bool = False
    quiet: bool = False
    draws: bool = False


class Group:
    """The ranks that hold one set of components, or engines that share work; threads may call them.

    ``run`` calls all members with the same arguments and in the same order, and returns the result of the first.
    ``scatter`` gives each member its own arguments, and returns every member's result.
    ``stream`` does the same with results that come one by one.

    Attributes:
        restarts: whether members that end are restarted, and their calls made again.
        answered: the names of engines that have answered requests since they were restarted.
    """

    def __init__(self, name: str, members: tuple[Member, ...]) -> None:
        self.name = name
        self.members = members
        self.restarts = False
        self.answered: set[str] = set()
        self.calls: list[Call] = []
        self.dropped: list[int] = []
        self._one_thread = threading.RLock()

    def run(self, method: str, *args: Any) -> Any:
        """Calls a method of ``Host`` and returns a reference to its result."""
        return self._call(dict.fromkeys(self.members, args), method)[0]

    def scatter(
        self, method: str, parts: Sequence[tuple[Any, ...]], *, draws: bool = False, beside: bool = False
    ) -> list[Any]:
        """Calls a method of ``Host`` on the first members, each with its own arguments; returns a reference each.

        Args:
            method: its name.
            parts: the arguments of each member.
            draws: whether engines answer requests with it.
            beside: run it beside the calls of requests, not after them.
        """
        return self._call(dict(zip(self.members[: len(parts)], parts, strict=True)), method, draws, beside)

    def stream(self, parts: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls ``Host.stream`` on members, by their numbers, each with its own arguments; returns their generators.

        Ray does not make these calls again, since a stream that is drawn again may have another order.
        """
        with self._one_thread:
            self._send_drops()
            streams = {}
            for i, args in parts.items():
                stream = self.members[i].host.stream.options(num_returns="streaming", max_task_retries=0)
                streams[i] = stream.remote(*args)
            ends = {self.members[i]: stream.completed() for i, stream in streams.items()}
            self.calls.append(Call(ends, streams=True, draws=True))
            return streams

    def _call(
        self, arguments: Mapping[Member, tuple[Any, ...]], method: str, draws: bool = False, beside: bool = False
    ) -> list[Any]:
        with self._one_thread:
            self._send_drops()
            results, ends = [], {}
            for member, args in arguments.items():
                run = member.host.run.options(num_returns=2, concurrency_group="publish" if beside else None)
                result, ends[member] = run.remote(method, *args)
                results.append(result)
            self.calls.append(Call(ends, draws=draws))
            return results

    @property
    def ends(self) -> list[Any]:
        """References that are ready when all calls have ended."""
        return [end for call in self.calls for end in call.open.values()]

    def ends_of(self, results: Iterable[Any]) -> list[Any]:
        """Returns the ends of the calls that give these results.

        A result may fail a moment before the end of its call, and the ends show which members have failed.
        """
        tasks = {result.task_id() for result in results}
        ends = [end for call in self.calls if not call.streams for end in call.open.values()]
        return [end for end in ends if end.task_id() in tasks]

    @property
    def idle(self) -> bool:
        """Whether all calls have ended."""
        ends = self.ends
        return not ends or len(ray.wait(ends, num_returns=len(ends), timeout=0)[0]) == len(ends)

    def replace(self, old: Member, new: Member) -> None:
        """Puts a restarted process in the place of the one that ended, also in calls that have not ended."""
        self.members = tuple(new if member is old else member for member in self.members)
        for call in self.calls:
            call.open = {new if member is old else member: end for member, end in call.open.items()}

    def settle(self) -> dict[Member, Exception]:
        """Removes calls that have ended, and returns the first error of each member that is not quiet."""
        ends = self.ends
        ready = set(ray.wait(ends, num_returns=len(ends), timeout=0)[0]) if ends else set()
        errors: dict[Member, Exception] = {}
        for call in self.calls:
            for member, end in list(call.open.items()):
                if end in ready:
                    del call.open[member]
                    try:
                        ray.get(end)
                        if call.draws:
                            self.answered.add(member.name)
                    except ray.exceptions.RayError as error:
                        ended = self.restarts and isinstance(error, ray.exceptions.RayActorError)
                        if not call.quiet and not ended:
                            errors.setdefault(member, error)
        with self._one_thread:
            self.calls = [call for call in self.calls if call.open]
        return errors

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
