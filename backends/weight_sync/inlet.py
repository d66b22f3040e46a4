"""The receiving side of publications between processes: one sender, or several that each send their rows."""

from __future__ import annotations

import contextlib
import functools
import math
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any, TypeAlias

import attrs
import torch

from verl_fn.backends.protocol import BUCKET_BYTES, Chunk, TensorSpec, WeightSource

from .channel import (
    ADAPTERS,
    CHANGED,
    MERGED,
    SECONDS_TO_ANSWER,
    WHOLE,
    CannotOpen,
    End,
    Location,
    SenderFailed,
    admitted,
    opened,
    places,
    receive_message,
    send_message,
    transfer,
)
from .publication import Apart, Cut, IncompleteWeights, check_cuts, in_dtype

Offers: TypeAlias = Mapping[str, tuple[tuple[TensorSpec, ...], Cut | None]]


class _Sender(End):
    """The receiving end of one sender.

    Attributes:
        version: of the weights that the sender has announced.
        offers: by name, the tensors of each source that it can send, and which rows of them; None for all.
        name: is the same in a process that the sender was passed on to.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.version: int | None = None
        self.offers: Offers = {}
        self.name = uuid.uuid4().hex

    def __reduce__(self) -> tuple[Any, ...]:
        return _passed_on, (self.name, self._connection, self.version, self.offers)

    def announced(self, message: tuple[Any, ...]) -> None:
        """Takes the specifications of the next publication from its first message."""
        _, self.version, self.offers = _checked(message)

    def next(self) -> tuple[Any, ...]:
        """Receives the next message.

        Raises:
            SenderFailed: the sender failed or ended.
        """
        return _checked(receive_message(self.open))

    def start(self, device: torch.device) -> None:
        """Opens the staging areas that the sender offers, until it has one that this process can open."""
        while (message := self.next())[0] == "staging":
            try:
                self._staging = opened(message[1], device, self.open)
            except CannotOpen as error:
                send_message(self.open, ("cannot", str(error)))
            else:
                send_message(self.open, ("opened",))

    def bucket(self, cut: Cut | None) -> tuple[int, list[Chunk]] | None:
        """Receives the next bucket, and returns the number of its slot and its chunks; None after the last one.

        Args:
            cut: the rows that this sender sends; None for all.

        Raises:
            IncompleteWeights: it has rows that this sender has not announced.
        """
        kind, *rest = self.next()
        if kind == "end":
            return None
        number, dtype, entries = rest
        assert self._staging is not None
        tensors, nbytes = places(self._staging.slot(number), dtype, [math.prod(shape) for _, _, shape, _ in entries])
        if nbytes:
            transfer(self._staging, number, nbytes)
        chunks = []
        for t, (name, start, shape, checksum) in zip(tensors, entries, strict=True):
            chunk = Chunk(name, start, t.view(shape), checksum)
            if cut is not None:
                first, last = cut.rows(name)
                end = start + len(chunk.values)
                if start < first or end > last:
                    raise IncompleteWeights(
                        f"rank {cut.number} sent rows {start} to {end} of {name!r}, and had announced that it "
                        f"sends rows {first} to {last}"
                    )
            chunks.append(chunk)
        return number, chunks

    def taken(self, number: int) -> None:
        """Tells the sender that it can use a slot again."""
        # If the sender has failed, its next message says why.
        with contextlib.suppress(SenderFailed):
            send_message(self.open, ("taken", number))


# The senders that another process has passed on to this one; their staging areas last as long as their connections.
_PASSED_ON: dict[str, _Sender] = {}


def _passed_on(name: str, connection: Connection, version: int | None, offers: Offers) -> _Sender:
    if name not in _PASSED_ON:
        _PASSED_ON[name] = _Sender(connection)
    sender = _PASSED_ON[name]
    sender.version, sender.offers = version, offers
    return sender


def give_up(but: Collection[_Sender] = ()) -> None:
    """Closes this process's end of senders that were passed on to it."""
    for name, sender in list(_PASSED_ON.items()):
        if sender not in but:
            _PASSED_ON.pop(name).close()


def _checked(message: tuple[Any, ...]) -> tuple[Any, ...]:
    if message[0] == "failed":
        raise SenderFailed(f"the sender failed: {message[2]}")
    return message


