"""Publications between two processes: a connection for messages, and a staging area for the weights.

Both ends last as long as the run. When a publication fails, both sides close their end, and the next one starts with
a new connection.

The sender makes a staging area of two slots, in shared memory or over a process group, and describes it; the receiver
opens the description. The sender then copies each bucket into a slot and the receiver reads it there, so the weights
themselves are never shared.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from verl_fn.backends.agreement import open_store, use_loopback

from .publication import IncompleteWeights

SLOTS = 2
ALIGNMENT = 256  # bytes, of each tensor in a slot
GROUP_TIMEOUT = timedelta(seconds=600)
# What a sender can send: the model with its adapters merged in, or the same without frozen tensors; the model and
# its adapters, or only the adapters.
MERGED, CHANGED, WHOLE, ADAPTERS = "merged", "changed", "whole", "adapters"

# Timeout of each message of the authentication.
SECONDS_TO_ANSWER = 10


@attrs.frozen
class Location:
    """Where a process computes: it decides how buckets can reach the process.

    Attributes:
        host: identifies the machine.
        device: ``cpu`` or ``cuda``.
        gpu: identifies the current GPU, equally in all processes on the machine.
    """

    host: str
    device: str
    gpu: str = ""

    @classmethod
    def of(cls, device: torch.device) -> Location:
        """Returns the location of this process, computing on ``device``."""
        host = f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
        if device.type != "cuda":
            return cls(host, "cpu")
        return cls(host, "cuda", str(torch.cuda.get_device_properties(device).uuid))


Description: TypeAlias = tuple[Any, ...]
"""What the receiver needs to open a staging area; it can be pickled."""


def kinds(sender: Location, receiver: Location) -> list[str]:
    """Returns the kinds of staging to try between two locations, the fastest first.

    Example:
        >>> kinds(Location("a", "cuda", "GPU-1"), Location("a", "cuda", "GPU-1"))
        ['ipc', 'memory', 'socket']
        >>> kinds(Location("a", "cuda", "GPU-1"), Location("b", "cuda", "GPU-2"))
        ['group', 'socket']
        >>> kinds(Location("a", "cpu"), Location("b", "cpu"))
        ['socket']
    """
    usable = []
    if sender.device == receiver.device == "cuda":
        # NCCL refuses two ranks on one GPU, and a process may be unable to open memory of another GPU.
        usable.append("ipc" if (sender.host, sender.gpu) == (receiver.host, receiver.gpu) else "group")
    if sender.host == receiver.host:
        usable.append("memory")
    return [*usable, "socket"]


class CannotOpen(RuntimeError):
    """This process cannot open a staging area; the next kind is tried."""


class Staging:
    """Two slots of bytes, on the sender's or on the receiver's side: here in one tensor that both processes see."""

    def __init__(self, memory: Tensor) -> None:
        self._slots = memory.view(SLOTS, -1)

    def slot(self, number: int) -> Tensor:
        """Returns the bytes of a slot."""
        return self._slots[number]

    def flush(self, number: int, nbytes: int) -> None:
        """Transfers the first bytes of a slot: makes them visible to the receiver, or waits for them there."""
        if self._slots.is_cuda:
            torch.cuda.current_stream(self._slots.device).synchronize()

    def close(self) -> None:
        """Frees the slots."""
        self._slots = torch.empty(SLOTS, 0, dtype=torch.uint8)


class _Group(Staging):
    """Slots of one process, whose bytes a process group of two sends."""

    def __init__(self, memory: Tensor, group: Any, rank: int) -> None:
        super().__init__(memory)
        self._group, self._rank = group, rank

    def flush(self, number: int, nbytes: int) -> None:
        part = [self.slot(number)[:nbytes]]
        work = self._group.send(part, 1, 0) if self._rank == 0 else self._group.recv(part, 0, 0)
        work.wait()
        super().flush(number, nbytes)

    def close(self) -> None:
        super().close()
        self._group = None


class _Socket(Staging):
    """Slots of one process, whose bytes are sent over the connection itself."""

    def __init__(self, memory: Tensor, connection: Connection, sends: bool) -> None:
        super().__init__(memory)
        self._connection, self._sends = connection, sends

    def flush(self, number: int, nbytes: int) -> None:
        part = self.slot(number)[:nbytes].numpy().data
        if self._sends:
            self._connection.send_bytes(part)
        else:
            self._connection.recv_bytes_into(part)


def room_for(nbytes: int, count: int) -> int:
    """Returns the size of a slot for so many bytes in so many tensors.

    Example:
        >>> room_for(1000, 2)
        1792
    """
    return -(-(nbytes + ALIGNMENT * (count + 1)) // ALIGNMENT) * ALIGNMENT


def places(slot: Tensor, dtype: torch.dtype, counts: Sequence[int]) -> tuple[list[Tensor], int]:
    """Returns where tensors with so many elements lie in a slot, one after the other, and how many bytes they take.

    Example:
        >>> tensors, nbytes = places(torch.zeros(1024, dtype=torch.uint8), torch.float32, [3, 100])
        >>> [len(t) for t in tensors], nbytes
        ([3, 100], 768)
    """
    unit = ALIGNMENT // dtype.itemsize
    sizes = [size for count in counts for size in (count, -count % unit)]
    nbytes = sum(sizes) * dtype.itemsize
    return list(slot[:nbytes].view(dtype).split(sizes)[::2]), nbytes


def offered(
    kind: str, nbytes: int, device: torch.device, connection: Connection
) -> tuple[Description, Callable[[], Staging]]:
    """Makes the sender's side of a staging area.

    Args:
        kind: one of ``kinds``.
        nbytes: the size of each slot.

    Returns:
        The description for the receiver, and a function that makes the sender's side once the description was sent.
    """
    size = SLOTS * nbytes
    if kind == "ipc":
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return (kind, nbytes, *reduce_tensor(memory)), lambda: Staging(memory)
    if kind == "memory":
        # Memory without a name in any file system disappears with the processes, however they end.
        fd = os.memfd_create("verl_fn_weights")
        try:
            os.ftruncate(fd, size)
            memory = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        except BaseException:
            os.close(fd)
            raise
        mark = os.urandom(16)
        memory[:16] = torch.tensor(list(mark), dtype=torch.uint8)
        staging = Staging(memory)
        weakref.finalize(staging, os.close, fd)
        return (kind, nbytes, os.getpid(), fd, mark), lambda: staging
    if kind == "group":
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        address = connection_address(connection)
        store = open_store(address, 2, GROUP_TIMEOUT)
        return (kind, nbytes, device.type, address, store.port), lambda: _Group(memory, _pair(device, store, 0), 0)
    return (kind, nbytes), lambda: _Socket(torch.empty(size, dtype=torch.uint8), connection, True)


def opened(description: Description, device: torch.device, connection: Connection) -> Staging:
    """Opens the receiver's side of a staging area.

    Raises:
        CannotOpen: this process cannot open it.
    """
    kind, nbytes, *rest = description
    size = SLOTS * nbytes
    try:
        if kind == "ipc":
            rebuild, arguments = rest
            # The device may have another number here than in the sender's process.
            number = torch.cuda.current_device() if device.index is None else device.index
            return Staging(rebuild(*arguments[:6], number, *arguments[7:]))
        if kind == "memory":
            pid, fd, mark = rest
            own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            try:
                memory = torch.frombuffer(mmap.mmap(own_fd, size), dtype=torch.uint8)
            finally:
                os.close(own_fd)
            if bytes(memory[:16].tolist()) != mark:
                raise CannotOpen("the sender's process numbers belong to another machine")
            return Staging(memory)
        if kind == "group":
            _, address, port = rest
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            store = dist.TCPStore(address, port, 2, is_master=False, timeout=GROUP_TIMEOUT)
            return _Group(memory, _pair(device, store, 1), 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise CannotOpen(f"{kind}: {error}") from error
    return _Socket(torch.empty(size, dtype=torch.uint8), connection, False)


def connection_address(connection: Connection) -> str:
    """Returns the address of this process, as the other end of a TCP connection sees it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        name: str = end.getsockname()[0]
    return name


