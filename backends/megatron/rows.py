"""Micro-batches as Megatron wants them: rows end to end, cut for the ranks that share them, or a table of rows.

With context parallelism each row is padded to a multiple of 2 cp tokens and cut into 2 cp chunks. Rank r gets chunks
r and 2 cp - 1 - r, so that causal attention takes all ranks equally long. Padding at the end of a row is seen by no
token of it, and padding at the end of the micro-batch is a row of its own.

Layers that do not keep rows apart get a table of rows: each row is padded on the right to the longest one. Causal
layers do not see what comes after a row.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from verl_fn.backends.hf.outputs import check_targets, temperatures_of
from verl_fn.backends.hf.ulysses import Whole
from verl_fn.backends.hf.vision import Family, Seen
from verl_fn.backends.megatron.attention import Pieces, own_places
from verl_fn.backends.megatron.layout import Layout, Sizes
from verl_fn.state import POSITIONS, Batch, tree

PADDING = 0  # the id of a token that no loss reads
ROUTED = "routed_experts"  # the field of the experts to replay


@attrs.frozen(eq=False)
class MicroBatch:
    """A micro-batch on the device of one rank.

    Attributes:
        batch: its rows, whole.
        tokens: this rank's tokens, padding included, ``[1, t]``, or a table of rows, ``[b, t]``.
        positions: the place of each in its row; with ``sees``, time, height and width, ``[3, b, t]``.
        packed: Megatron's ``PackedSeqParams``; None for a table.
        targets: the indices in the batch of the tokens with ``response_mask`` that this rank computes.
        seen: for each, the index among this rank's tokens of the one before it.
        last: for each row, as ``seen``, the index of its last token.
        last_rows: the rows whose last token this rank has.
        temperature: one for each target, or None where all are 1.
        group: the ranks that share the rows, if any do.
        routed_tokens: for each token that this rank's routers see, its index in the batch, or -1 for padding; None
            where nothing can be replayed.
        routed: the experts that each of these goes to in each layer with experts, or None where routers decide.
        images: the images of the rows; None if no row of the whole batch has any.
        image_tokens: where the tokens that stand for their features lie among this rank's tokens.
    """

    batch: Batch
    tokens: Int[Tensor, "b t"]
    positions: Int[Tensor, "*axes b t"]
    packed: Any
    targets: Int[Tensor, " n"]
    seen: Int[Tensor, " n"]
    last: Int[Tensor, " b"]
    last_rows: Int[Tensor, " b"]
    temperature: Tensor | None
    group: Any
    routed_tokens: Int[Tensor, " s"] | None
    routed: Int[Tensor, "s l k"] | None
    images: Seen | None
    image_tokens: Int[Tensor, " i"]

    @classmethod
    def of(
        cls,
        batch: Batch,
        layout: Layout,
        device: torch.device,
        length: int | None = None,
        experts: int | None = None,
        table: tuple[int, int] | None = None,
        sees: tuple[Family, Any] | None = None,
    ) -> MicroBatch:
        """Cuts a batch on the CPU for this rank, and copies it to a device.

        Args:
            length: how many tokens all ranks have together, padding included; by default as few as fit.
            experts: how many a layer has, if its router can record and replay; None if it cannot.
            table: how many rows and columns of a table there are; None for rows end to end.
            sees: the family and the config of a model with images and positions of three axes.

        Raises:
            ValueError: as ``check_targets``, or a token is to go to one expert twice.
        """
        targets = check_targets(batch)
        sizes = layout.sizes
        starts, ends = _bounds(batch, sizes, length, table)
        length = int(ends[-1])
        moved = (starts - batch.cu_seqlens)[:-1].repeat_interleave(batch.lengths)
        places = torch.arange(batch.num_tokens) + moved
        own = own_places(ends, sizes.cp, layout.groups.cp.rank())
        index = torch.full((length,), -1).index_copy(0, own, torch.arange(len(own)))
        tokens = torch.full((length,), PADDING).index_copy(0, places, batch.tokens)[own]
        positions = (torch.arange(length) - ends[:-1].repeat_interleave(ends.diff()))[own]
        if sees is not None:
            positions = _axes(batch, positions, places)
        routed_tokens = routed = None
        if experts is not None:
            routed_tokens = torch.full((length,), -1).index_copy(0, places, torch.arange(batch.num_tokens))[own]
            routed_tokens = _seen_by_routers(routed_tokens, layout, table)
            routed = _routed(batch, routed_tokens, experts)
        seen, last = index[places[targets - 1]], index[places[batch.last]]
        mine, mine_last = seen >= 0, last >= 0
        on_device, heat = batch.without(ROUTED).to(device), temperatures_of(batch)
        images = None if sees is None else Seen.of(*sees, on_device)
        return cls(
            on_device,
            tokens.view(table or (1, -1)).to(device),
            positions.view(*positions.shape[:-1], *(table or (1, -1))).to(device),
            _packed(ends, layout, device) if table is None else None,
            targets[mine].to(device),
            seen[mine].to(device),
            last[mine_last].to(device),
            mine_last.nonzero()[:, 0].to(device),
            None if heat is None else heat[targets][mine].to(device),
            layout.groups.cp if sizes.cp > 1 else None,
            None if routed_tokens is None else routed_tokens.to(device),
            None if routed is None else routed.to(device),
            images,
            index[places].to(device)[[] if images is None else images.images],
        )

    def spread(self, values: Tensor, *, rows: bool = False) -> Tensor:
        """Returns values for this rank's targets, or rows, as a whole vector: ``[T]`` or ``[B]``.

        Ranks that share the rows add up their parts.
        """
        places, size = (self.last_rows, len(self.batch)) if rows else (self.targets, self.batch.num_tokens)
        whole = values.new_zeros(size).index_copy(0, places, values)
        return whole if self.group is None else Whole.apply(whole, self.group)


def _bounds(batch: Batch, sizes: Sizes, length: int | None, table: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Returns where each row starts, with the end of the last, and the same with what follows the last row."""
    if table is not None:
        ends = torch.arange(table[0] + 1) * table[1]
        return ends[: len(batch) + 1], ends
    starts, total = padded_starts(batch.lengths, sizes.tp, sizes.cp)
    length = max(total, length or 0)
    return starts, starts if length == int(starts[-1]) else torch.cat([starts, torch.tensor([length])])


