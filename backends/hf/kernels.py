"""Triton kernels over rows of logits, and ones whose result for a row does not depend on how many rows a call has.

The first are the reductions of log-probabilities, the gradient in the logits' place, and draws of tokens. Each
reads the logits in whatever dtype the output layer gave them, and computes in fp32. The others compute ``exact``
models and, some of them, other decoders: a program computes a tile of rows, and adds over the inner dimension in
one order. What a call's number of rows decides is how many programs run, and the tiles of a product, or the
library's kernel in their place; all of these add in the same order.
"""

# Triton takes the annotations of a kernel's arguments for its own types, so its tensors have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn.functional import linear

from verl_fn.backends.draws import ONE

BLOCK = 4096
# Tiles of a product, from large to small. Smaller ones are used if a test of the shape shows that they add in the
# same order as the largest ones.
MANY = {"ROWS": 128, "COLUMNS": 128, "INNER": 64, "num_warps": 8, "num_stages": 3}
TALL = {"ROWS": 128, "COLUMNS": 64, "INNER": 64, "num_warps": 8, "num_stages": 4}
SOME = {"ROWS": 64, "COLUMNS": 64, "INNER": 64, "num_warps": 4, "num_stages": 4}
FEW = {"ROWS": 64, "COLUMNS": 32, "INNER": 64, "num_warps": 4, "num_stages": 4}
# The least number of programs per processor of a GPU at which tiles of a size are the fastest, measured on an H200.
LEAST = ((MANY, 1.0), (TALL, 0.7), (SOME, 0.7), (FEW, 0.0))
# Without tensor cores, tiles of fp32 need more registers.
WIDE = {"ROWS": 64, "COLUMNS": 64, "INNER": 32, "num_warps": 4, "num_stages": 2}
# Which shapes of the library's product are tested: the most rows, the fewest columns, and the largest weight. A test
# takes time, and memory for a second weight.
MOST_ROWS, LEAST_COLUMNS, MOST_ELEMENTS = 1024, 256, 2**27
# How many elements a test compares; a sum in another order changes one in a few hundred.
COMPARED = 2**18
# Neighbouring programs share columns of the weight.
GROUP = 8
QUERIES, KEYS = 64, 64


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


