"""Attention that compiled layers call uncompiled: with soft-capped scores, and of ranks that share the sequence.

It is a module of its own, since ``torch.compiler`` imports much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from verl_fn.backends.hf.ulysses import Sequence

BLOCK = 128
_compiled: Callable[..., Any] = torch.compile(flex_attention)


# A layer that is compiled calls it uncompiled: it makes a mask in the first layer of a forward pass only, and code
# that recomputes the layer must not differ from the code that ran first.
@torch.compiler.disable(recursive=False)
def capped_attention(
    q: Float[Tensor, "T heads dim"],
    k: Float[Tensor, "T kv_heads dim"],
    v: Float[Tensor, "T kv_heads dim"],
    packing: Any,
    scaling: float | None,
    window: int | None,
    softcap: float,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "T heads dim"]:
    """Computes causal attention within each row, with scores c * tanh(score / c) for a cap c."""
    if window not in packing.masks:
        packing.masks[window] = block_mask(packing, window)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out, lse = _compiled(
        *heads, score_mod=capped, block_mask=packing.masks[window], scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1], return_lse=True,
    )  # fmt: skip
    if sinks is not None:
        out = (out * torch.sigmoid(lse - sinks.float()[:, None])[..., None]).to(out.dtype)
    return cast(Tensor, out[0].transpose(0, 1))


def block_mask(packing: Any, window: int | None) -> BlockMask:
    """Returns a mask in which a block of queries reads the blocks from its first token's row start up to itself."""
    total = len(packing.slots)
    places = torch.arange(total, device=packing.slots.device, dtype=torch.int32)
    row = torch.searchsorted(packing.cu_seqlens, places, right=True) - 1
    first = packing.cu_seqlens[row]
    if window is not None:
        first = torch.maximum(first, places - window + 1)
    blocks = torch.arange(-(-total // BLOCK), device=places.device, dtype=torch.int32)
    start = first[::BLOCK] // BLOCK
    order = (start[:, None] + blocks).clamp(max=len(blocks) - 1)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j >= first[i])

    return BlockMask.from_kv_blocks(
        (blocks - start + 1)[None, None], order[None, None], BLOCK_SIZE=BLOCK, mask_mod=visible,
        seq_lengths=(total, total),
    )  # fmt: skip


# Compiled code silently loses the gradient of the exchange.
@torch.compiler.disable
def shared(ranks: Sequence, attend: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """Computes the attention of ranks that share the sequence, each for a part of the heads."""
    *others, sinks = options
    if sinks is not None:
        sinks = sinks.unflatten(0, (ranks.size, -1))[ranks.rank]
    return ranks.to_tokens(attend(*(ranks.to_heads(x) for x in (q, k, v)), *others, sinks))
