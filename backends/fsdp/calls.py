"""What the ranks do around a pass: agree on the call, share the rows out, and bring results together.

While ranks do this no GPU computes, so it is kept short: a few numbers travel beforehand, the contents of the batch
are compared while the GPUs are busy, and outputs come back as one tensor.
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
from verl_fn.backends.hf.outputs import Staged
from verl_fn.state import PER_ROW, Batch, TrainState, deal, groups_of


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
def one_thread() -> Iterator[None]:
    """Keeps small operations on the CPU to one thread: many threads take longer over them than one, on one rank too."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def agree_on_call(
    layout: Layout,
    batch: Batch,
    wanted: Iterable[str],
    state: TrainState | None = None,
    together: str | None = None,
) -> None:
    """Refuses calls that would let ranks wait for each other: other rows, other outputs or another state.

    Raises:
        LayoutError: ranks were given batches of different shapes, needs, or states of different steps.
    """
    if layout.size > 1:
        about = () if state is None else (state.step, str(state.rng))
        given = {"batch": _outline(batch, together), "needs": sorted(wanted), "state (step and key)": about}
        require_same({**given, "field that keeps rows together": together})


def agree_on_batch(layout: Layout, batch: Batch) -> None:
    """Compares all that the batch holds. It takes milliseconds, in which a GPU can compute.

    Raises:
        LayoutError: ranks were given different batches.
    """
    if layout.size > 1:
        require_same({"batch": of_batch(batch)})


def _outline(batch: Batch, together: str | None) -> bytes:
    """Returns a hash of what decides who computes which rows: lengths, groups, and the fields by name."""
    found = hashlib.blake2b(batch.cu_seqlens.numpy().data, digest_size=8)
    found.update(repr((sorted(batch.per_token), sorted(batch.per_row))).encode())
    if together is not None:
        found.update(repr(groups_of(batch, together)).encode())
    return found.digest()


def share_out(
    layout: Layout, batch: Batch, max_tokens: int, device: torch.device, together: str | None = None
) -> Share:
    """Returns this rank's micro-batches.

    All are staged before any is computed on: a copy to a GPU waits for what the GPU does.

    Args:
        together: a per-row field; rows with one value of it go to one micro-batch of one rank.

    Raises:
        ValueError: a row or group is longer than the budget, or cannot be computed on; on all ranks.
    """
    rows = deal(batch, layout.shares, max_tokens, together)
    mine, staged = rows[layout.share], []
    with contextlib.nullcontext() if layout.size == 1 else agreed():
        for part in mine:
            # One that fills up is a whole group, so that a loss of groups can be computed on it.
            taken = batch.take(torch.tensor(part or groups_of(batch, together)[0]))
            staged.append(Staged.of(taken if part else _weightless(taken), device, layout.sequence))
    return Share(rows, staged, mine)


def _weightless(batch: Batch) -> Batch:
    if "loss_weight" in batch:
        batch = batch.with_tokens(loss_weight=torch.zeros(batch.num_tokens))
    return batch.with_rows(row_weight=torch.zeros(len(batch))) if "row_weight" in batch else batch


def brought_together(
    layout: Layout, batch: Batch, share: Share, outputs: Sequence[Mapping[str, Tensor]], names: Iterable[str]
) -> dict[str, Tensor]:
    """Returns the outputs of all rows, in the order of the batch, on every rank, on the CPU.

    Args:
        layout: how ranks share rows.
        batch: the whole.
        share: how it was shared out.
        outputs: of each of this rank's micro-batches that has rows.
        names: of the outputs, per token and per row.
    """
    dealt = [torch.tensor([row for part in parts for row in part], dtype=torch.int64) for parts in share.rows]
    device = share.staged[0].batch.tokens.device
    whole: dict[str, Tensor] = {}
    by_row = sorted(name for name in names if name in PER_ROW)
    by_token = sorted(name for name in names if name not in PER_ROW)
    for chosen, lengths in ((by_token, batch.lengths), (by_row, torch.ones(len(batch), dtype=torch.int64))):
        if chosen:
            sizes = [int(lengths[rows].sum()) for rows in dealt]
            mine = torch.zeros(len(chosen), max(sizes), device=device)
            for i, name in enumerate(chosen):
                if outputs:
                    mine[i, : sizes[layout.share]] = torch.cat([found[name] for found in outputs])
            spoken = _of_all_shares(layout, mine).transpose(0, 1).reshape(len(chosen), -1)
            places = _places(lengths, dealt, max(sizes)).to(device)
            whole |= zip(chosen, spoken[:, places].cpu().unbind(), strict=True)
    return whole


def _of_all_shares(layout: Layout, mine: Tensor) -> Tensor:
    """Returns the tensors of all shares, by share; ranks that share rows have the same one."""
    if layout.size == 1:
        return mine[None]
    everyone = mine.new_empty(layout.size, *mine.shape)
    dist.all_gather_into_tensor(everyone.view(-1), mine.view(-1))
    return everyone[:: layout.sp]


def _places(lengths: Tensor, dealt: Sequence[Tensor], each: int) -> Tensor:
    """Returns where each entry of the whole lies among the shares, which have room for ``each`` entries.

    Args:
        lengths: entries of each row: its tokens, or one.
        dealt: the rows of each share.
        each: entries that there is room for.

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
