"""Triton kernels over rows of logits: the reductions of log-probabilities, and the gradient in the logits' place.

Each reads the logits once, in whatever dtype the output layer gave them, and computes in fp32.
"""

# Triton takes the annotations of a kernel's arguments for its own types, so its tensors have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 4096


def reduce_rows(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    temperature: Float[Tensor, " N"] | None,
    logprobs: Float[Tensor, " N"],
    log_z: Float[Tensor, " N"],
    entropies: Float[Tensor, " N"] | None,
    softcap: float | None = None,
) -> None:
    """Writes the log-probabilities of ``targets``, the log-normalisers and, if there is room for them, entropies."""
    rows, vocab = logits.shape
    _reduce[(rows,)](
        logits, logits.stride(0), vocab, targets, temperature, logprobs, log_z, entropies, softcap or 1.0,
        HEATED=temperature is not None, CAPPED=softcap is not None, ENTROPY=entropies is not None,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def gradient_in_place(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    temperature: Float[Tensor, " N"] | None,
    log_z: Float[Tensor, " N"],
    d_logprobs: Float[Tensor, " N"],
    entropies: Float[Tensor, " N"] | None,
    d_entropies: Float[Tensor, " N"],
    softcap: float | None = None,
) -> None:
    """Overwrites logits with the gradient with respect to them."""
    rows, vocab = logits.shape
    _gradient[(rows, triton.cdiv(vocab, BLOCK))](
        logits, logits.stride(0), vocab, targets, temperature, log_z, d_logprobs, entropies, d_entropies,
        softcap or 1.0, HEATED=temperature is not None, CAPPED=softcap is not None, ENTROPY=entropies is not None,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _capped(x, cap):
    """Returns cap * tanh(x / cap); the exponent is never positive, so nothing overflows."""
    e = tl.exp(-2.0 * tl.abs(x) / cap)
    return tl.where(x < 0.0, -cap, cap) * (1.0 - e) / (1.0 + e)


@triton.jit
def _reduce(
    logits, stride, vocab, targets, temperature, logprobs, log_z, entropies, cap,
    HEATED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scale = 1.0
    if HEATED:
        scale = 1.0 / tl.load(temperature + row)
    # Each lane keeps its own running maximum, sum of exponentials, and sum of exponentials times logits.
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        if CAPPED:
            x = tl.where(at < vocab, _capped(x, cap), -float("inf"))
        x = x * scale
        new = tl.maximum(top, x)
        # A lane that has seen nothing, or only -inf, has no finite maximum to subtract.
        base = tl.where(new == -float("inf"), 0.0, new)
        shrink, e = tl.exp(top - base), tl.exp(x - base)
        mass = mass * shrink + e
        if ENTROPY:
            moment = moment * shrink + tl.where(e > 0.0, e * x, 0.0)
        top = new
    highest = tl.max(top)
    share = tl.exp(top - highest)
    total = tl.sum(mass * share)
    z = highest + tl.log(total)
    target = tl.load(targets + row)
    tl.store(log_z + row, z)
    drawn = tl.load(logits + target).to(tl.float32)
    if CAPPED:
        drawn = _capped(drawn, cap)
    tl.store(logprobs + row, drawn * scale - z)
    if ENTROPY:
        tl.store(entropies + row, z - tl.sum(moment * share) / total)


@triton.jit
def _gradient(
    logits, stride, vocab, targets, temperature, log_z, d_logprobs, entropies, d_entropies, cap,
    HEATED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scale = 1.0
    if HEATED:
        scale = 1.0 / tl.load(temperature + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    slope = scale
    if CAPPED:
        x = _capped(x, cap)
        # The derivative of c * tanh(x / c) is 1 - (its value / c)^2.
        slope = scale * (1.0 - x / cap * (x / cap))
    x = x * scale
    from_logprob = tl.load(d_logprobs + row)
    log_p = x - tl.load(log_z + row)
    p = tl.exp(log_p)
    d = tl.where(at == tl.load(targets + row), from_logprob, 0.0) - p * from_logprob
    if ENTROPY:
        # d entropy / d logit = -p (log p + entropy)
        bent = tl.where(p > 0.0, p * (log_p + tl.load(entropies + row)), 0.0)
        d -= bent * tl.load(d_entropies + row)
    tl.store(logits + at, (d * slope).to(logits.dtype.element_ty), mask=at < vocab)
