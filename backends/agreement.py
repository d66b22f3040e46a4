"""What the ranks of a process group must agree on, and how they find out that they do not.

Ranks that were given different things would wait for each other, or, worse, go on with a mixture.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
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
    """The values of all ranks, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def alone(value: Any) -> list[Any]:
    """The same where there are no other ranks.

    >>> alone(3)
    [3]
    """
    return [value]


@contextlib.contextmanager
def agreed(gather: Gather = gathered) -> Iterator[None]:
    """What goes wrong inside on some rank is raised on all of them, so that none waits for one that gave up.

    >>> with agreed(alone):
    ...     raise OSError("no room")
    Traceback (most recent call last):
    OSError: no room
    """
    mine = None
    try:
        yield
    except Exception as error:
        mine = error
    if gather is gathered and _all_equal(bytes(8) if mine is None else b"failed.."):
        # All are well, or all raise errors of their own.
        told = [mine]
    else:
        told = gather(mine if mine is None else _sendable(mine))
    if mine is not None:
        raise mine
    if (theirs := next((error for error in told if error is not None), None)) is not None:
        raise theirs


def _sendable(error: Exception) -> Exception:
    """An error that can be sent to other ranks; one that cannot is told in its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def require_same(given: Mapping[str, Any]) -> None:
    """Compare what was given to this rank, by name, with what was given to the others; all ranks call it together.

    Raises:
        LayoutError: some rank was given something else, on every rank.
    """
    # A number each is enough where all are given the same, which is nearly always.
    if dist.get_world_size() == 1 or _all_equal(_hash(pickle.dumps(dict(given)))):
        return
    told = gathered(dict(given))
    for name, first in told[0].items():
        if odd := [rank for rank, one in enumerate(told) if one[name] != first]:
            # Bytes are a hash, which says nothing to a person.
            values = "" if isinstance(first, bytes) else f" ({told[odd[0]][name]!r} instead of {first!r})"
            raise LayoutError(
                f"ranks {odd[:8]} were given another {name} than rank 0{values}; all ranks must be given the same"
            )


def _all_equal(digest: bytes) -> bool:
    """Returns whether all ranks have this digest of 8 bytes."""
    if dist.get_world_size() == 1:
        return True
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    # The largest, and the complement of the smallest.
    ends = torch.cat([mine, ~mine])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return bool(ends[0] == ~ends[1])


def settings(folder: Path, optimizer: Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a backend was made with, to compare: its options, its optimizer and a hash of the model's config."""
    config = folder / "config.json"
    return {
        **{name: str(value) for name, value in options.items()},
        "model (config.json)": _hash(config.read_bytes() if config.is_file() else b"none"),
        "optimizer": described(optimizer),
    }


def of_batch(batch: Batch) -> bytes:
    """A hash of all that a batch holds."""
    h = hashlib.blake2b(digest_size=8)
    for name in sorted({"tokens", "positions", "cu_seqlens", *batch.per_token, *batch.per_row}):
        h.update(name.encode())
        h.update(batch[name].contiguous().view(torch.uint8).numpy().data)
    return h.digest()


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def described(value: Any) -> str:
    """Describes a value of settings so that equal ones are described alike in every process.

    Frozen classes are described by their fields, functions by their name, code, defaults and what they enclose.

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
    return repr(value) if type(value).__repr__ is not object.__repr__ else f"{type(value).__qualname__} object"