def draw(
    logits: Float[Tensor, "n V"], u: Float64[Tensor, " n"], temperature: float, noise: float
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"], Bool[Tensor, " n"]]:
    """Draws as ``Draws.draw`` without top-k and top-p, and without fp32 logits of all rows in memory.

    Args:
        logits: in the dtype of the output layer.
        u: the number in [0, 1) of each row.
        temperature: divides the logits; above 0.
        noise: how much two computations of a logit may differ, divided by the temperature.

    Returns:
        For each row its token, or ``V`` if logits are not finite, its log-prob, and whether the draw is a near tie.
    """
    n, V = logits.shape
    blocks, device = triton.cdiv(V, BLOCK), logits.device
    tokens, wholes = (torch.empty(*shape, dtype=torch.int64, device=device) for shape in ((n,), (n, blocks)))
    tops, masses = torch.empty(2, n, blocks, dtype=torch.float32, device=device)
    log_probs = torch.empty(n, dtype=torch.float32, device=device)
    near = torch.empty(n, dtype=torch.bool, device=device)
    # A row is shared by a program for each block, so that few rows keep a GPU busy too.
    given, grid = (logits, logits.stride(0), V, temperature, tops, masses), (n, blocks)
    sizes = {"BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(blocks), "num_warps": 8}
    _mass_of_block[grid](*given, BLOCK=BLOCK, num_warps=8)
    _whole_of_block[grid](*given, wholes, ONE=ONE, **sizes)
    _draw[(n,)](*given, wholes, u, tokens, log_probs, near, noise, ONE=ONE, **sizes)
    return tokens, log_probs, near


@triton.jit
def _heated(logits, stride, V, temperature, row, block, BLOCK: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(logits + row * stride + at, mask=at < V, other=-float("inf")).to(tl.float32) / temperature


@triton.jit(do_not_specialize=["stride"])
def _mass_of_block(logits, stride, V, temperature, tops, masses, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = _heated(logits, stride, V, temperature, row, block, BLOCK)
    top = tl.max(x)
    at = row * tl.num_programs(1) + block
    tl.store(tops + at, top)
    # A block of -inf has no finite maximum to subtract.
    tl.store(masses + at, tl.sum(tl.exp(x - tl.maximum(top, -3e38))))


@triton.jit
def _mass_of_row(tops, masses, row, V, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    count = tl.cdiv(V, BLOCK)
    at = row * count + block
    own = tl.load(tops + at, mask=block < count, other=-float("inf"))
    top = tl.max(own)
    parts = tl.load(masses + at, mask=block < count, other=0.0)
    return top, tl.sum(parts * tl.exp(own - tl.maximum(top, -3e38)))


@triton.jit(do_not_specialize=["stride"])
def _whole_of_block(
    logits, stride, V, temperature, tops, masses, wholes,
    ONE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = _heated(logits, stride, V, temperature, row, block, BLOCK)
    top, mass = _mass_of_row(tops, masses, row, V, BLOCK, BLOCKS)
    tl.store(wholes + row * tl.num_programs(1) + block, tl.sum((tl.exp(x - top) / mass * ONE).to(tl.int64)))


@triton.jit(do_not_specialize=["stride"])
def _draw(
    logits, stride, V, temperature, tops, masses, wholes, u, tokens, log_probs, near, noise,
    ONE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top, mass = _mass_of_row(tops, masses, row, V, BLOCK, BLOCKS)
    if (mass != mass) | (top == float("inf")) | (top == -float("inf")):
        tl.store(tokens + row, V)
        tl.store(log_probs + row, 0.0)
        tl.store(near + row, False)
    else:
        block, count = tl.arange(0, BLOCKS), tl.cdiv(V, BLOCK)
        parts = tl.load(wholes + row * count + block, mask=block < count, other=0)
        total = tl.sum(parts)
        goal = tl.ceil((1.0 - tl.load(u + row)) * total.to(tl.float64)).to(tl.int64)
        chosen = tl.minimum(tl.sum((tl.cumsum(parts, 0) < goal).to(tl.int32)), count - 1)
        before = tl.sum(tl.where(block < chosen, parts, 0))
        prob = tl.exp(_heated(logits, stride, V, temperature, row, chosen, BLOCK) - top) / mass
        whole = (prob * ONE).to(tl.int64)
        reached = before + tl.cumsum(whole, 0)
        start = chosen * BLOCK
        index = tl.minimum(tl.sum((reached < goal).to(tl.int32)), tl.minimum(V - 1 - start, BLOCK - 1))
        mine = tl.arange(0, BLOCK) == index
        p = tl.sum(tl.where(mine, prob, 0.0))
        own = tl.sum(tl.where(mine, whole, 0))
        above = tl.sum(tl.where(mine, reached, 0))
        reach = 2 * noise * goal.to(tl.float32) * (1.0 - goal.to(tl.float32) / total.to(tl.float32))
        gap = tl.minimum(above - goal, goal - (above - own)).to(tl.float32)
        tl.store(tokens + row, start + index)
        tl.store(log_probs + row, tl.log(p * (ONE / total.to(tl.float32))))
        tl.store(near + row, gap < reach)


def product(
    x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"], bias: Tensor | None = None
) -> Float[Tensor, "T N"]:
    """Returns ``x @ weight.T + bias``, summed in fp32.

    A step of a decoder has few rows. For these the library's product is faster, and it is used if a test of the shape
    shows that it adds in the same order.
    """
    (T, K), N = x.shape, len(weight)
    if _tested(T, N, K, x.dtype) and _library_same_order(T, N, K, bias is not None, x.dtype, x.device):
        return linear(x, weight, bias)
    return _product_by(_tiles(T, N, K, x.dtype, x.device), x, weight, bias)


def _tested(T: int, N: int, K: int, dtype: torch.dtype) -> bool:
    """Returns whether a test of this shape of the library's product is worth its time and memory.

    Decoders have multiples of 8 rows, and prompts any number.
    """
    few = T <= MOST_ROWS and T % 8 == 0
    return few and dtype != torch.float32 and N >= LEAST_COLUMNS and N * K <= MOST_ELEMENTS


@functools.cache
def _library_same_order(T: int, N: int, K: int, biased: bool, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether the library's product and the largest tiles give equal bits for this shape, in every row."""
    generator = torch.Generator(device).manual_seed(N * K)
    try:
        given = [torch.empty(*shape, dtype=dtype, device=device) for shape in ((T, K), (N, K), (N,))]
        for _ in range(triton.cdiv(COMPARED, T * N)):
            x, weight, column = (t.normal_(generator=generator) for t in given)
            bias = column if biased else None
            if not torch.equal(linear(x, weight, bias), _product_by(MANY, x, weight, bias)):
                return False
    except torch.OutOfMemoryError:
        return False
    return True


def _tiles(T: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Returns the largest tiles whose programs keep the GPU busy; small products have small tiles."""
    if dtype == torch.float32:
        return WIDE
    place = len(LEAST) - 1
    if FEW["ROWS"] < T:
        busy = (_programs(tiles, T, N) >= least * processors(device) for tiles, least in LEAST)
        place = next(place for place, enough in enumerate(busy) if enough)
    return LEAST[place][0] if place == 0 or _same_order(place, N, K, dtype, device) else MANY


def _programs(tiles: dict[str, int], T: int, N: int) -> int:
    return triton.cdiv(T, tiles["ROWS"]) * triton.cdiv(N, tiles["COLUMNS"])


@functools.cache
def processors(device: torch.device) -> int:
    """Returns how many multiprocessors a GPU has; 1 for a CPU, on which kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _product_by(tiles: dict[str, int], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (T, K), N = x.shape, len(weight)
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    out = x.new_empty(T, N)
    grid = (_programs(tiles, T, N),)
    _product[grid](
        x, weight, x if bias is None else bias, out, T, N, K, weight.stride(0), BIASED=bias is not None,
        WHOLE=K % tiles["INNER"] == 0, GROUP=GROUP, **tiles,
    )  # fmt: skip
    return out


@functools.cache
def _same_order(place: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether the tiles at a place in ``LEAST`` and the largest ones give equal bits for this shape."""
    tiles, _ = LEAST[place]
    generator = torch.Generator(device).manual_seed(N * K)
    x, weight = (torch.randn(n, K, generator=generator, device=device).to(dtype) for n in (128, min(N, 1024)))
    return torch.equal(_product_by(tiles, x, weight, None), _product_by(MANY, x, weight, None))


@triton.jit(do_not_specialize=["T"])
def _product(
    x, weight, bias, out, T, N, K, stride,
    BIASED: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    in_rows, in_columns = tl.cdiv(T, ROWS), tl.cdiv(N, COLUMNS)
    group = program // (GROUP * in_columns)
    first = group * GROUP
    size = tl.minimum(in_rows - first, GROUP)
    inside = program % (GROUP * in_columns)
    row = ((first + inside % size) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = ((inside // size) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inner = tl.arange(0, INNER)
    a = x + row[:, None] * K + inner
    b = weight + column[None, :] * stride + inner[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, INNER):
        if WHOLE:
            left = tl.load(a, mask=row[:, None] < T, other=0.0)
            right = tl.load(b, mask=column[None, :] < N, other=0.0)
        else:
            left = tl.load(a, mask=(row[:, None] < T) & (inner + start < K)[None, :], other=0.0)
            right = tl.load(b, mask=(column[None, :] < N) & (inner + start < K)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        a += INNER
        b += INNER
    if BIASED:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * N + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row[:, None] < T) & (column[None, :] < N))


def gated(gate: Float[Tensor, "*T F"], up: Float[Tensor, "*T F"]) -> Float[Tensor, "*T F"]:
    """Returns silu(gate) * up; the activation is rounded to the dtype before the product."""
    width = gate.shape[-1]
    # Halves of one product stay where they are.
    rows = [x.reshape(-1, width) for x in (gate, up)]
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in rows]
    out = rows[0].new_empty(rows[0].shape)
    _gated[(len(out), triton.cdiv(width, 1024))](
        *rows, out, width, rows[0].stride(0), rows[1].stride(0), BLOCK=1024, num_warps=4
    )
    return out.view(gate.shape)


@triton.jit
def _gated(gate, up, out, width, gate_row, up_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gate + row * gate_row + at, mask=at < width, other=0.0)
    wide = value.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(value.dtype).to(tl.float32)
    product = active * tl.load(up + row * up_row + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, product.to(value.dtype), mask=at < width)


def store(
    x: Float[Tensor, "T kv dim"],
    cache: Float[Tensor, "slots kv places dim"],
    slots: Int[Tensor, " T"],
    places: Int[Tensor, " T"],
) -> None:
    """Writes keys or values of tokens into their places of a contiguous cache."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    T, kv, dim = x.shape
    _store[(T, kv)](
        x, cache, slots, places, x.stride(0), x.stride(1), cache.stride(0), cache.stride(1), DIM=dim,
        BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


@triton.jit
def _store(
    x, cache, slots, places, x_token, x_head, c_slot, c_head, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, place = tl.load(slots + token).to(tl.int64), tl.load(places + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + token * x_token + head * x_head + at, mask=at < DIM)
    tl.store(cache + slot * c_slot + head * c_head + place * DIM + at, value, mask=at < DIM)


def norm(x: Float[Tensor, "*T H"], weight: Float[Tensor, " H"], eps: float) -> Float[Tensor, "*T H"]:
    """Returns the RMS norm: in fp32, cast, and then times the weight."""
    rows = x.reshape(-1, 1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    _norm_by(rows, None, weight, out, eps)
    return out.view(x.shape)


def norm_heads(x: Float[Tensor, "T heads dim"], weight: Float[Tensor, " dim"], eps: float) -> None:
    """Overwrites each head with its RMS norm; the elements of a head are contiguous."""
    _norm_by(x, None, weight, x, eps)


def add_norm(
    x: Float[Tensor, "T H"], delta: Float[Tensor, "*parts T H"] | None, weight: Float[Tensor, " H"], eps: float
) -> Float[Tensor, "T H"]:
    """Adds ``delta``, or the sum of its parts, to ``x`` in place, and returns the RMS norm of the sum."""
    out = torch.empty_like(x)
    _norm_by(x[:, None], delta, weight, out, eps)
    return out


def _norm_by(x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    T, parts, H = x.shape
    _norm[(T, parts)](
        x, x if delta is None else delta, weight, out, eps, x.stride(0), T * H, H=H,
        BLOCK=triton.next_power_of_2(H), PARTS=0 if delta is None else delta.numel() // (T * H), num_warps=4,
    )  # fmt: skip


@triton.jit
def _norm(x, delta, weight, out, eps, stride, part, H: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * stride + tl.program_id(1) * H
    at = tl.arange(0, BLOCK)
    there = at < H
    value = tl.load(x + row + at, mask=there, other=0.0)
    if PARTS > 0:
        more = tl.load(delta + row + at, mask=there, other=0.0).to(tl.float32)
        for i in tl.static_range(1, PARTS):
            more += tl.load(delta + i * part + row + at, mask=there, other=0.0)
        value = (value.to(tl.float32) + more.to(value.dtype).to(tl.float32)).to(value.dtype)
        tl.store(x + row + at, value, mask=there)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / H + eps)
    narrow = (wide * scale).to(value.dtype).to(tl.float32)
    scaled = narrow * tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row + at, scaled.to(value.dtype), mask=there)


def packed_attention(
    q: Float[Tensor, "T heads dim"],
    k: Float[Tensor, "T kv dim"],
    v: Float[Tensor, "T kv dim"],
    packing: Any,
    scaling: float,
    window: int | None,
) -> Float[Tensor, "T heads dim"]:
    """Returns causal attention within each of the packed rows."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    strides = [(0, x.stride(0), x.stride(1)) for x in (k, v)]
    rows, cu = (packing.rows, packing.longest), packing.cu_seqlens
    return _attention_of(q, k, v, strides, cu, None, rows, scaling, window)


def step_attention(
    q: Float[Tensor, "n heads dim"],
    keys: Float[Tensor, "slots kv places dim"],
    values: Float[Tensor, "slots kv places dim"],
    positions: Int[Tensor, " n"],
    lanes: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    window: int | None,
) -> Float[Tensor, "n heads dim"]:
    """Returns the attention of one token of each row over a cache.

    Args:
        positions: the place of each token; -1 for a token of no row, whose result is 0.
        lanes: the slot of each token; and by slot, the one from which its first places are read, and how many.
    """
    strides = [(x.stride(0), x.stride(2), x.stride(1)) for x in (keys, values)]
    return _attention_of(q, keys, values, strides, positions, lanes, (len(q), 1), scaling, window)


def _attention_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strides: list[tuple[int, int, int]],
    places: Tensor,
    lanes: tuple[Tensor, Tensor, Tensor] | None,
    rows: tuple[int, int],
    scaling: float,
    window: int | None,
) -> Tensor:
    """Runs the kernel; strides of keys and values are of a row, a place and a head, ``rows`` count and longest."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    _, heads, dim = q.shape
    kv = k.shape[1]
    group = heads // kv
    out = q.new_empty(q.shape)
    queries = max(QUERIES, triton.next_power_of_2(group))
    grid = (triton.cdiv(rows[1], queries // group), rows[0] * kv)
    _attention[grid](
        q, k, v, out, places, *(lanes or [places] * 3), q.stride(0), q.stride(1), *strides[0], *strides[1],
        out.stride(0), out.stride(1), scaling, window or 0, KV=kv, GROUP=group, DIM=dim,
        BLOCK=max(16, triton.next_power_of_2(dim)), QUERIES=queries, KEYS=KEYS, WINDOWED=window is not None,
        STEP=lanes is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["window"])
def _attention(
    q, k, v, out, places, slots, sources, shared, q_token, q_head, k_row, k_place, k_head, v_row, v_place, v_head,
    o_token, o_head, scaling, window,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = QUERIES // GROUP
    row, head = tl.program_id(1) // KV, tl.program_id(1) % KV
    # ``token`` is the first query's in its tensor, ``place`` its place in the row; ``count`` queries follow. Keys of
    # packed rows lie at the row's first token, of a cache in the row's slot or in the one that it shares.
    if STEP:
        token, place, count = row.to(tl.int64), tl.load(places + row).to(tl.int32), 1
        slot = tl.maximum(tl.load(slots + row), 0).to(tl.int64)
        border, source = tl.load(shared + slot).to(tl.int32), tl.load(sources + slot).to(tl.int64)
        k_base, v_base = k + slot * k_row + head * k_head, v + slot * v_row + head * v_head
        k_other, v_other = (source - slot) * k_row, (source - slot) * v_row
    else:
        base, place = tl.load(places + row).to(tl.int64), tl.program_id(0) * TOKENS
        token, count = base + place, (tl.load(places + row + 1) - base).to(tl.int32) - place
        k_base, v_base = k + base * k_place + head * k_head, v + base * v_place + head * v_head
    if count <= 0:
        return
    count = tl.minimum(count, TOKENS)
    m = tl.arange(0, QUERIES)
    of, member = m // GROUP, m % GROUP
    asked = of < count
    at = place + of
    d = tl.arange(0, BLOCK)
    q_at = q + (token + of)[:, None] * q_token + (head * GROUP + member)[:, None] * q_head + d[None, :]
    query = tl.load(q_at, mask=asked[:, None] & (d < DIM)[None, :], other=0.0)
    top = tl.full((QUERIES,), -float("inf"), tl.float32)
    mass = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, BLOCK), tl.float32)
    end = place + count
    begin = 0
    if WINDOWED:
        begin = tl.maximum(place - window + 1, 0) // KEYS * KEYS
    for first in range(begin, end, KEYS):
        n = first + tl.arange(0, KEYS)
        there = (n < end)[:, None] & (d < DIM)[None, :]
        at_k, at_v = n.to(tl.int64) * k_place, n.to(tl.int64) * v_place
        if STEP:
            at_k, at_v = at_k + tl.where(n < border, k_other, 0), at_v + tl.where(n < border, v_other, 0)
        keys = tl.load(k_base + at_k[:, None] + d[None, :], mask=there, other=0.0)
        values = tl.load(v_base + at_v[:, None] + d[None, :], mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scaling
        seen = (n[None, :] <= at[:, None]) & asked[:, None]
        if WINDOWED:
            seen = seen & (n[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen no key has no finite maximum to subtract.
        level = tl.where(new == -float("inf"), 0.0, new)
        shares, shrink = tl.exp(scores - level[:, None]), tl.exp(top - level)
        mass = mass * shrink + tl.sum(shares, 1)
        total = tl.dot(shares.to(values.dtype), values, total * shrink[:, None], input_precision="ieee")
        top = new
    result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
    o_at = out + (token + of)[:, None] * o_token + (head * GROUP + member)[:, None] * o_head + d[None, :]
    tl.store(o_at, result.to(out.dtype.element_ty), mask=asked[:, None] & (d < DIM)[None, :])
