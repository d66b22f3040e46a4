"""How processes find each other to form a process group, without ports that other machines can reach."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

import torch.distributed as dist


def open_store(address: str, size: int, timeout: timedelta) -> dist.TCPStore:
    """Opens a store on a free port that listens only on this address; torch's own store listens on all.

    Args:
        address: an IP address of this machine.
        size: how many processes use the store.
        timeout: how long a process waits for a value.

    Example:
        >>> store = open_store("127.0.0.1", 1, timedelta(seconds=5))
        >>> store.set("a", "b")
        >>> store.get("a")
        b'b'
    """
    with socket.create_server((address, 0), family=_family(address)) as listening:
        port = listening.getsockname()[1]
        # The store owns the descriptor.
        return dist.TCPStore(
            address, port, size, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )  # fmt: skip


def use_loopback(address: str) -> None:
    """Makes gloo and NCCL listen on the loopback device if the store does, and so all ranks are on one machine.

    They then need not resolve the host's name either.
    """
    if ipaddress.ip_address(address).is_loopback:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
