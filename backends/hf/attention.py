"""Attention over packed rows, registered with transformers as ``verl_fn_packed``.

Rows lie end to end in one sequence and must not attend to each other. transformers' own packed calls are silently
wrong in several combinations of mask, cache and kernel. Here the model passes the layout of the rows to this function
as one keyword argument, ``packing``, and no mask is made.

Scores may be soft-capped, c * tanh(score / c) (Gemma 2, arXiv 2408.00118), and a head may have a sink, a learned
score that takes a share of the softmax and has no value (gpt-oss, arXiv 2508.10925).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from verl_fn.state import Batch

NAME = "verl_fn_packed"
# The smallest heads that FlexAttention's kernels take.
FLEX_DIM = 16
# The fewest tokens of a row that is alone in its micro-batch and takes cuDNN's attention. cuDNN plans each new
# length, and for shorter rows planning takes longer than its kernels save.
LONG = 8192


@attrs.frozen(eq=False)
class Packing:
    """The layout of rows in a packed sequence.

    Attributes:
        cu_seqlens: the starts of all rows and the end of the last, int32, on the model's device.
        places: 0 to the longest row's last token. The longest row's length is passed as the length of this tensor,
            since code is compiled for any size of a tensor but again for every other number.
        slots: each token's place in a padded ``[B * longest]`` table.
        sequence: the ranks that share the sequence, if any; each then has a part of its tokens.
        plain: use only torch's own functions. Every ``torch.func`` transformation accepts them under
            ``SDPBackend.MATH``; ``Skeleton.hidden_states`` sets it.
        masks: the block masks of this packing that were made, by window.
        blocks: a number for each token; tokens of a row with the same one, unless it is -1, also attend to tokens
            after them: the tokens of an image. None without such tokens.
    """

    cu_seqlens: Int[Tensor, " B1"]
    places: Int[Tensor, " longest"]
    slots: Int[Tensor, " T"]
    sequence: Any = None
    plain: bool = False
    masks: dict[int | None, Any] = attrs.field(factory=dict)
    blocks: Int[Tensor, " T"] | None = None

    @classmethod
    def of(cls, batch: Batch, device: torch.device, sequence: Any = None) -> Packing:
        """Returns the packing of a batch on the CPU."""
        lengths = batch.lengths
        longest = int(lengths.max())
        within = torch.arange(batch.num_tokens) - batch.cu_seqlens[:-1].long().repeat_interleave(lengths)
        slots = batch.row_ids * longest + within
        cu_seqlens = batch.cu_seqlens.to(device, non_blocking=True)
        return cls(cu_seqlens, torch.arange(longest, device=device), slots.to(device, non_blocking=True), sequence)

    @classmethod
    def of_table(cls, rows: int, length: int, device: torch.device) -> Packing:
        """Returns the packing of rows of one length."""
        cu_seqlens = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
        slots = torch.arange(rows * length, device=device)
        return cls(cu_seqlens, slots[:length], slots)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.cu_seqlens) - 1

    @property
    def longest(self) -> int:
        """How many tokens the longest row has."""
        return len(self.places)

    def table(self, x: Tensor, padding: int = 0) -> Tensor:
        """Returns packed tokens, ``[T, ...]``, as a table of rows, ``[B, longest, ...]``, padded on the right."""
        rows = x.new_full((self.rows * self.longest, *x.shape[1:]), padding).index_copy(0, self.slots, x)
        return rows.view(self.rows, self.longest, *x.shape[1:])


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
    s_aux: Float[Tensor, " heads"] | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 T heads dim"], None]:
    """Computes causal attention within each row, on CUDA in half precision by fused kernels.

    Raises:
        NotImplementedError: the model made a mask of its own.
    """
    if attention_mask is not None and attention_mask.numel() > 1:
        raise NotImplementedError(f"{type(module).__name__} makes a mask of its own; packed attention takes none")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attend = chosen(q, packing)
    options = packing, scaling, sliding_window, softcap, s_aux
    if packing.sequence is None:
        return attend(q, k, v, *options)[None], None
    from verl_fn.backends.hf.uncompiled import shared

    return shared(packing.sequence, attend, q, k, v, *options)[None], None


def chosen(q: Tensor, packing: Packing) -> Callable[..., Tensor]:
    """Returns the attention for queries of this dtype and device, ``[T, heads, dim]``."""
    half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and packing.blocks is None
    return _fused if half and not packing.plain else _padded


def _fused(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Calls FlashAttention, or FlexAttention if scores have a soft cap: torch's FlashAttention has none."""
    if softcap is not None:
        from verl_fn.backends.hf import uncompiled

        attend = uncompiled.capped_attention if q.shape[-1] >= FLEX_DIM else _padded
        return attend(q, k, v, packing, scaling, window, softcap, sinks)
    cu, longest = packing.cu_seqlens, packing.longest
    size = (-1 if window is None else window - 1, 0)
    if sinks is not None:
        return cast(Tensor, _FlashWithSinks.apply(q, k, v, sinks, cu, longest, scaling, size)[0])
    # cuDNN's backward pass does not repeat bitwise.
    repeats, as_wide = torch.are_deterministic_algorithms_enabled(), v.shape[-1] == k.shape[-1]
    if window is None and packing.rows == 1 and longest >= LONG and as_wide and not repeats:
        return _one_row(q, k, v, scaling)
    from torch.nn.attention.varlen import varlen_attn

    # The kernel takes values as wide as keys; those of latent attention are narrower.
    width = v.shape[-1]
    v = pad(v, (0, k.shape[-1] - width))
    # Its types don't say that it returns a tuple only if more than the output is asked for.
    out = cast(Tensor, varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=size))
    return out[..., :width]


