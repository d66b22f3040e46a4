"""The sending side of publications between processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import attrs
import torch

from verl_fn.backends.protocol import BUCKET_BYTES, Chunk, WeightSource
from verl_fn.backends.tensor_file import checksum

from .channel import (
    ADAPTERS,
    CHANGED,
    MERGED,
    SECONDS_TO_ANSWER,
    SLOTS,
    WHOLE,
    End,
    Location,
    SenderFailed,
    connected,
    kinds,
    offered,
    places,
    receive_message,
    room_for,
    send_message,
    transfer,
)
from .publication import form_of, in_dtype

TRIES = 3  # to connect to an engine
# An engine that refuses the weights, or has ended, raises the reason in its own call.
REFUSABLE = contextlib.suppress(SenderFailed)


def part_bytes(max_bytes: int) -> int:
    """Returns the most bytes that are sent at a time; a 32nd of the bucket is left for alignment and checksums.

    Example:
        >>> part_bytes(96)
        46
    """
    return (max_bytes - max_bytes // 32) // SLOTS


@attrs.frozen
class Wish:
    """What an engine asks a sender for.

    Attributes:
        max_bytes: the most bytes of a bucket.
        checked: whether it compares checksums.
    """

    kind: str
    max_bytes: int
    checked: bool
    dtype: torch.dtype


class Outlet(End):
    """The sending end, to one engine.

    Args:
        address: the address of the engine's inlet.
        allowed: the kinds of staging to choose from; by default all.

    Attributes:
        kind: of the staging area.
        announced: whether the engine knows of the publication that is being sent.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, device: torch.device, allowed: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self._address, self._secret, self._device, self._allowed = address, secret, device, allowed
        self._room = 0
        self._dtype: torch.dtype | None = None
        self._busy: list[int] = []
        self.kind = ""
        self.announced = False

    def offer(
        self, version: int, sources: Mapping[str, WeightSource], identify: Mapping[str, Callable[[], str]]
    ) -> Wish | None:
        """Announces weights to the engine.

        Args:
            sources: by name, what the engine can choose from.
            identify: for each source that lacks frozen weights, identifies these.

        Returns:
            What the engine asks for; None if it refuses the weights.
        """
        offers = {kind: (source.specs, getattr(source, "cut", None)) for kind, source in sources.items()}
        reused = self._connection is not None
        reply = self._answered("specs", version, offers)
        if reply is None and reused:
            # The engine closed the connection after another rank had failed.
            reply = self._answered("specs", version, offers)
        if reply is None:
            # The engine has ended (whoever waits for its call notices), or this publication has failed before.
            return None
        with REFUSABLE:
            kind, *rest = reply
            if kind == "identify":
                send_message(self.open, ("base", identify[rest[0]]()))
                kind, *rest = receive_message(self.open)
            if kind == "start":
                *asked, receiver = rest
                wish = Wish(*asked)
                specs, cut = offers[wish.kind]
                specs = in_dtype(specs, wish.dtype)
                rows = [spec.nbytes // max(1, spec.rows) for spec in specs]
                most = part_bytes(wish.max_bytes) // (1 if cut is None else cut.of)
                room = max(min(most, sum(spec.nbytes for spec in specs)), max(rows, default=0))
                self._make_room(room_for(room, len(specs)), receiver)
                self._dtype = wish.dtype
                send_message(self.open, ("ready",))
                return wish
        self.close()
        return None

    def _answered(self, *message: Any) -> tuple[Any, ...] | None:
        """Returns the engine's answer to the first message; None if it has ended or closed the connection."""
        self._connection = self._connection or self._connected()
        with REFUSABLE:
            if self._connection is not None:
                send_message(self._connection, message)
                self.announced = True
                answer: tuple[Any, ...] = receive_message(self._connection)
                return answer
        self.close()
        return None

    def _connected(self) -> Connection | None:
        """Connects to the engine; returns None if it has ended.

        Raises:
            RuntimeError: its address cannot be reached.
        """
        # An engine gives up one that does not answer in time, as after a pause of this process.
        for _ in range(TRIES):
            try:
                return connected(self._address, self._secret)
            except (ConnectionError, EOFError):
                continue
            except OSError as error:
                raise RuntimeError(f"the rollout engine at {self._address} cannot be reached: {error}") from error
        return None

    def put(self, bucket: Sequence[Chunk]) -> bool:
        """Sends a bucket, and returns whether the engine accepts it."""
        if self._connection is None or self._staging is None:
            return False
        with REFUSABLE:
            free = [i for i in range(SLOTS) if i not in self._busy]
            number = free[0] if free else self._taken()
            if number is not None:
                self._write(number, bucket)
                return True
        self.close()
        return False

    def end(self) -> None:
        """Ends the publication, and waits until the engine has all weights."""
        with REFUSABLE:
            send_message(self.open, ("end",))
            while self._taken() is not None:
                pass
            return
        self.close()

    def _write(self, number: int, bucket: Sequence[Chunk]) -> None:
        """Copies a bucket into a slot, in the engine's dtype, and tells the engine what it holds."""
        assert self._staging is not None and self._dtype is not None
        slot = self._staging.slot(number)
        targets, nbytes = places(slot, self._dtype, [chunk.values.numel() for chunk in bucket])
        targets = [t.view(chunk.values.shape) for t, chunk in zip(targets, bucket, strict=True)]
        entries = [(chunk.name, chunk.start, tuple(chunk.values.shape), chunk.checksum) for chunk in bucket]
        message = ("bucket", number, self._dtype, entries)
        if nbytes and slot.device == bucket[0].values.device:
            torch._foreach_copy_(targets, [chunk.values for chunk in bucket])
        else:
            for target, chunk in zip(targets, bucket, strict=True):
                # Converted where it lies; otherwise torch copies the source's dtype to the CPU and converts it there.
                target.copy_(chunk.values.to(self._dtype))
        # Both sides take part in the transfer of a group or a socket, so the message has to come before it.
        message_first = self.kind in ("group", "socket")
        if message_first:
            send_message(self.open, message)
        if nbytes:
            transfer(self._staging, number, nbytes)
        if not message_first:
            send_message(self.open, message)
        self._busy.append(number)

    def fail(self, version: int, error: BaseException) -> None:
        """Tells the engine that a publication failed, also if it waits for the announcement."""
        # An engine says nothing before the announcement, so what can be read then is that it closed the connection.
        if not self.announced and (self._connection is None or self._connection.poll()):
            self.close()
            with contextlib.suppress(AuthenticationError, OSError, EOFError):
                self._connection = connected(self._address, self._secret, SECONDS_TO_ANSWER)
        if self._connection is not None:
            with contextlib.suppress(SenderFailed):
                send_message(self._connection, ("failed", version, f"{type(error).__name__}: {error}"))
        self.close()

    def close(self) -> None:
        """Closes the connection; the next publication makes a new one."""
        super().close()
        self._room, self._busy = 0, []

    def _taken(self) -> int | None:
        """Returns the slot that the engine has read; None when it has finished the publication."""
        kind, *rest = receive_message(self._connection)
        if kind == "taken":
            self._busy.remove(rest[0])
            slot: int = rest[0]
            return slot
        self._busy = []
        if kind == "refused":
            raise SenderFailed("the engine refuses the weights")
        return None

    def _make_room(self, nbytes: int, receiver: Location) -> None:
        """Agrees with the engine on a staging area of this size, unless there is one."""
        if self._staging is not None and self._room >= nbytes:
            return
        assert self._connection is not None
        reasons = []
        for kind in kinds(Location.of(self._device), receiver) if self._allowed is None else self._allowed:
            try:
                description, start = offered(kind, nbytes, self._device, self._connection)
            except (OSError, RuntimeError) as error:
                reasons.append(f"{kind}: {error}")
                continue
            send_message(self._connection, ("staging", description))
            staging = start()
            reply, *rest = receive_message(self._connection)
            if reply == "opened":
                self._staging, self._room, self.kind = staging, nbytes, kind
                return
            staging.close()
            if reply == "refused":
                raise SenderFailed("the engine refuses the weights")
            reasons += rest
        raise RuntimeError(f"no kind of staging area reaches the rollout engine: {'; '.join(reasons)}")


def send(outlets: Sequence[Outlet], version: int, source: WeightSource) -> None:
    """Sends weights to engines, bucket by bucket, each read once for all engines.

    Where the source has a part of the rows, the other ranks send theirs at the same time, and an engine receives
    each bucket from all of them together.

    Weights are read even if no engine takes them, since other ranks may take part in reading them. Frozen ones are
    read only for an engine that asks for them.
    """
    sources: dict[str, WeightSource] = {}
    identify, parts = {}, {}
    for kind, part, name in ((MERGED, CHANGED, "kept"), (WHOLE, ADAPTERS, "apart")):
        form = form_of(source, name)
        if form is not None:
            sources |= {kind: form.whole, part: form.changing}
            identify[part] = form.identify
            parts[part] = frozenset(spec.name for spec in form.changing.specs)
    # What was passed may be a part that the engine chose.
    sources[MERGED] = source
    for outlet in outlets:
        outlet.announced = False
    try:
        replies = [(outlet, outlet.offer(version, sources, identify)) for outlet in outlets]
        wanted = {outlet: wish for outlet, wish in replies if wish is not None}
        chosen = _one_source(sources, list(wanted.values()))
        size = min((wish.max_bytes for wish in wanted.values()), default=BUCKET_BYTES)
        dtype = next((wish.dtype for wish in wanted.values()), None)
        checked = any(wish.checked for wish in wanted.values())
        accepting = list(wanted)
        # The size counts once tensors are converted.
        narrowest = min((spec.dtype.itemsize for spec in chosen.specs), default=1)
        growth = dtype.itemsize / narrowest if dtype else 1.0
        # A checksum of the source's own also covers the way from the source to here.
        own = all(spec.dtype == dtype for spec in chosen.specs)
        for bucket in chosen.buckets(int(part_bytes(size) / growth), checked=checked and own):
            if checked and not own:
                bucket = tuple(attrs.evolve(c, checksum=checksum(c.values, dtype)) for c in bucket)
            given = {kind: tuple(c for c in bucket if c.name in names) for kind, names in parts.items()}
            accepting = [o for o in accepting if o.put(given.get(wanted[o].kind, bucket))]
            # Before the source makes the next one.
            del bucket, given
        for outlet in accepting:
            outlet.end()
    except BaseException as error:
        for outlet in outlets:
            outlet.fail(version, error)
        raise


def _one_source(sources: Mapping[str, WeightSource], wishes: Sequence[Wish]) -> WeightSource:
    """Returns the source that has what all engines ask for.

    Raises:
        ValueError: engines ask for weights that no one source has, or in different dtypes.
    """
    least = CHANGED if CHANGED in sources else MERGED
    kinds, dtypes = {wish.kind for wish in wishes} or {least}, {wish.dtype for wish in wishes}
    if len(dtypes) > 1:
        raise ValueError(f"engines of one publication have different dtypes: {sorted(map(str, dtypes))}")
    if kinds & {MERGED, CHANGED} and kinds & {WHOLE, ADAPTERS}:
        raise ValueError("some engines of one publication take only adapters, and others take them merged")
    return sources[next(kind for kind in (MERGED, WHOLE, CHANGED, ADAPTERS) if kind in kinds)]
