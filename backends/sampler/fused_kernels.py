"""Triton kernels of a decoding step, each of which does what takes several operations of torch; see ``FusedDecoder``.

Norms and gates are in ``hf.kernels``, since exact models have the same.

``Lanes`` are what they know about the rows.
A token has a slot of the cache and a place in it. A token whose place is -1 belongs to no row: kernels that read or
write the cache skip it. Values are rounded where transformers rounds them.
"""

# Triton takes the annotations of a kernel's arguments for its own types, so its tensors have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from verl_fn.backends.hf.kernels import processors

# The keys that a program of ``step_attention`` reads at a time, and the elements of a head for each of its warps.
# Many small programs were the fastest on an H200.
KEYS, WARP = 16, 128
# A row is shared by as many programs of ``step_attention`` as keep a GPU busy, so many at most.
MOST_SPLITS = 16
# The elements of heads, for each processor, up to which all programs run at the same time.
RESIDENT = 1024


@attrs.frozen(eq=False)
class Lanes:
    """What a GPU knows about the rows that it decodes, by slot; the host reads it between steps only.

    Attributes:
        active: the slots that a step decodes; -1 stands for none.
        tokens: the last token of each slot's row, which is not in the cache yet.
        places: its place.
        ends: the place of the row's last draw.
        alive: whether the row goes on.
        sources: the slot from which the row's prompt is read, though its own has the same: rows that read the same
            memory find it in the cache of the chip.
        shared: how many of its places are read there.
        uniforms: the number in [0, 1) that draws the token after each place.
        drawn: the token drawn for each place; likewise its log-prob with and without the cut, whether it is a near
            tie, and the version of the weights.
        version: of the weights of the next step.
        stops: whether a token ends a row; the token after the last one stands for a draw from NaN.
    """

    active: Int[Tensor, " lanes"]
    tokens: Int[Tensor, " slots"]
    places: Int[Tensor, " slots"]
    ends: Int[Tensor, " slots"]
    alive: Bool[Tensor, " slots"]
    sources: Int[Tensor, " slots"]
    shared: Int[Tensor, " slots"]
    uniforms: Float64[Tensor, "slots length"]
    drawn: Int[Tensor, "slots length"]
    log_probs: Float[Tensor, "slots length"]
    full_log_probs: Float[Tensor, "slots length"]
    near: Bool[Tensor, "slots length"]
    versions: Int[Tensor, "slots length"]
    version: Int[Tensor, ""]
    stops: Bool[Tensor, " V_and_1"]

    @classmethod
    def of(cls, slots: int, length: int, vocab: int, device: torch.device) -> Lanes:
        """Allocates them, with no row alive."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            active=zeros(lanes_for(slots)) - 1,
            tokens=zeros(slots),
            places=zeros(slots),
            ends=zeros(slots),
            alive=zeros(slots, dtype=torch.bool),
            sources=torch.arange(slots, device=device),
            shared=zeros(slots),
            uniforms=zeros(slots, length, dtype=torch.float64),
            drawn=zeros(slots, length),
            log_probs=zeros(slots, length, dtype=torch.float32),
            full_log_probs=zeros(slots, length, dtype=torch.float32),
            near=zeros(slots, length, dtype=torch.bool),
            versions=zeros(slots, length),
            version=zeros(),
            stops=zeros(vocab + 1, dtype=torch.bool),
        )


def lanes_for(rows: int) -> int:
    """Returns the number of lanes of the smallest graph that decodes so many rows.

    Example:
        >>> [lanes_for(rows) for rows in (1, 9, 200, 300, 1000)]
        [8, 16, 256, 384, 1024]
    """
    return max(8, 1 << (rows - 1).bit_length()) if rows <= 256 else -(-rows // 128) * 128


def begin(
    lanes: Lanes, slots: Int[Tensor, " n"]
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"], Float64[Tensor, " n"]]:
    """Returns each slot's last token, the token's place, and the number that draws the next token.

    A row that has ended has place -1.
    """
    n = len(slots)
    tokens, places, u = torch.empty_like(slots), torch.empty_like(slots), lanes.uniforms.new_empty(n)
    _begin[(triton.cdiv(n, 128),)](
        slots, lanes.tokens, lanes.places, lanes.alive, lanes.uniforms, tokens, places, u, n, lanes.uniforms.shape[1],
        BLOCK=128, num_warps=4,
    )  # fmt: skip
    return tokens, places, u


@triton.jit(do_not_specialize=["n", "length"])
def _begin(
    slots, l_tokens, l_places, l_alive, l_uniforms, tokens, places, u, n, length, BLOCK: tl.constexpr
):  # fmt: skip
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + lane, mask=lane < n, other=-1)
    live = slot >= 0
    live = live & (tl.load(l_alive + slot, mask=live, other=0) != 0)
    place = tl.load(l_places + slot, mask=live, other=-1)
    tl.store(tokens + lane, tl.load(l_tokens + slot, mask=live, other=0), mask=lane < n)
    tl.store(places + lane, place, mask=lane < n)
    tl.store(u + lane, tl.load(l_uniforms + slot * length + place, mask=live, other=0.0), mask=lane < n)


def rotate_and_store(
    qkv: Float[Tensor, "T heads_and_2kv dim"],
    cache: Float[Tensor, "2 slots kv places dim"],
    slots: Int[Tensor, " T"],
    places: Int[Tensor, " T"],
    turns: Float[Tensor, "length 2 half"],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Applies head norms and the rotary embedding in place, and writes keys and values into the cache.

    Args:
        cache: of keys and values.
        places: the place of each token.
        turns: cosines and sines of each place.
        norms: the weights of the norms of queries and keys.
        eps: of these norms.
    """
    T, dim, kv = len(qkv), qkv.shape[-1], cache.shape[2]
    group = qkv.shape[1] // kv - 2
    assert qkv.is_contiguous() and cache[0, 0].is_contiguous(), "the kernel computes addresses from shapes"
    q_norm, k_norm = norms or (qkv, qkv)
    # Without fusion, since torch rounds the two products of a rotation before it adds them.
    _rotate_and_store[(T, kv)](
        qkv, cache, slots, places, turns, q_norm, k_norm, eps, cache.stride(0), cache.stride(1), cache.shape[3],
        KV=kv, GROUP=group, MEMBERS=triton.next_power_of_2(group), DIM=dim,
        HALF=triton.next_power_of_2(dim // 2), NORMED=norms is not None, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _head_norm(first, second, weight, half, there, eps, DIM: tl.constexpr):
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
    low = tl.load(weight + half, mask=there, other=0.0).to(tl.float32)[None, :]
    high = tl.load(weight + DIM // 2 + half, mask=there, other=0.0).to(tl.float32)[None, :]
    a, b = (a * scale).to(first.dtype).to(tl.float32), (b * scale).to(first.dtype).to(tl.float32)
    return (a * low).to(first.dtype), (b * high).to(first.dtype)


@triton.jit
def _turned(first, second, cos, sin):
    """Rotates element i together with element i + dim/2, rounded as in transformers."""
    kind = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    low = (a * cos).to(kind).to(tl.float32) + (-b * sin).to(kind).to(tl.float32)
    high = (b * cos).to(kind).to(tl.float32) + (a * sin).to(kind).to(tl.float32)
    return low.to(kind), high.to(kind)


@triton.jit(do_not_specialize=["length"])
def _rotate_and_store(
    qkv, cache, slots, places, turns, q_norm, k_norm, eps, c_kind, c_slot, length,
    KV: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + token).to(tl.int64)
    if place < 0:
        return
    slot = tl.load(slots + token).to(tl.int64)
    half = tl.arange(0, HALF)
    there = half < DIM // 2
    cos = tl.load(turns + place * DIM + half, mask=there, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(turns + place * DIM + DIM // 2 + half, mask=there, other=0.0).to(tl.float32)[None, :]
    row = qkv + token * ((GROUP + 2) * KV * DIM)
    member = tl.arange(0, MEMBERS)
    at = row + (head * GROUP + member)[:, None] * DIM + half[None, :]
    asked = (member < GROUP)[:, None] & there[None, :]
    first, second = tl.load(at, mask=asked, other=0.0), tl.load(at + DIM // 2, mask=asked, other=0.0)
    if NORMED:
        first, second = _head_norm(first, second, q_norm, half, there, eps, DIM)
    first, second = _turned(first, second, cos, sin)
    tl.store(at, first, mask=asked)
    tl.store(at + DIM // 2, second, mask=asked)
    one = tl.arange(0, 1)[:, None]
    key = row + (GROUP * KV + head + one) * DIM + half[None, :]
    first = tl.load(key, mask=there[None, :], other=0.0)
    second = tl.load(key + DIM // 2, mask=there[None, :], other=0.0)
    if NORMED:
        first, second = _head_norm(first, second, k_norm, half, there, eps, DIM)
    first, second = _turned(first, second, cos, sin)
    tl.store(key, first, mask=there[None, :])
    tl.store(key + DIM // 2, second, mask=there[None, :])
    target = cache + slot * c_slot + (head * length + place) * DIM + one + half[None, :]
    tl.store(target, first, mask=there[None, :])
    tl.store(target + DIM // 2, second, mask=there[None, :])
    value = row + ((GROUP + 1) * KV + head + one) * DIM + half[None, :]
    tl.store(target + c_kind, tl.load(value, mask=there[None, :], other=0.0), mask=there[None, :])
    upper = tl.load(value + DIM // 2, mask=there[None, :], other=0.0)
    tl.store(target + c_kind + DIM // 2, upper, mask=there[None, :])


def step_attention(
    qkv: Float[Tensor, "n heads_and_2kv dim"],
    cache: Float[Tensor, "2 slots kv places dim"],
    slots: Int[Tensor, " n"],
    places: Int[Tensor, " n"],
    lanes: Lanes,
    scaling: float,
    window: int | None,
) -> Float[Tensor, "n heads dim"]:
    """Returns the attention of one token of each row over the places of its slot up to its own."""
    n, dim, kv = len(qkv), qkv.shape[-1], cache.shape[2]
    group = qkv.shape[1] // kv - 2
    splits = min(MOST_SPLITS, triton.next_power_of_2(triton.cdiv(4 * processors(qkv.device), n * kv)))
    out = qkv.new_empty(n, group * kv, dim)
    # Of each share of a row: its weighted sum, and the logarithm of its weight.
    sums = qkv.new_empty((n, group * kv, splits, dim), dtype=torch.float32) if splits > 1 else out
    masses = qkv.new_empty((n, group * kv, splits), dtype=torch.float32) if splits > 1 else out
    block = max(16, triton.next_power_of_2(dim))
    together = splits == 1 and n * kv * block <= RESIDENT * processors(qkv.device)
    _step_attention[(n, kv, splits)](
        qkv, cache, slots, places, lanes.sources, lanes.shared, out, sums, masses, scaling, window or 0,
        cache.stride(0), cache.stride(1), cache.shape[3], KV=kv, GROUP=group,
        MEMBERS=max(16, triton.next_power_of_2(group)), DIM=dim, BLOCK=block,
        KEYS=KEYS, TURN=together, WINDOWED=window is not None, SPLITS=splits, num_warps=max(1, block // WARP),
        num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _combine[(n, group * kv)](
            sums, masses, out, HEADS=group * kv, DIM=dim, BLOCK=block, SPLITS=splits, num_warps=1
        )
    return out


@triton.jit(do_not_specialize=["window", "length"])
def _step_attention(
    qkv, cache, slots, places, sources, shared, out, sums, masses, scaling, window, c_kind, c_slot, length,
    KV: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, SPLITS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    token, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    # A token of no row sees no places, and its result is never read.
    end = (tl.load(places + token) + 1).to(tl.int32)
    slot = tl.maximum(tl.load(slots + token), 0).to(tl.int64)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(end - window, 0)
    share = tl.cdiv(tl.cdiv(end - begin, KEYS), SPLITS) * KEYS
    first = begin + split * share
    last = tl.minimum(first + share, end)
    member, d = tl.arange(0, MEMBERS), tl.arange(0, BLOCK)
    asked = (member < GROUP)[:, None] & (d < DIM)[None, :]
    at = (head * GROUP + member)[:, None] * DIM + d[None, :]
    query = tl.load(qkv + token * ((GROUP + 2) * KV * DIM) + at, mask=asked, other=0.0)
    base = cache + head.to(tl.int64) * length * DIM
    own, other = slot * c_slot, tl.load(sources + slot).to(tl.int64) * c_slot
    border = tl.load(shared + slot).to(tl.int32)
    top = tl.full((MEMBERS,), -float("inf"), tl.float32)
    mass = tl.zeros((MEMBERS,), tl.float32)
    total = tl.zeros((MEMBERS, BLOCK), tl.float32)
    # Programs that begin together read a shared prompt together, from the cache of the chip, while its memory idles.
    # So half of the heads begin at the end.
    blocks = tl.cdiv(tl.maximum(last - first, 0), KEYS)
    for i in range(blocks):
        block = i
        if TURN:
            block = tl.where(head % 2 == 1, blocks - 1 - i, i)
        n = first + block * KEYS + tl.arange(0, KEYS)
        there = (n < last)[:, None] & (d < DIM)[None, :]
        at_keys = base + (tl.where(n < border, other, own) + n * DIM)[:, None] + d[None, :]
        keys = tl.load(at_keys, mask=there, other=0.0)
        values = tl.load(at_keys + c_kind, mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scaling
        scores = tl.where((n < last)[None, :], scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        shares, shrink = tl.exp(scores - new[:, None]), tl.exp(top - new)
        mass = mass * shrink + tl.sum(shares, 1)
        total = tl.dot(shares.to(values.dtype), values, total * shrink[:, None], input_precision="ieee")
        top = new
    result = total / tl.where(mass > 0, mass, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out + token * (GROUP * KV * DIM) + at, result.to(out.dtype.element_ty), mask=asked)
    else:
        part = (token * (GROUP * KV) + head * GROUP + member) * SPLITS + split
        tl.store(sums + part[:, None] * DIM + d[None, :], result, mask=asked)
        tl.store(masses + part, top + tl.log(mass), mask=member < GROUP)


@triton.jit
def _combine(sums, masses, out, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    mass = tl.load(masses + row * SPLITS + split)
    mass = tl.exp(mass - tl.maximum(tl.max(mass), -3e38))
    at = sums + (row * SPLITS + split)[:, None] * DIM + d[None, :]
    parts = tl.load(at, mask=(d < DIM)[None, :], other=0.0)
    whole = tl.sum(mass)
    result = tl.sum(parts * mass[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out + row * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


def advance(
    lanes: Lanes,
    slots: Int[Tensor, " n"],
    places: Int[Tensor, " n"],
    tokens: Int[Tensor, " n"],
    log_probs: Float[Tensor, " n"],
    full: Float[Tensor, " n"],
    near: Bool[Tensor, " n"],
) -> None:
    """Keeps the draws of rows that are alive, and ends the rows that are done."""
    n = len(slots)
    _advance[(triton.cdiv(n, 128),)](
        slots, places, tokens, log_probs, full, near, lanes.tokens, lanes.places, lanes.ends, lanes.alive,
        lanes.drawn, lanes.log_probs, lanes.full_log_probs, lanes.near, lanes.versions, lanes.version, lanes.stops,
        n, lanes.drawn.shape[1], len(lanes.stops) - 1, BLOCK=128, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "length", "nothing"])
def _advance(
    slots, places, tokens, log_probs, full, near, l_tokens, l_places, l_ends, l_alive, l_drawn, l_log_probs, l_full,
    l_near, l_versions, version, stops, n, length, nothing, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + lane, mask=lane < n, other=-1)
    live = place >= 0
    slot = tl.load(slots + lane, mask=live, other=0)
    token = tl.load(tokens + lane, mask=live, other=0)
    at = slot * length + place + 1
    tl.store(l_drawn + at, token, mask=live)
    tl.store(l_log_probs + at, tl.load(log_probs + lane, mask=live, other=0.0), mask=live)
    tl.store(l_full + at, tl.load(full + lane, mask=live, other=0.0), mask=live)
    tl.store(l_near + at, tl.load(near + lane, mask=live, other=0), mask=live)
    tl.store(l_versions + at, tl.load(version), mask=live)
    stopped = tl.load(stops + token, mask=live, other=0) != 0
    ended = stopped | (place + 1 >= tl.load(l_ends + slot, mask=live, other=0))
    # A draw from NaN is no token that can be looked up.
    tl.store(l_tokens + slot, tl.where(token == nothing, 0, token), mask=live)
    tl.store(l_places + slot, place + 1, mask=live)
    tl.store(l_alive + slot, ended == 0, mask=live)
