"""What the ranks of a process group must agree on, and how they find out that they do not.

Ranks that were given different things would wait for each other, or, worse, go on with a mixture.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from verl_fn.state import Batch, Grads, Key, Params, TrainState, tree
from verl_fn.steps import Optimizer, apply_update

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
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    theirs = mine.new_empty(dist.get_world_size())
    if len(theirs) == 1:
        return True
    dist.all_gather_into_tensor(theirs, mine)
    return bool((theirs == mine).all())


def settings(folder: Path, optimizer: Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a backend was made with, to compare: its options, and hashes of the model's config and of the optimizer."""
    config = folder / "config.json"
    return {
        **{name: str(value) for name, value in options.items()},
        "model (config.json)": _hash(config.read_bytes() if config.is_file() else b"none"),
        "optimizer": _hash(_behaviour(optimizer)),
    }


def sample(tensors: Mapping[str, Tensor]) -> bytes:
    """A hash of some elements of every tensor, to tell another checkpoint by.

    >>> w = torch.arange(1000.0)
    >>> sample({"w": w}) == sample({"w": w.clone()}) != sample({"w": w + 1})
    True
    """
    return _hash(
        tree.digest({name: t.reshape(-1)[:: max(1, t.numel() // 64)] for name, t in tensors.items()}).encode()
    )


def of_batch(batch: Batch) -> bytes:
    """A hash of all that a batch holds."""
    h = hashlib.blake2b(digest_size=8)
    for name in sorted({"tokens", "positions", "cu_seqlens", *batch.per_token, *batch.per_row}):
        h.update(name.encode())
        h.update(batch[name].contiguous().view(torch.uint8).numpy().data)
    return h.digest()


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _behaviour(optimizer: Optimizer) -> bytes:
    """What an optimizer does to a parameter: it is a pair of functions, with no settings to look at."""
    params = Params({"w": torch.tensor([1.0, -0.5, 0.25])})
    # A norm that any clipping changes, beside gradients as small as Adam's epsilon.
    grads = Grads({"w": torch.tensor([300.0, 1e-8, -1e-3])})
    told = b""
    try:
        state = TrainState(params, optimizer.init(params), 0, Key.from_seed(0), 0)
        for position in (0, 1, 3, 10, 30, 100, 1000, 10_000, 100_000):
            state = attrs.evolve(state, scheduler=position)
            state, _ = apply_update(optimizer, state, grads, donate_inputs=False)
            told += tree.digest(state).encode()
    except Exception as error:  # A refusal tells it from others, too.
        return repr(error).encode()
    return told
