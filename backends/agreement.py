"""Process groups: how processes find each other, and what ranks do around a pass.

They agree on what they were given: ranks with different arguments, or with a step that failed on one of them, would
wait for each other for ever, or compute a mixture that is wrong. No port is opened that other machines can reach if
all ranks are on this one. Then they divide the rows, and gather the results.

No GPU computes meanwhile, so it has to be short: ranks compare a few numbers before the pass and the contents of the
batch while GPUs are busy, and outputs are gathered as one tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import pickle
import re
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from verl_fn.state import PER_ROW, Batch, Metrics, TrainState, deal, groups_of, metrics, output_width, tree
from verl_fn.steps import Optimizer

from .hf.config import ModelError
from .hf.skeleton import Hollow
from .hf.ulysses import LayoutError
from .hf.vision import beside_tokens
from .hf.weights import FolderWeights

Gather: TypeAlias = Callable[[Any], list[Any]]
S = TypeVar("S")


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
        "optimizer": settings_of(optimizer),
    }


def settings_of(optimizer: Optimizer) -> str:
    """Returns an optimizer's settings for a comparison between processes; a function is compared by its name."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(optimizer))


def readable_weights(folder: str | Path, model: Hollow) -> FolderWeights | None:
    """Returns the weights of a folder, or None if transformers has to convert them; all ranks call it together.

    Raises:
        ModelError: some ranks can read them, and others cannot.
        LayoutError: ranks read different weights.
    """
    weights = FolderWeights.of(folder, model)
    lacking = gathered(str(folder) if weights is None else "")
    if any(lacking) and not all(lacking):
        rank = [bool(one) for one in lacking].index(True)
        raise ModelError(
            f"rank {rank} cannot read the weights in {lacking[rank]}, and other ranks can; copy the folder again to "
            "the machine of this rank"
        )
    if weights is not None:
        require_same({"weights": weights.digest.encode()})
    return weights


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
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listening:
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


class RowLayout(Protocol):
    """How ranks share the rows of a batch."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def shares(self) -> int:
        """Into how many parts the rows are dealt."""
        ...

    @property
    def share(self) -> int:
        """The number of this rank's part."""
        ...

    @property
    def answering(self) -> range:
        """For each part, a rank that computes its outputs."""
        ...


@attrs.frozen(eq=False)
class Share(Generic[S]):
    """This rank's micro-batches; every rank has the same number.

    Attributes:
        rows: the rows of the batch in each micro-batch of each share.
        staged: this rank's micro-batches on its device; one without rows has a row of no weight instead.
        own_rows: the rows of each of this rank's micro-batches.
    """

    rows: list[list[list[int]]]
    staged: list[S]
    own_rows: list[list[int]]

    def __iter__(self) -> Iterator[tuple[list[int], S]]:
        return iter(zip(self.own_rows, self.staged, strict=True))

    def __len__(self) -> int:
        return len(self.staged)


def agree_on_call(
    layout: RowLayout,
    batch: Batch,
    wanted: Iterable[str],
    state: TrainState | None = None,
    together: str | None = None,
) -> None:
    """Compares what decides how a call proceeds, since ranks that proceed differently would wait for each other.

    Raises:
        LayoutError: ranks were given batches of different shapes, needs, or states of different steps.
    """
    if layout.size > 1:
        step = () if state is None else (state.step, str(state.rng))
        given = {"batch": _outline(batch, together), "needs": sorted(wanted), "state (step and key)": step}
        require_same({**given, "field that keeps rows together": together})


def agree_on_batch(layout: RowLayout, batch: Batch) -> None:
    """Compares all tensors of the batch, for some milliseconds, while a GPU computes.

    Raises:
        LayoutError: ranks were given different batches.
    """
    if layout.size > 1:
        require_same({"batch": of_batch(batch)})


def _outline(batch: Batch, together: str | None) -> bytes:
    """Returns a hash of what decides which rank computes which rows: lengths, groups and the names of fields."""
    outline = hashlib.blake2b(batch.cu_seqlens.numpy().data, digest_size=8)
    outline.update(repr((sorted(batch.per_token), sorted(batch.per_row), sorted(batch.ragged))).encode())
    if together is not None:
        outline.update(repr(groups_of(batch, together)).encode())
    return outline.digest()