def padded_starts(lengths: Int[Tensor, " b"], tp: int, cp: int) -> tuple[Tensor, int]:
    """Returns where each padded row starts, with the end of the last, and the length that ranks can share.

    Example:
        >>> padded_starts(torch.tensor([3, 5]), 1, 1)
        (tensor([0, 3, 8]), 8)
        >>> padded_starts(torch.tensor([3, 5]), 2, 2)
        (tensor([ 0,  4, 12]), 12)
    """
    each = 2 * cp if cp > 1 else 1
    rounded = (lengths + each - 1) // each * each
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), rounded.cumsum(0)])
    align = math.lcm(each, tp * cp)
    return starts, -(-int(starts[-1]) // align) * align


def _packed(ends: Tensor, layout: Layout, device: torch.device) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu, longest = ends.int().to(device), int(ends.diff().max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu, cu_seqlens_kv_padded=cu,
        max_seqlen_q=longest, max_seqlen_kv=longest, cp_group=layout.groups.cp,
    )  # fmt: skip
    # ``PackedAttention`` needs them in each layer.
    pieces = Pieces.of(ends, layout.sizes.cp, layout.groups.cp.rank())
    packed.pieces = tree.map_tensors(lambda t: t.to(device), pieces)
    return packed


def _seen_by_routers(tokens: Tensor, layout: Layout, table: tuple[int, int] | None) -> Tensor:
    """Returns the tokens that this rank's routers see, in their order."""
    if table is not None:
        # Layers have the tokens of one position after the other.
        tokens = tokens.view(table).t().flatten()
    return tokens.chunk(layout.sizes.tp)[layout.tp_rank] if layout.sizes.sp else tokens


def _routed(batch: Batch, tokens: Tensor, experts: int) -> Tensor | None:
    """Returns the experts to replay for these tokens, or None; padding needs some too, and goes to all in turn.

    Raises:
        ValueError: a token is to go to one expert twice; Megatron sends each token to as many as there are numbers.
    """
    if ROUTED not in batch:
        return None
    of_batch = batch[ROUTED]
    topk = of_batch.shape[-1]
    in_turn = (torch.arange(len(tokens))[:, None, None] * topk + torch.arange(topk)) % experts
    routed = torch.where(tokens[:, None, None] >= 0, of_batch[tokens.clamp(min=0)], in_turn.to(of_batch.dtype))
    twice = (routed.sort(-1).values.diff(dim=-1) == 0).flatten(1).any(1)
    if bool(twice.any()):
        token = int(tokens[twice.nonzero()[0, 0]])
        raise ValueError(
            f"{ROUTED}: the token at position {int(batch.positions[token])} of a row of "
            f"{int(batch.lengths[batch.row_ids[token]])} tokens goes to one expert twice; write what forward gives "
            f"for {ROUTED!r} into the batch"
        )
    return routed


def _axes(batch: Batch, within: Tensor, places: Tensor) -> Int[Tensor, "3 t"]:
    """Returns the time, height and width of each token; of text, and of padding, all three are its place in a row."""
    axes = within.expand(3, -1)
    if POSITIONS not in batch.per_token:
        return axes.contiguous()
    return axes.index_copy(1, places, batch[POSITIONS][:, 1:].t())