def _one_row(q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """Calls cuDNN's attention, or FlashAttention for heads that cuDNN's does not take."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


class _FlashWithSinks(torch.autograd.Function):
    """FlashAttention in which the softmax of each head has one more term, its sink.

    The kernel's backward pass takes the output and the log of the softmax's denominator; given both with the sink in
    them, it returns the gradients of the softmax with the sink.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu: Tensor, longest: int, scale: float | None,
        window: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        import torch.nn.attention.varlen  # registers the operators

        causal = window == (-1, 0)
        out, lse, random = torch.ops.torch_attn._varlen_attn(
            q, k, v, cu, cu, longest, longest, causal, scale, list(window)
        )
        whole = torch.logaddexp(lse, sinks.float()[:, None])
        share = torch.exp(lse - whole).T[..., None]
        return (out * share).to(out.dtype), whole, random

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, sinks, cu, ctx.longest, ctx.scale, ctx.window = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(q, k, v, sinks, cu, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, cu, out, whole, random = ctx.saved_tensors
        grads = torch.ops.torch_attn._varlen_attn_backward(
            grad, q, k, v, out, whole, cu, cu, ctx.longest, ctx.longest, ctx.window == (-1, 0), random, ctx.scale,
            list(ctx.window),
        )  # fmt: skip
        share = torch.exp(sinks.float()[:, None] - whole)
        d_sinks = -(share * (grad.float() * out.float()).sum(-1).T).sum(-1)
        return *grads, d_sinks.to(sinks.dtype), None, None, None, None


def _padded(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    # Rows are padded on the right, so the causal mask hides the padding from every token.
    longest = packing.longest
    q, k, v = (packing.table(x).transpose(1, 2) for x in (q, k, v))
    i, mask = packing.places, None
    if window is not None and longest > window:
        mask = (i[:, None] >= i) & (i[:, None] - i < window)
    if packing.blocks is not None:
        numbers = packing.table(packing.blocks, -1)[:, None]
        same = numbers[..., None] == numbers[..., None, :]
        mask = (i[:, None] >= i if mask is None else mask) | (same & (numbers >= 0)[..., None])
    if softcap is None and sinks is None:
        gqa = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
    else:
        out = _scored(q, k, v, i[:, None] >= i if mask is None else mask, scaling, softcap, sinks)
    return out.transpose(1, 2).flatten(0, 1)[packing.slots]


def _scored(
    q: Float[Tensor, "B heads L dim"], k: Tensor, v: Tensor, visible: Bool[Tensor, "L L"], scaling: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Float[Tensor, "B heads L vdim"]:  # fmt: skip
    """Attention with the whole table of scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT).float() * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    probs = softmax(scores, softcap, sinks, torch.zeros_like(scores).masked_fill(~visible, -torch.inf))
    return probs.to(v.dtype) @ v


def softmax(
    scores: Float[Tensor, "*B heads L keys"], softcap: float | None, sinks: Tensor | None, bias: Tensor
) -> Float[Tensor, "*B heads L keys"]:
    """Returns the shares of keys for scores with a soft cap, if any, a bias, and a sink for each head, if any.

    Example:
        >>> scores = torch.zeros(1, 1, 3)
        >>> softmax(scores, None, torch.zeros(1), torch.tensor([0.0, 0.0, -torch.inf])).round(decimals=3)
        tensor([[[0.3330, 0.3330, 0.0000]]])
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def register(name: str = NAME, attend: Callable[..., Any] = packed_attention) -> None:
    """Registers an attention with transformers, and an empty mask for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