def _pair(device: torch.device, store: Any, rank: int) -> Any:
    """Makes a process group of two, independent of any other group of this process."""
    use_loopback(store.host)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = GROUP_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    return dist.ProcessGroupGloo(store, rank, 2, GROUP_TIMEOUT)


class SenderFailed(IncompleteWeights):
    """The process at the other end failed or ended during a publication."""


class End:
    """One end of a channel: a connection, and the staging area that both ends have agreed on over it."""

    def __init__(self, connection: Connection | None = None) -> None:
        self._connection = connection
        self._staging: Staging | None = None

    @property
    def open(self) -> Connection:
        """The connection."""
        assert self._connection is not None
        return self._connection

    def close(self) -> None:
        """Closes the connection; the next publication makes a new one."""
        if self._connection is not None:
            self._connection.close()
        if self._staging is not None:
            self._staging.close()
        self._connection = self._staging = None


def connected(address: tuple[str, int], secret: bytes, seconds: int = 0) -> Connection:
    """Connects to an inlet.

    Args:
        seconds: how long to wait for each of its answers; 0 waits for as long as it takes.

    Raises:
        AuthenticationError: the inlet has another key.
        OSError: it cannot be reached, or does not answer in time.
        EOFError: it closed the connection.
    """
    with socket.create_connection(address, seconds or None) as end:
        end.setblocking(True)
        connection = Connection(end.detach())
    return _authenticated(connection, secret, seconds, answer_challenge, deliver_challenge)