def share_out(
    layout: RowLayout,
    batch: Batch,
    max_tokens: int,
    stage: Callable[[Batch], S],
    together: str | None = None,
    *,
    padded: bool = False,
) -> Share[S]:
    """Returns this rank's micro-batches.

    All are copied to the device before the first is computed on, since a copy to a GPU waits for its computations.

    Args:
        max_tokens: of a micro-batch; patches of images count, too.
        stage: puts the rows of a micro-batch on the device of this rank.
        together: a per-row field; rows with the same value in it go to one micro-batch of one rank.
        padded: the budget counts rows as long as the longest of their micro-batch.

    Raises:
        ValueError: on all ranks, if a row or group is longer than the budget or cannot be computed on.
    """
    rows = deal(batch, layout.shares, max_tokens, together, padded=padded, beside=beside_tokens(batch))
    own_rows, staged = rows[layout.share], []
    with contextlib.nullcontext() if layout.size == 1 else agreed():
        for part in own_rows:
            # A micro-batch without rows gets a whole group of no weight, on which a loss of groups can be computed.
            taken = batch.take(torch.tensor(part or groups_of(batch, together)[0]))
            staged.append(stage(taken if part else _weightless(taken)))
    return Share(rows, staged, own_rows)


def _weightless(batch: Batch) -> Batch:
    if "loss_weight" in batch:
        batch = batch.with_tokens(loss_weight=torch.zeros(batch.num_tokens))
    return batch.with_rows(row_weight=torch.zeros(len(batch))) if "row_weight" in batch else batch


def brought_together(
    layout: RowLayout,
    batch: Batch,
    share: Share[S],
    outputs: Sequence[Mapping[str, Tensor]],
    names: Iterable[str],
    device: torch.device,
) -> dict[str, Tensor]:
    """Returns the outputs of all rows, in the order of the batch, on every rank, on the CPU.

    Args:
        outputs: the outputs of each of this rank's micro-batches that has rows.
        names: the names of the outputs, per token and per row.
    """
    dealt = [torch.tensor([row for part in parts for row in part], dtype=torch.int64) for parts in share.rows]
    whole: dict[str, Tensor] = {}
    by_row = sorted(name for name in names if name in PER_ROW)
    by_token = sorted(name for name in names if name not in PER_ROW)
    for chosen, lengths in ((by_token, batch.lengths), (by_row, torch.ones(len(batch), dtype=torch.int64))):
        if chosen:
            sizes = [int(lengths[rows].sum()) for rows in dealt]
            # Outputs of several numbers for each token have a line for each of them.
            lines = [output_width(name, batch) or 1 for name in chosen]
            own = torch.zeros(sum(lines), max(sizes), device=device)
            if outputs:
                entries = [torch.cat([of_part[name] for of_part in outputs]) for name in chosen]
                own[:, : sizes[layout.share]] = torch.cat([t.reshape(len(t), -1).t() for t in entries])
            by_share = _of_all_shares(layout, own).transpose(0, 1).reshape(sum(lines), -1)
            places = _places(lengths, dealt, max(sizes)).to(device)
            parts = by_share[:, places].cpu().split(lines)
            whole |= {name: _of_lines(name, part, batch) for name, part in zip(chosen, parts, strict=True)}
    return whole


def added_up(layout: RowLayout, totals: Metrics) -> Metrics:
    """Returns the metrics of all shares, added up, on every rank; of ranks with the same rows, one is counted."""
    own = totals if dist.get_rank() in layout.answering else {}
    return metrics.merge(*gathered(tree.map_tensors(lambda t: t.cpu(), own)))


def _of_lines(name: str, part: Tensor, batch: Batch) -> Tensor:
    """Returns an output from its lines; ids come as floats, exact up to 2**24."""
    if output_width(name, batch) is None:
        return part[0]
    return part.t().contiguous().long() if name.startswith("top_ids") else part.t().contiguous()


def _of_all_shares(layout: RowLayout, own: Tensor) -> Tensor:
    """Returns the tensors of all shares, by share; ranks that share rows have the same one."""
    if layout.size == 1:
        return own[None]
    by_rank = own.new_empty(layout.size, *own.shape)
    dist.all_gather_into_tensor(by_rank.view(-1), own.view(-1))
    answering = layout.answering
    return by_rank[answering.start : answering.stop : answering.step]


def _places(lengths: Tensor, dealt: Sequence[Tensor], each: int) -> Tensor:
    """Returns the place of each entry of the whole batch in the shares, laid end to end.

    Args:
        lengths: how many entries each row has: one for each token, or one.
        dealt: the rows of each share.
        each: how many entries each share has room for.

    Example:
        >>> _places(torch.tensor([2, 1, 1]), [torch.tensor([1, 2]), torch.tensor([0])], 2).tolist()
        [2, 3, 0, 1]
    """
    starts = torch.empty(len(lengths), dtype=torch.int64)
    for share, rows in enumerate(dealt):
        taken = lengths[rows]
        starts[rows] = share * each + taken.cumsum(0) - taken
    ends = lengths.cumsum(0)
    within = torch.arange(int(ends[-1])) - (ends - lengths).repeat_interleave(lengths)
    return starts.repeat_interleave(lengths) + within
