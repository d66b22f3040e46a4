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

import ray
import torch

from .errors import ActorHangs
from .group import Group, Member
from .host import Pulse

ANSWER_SECONDS = 5.0
TORCH = str(Path(torch.__file__).parent)


class Watch:
    """Checks the progress of groups, a few times in ``timeout`` seconds.

    Attributes:
        interval: seconds between checks.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.interval = min(timeout / 4, 10.0)
        self._next = 0.0
        self._asked: dict[Member, tuple[Any, float]] = {}
        self._pulses: dict[Member, Pulse] = {}
        self._since: dict[Group, tuple[list[Pulse], float]] = {}

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
            silent = [member for member in group.members if self._waited(member, now) > self._timeout]
            reachable = group.reachable
            for member in group.members:
                if member not in self._asked and reachable:
                    self._asked[member] = (ask(member, "pulse"), now)
            if silent:
                raise self._hangs(group, silent[0], "does not answer", silent)
            if len(group.members) > 1 and self._stands_still(group, now):
                culprit = self._culprit(group)
                if culprit is not None:
                    raise culprit

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
            self._pulses[member] = ray.get(ref)
        return 0.0

    def _stands_still(self, group: Group, now: float) -> bool:
        pulses = [self._pulses[member] for member in group.members if member in self._pulses]
        before, since = self._since.get(group, ([], now))
        if pulses != before or not any(pulse.busy for pulse in pulses):
            since = now
        self._since[group] = (pulses, since)
        return now - since > self._timeout

    def _culprit(self, group: Group) -> ActorHangs | None:
        """Returns an error for the rank that holds the others up; None where a rank has died.

        It is the one that has started the fewest collectives, of those that are in none now.
        """
        asked = {member: ask(member, "stack") for member in group.members}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_SECONDS)
        stacks: dict[Member, traceback.StackSummary] = {}
        for member, ref in asked.items():
            if not ray.wait([ref], timeout=0)[0]:
                return self._hangs(group, member, "does not answer", [member])
            try:
                stacks[member] = ray.get(ref)
            except ray.exceptions.RayError:
                return None
        pulses = {member: self._pulses[member] for member in group.members}
        acting = [m for m in group.members if pulses[m].busy and not waits(stacks[m])] or list(group.members)
        guilty = min(acting, key=lambda member: pulses[member].collectives)
        place = "".join(stacks[guilty].format()).rstrip()
        return self._hangs(group, guilty, f"is here in its main thread:\n{place}", [guilty])

    def absent(self, group: Group, failed: Mapping[Member, Exception]) -> ActorHangs | None:
        """Returns an error for a member that was missing in a collective that failed; None where none was.

        Such a member runs the same call and is in no collective.
        """
        first, error = next(iter(failed.items()))
        for member in group.members:
            if member in failed or not any(member in call.open for call in group.calls):
                continue
            ref = ask(member, "stack")
            what = "does not answer"
            if ray.wait([ref], timeout=ANSWER_SECONDS)[0]:
                try:
                    stack = ray.get(ref)
                except ray.exceptions.RayError:
                    continue
                if not stack or waits(stack):
                    continue
                what = f"was not in it and is here in its main thread:\n{''.join(stack.format()).rstrip()}"
            return ActorHangs(
                f"{first.name} (pid {first.pid}) failed in a collective: {error}\n"
                f"{member.name} (pid {member.pid}) {what}\nThe same command continues from the last checkpoint"
            )
        return None

    def _hangs(self, group: Group, guilty: Member, what: str, not_waiting: list[Member]) -> ActorHangs:
        others = ", ".join(member.name for member in group.members if member not in not_waiting)
        waiting = f"; {others} wait{'s' if ',' not in others else ''} for it" if others else ""
        return ActorHangs(
            f"{guilty.name} (pid {guilty.pid}) hangs: it made no progress for ray.timeout = {self._timeout:g} s"
            f"{waiting}. It {what}\nThe same command continues from the last checkpoint. If this was only slow, "
            "raise ray.timeout"
        )


def ask(member: Member, method: str) -> Any:
    """Calls a method of a member beside its current call, and returns a reference to the result."""
    return getattr(member.host, method).options(concurrency_group="ask").remote()


def waits(stack: traceback.StackSummary) -> bool:
    """Returns whether a thread is in a collective: its innermost line outside torch's other code is in
    ``torch.distributed``.

    Example:
        >>> here = traceback.extract_stack()
        >>> waits(here)
        False
    """
    for line in reversed(stack):
        if line.filename.startswith(f"{TORCH}/distributed"):
            return True
        if not line.filename.startswith(TORCH):
            return False
    return False