def admitted(connection: Connection, secret: bytes, seconds: int) -> Connection:
    """Returns a connection that an inlet has accepted, if the other end knows the key.

    Raises:
        AuthenticationError, OSError, EOFError: it does not, or says nothing for so many seconds.
    """
    return _authenticated(connection, secret, seconds, deliver_challenge, answer_challenge)


def _authenticated(
    connection: Connection, secret: bytes, seconds: int, *challenges: Callable[[Connection, bytes], None]
) -> Connection:
    try:
        _limit_waiting(connection, seconds)
        for challenge in challenges:
            challenge(connection, secret)
        _limit_waiting(connection, 0)
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            # Otherwise a small message may wait for 40 ms on Linux.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _limit_waiting(connection: Connection, seconds: int) -> None:
    """Makes a read raise ``OSError`` after so many seconds without data; 0 removes the limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


CLOSED = "the process at the other end of a publication closed its connection"


def send_message(connection: Connection, message: Any) -> None:
    """Sends a message.

    Raises:
        SenderFailed: the other process closed the connection.
    """
    with contextlib.suppress(OSError):
        connection.send(message)
        return
    # Without the OSError, whose frames hold a view of the message: collecting the two in a cycle crashes Python 3.12.
    raise SenderFailed(CLOSED)


def transfer(staging: Staging, number: int, nbytes: int) -> None:
    """Transfers the first bytes of a slot; see ``Staging.flush``.

    Raises:
        SenderFailed: the other process closed the connection.
    """
    with contextlib.suppress(OSError, EOFError):
        staging.flush(number, nbytes)
        return
    raise SenderFailed(CLOSED)  # without the OSError, as above


def receive_message(connection: Connection | None) -> Any:
    """Waits for the next message and returns it.

    Raises:
        SenderFailed: the other process closed the connection.
    """
    assert connection is not None
    try:
        return connection.recv()
    except (EOFError, OSError) as error:
        raise SenderFailed(CLOSED) from error
