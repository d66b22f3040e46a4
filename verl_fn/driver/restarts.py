"""Restarts engines that die or hang: each gets its weights again, and Ray makes its open calls again.

Ray starts the process and repeats the calls that have not ended, so references to their results stay valid wherever
they were passed. The calls wait in the new process until the driver has built the engine there and has published the
version that the old one held. Draws depend on keys and places alone, so the answers are the ones that the old process
would have given.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import attrs
import ray

from .errors import ENDED_WITH
from .failures import death_of, unwrapped_error
from .group import Group, Member

START_SECONDS = 300


class Holder(Protocol):
    """Knows which weights each engine holds, and sends them again."""

    def listening(self, engine: int) -> list[tuple[Any, ...]]:
        """Returns the calls by which an engine that was made anew listens for weights."""
        ...

    def restore(self, engine: int, address: Sequence[Any]) -> Sequence[tuple[Any, ...]] | None:
        """Sends an engine the weights that it held, and returns the calls by which it gets back to where it was.

        Returns:
            Methods of ``Host`` and their arguments; None if open requests need weights that are gone.
        """
        ...

    def resume(self, engine: int) -> None:
        """Sends an engine the weights that its open calls wait for."""
        ...


@attrs.define
class _Stage:
    """What a restart waits for.

    Attributes:
        ref: is ready when the next stage can begin.
        limit: the most seconds; None for no limit.
    """

    ref: Any
    limit: float | None = None
    since: float = attrs.field(factory=time.monotonic)

    def is_late(self) -> bool:
        """Returns whether the limit is over."""
        return self.limit is not None and time.monotonic() - self.since > self.limit


class _EndedAgain(Exception):
    """The process ended during the restart."""


class Restarts:
    """Restarts the engines of one group.

    Args:
        group: the engines.
        limit: the most restarts of an engine that answers nothing in between.
        made: the calls that made the engines.
        code: references to the user's own objects.
        started: waits for a new process, and checks its code.
        holder: has the weights.

    Attributes:
        reasons: why engines were restarted, since the driver asked last.
    """

    def __init__(
        self,
        group: Group,
        limit: int,
        made: Sequence[tuple[Any, ...]],
        code: Sequence[str],
        started: Callable[[str, Any, Any], Member],
        holder: Holder,
    ) -> None:
        self._group, self._limit = group, limit
        self._made, self._code = made, code
        self._started, self._holder = started, holder
        self._counts: Counter[str] = Counter()
        # What engines that have answered nothing since ended with.
        self._errors: dict[str, str] = {}
        self._running: dict[str, tuple[Iterator[_Stage], _Stage, Exception]] = {}
        self.reasons: list[str] = []

    @property
    def refs(self) -> list[Any]:
        """References that are ready when a restart can go on."""
        return [stage.ref for _, stage, _ in self._running.values()]

    def has(self, member: Member) -> bool:
        """Returns whether a member is of this group."""
        return member in self._group.members

    def advance(self) -> None:
        """Notices engines that have ended, and lets restarts go on as far as they can without waiting.

        Raises:
            ActorDied: an engine has ended too often, or cannot get its weights again.
            Exception: the engine cannot be made again; the error is its own.
        """
        for member in self._group.members:
            if member.pid and _ready(member.sentinel):
                self.begin(member, death_of(member))
        for name, (stages, stage, error) in list(self._running.items()):
            try:
                while _ready(stage.ref):
                    stage = next(stages)
                    self._running[name] = stages, stage, error
                if stage.is_late():
                    raise error
            except (StopIteration, _EndedAgain):
                del self._running[name]

    def begin(self, member: Member, error: Exception) -> None:
        """Begins to restart an engine that has ended or hangs.

        Raises:
            Exception: ``error``, if it was restarted as often as allowed, or came again after a restart.
        """
        name = member.name
        if name in self._group.answered:
            self._group.answered.remove(name)
            self._counts[name] = 0
            self._errors.pop(name, None)
        said = "\n".join(line for line in str(error).splitlines() if ENDED_WITH in line)
        if said and said == self._errors.get(name):
            error.add_note("it ended with the same error before, so another restart would not help")
            raise error
        self._errors[name] = said
        if self._counts[name] >= self._limit:
            if self._limit:
                error.add_note(
                    f"it was restarted {self._limit} times (rollout.max_restarts) and answered nothing in between"
                )
            raise error
        self._counts[name] += 1
        first, *_ = str(error).splitlines()
        self.reasons.append(f"{first}; it was restarted, {self._counts[name]} of {self._limit} times in a row")
        if not _ready(member.sentinel):
            ray.kill(member.host, no_restart=False)
        starting = attrs.evolve(member, pid=0)
        self._group.replace(member, starting)
        stages = self._stages(starting, error)
        self._running[name] = stages, next(stages), error

    def _stages(self, old: Member, error: Exception) -> Iterator[_Stage]:
        """Restarts an engine, and yields what it waits for."""
        yield _Stage(old.sentinel, START_SECONDS)
        about = None
        deadline = time.monotonic() + START_SECONDS
        while about is None:
            ref = old.host.about.options(concurrency_group="ask", max_task_retries=0).remote(self._code)
            yield _Stage(ref, START_SECONDS)
            try:
                ray.get(ref)
                about = ref
            except ray.exceptions.ActorUnavailableError:
                if time.monotonic() > deadline:
                    raise error from None
                time.sleep(0.1)
            except ray.exceptions.RayActorError:
                raise error from None
        new = self._started(old.name, old.host, about)
        self._group.replace(old, new)
        engine = self._group.members.index(new)
        listening = self._holder.listening(engine)
        results = yield from self._calls(new, [*self._made, *listening], ready=False)
        calls = self._holder.restore(engine, results[len(self._made) :])
        if calls is None:
            raise error
        yield from self._calls(new, calls, ready=True)
        self._holder.resume(engine)

    def _calls(
        self, member: Member, calls: Sequence[tuple[Any, ...]], *, ready: bool
    ) -> Generator[_Stage, None, list[Any]]:
        """Makes calls in a new process before those that wait there; returns their results."""
        ref = member.host.restore.options(concurrency_group="restore", max_task_retries=0).remote(calls, ready)
        yield _Stage(ref)
        try:
            results: list[Any] = ray.get(ref)
            return results
        except ray.exceptions.RayActorError:
            # Its sentinel has the reason.
            raise _EndedAgain from None
        except ray.exceptions.RayTaskError as error:
            raise unwrapped_error(error, member.name) from None


def _ready(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0, fetch_local=False)[0])
