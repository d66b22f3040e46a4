"""Detects ranks that hang: the driver asks every member for its progress while it waits.

The ranks of a group run the same collectives, several in each micro-batch. A group hangs if, during a call, no rank
starts a collective or reaches another line of its code for ``ray.timeout`` seconds.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import ray
import torch

from .group import Group, Member
from .host import Heartbeat
from .ranks import ActorHangs

ANSWER_SECONDS = 5.0
TORCH = str(Path(torch.__file__).parent)


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
        """Reads the answers that came and asks again, if it is time.

        Raises:
            ActorHangs: a member does not answer, or a group makes no progress.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.interval
        for group in groups:
            # Engines don't wait for each other, so each may hang by itself.
            units = [group.members] if group.restart is None else [(m,) for m in group.members]
            for members in units:
                silent = any(self._waited(member, now) > self._timeout for member in members)
                for member in members:
                    if member not in self._asked:
                        self._asked[member] = (ask(member, "heartbeat"), now)
                still = self._stands_still(members, now, engine=group.restart is not None)
                if (silent or still) and (error := self._hanging(group, members)) is not None:
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
            heartbeats = [attrs.evolve(heartbeat, place=0) for heartbeat in heartbeats]
        elif len(members) == 1:
            return False
        before, since = self._since.get(members, ([], now))
        waited_for = [heartbeat.steps is not None if engine else heartbeat.busy for heartbeat in heartbeats]
        if heartbeats != before or not any(waited_for):
            since = now
        self._since[members] = (heartbeats, since)
        return now - since > self._timeout

    def _hanging(self, group: Group, members: tuple[Member, ...] = ()) -> ActorHangs | None:
        """Returns an error with every rank's stack and the name of a suspect; None if a rank has died.

        The suspect is, in this order: a rank that does not answer, a rank outside any collective, the rank that has
        started the fewest collectives.
        """
        stacks = stacks_of(members or group.members)
        if stacks is None:
            return None
        answering = [member for member, stack in stacks.items() if stack is not None]
        acting = [m for m in answering if self._heartbeats[m].busy and not waits(stacks[m])] or answering
        differing = [member for member in stacks if member not in answering] or sorted(
            acting, key=lambda member: self._heartbeats[member].collectives
        )
        return ActorHangs(
            f"{differing[0].name} (pid {differing[0].pid}) hangs: {group.name} made no progress for ray.timeout = "
            f"{self._timeout:g} s\n{described(stacks)}\nThe same command continues from the last checkpoint. If this "
            "was only slow, raise ray.timeout",
            differing[0],
        )

    def absent(self, group: Group, failed: Mapping[Member, Exception]) -> ActorHangs | None:
        """Returns an error for a rank that was missing in a collective that failed; None where none was.

        Such a rank runs the same call and is in no collective.
        """
        running = {group.members[number] for call in group.calls for number in call.open}
        stacks = stacks_of([member for member in group.members if member in running and member not in failed])
        missing = [m for m, stack in (stacks or {}).items() if stack is None or (stack and not waits(stack))]
        if stacks is None or not missing:
            return None
        first, error = next(iter(failed.items()))
        return ActorHangs(
            f"{first.name} (pid {first.pid}) failed in a collective: {error}\n{missing[0].name} (pid "
            f"{missing[0].pid}) was not in it\n{described(stacks)}\nThe same command continues from the last "
            "checkpoint"
        )


def stacks_of(members: Iterable[Member]) -> dict[Member, traceback.StackSummary | None] | None:
    """Returns the stack of each member's call, and None for one that does not answer; None where one has died."""
    asked = {member: ask(member, "stack") for member in members}
    ready = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_SECONDS)[0] if asked else []
    try:
        return {member: ray.get(ref) if ref in ready else None for member, ref in asked.items()}
    except ray.exceptions.RayError:
        return None


def described(stacks: Mapping[Member, traceback.StackSummary | None]) -> str:
    """Describes where ranks are; those with the same stack share a paragraph."""
    alike: dict[str, list[str]] = {}
    for member, stack in stacks.items():
        where = "does not answer"
        if stack is not None:
            state = "waits in a collective" if waits(stack) else "is here"
            where = f"{state}:\n{''.join(stack.format()).rstrip()}" if stack else "runs no call"
        alike.setdefault(where, []).append(member.name)
    return "\n".join(f"{', '.join(names)} {where}" for where, names in alike.items())


def ask(member: Member, method: str) -> Any:
    """Calls a method of a member beside its current call, and returns a reference to the result."""
    return getattr(member.host, method).options(concurrency_group="ask").remote()


def waits(stack: traceback.StackSummary | None) -> bool:
    """Returns whether a thread is in a collective: its innermost line outside torch's other code is in
    ``torch.distributed``.

    Example:
        >>> here = traceback.extract_stack()
        >>> waits(here)
        False
    """
    for line in reversed(stack or ()):
        if line.filename.startswith(f"{TORCH}/distributed"):
            return True
        if not line.filename.startswith(TORCH):
            return False
    return False
