"""What the ranks do around a pass: agree on the call, share the rows out, and bring results together.

While ranks do this no GPU computes, so it is kept short: a few numbers travel beforehand, the contents of the batch are
compared while the GPUs are busy, and outputs come back as one tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from verl_fn.backends.agreement import agreed, of_batch, require_same
from verl_fn.backends.fsdp.sharding import Layout
from verl_fn.backends.hf.skeleton import Staged
from verl_fn.state import Batch, TrainState, deal


@attrs.frozen(eq=False)
class Share:
    """A rank's micro-batches; as many as every other rank has.

    Attributes:
        rows: of every rank that has rows of its own, for each of its micro-batches, the rows of the batch.
        staged: this rank's micro-batches on its device; one without rows is filled with a row of no weight.
        mine: the rows of each of them.
    """

    rows: list[list[list[int]]]
    staged: list[Staged]
    mine: list[list[int]]

    def __iter__(self) -> Iterator[tuple[list[int], Staged]]:
        return iter(zip(self.mine, self.staged, strict=True))

    def __len__(self) -> int:
        return len(self.staged)


@contextlib.contextmanager
def one_thread(layout: Layout) -> Iterator[None]:
    """Keeps small operations on the CPU to one thread: ranks of one host would otherwise wait for each other's."""
    before = torch.get_num_threads()
    if layout.size == 1 or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def agree_on_call(layout: Layout, batch: Batch, wanted: Iterable[str], state: TrainState | None = None) -> None:
    """Refuses calls that would let ranks wait for each other: other rows, other outputs or another state.

    Raises:
        LayoutError: ranks were given batches of different shapes, needs, or states of different steps.
    """
    if layout.size > 1:
        about = () if state is None else (state.step, str(state.rng))
        require_same({"batch": _outline(batch), "needs": sorted(wanted), "state (step and key)": about})


def agree_on_batch(layout: Layout, batch: Batch) -> None:
    """Compares all that the batch holds. It takes milliseconds, in which a GPU can compute.

    Raises:
        LayoutError: ranks were given different batches.
    """
    if layout.size > 1:
        require_same({"batch": of_batch(batch)})


def _outline(batch: Batch) -> bytes:
    """Returns a hash of what decides who computes which rows: the lengths, and the fields by name."""
    found = hashlib.blake2b(batch.cu_seqlens.numpy().data, digest_size=8)
    found.update(repr((sorted(batch.per_token), sorted(batch.per_row))).encode())
    return found.digest()


def share_out(layout: Layout, batch: Batch, max_tokens: int, device: torch.device) -> Share:
    """Returns this rank's micro-batches.

    All are staged before any is computed on: a copy to a GPU waits for what the GPU does.

    Raises:
        ValueError: a row is longer than the budget, or cannot be computed on; on all ranks.
    """
    rows = deal(batch, layout.shares, max_tokens)
    mine, staged = rows[layout.share], []
    with contextlib.nullcontext() if layout.size == 1 else agreed():
        for part in mine:
            taken = batch.take(torch.tensor(part or [0]))
            if not part and "loss_weight" in batch:
                taken = taken.with_tokens(loss_weight=torch.zeros(taken.num_tokens))
            staged.append(Staged.of(taken, device, layout.sequence))
    return Share(rows, staged, mine)


def brought_together(
    layout: Layout, batch: Batch, share: Share, outputs: Sequence[Mapping[str, Tensor]], names: Iterable[str]
) -> dict[str, Tensor]:
    """Returns the outputs of all rows, in the order of the batch, on every rank, on the CPU.

    Args:
        outputs: of each of this rank's micro-batches that has rows.
        names: of the outputs.
    """
    names = sorted(names)
    lengths = batch.lengths
    dealt = [torch.tensor([row for part in parts for row in part], dtype=torch.int64) for parts in share.rows]
    sizes = [int(lengths[rows].sum()) for rows in dealt]
    device = share.staged[0].batch.tokens.device
    mine = torch.zeros(len(names), max(sizes), device=device)
    for i, name in enumerate(names):
        parts = [found[name] for found in outputs]
        if parts:
            mine[i, : sizes[layout.share]] = torch.cat(parts)
    if layout.size == 1:
        everyone = mine[None]
    else:
        everyone = mine.new_empty(layout.size, *mine.shape)
        dist.all_gather_into_tensor(everyone.view(-1), mine.view(-1))
    spoken = everyone[:: layout.sp].transpose(0, 1).reshape(len(names), -1)
    whole = spoken[:, _places(batch, dealt, max(sizes)).to(device)].cpu()
    return dict(zip(names, whole.unbind(), strict=True))


def _places(batch: Batch, dealt: Sequence[Tensor], each: int) -> Tensor:
    """Returns where each token of the batch lies among the shares, which have room for ``each`` tokens."""
    starts = torch.empty(len(batch), dtype=torch.int64)
    lengths = batch.lengths
    for share, rows in enumerate(dealt):
        taken = lengths[rows]
        starts[rows] = share * each + taken.cumsum(0) - taken
    return batch.spread(starts) + torch.arange(batch.num_tokens) - batch.spread(batch.cu_seqlens[:-1].long())
