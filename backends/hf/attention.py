"""Attention over packed rows, registered with transformers as ``verl_fn_packed``.

Rows lie end to end in one sequence and must not attend to each other. transformers' own packed calls are silently
wrong in several combinations of mask, cache and kernel. Here the model passes the layout of the rows to this function
as one keyword argument, ``packing``, and no mask is made.
"""

from __future__ import annotations

from typing import Any, cast

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from verl_fn.state import Batch

NAME = "verl_fn_packed"


@attrs.frozen(eq=False)
class Packing:
    """The layout of rows in a packed sequence.

    Attributes:
        cu_seqlens: the starts of all rows and the end of the last, int32, on the model's device.
        places: 0 to the longest row's last token. The longest row's length is passed as the length of this tensor,
            since code is compiled for any size of a tensor but again for every other number.
        slots: each token's place in a padded ``[B * longest]`` table.
        sequence: the ranks that share the sequence, if any; each then has a part of its tokens.
        plain: use only torch's own functions, which every ``torch.func`` transformation accepts.
    """

    cu_seqlens: Int[Tensor, " B1"]
    places: Int[Tensor, " longest"]
    slots: Int[Tensor, " T"]
    sequence: Any = None
    plain: bool = False

    @classmethod
    def of(cls, batch: Batch, device: torch.device, sequence: Any = None) -> Packing:
        """Returns the packing of a batch on the CPU."""
        lengths = batch.lengths
        longest = int(lengths.max())
        within = torch.arange(batch.num_tokens) - batch.cu_seqlens[:-1].long().repeat_interleave(lengths)
        slots = batch.row_ids * longest + within
        cu_seqlens = batch.cu_seqlens.to(device, non_blocking=True)
        return cls(cu_seqlens, torch.arange(longest, device=device), slots.to(device, non_blocking=True), sequence)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.cu_seqlens) - 1

    @property
    def longest(self) -> int:
        """How many tokens the longest row has."""
        return len(self.places)


def packed_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 heads T dim"],
    key: Float[Tensor, "1 kv_heads T dim"],
    value: Float[Tensor, "1 kv_heads T dim"],
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 T heads dim"], None]:
    """Computes causal attention within each row: FlashAttention on CUDA in half precision, SDPA elsewhere.

    Raises:
        NotImplementedError: the model uses soft-capped scores, attention sinks or a mask that it made itself.
    """
    if attention_mask is not None and attention_mask.numel() > 1:
        raise NotImplementedError(f"{type(module).__name__} makes a mask of its own, which packed attention lacks")
    if softcap is not None or s_aux is not None:
        raise NotImplementedError(
            f"{type(module).__name__} uses soft-capped scores or attention sinks, which packed attention lacks"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    attend = _transformable if packing.plain else _flash if half else _padded

    if packing.sequence is None:
        return attend(q, k, v, packing, scaling, sliding_window)[None], None
    from verl_fn.backends.hf.shared_attention import shared

    return shared(packing.sequence, attend, q, k, v, packing, scaling, sliding_window)[None], None


def _flash(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = packing.cu_seqlens, packing.longest
    size = (-1 if window is None else window - 1, 0)
    # It returns a tuple only where more than the output is asked for, which its types don't say.
    return cast(Tensor, varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=size))


def _padded(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None) -> Tensor:
    # Rows are padded on the right, so the causal mask alone hides the padding from every token.
    rows, longest = packing.rows, packing.longest

    def spread(x: Tensor) -> Tensor:
        table = x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, packing.slots, x)
        return table.view(rows, longest, *x.shape[1:]).transpose(1, 2)

    mask = None
    if window is not None and longest > window:
        i = packing.places
        mask = (i[:, None] >= i) & (i[:, None] - i < window)
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        spread(q), spread(k), spread(v), attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
    )
    return out.transpose(1, 2).flatten(0, 1)[packing.slots]


def _transformable(q: Tensor, k: Tensor, v: Tensor, packing: Packing, *options: Any) -> Tensor:
    """Computes the same with matrix products and a softmax, since fused kernels have no forward-mode derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return _padded(q, k, v, packing, *options)


def register() -> None:
    """Registers the function with transformers, and an empty mask for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
