"""Attention over packed rows without transformer-engine, as a core attention of Megatron.

On CUDA in half precision it is torch's ``varlen_attn``, elsewhere scaled dot-product attention row by row. With
context parallelism each rank gathers the keys and values of all ranks; its queries are chunks r and 2 cp - 1 - r of
each row.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from verl_fn.backends.hf.config import ModelError


class PackedAttention(nn.Module):
    """A core attention for Megatron's layers; its arguments are those of ``DotProductAttention``.

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
        query: Float[Tensor, "t heads dim"],
        key: Float[Tensor, "t kv_heads dim"],
        value: Float[Tensor, "t kv_heads dim"],
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any,
        **options: Any,
    ) -> Float[Tensor, "t width"]:
        """Computes causal attention within each row."""
        rows, group = packed_seq_params.cu_seqlens_q, packed_seq_params.cp_group
        if group is not None and group.size() > 1:
            out = _shared(query, key, value, rows, group, self.scale)
        elif query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            out = _flash(query, key, value, rows, packed_seq_params.max_seqlen_q, self.scale)
        else:
            ends = rows.tolist()
            parts = [(query[a:b], key[a:b], value[a:b]) for a, b in itertools.pairwise(ends)]
            out = torch.cat([_row(q, k, v, self.scale) for q, k, v in parts])
        return out.flatten(1)


def _flash(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, longest: int, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(query, key, value, rows, rows, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out


def _row(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None = None) -> Tensor:
    """Computes the attention of the queries of one row."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    gqa = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)
    return out[0].transpose(0, 1)


def _shared(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, group: Any, scale: float | None) -> Tensor:
    """Computes the attention of this rank's queries to the keys of all ranks that share the rows."""
    cp, rank = group.size(), group.rank()
    keys, values = (_Gathered.apply(x, group) for x in (key, value))
    outputs = []
    for a, b in zip((rows // cp).tolist()[:-1], (rows // cp).tolist()[1:], strict=True):
        chunk = (b - a) // 2
        # Chunk i of a row lies on rank min(i, 2 cp - 1 - i), as its first or second one.
        order = [(i, 0) if i < cp else (2 * cp - 1 - i, 1) for i in range(2 * cp)]
        k, v = (torch.cat([x[r, a + h * chunk : a + (h + 1) * chunk] for r, h in order]) for x in (keys, values))
        within = torch.arange(chunk, device=query.device)
        at = torch.cat([rank * chunk + within, (2 * cp - 1 - rank) * chunk + within])
        mask = at[:, None] >= torch.arange(2 * cp * chunk, device=query.device)
        outputs.append(_row(query[a:b], k, v, scale, mask))
    return torch.cat(outputs)


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