class Inlet:
    """The receiving end, in the process of a rollout engine.

    Args:
        host: the address to listen on.
        secret: the key that senders have to know.
        device: the device of the engine's weights.
        dtype: the dtype of the engine's weights; they are sent in it.
    """

    def __init__(self, host: str, secret: bytes, device: torch.device, dtype: torch.dtype) -> None:
        # All ranks of a trainer connect at the same time.
        self._listener = Listener((host, 0), backlog=1024)
        self._secret, self._device, self._dtype = secret, device, dtype
        self._senders: list[_Sender] = []
        # The versions whose publication has failed.
        self._failed: set[int | None] = set()

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that senders connect to."""
        address: tuple[str, int] = self._listener.address
        return address

    def receive(self, version: int, publish: Callable[[WeightSource], None]) -> None:
        """Receives the next source and passes it to ``publish``.

        Args:
            version: the version that the weights must have. After a failure the next publication needs another
                version: a late sender of the one that failed would be taken for a sender of the next.
            publish: reads the source.

        Raises:
            IncompleteWeights: the weights are of another version, or incomplete.
            Exception: as ``publish``.
        """
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            failing.callback(self._failed.add, version)
            try:
                self._announced(version)
                _check(self._senders, version)
                publish(Arriving(self._senders, MERGED, self._dtype, self._device))
            except BaseException as error:
                for sender in self._senders:
                    with contextlib.suppress(SenderFailed):
                        send_message(sender.open, ("refused", f"{type(error).__name__}: {error}"))
                raise
            for sender in self._senders:
                send_message(sender.open, ("done",))
            failing.pop_all()

    def close(self) -> None:
        """Closes all connections; the next publication makes new ones."""
        for sender in self._senders:
            sender.close()
        self._senders = []

    def _announced(self, version: int) -> None:
        """Receives the specifications of the next publication of all senders, over open connections or new ones."""
        try:
            messages = [receive_message(sender.open) for sender in self._senders]
        except SenderFailed:
            # They were closed between two publications, after which senders connect again.
            self.close()
        else:
            arrived = list(zip(self._senders, messages, strict=True))
            self._senders = [sender for sender, message in arrived if not self._sent_away(sender, message, version)]
            for sender, message in arrived:
                if sender in self._senders:
                    sender.announced(message)
        while len(self._senders) < max((_count(sender) for sender in self._senders), default=1):
            sender = _Sender(self._accepted())
            message = receive_message(sender.open)
            if not self._sent_away(sender, message, version):
                self._senders.append(sender)
                sender.announced(message)

    def _sent_away(self, sender: _Sender, message: tuple[Any, ...], version: int) -> bool:
        """Sends away a sender whose first message is of a publication that has failed, and returns whether it did."""
        late = message[1] != version and message[1] in self._failed
        if late:
            sender.close()
        return late

    def _accepted(self) -> Connection:
        """Waits for a sender that knows the secret; others are sent away, also senders that say nothing."""
        while True:
            try:
                connection = self._listener.accept()
            except ConnectionError:
                continue
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                return admitted(connection, self._secret, SECONDS_TO_ANSWER)


def _count(sender: _Sender) -> int:
    """Returns how many senders send a publication together."""
    cut = sender.offers[MERGED][1]
    return 1 if cut is None else cut.of


def _check(senders: Sequence[_Sender], version: int) -> None:
    """Compares what the senders have announced.

    Raises:
        IncompleteWeights: the weights are of another version, or differ between senders, or the senders together do
            not send each row once.
    """
    tensors = [{kind: specs for kind, (specs, _) in sender.offers.items()} for sender in senders]
    for sender, announced in zip(senders, tensors, strict=True):
        if sender.version != version:
            raise IncompleteWeights(
                f"weights of version {sender.version} were sent where version {version} was announced"
            )
        if announced != tensors[0]:
            raise IncompleteWeights("ranks announced different tensors for one publication")
    for kind, (specs, cut) in senders[0].offers.items():
        if cut is not None:
            check_cuts(specs, [c for sender in senders if (c := sender.offers[kind][1]) is not None])


@attrs.frozen(eq=False)
class Arriving:
    """Weights that arrive from one sender or several, a ``WeightSource``.

    A child can read the buckets in place of this process: pickled by ``ForkingPickler``, the source takes its
    connections along. The announcement and the end of the publication stay here.
    """

    senders: Sequence[_Sender]
    kind: str
    dtype: torch.dtype
    device: torch.device

    def __reduce__(self) -> tuple[Any, ...]:
        return _to_be_read, (self.senders, self.kind, self.dtype, self.device)

    @functools.cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, in the engine's dtype."""
        return in_dtype(self.senders[0].offers[self.kind][0], self.dtype)

    @property
    def apart(self) -> Apart | None:
        """The same model with its adapters not merged, where the senders have adapters."""
        return self._apart(WHOLE, ADAPTERS)

    @property
    def kept(self) -> Apart | None:
        """The same weights with the frozen ones apart, where the senders have frozen ones."""
        return self._apart(MERGED, CHANGED)

    def _apart(self, kind: str, part: str) -> Apart | None:
        if part not in self.senders[0].offers:
            return None
        whole, changing = (attrs.evolve(self, kind=name) for name in (kind, part))
        return Apart(whole, changing, functools.partial(self._identify, part))

    def _identify(self, part: str) -> str:
        for sender in self.senders:
            send_message(sender.open, ("identify", part))
        return " ".join(str(sender.next()[1]) for sender in self.senders)

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Yields the buckets as they arrive, joined if there are several senders; see ``WeightSource``."""
        for sender in self.senders:
            send_message(sender.open, ("start", self.kind, max_bytes, checked, self.dtype, Location.of(self.device)))
        # A sender may wait for the next engine before it sends its first bucket, and that engine for all senders.
        for sender in self.senders:
            sender.start(self.device)
        order = {spec.name: i for i, spec in enumerate(self.specs)}
        left = list(self.senders)
        while left:
            parts = [(sender, sender.bucket(sender.offers[self.kind][1])) for sender in left]
            arrived = [(sender, *part) for sender, part in parts if part is not None]
            left = [sender for sender, *_ in arrived]
            chunks = [chunk for *_, part in arrived for chunk in part]
            if len(arrived) > 1:
                chunks.sort(key=lambda chunk: (order[chunk.name], chunk.start))
            if chunks:
                yield tuple(chunks)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            for sender, number, _ in arrived:
                sender.taken(number)


def _to_be_read(senders: Sequence[_Sender], *rest: Any) -> Arriving:
    give_up(but=senders)
    return Arriving(senders, *rest)
