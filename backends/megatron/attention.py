"""Attention over rows without transformer-engine, as a core attention of Megatron.

On CUDA in half precision it is torch's ``varlen_attn``, elsewhere scaled dot-product attention row by row. With
context parallelism each rank gathers the keys and values of all ranks; its queries are chunks r and 2 cp - 1 - r of
each row.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from verl_fn.backends.hf.config import ModelError


class PackedAttention(nn.Module):
    """A core attention for Megatron's layers; its arguments are the same as for ``DotProductAttention``.

    Raises:
        ModelError: the model uses attention sinks or windows.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        super().__init__()
        if config.softmax_type != "vanilla" or config.window_size is not None:
            raise ModelError(
                "this model uses attention sinks or windows, which only transformer-engine's attention has: install "
                "transformer-engine and set dtype = bfloat16"
            )
        self.scale: float | None = options.get("softmax_scale")

    def forward(
        self,
        query: Float[Tensor, "*t heads dim"],
        key: Float[Tensor, "*t kv_heads dim"],
        value: Float[Tensor, "*t kv_heads dim"],
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Float[Tensor, "*t width"]:
        """Computes causal attention within each row: of rows end to end, or of a table, ``[t, b, heads, dim]``."""
        if packed_seq_params is None:
            out = _attended(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), scale=self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)
        pieces, group = packed_seq_params.pieces, packed_seq_params.cp_group
        if pieces.seen is not None:
            key, value = (_Gathered.apply(x, group).flatten(0, 1).index_select(0, pieces.seen) for x in (key, value))
        flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        return (_flash if flash else _by_piece)(query, key, value, pieces, self.scale).flatten(1)


def replace_attention(model: nn.Module, replaced: type[nn.Module]) -> None:
    """Replaces transformer-engine's attention with ``PackedAttention``, where both compute the same.

    Where the backward pass of transformer-engine's attention must repeat bitwise, it asks cuDNN for
    2 x heads x rows x tokens² bytes, with the rows and tokens of a micro-batch.

    Args:
        replaced: the class of transformer-engine's attention.
    """
    for module in model.modules():
        core: Any = getattr(module, "core_attention", None)
        if _is_plain(core, replaced):
            module.core_attention = PackedAttention(
                core.config, core.layer_number, core.attn_mask_type, "self", softmax_scale=core.softmax_scale
            )


def _is_plain(core: Any, replaced: Any) -> bool:
    """Returns whether this is causal self-attention without sinks and windows, with keys as wide as values."""
    return (
        isinstance(core, replaced)
        and type(core).forward is replaced.forward
        and core.attention_type == "self"
        and "causal" in core.attn_mask_type
        and core.softmax_type == "vanilla"
        and core.config.window_size is None
        and core.hidden_size_per_attention_head_k == core.hidden_size_per_attention_head_v
    )


class Pieces(NamedTuple):
    """Sequences of queries, and for each the keys that end with its last query.

    Attributes:
        queries: where the queries of each sequence begin, with the end of the last.
        keys: where the keys of each sequence begin, with the end of the last.
        most_queries: the most queries of a sequence.
        most_keys: the most keys of a sequence.
        seen: where several ranks share rows, the indices of the keys among the keys of all ranks, one rank after the
            other; otherwise None.
    """

    queries: Int[Tensor, " n"]
    keys: Int[Tensor, " n"]
    most_queries: int
    most_keys: int
    seen: Int[Tensor, " k"] | None = None

    @classmethod
    def of(cls, rows: Int[Tensor, " n"], cp: int, rank: int) -> Pieces:
        """Returns the pieces of a rank of context parallelism, two for each row if several ranks share rows.

        Chunk i of a row lies on rank min(i, 2 cp - 1 - i), as its first or second one.

        Args:
            rows: where each padded row begins, with the end of the last.
            cp: the number of ranks that share the rows.
            rank: the rank's number among them.

        Example:
            >>> pieces = Pieces.of(torch.tensor([0, 4]), cp=2, rank=1)
            >>> pieces.queries, pieces.keys, pieces.seen  # chunks 1 and 2, after chunks 0 and 0 to 1
            (tensor([0, 1, 2], dtype=torch.int32), tensor([0, 2, 5], dtype=torch.int32), tensor([0, 2, 0, 2, 3]))
        """
        lengths, tokens = rows.diff(), int(rows[-1]) // cp
        longest = int(lengths.max())
        if cp == 1:
            return cls(rows.int(), rows.int(), longest, longest)
        chunks = lengths // (2 * cp)
        keys = torch.stack([(rank + 1) * chunks, (2 * cp - rank) * chunks], 1).flatten()
        starts = _starts(keys)
        piece = torch.arange(len(keys)).repeat_interleave(keys)
        row, within = piece // 2, torch.arange(len(piece)) - starts[piece]
        number, place = within // chunks[row], within % chunks[row]
        second = number >= cp
        owner = torch.where(second, 2 * cp - 1 - number, number)
        seen = owner * tokens + rows[row] // cp + second * chunks[row] + place
        most = longest // (2 * cp)
        queries = _starts(chunks.repeat_interleave(2))
        return cls(queries.int(), starts.int(), most, (2 * cp - rank) * most, seen)


def own_places(rows: Int[Tensor, " n"], cp: int, rank: int) -> Int[Tensor, " t"]:
    """Returns the places of a rank's tokens among the tokens of all, in order: chunks r and 2 cp - 1 - r of each row.

    Args:
        rows: as for ``Pieces.of``.
    """
    if cp == 1:
        return torch.arange(int(rows[-1]))
    lengths = rows.diff()
    chunk = (lengths // (2 * cp)).repeat_interleave(lengths)
    within = torch.arange(int(rows[-1])) - rows[:-1].repeat_interleave(lengths)
    number = within // chunk
    return ((number == rank) | (number == 2 * cp - 1 - rank)).nonzero()[:, 0]


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _flash(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    sizes = pieces.queries, pieces.keys, pieces.most_queries, pieces.most_keys
    # The last query of a sequence sees its last key.
    out = varlen_attn(query, key, value, *sizes, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out


def _by_piece(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None) -> Tensor:
    ends = itertools.pairwise(zip(pieces.queries.tolist(), pieces.keys.tolist(), strict=True))
    parts = [(query[q:q_end], key[k:k_end], value[k:k_end]) for (q, k), (q_end, k_end) in ends]
    of_pieces = (_attended(*(x.transpose(0, 1)[None] for x in part), scale=scale) for part in parts)
    return torch.cat([out[0].transpose(0, 1) for out in of_pieces])


def _attended(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None) -> Float[Tensor, "b heads t dim"]:
    """Computes attention of queries, ``[b, heads, t, dim]``, to keys that end with the last query."""
    mask = None
    if k.shape[2] > q.shape[2]:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = seen.tril(k.shape[2] - q.shape[2])
    gqa = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)


class _Gathered(torch.autograd.Function):
    """Gathers a tensor of all ranks, ``[cp, t, ...]``; its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        gathered = x.new_empty(group.size(), *x.shape)
        dist.all_gather_into_tensor(gathered.view(-1), x.view(-1), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()].clone(), None
