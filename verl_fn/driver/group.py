"""Actors that take every call together, and what of their calls is still under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import ray

from verl_fn.state import Batch

from .parcels import flattened


@attrs.frozen(eq=False)
class Member:
    """One actor of the run: its handle, a reference that ends when it does, and its process."""

    name: str
    host: Any
    sentinel: Any
    pid: int
    node: str
    logs: tuple[str, ...]


@attrs.frozen(eq=False)
class Call:
    """What a group was asked to do.

    Attributes:
        open: for each member that has not ended it, a reference that is there when it has.
        needs: the references among its arguments; members begin when these are there.
    """

    open: dict[Member, Any]
    needs: tuple[Any, ...]


class Group:
    """The ranks that hold one set of components, or engines that share work, or a single actor.

    ``run`` calls all members with the same arguments and in the same order; what a call returns comes from the first.
    ``scatter`` gives each member arguments of its own, and returns what each returns.
    """

    def __init__(self, name: str, members: tuple[Member, ...]) -> None:
        self.name = name
        self.members = members
        self.calls: list[Call] = []
        self.dropped: list[int] = []

    def run(self, method: str, *args: Any, returns: int = 1) -> Any:
        """Call a method of ``Host``; references to its results, as a list if there are several."""
        if len(self.members) > 1:
            # Batches go to the store once, not once for every rank.
            args = tuple(ray.put(arg) if isinstance(arg, Batch) else arg for arg in args)
        results = self._call(dict.fromkeys(self.members, args), method, returns)[0]
        return results if returns > 1 else results[0]

    def scatter(self, method: str, parts: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of ``Host`` on the first members, each with its own arguments; a reference for each."""
        members = self.members[: len(parts)]
        return [results[0] for results in self._call(dict(zip(members, parts, strict=True)), method, 1)]

    def _call(self, arguments: Mapping[Member, tuple[Any, ...]], method: str, returns: int) -> list[list[Any]]:
        self._send_drops()
        found, ends, needs = [], {}, []
        for member, args in arguments.items():
            places, flat = flattened(args)
            *results, end = member.host.run.options(num_returns=returns + 1).remote(method, returns, places, *flat)
            found.append(results)
            ends[member] = end
            needs += [arg for arg in flat if isinstance(arg, ray.ObjectRef)]
        self.calls.append(Call(ends, tuple(dict.fromkeys(needs))))
        return found

    @property
    def ends(self) -> list[Any]:
        """What is there when all calls have ended."""
        return [end for call in self.calls for end in call.open.values()]

    @property
    def reachable(self) -> bool:
        """Whether members can hear a question: not while a call before it waits for its arguments."""
        needs = [need for call in self.calls for need in call.needs]
        return len(ray.wait(needs, num_returns=len(needs), timeout=0)[0]) == len(needs) if needs else True

    def settle(self) -> dict[Member, Exception]:
        """Forget calls that have ended; the first error of each member, in the order of its calls."""
        ends = self.ends
        ready = set(ray.wait(ends, num_returns=len(ends), timeout=0)[0]) if ends else set()
        errors: dict[Member, Exception] = {}
        for call in self.calls:
            for member, end in list(call.open.items()):
                if end in ready:
                    del call.open[member]
                    try:
                        ray.get(end)
                    except ray.exceptions.RayError as error:
                        errors.setdefault(member, error)
        self.calls = [call for call in self.calls if call.open]
        return errors

    def _send_drops(self) -> None:
        # By themselves: a call whose arguments failed never reaches the actor.
        if drops := self.dropped[:]:
            del self.dropped[: len(drops)]
            for member in self.members:
                member.host.drop.remote(drops)
