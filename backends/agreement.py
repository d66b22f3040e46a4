"""Process groups: how processes find each other, and checks that ranks agree on what they were given.

Ranks with different arguments, or with a step that failed on one of them, would wait for each other for ever, or
compute a mixture that is wrong. No port is opened that other machines can reach if all ranks are on this one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import os
import pickle
import socket
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from verl_fn.state import Batch, tree
from verl_fn.steps import Optimizer

from .hf.ulysses import LayoutError

Gather: TypeAlias = Callable[[Any], list[Any]]


def gathered(value: Any) -> list[Any]:
    """Returns the values of all ranks, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def alone(value: Any) -> list[Any]:
    """Returns what ``gathered`` returns where there are no other ranks.

    Example:
        >>> alone(3)
        [3]
    """
    return [value]


@contextlib.contextmanager
def agreed(gather: Gather = gathered) -> Iterator[None]:
    """Raises an error of any rank on all ranks, so that none waits for a rank that failed.

    Args:
        gather: returns the values of all ranks, by rank.

    Raises:
        Exception: this rank's own error, or else the error of the first rank that failed.

    Example:
        >>> with agreed(alone):
        ...     raise OSError("no room")
        Traceback (most recent call last):
        OSError: no room
    """
    own_error = None
    try:
        yield
    except Exception as error:
        own_error = error
    if gather is gathered and _all_equal(bytes(8) if own_error is None else b"failed.."):
        # Either no rank failed or every rank did: each knows all that it has to raise.
        errors = [own_error]
    else:
        errors = gather(own_error if own_error is None else _sendable(own_error))
    if own_error is not None:
        raise own_error
    if (first := next((error for error in errors if error is not None), None)) is not None:
        raise first


def _sendable(error: Exception) -> Exception:
    """Returns an error that can be pickled: this one, or one with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def require_same(given: Mapping[str, Any]) -> None:
    """Compares the arguments of this rank with the other ranks'; all ranks call it together.

    Args:
        given: this rank's arguments by name.

    Raises:
        LayoutError: there is no process group; or, on every rank, some rank was given something else.
    """
    if not dist.is_initialized():
        raise LayoutError(
            "there is no process group: start the ranks with torchrun and call torch.distributed."
            'init_process_group("cpu:gloo,cuda:nccl"), or make a group of this process: '
            'init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)'
        )
    # Equal hashes are enough if all ranks were given the same, as they nearly always are.
    if dist.get_world_size() == 1 or _all_equal(_hash(pickle.dumps(dict(given)))):
        return
    by_rank = gathered(dict(given))
    for name, first in by_rank[0].items():
        if differing := [rank for rank, arguments in enumerate(by_rank) if arguments[name] != first]:
            # Bytes are a hash and mean nothing to a person.
            values = "" if isinstance(first, bytes) else f" ({by_rank[differing[0]][name]!r} instead of {first!r})"
            raise LayoutError(
                f"ranks {differing[:8]} were given another {name} than rank 0{values}; all ranks must be given the "
                "same"
            )


def _all_equal(digest: bytes) -> bool:
    """Returns whether all ranks have this digest of 8 bytes."""
    if dist.get_world_size() == 1:
        return True
    number = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    # One reduction gives the largest number and the complement of the smallest.
    ends = torch.cat([number, ~number])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return bool(ends[0] == ~ends[1])


def settings(folder: Path, optimizer: Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a backend for a comparison: its options, its optimizer and a hash of its config.

    A dtype equals its name.
    """
    config = folder / "config.json"
    return {
        **{name: str(value).removeprefix("torch.") for name, value in options.items()},
        "model (config.json)": _hash(config.read_bytes() if config.is_file() else b"none"),
        "optimizer": described(optimizer),
    }


def of_batch(batch: Batch) -> bytes:
    """Returns a hash of all tensors of a batch.

    The contents are hashed by their CRC, several times as fast as a cryptographic hash. It differs wherever
    two tensors differ in one element, and else in all but one of 2**32 cases.
    """
    contents = {
        path: (t.dtype, t.shape, zlib.crc32(t.contiguous().reshape(-1).view(torch.uint8).numpy().data))
        for path, t in sorted(tree.paths(batch).items())
    }
    return _hash(repr(contents).encode())


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def described(value: Any) -> str:
    """Describes a setting such that equal settings have equal descriptions in every process.

    Frozen classes are described by their fields, functions by their name, code, defaults and the values they enclose.

    Example:
        >>> from verl_fn.steps import constant
        >>> described(constant(0.1))
        'Constant(lr=0.1, warmup_steps=0)'
        >>> described(lambda count: 0.1) == described(lambda count: 0.2)
        False
    """
    if attrs.has(type(value)) and not isinstance(value, type):
        fields = ", ".join(f"{f.name}={described(getattr(value, f.name))}" for f in attrs.fields(type(value)))
        return f"{type(value).__qualname__}({fields})"
    if isinstance(value, functools.partial):
        return f"partial({described(value.func)}, {described(value.args)}, {described(value.keywords)})"
    if isinstance(value, types.FunctionType):
        enclosed = [cell.cell_contents for cell in value.__closure__ or ()]
        inside = described((value.__code__, value.__defaults__, value.__kwdefaults__, enclosed))
        return f"{value.__module__}.{value.__qualname__} [{_hash(inside.encode()).hex()}]"
    if isinstance(value, types.CodeType):
        return f"{value.co_code.hex()} {value.co_names} {described(value.co_consts)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {described(item)}' for name, item in sorted(value.items()))}}}"
    if isinstance(value, Tensor):
        return tree.digest(value)
    has_repr = any("__repr__" in vars(kind) for kind in type(value).__mro__ if kind is not object)
    return repr(value) if has_repr else f"{type(value).__qualname__} object"


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
