"""Publications between two processes: a connection for messages, and a staging area for the weights.

Both ends last as long as the run. When a publication fails, both sides close their end, and the next one starts with
a new connection, so that it cannot receive messages of the failed one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

from .intake import IncompleteWeights
from .staging import Staging

# What a sender can send: the model with its adapters merged in, the model and its adapters, or the adapters alone.
MERGED, WHOLE, ADAPTERS = "merged", "whole", "adapters"


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


def prompt(connection: Connection) -> Connection:
    """Returns the connection set to send small messages at once; waiting for more takes 40 ms on Linux."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def limit_waiting(connection: Connection, seconds: int) -> None:
    """Makes it an ``OSError`` where the other end says nothing for so many seconds; with 0, waits for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def send_message(connection: Connection, message: Any) -> None:
    """Sends a message.

    Raises:
        SenderFailed: the other process closed the connection.
    """
    with contextlib.suppress(OSError):
        connection.send(message)
        return
    # Without the OSError, whose frames hold a view of the message: collecting the two in a cycle crashes Python 3.12.
    raise SenderFailed("the process at the other end of a publication closed its connection")


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
