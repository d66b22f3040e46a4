"""The work of ranks around a pass: they compare their arguments, divide the rows, and gather the results.

No GPU computes meanwhile, so it has to be short: ranks compare a few numbers before the pass and the contents of the
batch while GPUs are busy, and outputs are gathered as one tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from verl_fn.backends.agreement import agreed, of_batch, require_same
from verl_fn.state import PER_ROW, Batch, TrainState, deal, groups_of, output_width

S = TypeVar("S")


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
    beside: Tensor | None = None,
) -> Share[S]:
    """Returns this rank's micro-batches.

    All are copied to the device before the first is computed on, since a copy to a GPU waits for its computations.

    Args:
        layout: how ranks share rows.
        batch: all rows.
        max_tokens: the most tokens of a micro-batch.
        stage: puts the rows of a micro-batch on the device of this rank.
        together: a per-row field; rows with the same value in it go to one micro-batch of one rank.
        padded: the budget counts rows as long as the longest of their micro-batch.
        beside: what each row costs beside its tokens.

    Raises:
        ValueError: on all ranks, if a row or group is longer than the budget or cannot be computed on.
    """
    rows = deal(batch, layout.shares, max_tokens, together, padded=padded, beside=beside)
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
        layout: how ranks share rows.
        batch: all rows.
        share: which rank computed which rows.
        outputs: the outputs of each of this rank's micro-batches that has rows.
        names: the names of the outputs, per token and per row.
        device: the device of this rank.
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
