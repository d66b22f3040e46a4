"""Publications between two processes: a connection for messages, and a staging area for the weights.

Both ends last as long as the run. When a publication fails, both sides close their end, and the next one starts with
a new connection, so that it cannot receive messages of the failed one.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import attrs
import torch

from verl_fn.backends.protocol.weights import BUCKET_BYTES, Chunk, TensorSpec, WeightSource

from .intake import IncompleteWeights
from .source import InDtype, in_dtype
from .staging import SLOTS, CannotOpen, Place, Staging, kinds, offered, opened

ALIGNMENT = 256


class SenderFailed(IncompleteWeights):
    """The process at the other end failed or ended during a publication."""


class _End:
    """One end of a channel: a connection, and the staging area that both ends have agreed on over it."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._staging: Staging | None = None

    def close(self) -> None:
        """Closes the connection; the next publication makes a new one."""
        if self._connection is not None:
            self._connection.close()
        if self._staging is not None:
            self._staging.close()
        self._connection = self._staging = None


class Inlet(_End):
    """The receiving end, in the process of a rollout engine.

    Args:
        host: the address to listen on.
        secret: the key that senders have to know.
        device: the device of the engine's weights.
        dtype: the dtype of the engine's weights, which are sent in it.
    """

    def __init__(self, host: str, secret: bytes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._listener = Listener((host, 0), authkey=secret)
        self._device, self._dtype = device, dtype

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that senders connect to."""
        address: tuple[str, int] = self._listener.address
        return address

    def receive(self, version: int, publish: Callable[[WeightSource], None]) -> None:
        """Receives the next source and passes it to ``publish``.

        Args:
            version: the version that the weights must have.
            publish: reads the source.

        Raises:
            IncompleteWeights: the weights are of another version, or incomplete.
            Exception: as ``publish``.
        """
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            specs = self._announced(version)
            assert self._connection is not None
            source = _Arriving(self, self._connection, in_dtype(specs, self._dtype))
            try:
                publish(source)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    self._connection.send(("refused", f"{type(error).__name__}: {error}"))
                raise
            self._connection.send(("done",))
            failing.pop_all()

    def _announced(self, version: int) -> tuple[TensorSpec, ...]:
        """Receives the specifications of the next source, over the open connection or a new one."""
        if self._connection is not None:
            try:
                message = receive_message(self._connection)
            except SenderFailed:
                # It was closed between two publications, after which senders connect again.
                self.close()
        if self._connection is None:
            self._connection = self._accepted()
            message = receive_message(self._connection)
        _, sent, specs = message
        if sent != version:
            raise IncompleteWeights(f"weights of version {sent} were sent where version {version} was announced")
        announced: tuple[TensorSpec, ...] = specs
        return announced

    def _accepted(self) -> Connection:
        """Waits for a sender that knows the secret; others are sent away."""
        while True:
            with contextlib.suppress(AuthenticationError, EOFError, ConnectionError):
                return _prompt(self._listener.accept())

    def _open(self, description: tuple[Any, ...]) -> None:
        assert self._connection is not None
        try:
            self._staging = opened(description, self._device, self._connection)
        except CannotOpen as error:
            self._connection.send(("cannot", str(error)))
        else:
            self._connection.send(("opened",))


@attrs.frozen(eq=False)
class _Arriving:
    """Weights that arrive over a connection, a ``WeightSource``."""

    inlet: Inlet
    connection: Connection
    specs: tuple[TensorSpec, ...]

    def buckets(self, max_bytes: int = BUCKET_BYTES, *, checked: bool = False) -> Iterator[tuple[Chunk, ...]]:
        """Yields the buckets as they arrive; see ``WeightSource``."""
        inlet, connection = self.inlet, self.connection
        send_message(connection, ("start", max_bytes, checked, inlet._dtype, Place.of(inlet._device)))
        while True:
            kind, *rest = receive_message(connection)
            if kind == "end":
                return
            if kind == "failed":
                raise SenderFailed(f"the sender failed: {rest[0]}")
            if kind == "staging":
                inlet._open(rest[0])
                continue
            number, nbytes, entries = rest
            assert inlet._staging is not None
            inlet._staging.flush(number, nbytes)
            whole = inlet._staging.slot(number)
            yield tuple(
                Chunk(name, start, whole[at : at + size].view(dtype).view(shape), checksum)
                for name, start, shape, dtype, at, size, checksum in entries
            )
            if inlet._device.type == "cuda":
                torch.cuda.current_stream(inlet._device).synchronize()
            send_message(connection, ("taken", number))


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


class Outlet(_End):
    """The sending end, to one engine.

    Args:
        address: the address of the engine's inlet.
        secret: the key of the inlet.
        device: the device of the weights.
        allowed: the kinds of staging to choose from; by default all.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, device: torch.device, allowed: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self._address, self._secret, self._device, self._allowed = address, secret, device, allowed
        self._room = 0
        self._busy: list[int] = []
        self.kind = ""

    def offer(self, version: int, specs: tuple[TensorSpec, ...]) -> tuple[int, bool, torch.dtype] | None:
        """Announces weights to the engine.

        Returns:
            The engine's bucket size, whether it compares checksums, and its dtype; None if it refuses the weights.
        """
        if self._connection is None:
            self._connection = _prompt(Client(self._address, authkey=self._secret))
        with self._refusable():
            send_message(self._connection, ("specs", version, specs))
            kind, *rest = receive_message(self._connection)
            if kind == "start":
                max_bytes, checked, dtype, receiver = rest
                specs = in_dtype(specs, dtype)
                rows = [spec.nbytes // max(1, spec.rows) for spec in specs]
                room = max(min(max_bytes, sum(spec.nbytes for spec in specs)), max(rows, default=0))
                self._make_room(_aligned(room + ALIGNMENT * (len(specs) + 1)), receiver)
                return max_bytes, checked, dtype
        self.close()
        return None

    def put(self, bucket: Sequence[Chunk]) -> bool:
        """Sends a bucket, and returns whether the engine accepts it."""
        if self._connection is None or self._staging is None:
            return False
        with self._refusable():
            free = [i for i in range(SLOTS) if i not in self._busy]
            number = free[0] if free else self._taken()
            if number is not None:
                self._write(number, bucket)
                return True
        self.close()
        return False

    def end(self) -> None:
        """Ends the publication, and waits until the engine has all weights."""
        with self._refusable():
            send_message(self._open, ("end",))
            while self._taken() is not None:
                pass
            return
        self.close()

    def _write(self, number: int, bucket: Sequence[Chunk]) -> None:
        """Copies a bucket into a slot, and tells the engine where each chunk lies."""
        assert self._staging is not None
        whole, at, entries = self._staging.slot(number), 0, []
        targets: list[torch.Tensor] = []
        for chunk in bucket:
            t = chunk.values
            targets.append(whole[at : at + t.nbytes].view(t.dtype).view(t.shape))
            entries.append((chunk.name, chunk.start, tuple(t.shape), t.dtype, at, t.nbytes, chunk.checksum))
            at += _aligned(t.nbytes)
        torch._foreach_copy_(targets, [chunk.values for chunk in bucket])
        message = ("bucket", number, at, entries)
        if self.kind in ("group", "socket"):
            # Both sides take part in the transfer, so the message has to come first.
            send_message(self._open, message)
            self._staging.flush(number, at)
        else:
            self._staging.flush(number, at)
            send_message(self._open, message)
        self._busy.append(number)

    @property
    def _open(self) -> Connection:
        assert self._connection is not None
        return self._connection

    @contextlib.contextmanager
    def _refusable(self) -> Iterator[None]:
        """Ignores that an engine refused the weights or ended, since its own call raises the reason."""
        with contextlib.suppress(SenderFailed):
            yield

    def fail(self, error: BaseException) -> None:
        """Tells the engine that the publication failed."""
        if self._connection is not None:
            with contextlib.suppress(SenderFailed):
                send_message(self._connection, ("failed", f"{type(error).__name__}: {error}"))
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

    def _make_room(self, nbytes: int, receiver: Place) -> None:
        """Agrees with the engine on a staging area of this size, unless there is one."""
        if self._staging is not None and self._room >= nbytes:
            return
        assert self._connection is not None
        reasons = []
        for kind in kinds(Place.of(self._device), receiver) if self._allowed is None else self._allowed:
            description, start = offered(kind, nbytes, self._device, self._connection)
            send_message(self._connection, ("staging", description))
            staging = start()
            reply, *rest = receive_message(self._connection)
            if reply == "opened":
                self._staging, self._room, self.kind = staging, nbytes, kind
                return
            staging.close()
            reasons += rest
        raise RuntimeError(f"no kind of staging area reaches the rollout engine: {'; '.join(reasons)}")


def send(outlets: Sequence[Outlet], version: int, source: WeightSource) -> None:
    """Sends weights to engines, bucket by bucket, each gathered once for all engines.

    The whole source is read even if every engine refuses it, since other ranks may take part in reading it.
    """
    try:
        replies = [(outlet, outlet.offer(version, source.specs)) for outlet in outlets]
        wanted = [(outlet, reply) for outlet, reply in replies if reply is not None]
        size = min((max_bytes for _, (max_bytes, _, _) in wanted), default=BUCKET_BYTES)
        checked = any(check for _, (_, check, _) in wanted)
        dtypes = {dtype for _, (_, _, dtype) in wanted}
        if len(dtypes) > 1:
            raise ValueError(f"engines of one publication have different dtypes: {sorted(map(str, dtypes))}")
        source = InDtype(source, dtypes.pop()) if dtypes else source
        accepting = [outlet for outlet, _ in wanted]
        for bucket in source.buckets(size, checked=checked):
            accepting = [outlet for outlet in accepting if outlet.put(bucket)]
        for outlet in accepting:
            outlet.end()
    except BaseException as error:
        for outlet in outlets:
            outlet.fail(error)
        raise


def _prompt(connection: Connection) -> Connection:
    """Returns the connection set to send small messages at once; waiting for more takes 40 ms on Linux."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send_message(connection: Connection, message: Any) -> None:
    """Sends a message.

    Raises:
        SenderFailed: the other process closed the connection.
    """
    try:
        connection.send(message)
    except OSError as error:
        raise SenderFailed("the process at the other end of a publication closed its connection") from error


def receive_message(connection: Connection | None) -> Any:
    """Waits for the next message and returns it.

    Raises:
        SenderFailed: the other process closed the connection.
    """
    assert connection is not None
    try:
        return connection.recv()
    except (EOFError, OSError) as error:
        raise SenderFailed("the process at the other end of a publication closed its connection") from error
