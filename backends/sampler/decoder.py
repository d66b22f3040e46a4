"""Decoders: language models with a cache of slots, prefilled by rows and advanced a token at a time.

``GeneralDecoder`` runs any model with packed rows through its own forward; ``llama.LlamaDecoder`` runs models of the
Llama shape with fewer operations. Both keep row i of a batch in slot i of a cache that is allocated once, make no
mask and do not sample. ``PastDecoder`` runs models with padded rows in transformers' own cache. ``RowDecoder`` runs
models for which that is wrong: it computes each row again for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.backends.hf.attention import Packing, packed_attention, softmax
from verl_fn.backends.hf.past import Past
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.hf.vision import Seen, attentions
from verl_fn.backends.protocol import Chunk
from verl_fn.backends.weight_sync import whole_of_parts
from verl_fn.state import POSITIONS, Batch, split_by_tokens

NAME = "verl_fn_decode"
# The most tokens, padding included, that a decoder without a cache computes at a time.
ROW_TOKENS = 16384


class Decoder(Protocol):
    """A causal language model with a cache of ``slots`` rows.

    Attributes:
        shapes: the shapes of the weights by name, tied ones once.
        vocab: the size of the vocabulary.
        model: transformers' model of the same folder.
    """

    shapes: dict[str, torch.Size]
    vocab: int
    model: torch.nn.Module

    def begin(self, frozen: Collection[str] = ()) -> None:
        """Allocates places for all of ``shapes``; their contents are lost.

        Args:
            frozen: the names of tensors that nobody writes, so the decoder may compute with them without a copy.
        """
        ...

    def write(self, chunk: Chunk) -> None:
        """Copies rows of a weight into its place, in the decoder's dtype."""
        ...

    def finish(self) -> None:
        """Makes the weights that were written since ``begin`` the model's weights."""
        ...

    def reserve(self, slots: int, length: int) -> None:
        """Makes the cache at least this large; a larger one loses the contents."""
        ...

    def prefill(self, rows: Batch, slots: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """Writes whole rows into ``slots``, and returns fp32 logits after the last token of each."""
        ...

    def step(self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], longest: int) -> Float[Tensor, "n V"]:
        """Appends a token to each of the first n slots, and returns fp32 logits after it.

        Args:
            tokens: one for each slot.
            positions: where they go in the slots.
            longest: no slot has more tokens.
        """
        ...

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies the first ``length`` tokens of slots into others."""
        ...

    def drop_cache(self) -> None:
        """Frees the cache's memory."""
        ...

    def drop_weights(self) -> None:
        """Frees the weights' memory."""
        ...


# Where tokens lie, and attention over it


class Where:
    """The places of a call's tokens in the cache: whole rows, or one token for each of the first slots.

    Args:
        slots: the slot of each token.
        positions: the place of each token within its slot.
        packing: the layout of whole rows; None for a step.
        longest: how many places of each slot are read.
    """

    def __init__(
        self, slots: Int[Tensor, " T"], positions: Int[Tensor, " T"], packing: Packing | None, longest: int
    ) -> None:
        self.slots, self.positions, self.packing, self.longest = slots, positions, packing, longest
        self._biases: dict[int | None, Tensor] = {}

    @classmethod
    def of_rows(cls, rows: Batch, slots: Int[Tensor, " B"], device: torch.device) -> Where:
        packing = Packing.of(rows, device)
        return cls(rows.spread(slots).to(device), rows.positions.to(device), packing, packing.longest)

    def bias(self, window: int | None, kv_heads: int, dtype: torch.dtype) -> Float[Tensor, "nk 1 L"]:
        """Returns a bias that hides places from a step's tokens; layers with the same window share it."""
        if window not in self._biases:
            places = torch.arange(self.longest, device=self.positions.device)
            age = self.positions[:, None] - places
            hidden = age < 0 if window is None else (age < 0) | (age >= window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._biases[window] = bias[:, None, None].expand(-1, kv_heads, 1, -1).flatten(0, 1)
        return self._biases[window]


def attend(
    query: Float[Tensor, "n heads dim"],
    keys: Float[Tensor, "slots kv_heads places dim"],
    values: Float[Tensor, "slots kv_heads places vdim"],
    where: Where,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "n heads vdim"]:
    """Computes attention of one query for each row; query heads that share a KV head are queries of it, uncopied."""
    n, kv_heads = len(query), keys.shape[1]
    # Batched matrix products are several times as fast here as SDPA: it handles each row and head by itself.
    k = keys[:n, :, : where.longest].flatten(0, 1)
    v = values[:n, :, : where.longest].flatten(0, 1)
    bias = where.bias(window, kv_heads, query.dtype)
    q = query.reshape(n * kv_heads, -1, query.shape[-1])
    if softcap is None and sinks is None:
        shares = torch.softmax(torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scaling), -1)
    else:
        scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scaling).view(n, query.shape[1], 1, -1)
        of_row = bias.view(n, kv_heads, 1, -1)[:, :1]
        shares = softmax(scores, softcap, sinks, of_row).view(n * kv_heads, -1, scores.shape[-1]).to(v.dtype)
    return torch.bmm(shares, v).view(n, query.shape[1], -1)


