"""Publications between two processes: a connection for messages, and a staging area for the weights.

Both ends last as long as the run. When a publication fails, both sides close their end, and the next one starts with
a new connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from .intake import IncompleteWeights
from .staging import Staging

# What a sender can send: the model with its adapters merged in, the model and its adapters, or only the adapters.
MERGED, WHOLE, ADAPTERS = "merged", "whole", "adapters"

# Timeout of each message of the authentication.
SECONDS_TO_ANSWER = 10


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
        address: of the inlet.
        secret: its key.
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