def slot_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 heads T dim"],
    key: Float[Tensor, "1 kv_heads T dim"],
    value: Float[Tensor, "1 kv_heads T vdim"],
    attention_mask: Tensor | None,
    *,
    cache: Cache,
    where: Where,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 T heads vdim"], None]:
    """Computes transformers' attention over the cache: writes the tokens' keys and values, then reads the slots."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    keys, values = cache.layer(module, k, v)
    keys.transpose(1, 2).index_put_((where.slots, where.positions), k)
    values.transpose(1, 2).index_put_((where.slots, where.positions), v)
    if where.packing is not None:
        return packed_attention(
            module, query, key, value, None, packing=where.packing, scaling=scaling, sliding_window=sliding_window,
            softcap=softcap, s_aux=s_aux,
        )  # fmt: skip
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    attended = attend(q, keys, values, where, scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    return attended[None], None


def register() -> None:
    """Registers the function with transformers, and an empty mask for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, slot_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


# Any model


class Cache:
    """Keys and values of each attention layer, ``[slots, kv_heads, length, dim]``, allocated when it first runs."""

    def __init__(self, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self.layers: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}

    def layer(self, module: torch.nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if module not in self.layers:
            # Zeros, since hidden places are multiplied by zero, and zero times NaN is NaN.
            empty = [x.new_zeros(self.slots, x.shape[1], self.length, x.shape[2]) for x in (k, v)]
            self.layers[module] = empty[0], empty[1]
        return self.layers[module]


class GeneralDecoder:
    """Runs any causal language model with packed rows through its own forward; see ``Decoder``."""

    # What the model is given as its mask.
    _mask: Tensor | None = None

    def __init__(
        self, skeleton: Skeleton, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.skeleton, self.shapes, self.device = skeleton, shapes, device
        self.vocab = skeleton.output_layer.weight.shape[0]
        model: Any = skeleton.model
        self.model = model
        if not isinstance(self, RowDecoder):
            register()
            model.set_attn_implementation(attentions(model.config, NAME))
        skeleton.move_buffers(device)
        self._dtype = dtype
        self._weights: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        # The names of a state's own tensors that this publication may take, and of the ones that were taken.
        self._frozen: frozenset[str] = frozenset()
        self._taken: set[str] = set()
        self._cache = Cache(0, 0)
        # For each slot, how far the positions of text lie behind its places, since images have fewer positions than
        # tokens.
        self._behind = torch.zeros(0, dtype=torch.int64, device=device)

    def begin(self, frozen: Collection[str] = ()) -> None:
        self._frozen = frozenset(frozen)
        # A tensor of a state is never written to, so what is copied needs a place of its own.
        kept = {name: t for name, t in self._weights.items() if name not in self._taken}
        self._taken = set()
        self._weights = {
            name: kept[name] if name in kept else torch.empty(shape, dtype=self._dtype, device=self.device)
            for name, shape in self.shapes.items()
            if name not in self._frozen
        }

    def write(self, chunk: Chunk) -> None:
        if chunk.name in self._frozen:
            if self._fits(chunk):
                self._weights[chunk.name] = chunk.values.view(self.shapes[chunk.name])
                self._taken.add(chunk.name)
                return
            if chunk.name not in self._weights:
                shape = self.shapes[chunk.name]
                self._weights[chunk.name] = torch.empty(shape, dtype=self._dtype, device=self.device)
        place = self._weights[chunk.name]
        rows = place.view(1) if place.ndim == 0 else place
        rows[chunk.start : chunk.start + len(chunk.values)].copy_(chunk.values)

    def _fits(self, chunk: Chunk) -> bool:
        """Returns whether a chunk is a whole tensor with which this engine can compute."""
        values = chunk.values
        whole = values.numel() == self.shapes[chunk.name].numel()
        return whole and values.dtype == self._dtype and values.device == self.device

    def finish(self) -> None:
        self._buffers = {name: whole_of_parts(self._weights[name]) for name in self.skeleton.constants}

    def reserve(self, slots: int, length: int) -> None:
        if slots > self._cache.slots or length > self._cache.length:
            self._cache = Cache(slots, length)
            self._behind = torch.zeros(slots, dtype=torch.int64, device=self.device)

    def prefill(self, rows: Batch, slots: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        where = Where.of_rows(rows, slots, self.device)
        rows = rows.to(self.device)
        behind = rows[POSITIONS][rows.last] if POSITIONS in rows else rows.last.new_zeros(len(rows), 2)
        self._behind[slots.to(self.device)] = behind[:, 0] - behind[:, 1:].amax(1)
        seen = Seen.of(self.skeleton.family, self.skeleton.config, rows)
        if seen is not None and where.packing is not None:
            where.packing = attrs.evolve(where.packing, blocks=seen.blocks)
        return self._logits(rows.tokens, where, rows.last, seen)

    def step(self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], longest: int) -> Float[Tensor, "n V"]:
        slots = torch.arange(len(tokens), device=self.device)
        return self._logits(tokens, Where(slots, positions, None, longest), None)

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        for tensors in self._cache.layers.values():
            for t in tensors:
                t[targets, :, :length] = t[sources, :, :length]
        self._behind[targets] = self._behind[sources]

    def drop_cache(self) -> None:
        self._cache = Cache(0, 0)

    def drop_weights(self) -> None:
        self._weights, self._taken = {}, set()

    def _logits(
        self, tokens: Tensor, where: Where, last: Tensor | None, seen: Seen | None = None
    ) -> Float[Tensor, "n V"]:
        places = where.positions[None]
        if (family := self.skeleton.family) is not None and family.axes:
            # Only text follows a prompt, so it has one position on all axes of images.
            text = where.positions - self._behind[where.slots]
            places = torch.stack([where.positions, text, text, text])[:, None]

        def forward(skeleton: Skeleton) -> Tensor:
            given: dict[str, Any] = {
                "attention_mask": self._mask,
                "use_cache": False,
                "cache": self._cache,
                "where": where,
            }
            if seen is None:
                outputs = skeleton.body(input_ids=tokens[None], position_ids=places, **given)
            else:
                outputs = skeleton.read(tokens, places, seen, **given)
            hidden = outputs.last_hidden_state[0]
            return skeleton.logits(hidden if last is None else hidden[last])

        return self.skeleton.run(self._weights | self._buffers, forward)


class RowDecoder(GeneralDecoder):
    """Runs any causal language model with padded rows; see ``Decoder``.

    It holds the tokens of the slots instead of a cache, whose layout differs from family to family, and computes
    whole rows: n tokens take n passes over up to n tokens.
    """

    def __init__(
        self, skeleton: Skeleton, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(skeleton, shapes, device, dtype)
        self._texts = torch.zeros(0, 0, dtype=torch.int64)

    def reserve(self, slots: int, length: int) -> None:
        if slots > self._texts.shape[0] or length > self._texts.shape[1]:
            self._texts = torch.zeros(slots, length, dtype=torch.int64)

    def prefill(self, rows: Batch, slots: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        self._texts[rows.spread(slots), rows.positions] = rows.tokens
        return self._after(rows)

    def step(self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], longest: int) -> Float[Tensor, "n V"]:
        ends = positions.cpu()
        self._texts[torch.arange(len(ends)), ends] = tokens.cpu()
        texts = zip(self._texts, (ends + 1).tolist(), strict=False)
        return self._after(Batch.from_rows([text[:end] for text, end in texts]))

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        self._texts[targets, :length] = self._texts[sources, :length]

    def drop_cache(self) -> None:
        self._texts = torch.zeros(0, 0, dtype=torch.int64)

    def _after(self, rows: Batch) -> Float[Tensor, "B V"]:
        """Returns fp32 logits after the last token of each row."""
        split = split_by_tokens(rows, max(ROW_TOKENS, int(rows.lengths.max())), padded=True)
        return torch.cat([self._part(part) for part in split])[split.inverse.to(self.device)]

    def _part(self, rows: Batch) -> Float[Tensor, "B V"]:
        packing, last = Packing.of(rows, self.device), rows.last.to(self.device)
        given = rows.tokens.to(self.device), rows.positions.to(self.device), packing

        def forward(skeleton: Skeleton) -> Tensor:
            return skeleton.logits(skeleton.hidden_states(*given)[last])

        return self.skeleton.run(self._weights | self._buffers, forward)


class PastDecoder(RowDecoder):
    """Runs a causal language model whose rows go on from transformers' own cache; see ``Decoder``.

    Such are models with linear attention or Mamba layers.
    """

    def __init__(
        self, skeleton: Skeleton, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(skeleton, shapes, device, dtype)
        self._past = Past(skeleton)

    def reserve(self, slots: int, length: int) -> None:
        """Does nothing, since the cache grows with its rows."""

    def prefill(self, rows: Batch, slots: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        rows = rows.to(self.device)
        return self._with_weights(lambda skeleton: skeleton.logits(self._past.read(skeleton, rows, slots)))

    def step(self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], longest: int) -> Float[Tensor, "n V"]:
        return self._with_weights(
            lambda skeleton: skeleton.logits(self._past.step(skeleton, tokens, positions, longest))
        )

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        self._past.copy(sources, targets)

    def drop_cache(self) -> None:
        self._past = Past(self.skeleton)

    def _with_weights(self, fn: Callable[[Skeleton], Tensor]) -> Tensor:
        logits: Tensor = self.skeleton.run(self._weights | self._buffers, fn)
        return logits
