"""Decoders: language models with a cache of slots, prefilled by rows and advanced a token at a time.

``GeneralDecoder`` runs any model with packed rows through its own forward; ``llama.LlamaDecoder`` runs models of the
Llama shape with fewer operations. Both keep row i of a batch in slot i of a cache that is allocated once, make no
mask and do not sample. ``RowDecoder`` runs models with padded rows, and computes each row again for every token. The
log-probs of ``ExactDecoder`` equal the trainer's in every bit: it has the trainer's kernels, over a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_fn.backends.draws import Draws
from verl_fn.backends.hf import exact
from verl_fn.backends.hf.attention import Packing, packed_attention, register, softmax
from verl_fn.backends.hf.exact import LOG_PROBS, Activations, recorded
from verl_fn.backends.hf.logprobs import on_cuda
from verl_fn.backends.hf.past import Past
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.hf.vision import Seen, attentions
from verl_fn.backends.protocol import Chunk, Request
from verl_fn.backends.serving import seeds_of
from verl_fn.backends.weight_sync import whole_of_parts
from verl_fn.state import POSITIONS, Batch, split_by_tokens, version_of

NAME = "verl_fn_decode"
# The most tokens, padding included, that a decoder without a cache computes at a time.
ROW_TOKENS = 16384
# The most tokens of prompts that a prefill computes at a time: a bound of its memory.
PREFILL_TOKENS = 16384
# New rows begin when one slot in this many is free: a prefill of few rows takes as long as a step.
REFILL_PART = 8


# Where tokens lie, and attention over it


class Where:
    """The places of a call's tokens in the cache: whole rows, or one token for each of the first slots.

    Args:
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
    keys, values = cache.written(module, k, v, where)
    if cache.exact:
        assert scaling is not None
        if where.packing is not None:
            return exact.packed_attention(q, k, v, where.packing, scaling, sliding_window)[None], None
        places = -(-where.longest // exact.KEYS) * exact.KEYS
        k, v = (x[: len(q), :, :places] for x in (keys, values))
        return exact.step_attention(q, k, v, where.positions, scaling, sliding_window)[None], None
    if where.packing is not None:
        return packed_attention(
            module, query, key, value, None, packing=where.packing, scaling=scaling, sliding_window=sliding_window,
            softcap=softcap, s_aux=s_aux,
        )  # fmt: skip
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    attended = attend(q, keys, values, where, scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    return attended[None], None


# Any model


class Cache:
    """Keys and values of each attention layer, ``[slots, kv_heads, length, dim]``, allocated when it first runs.

    Args:
        exact: whether attention over it has the kernels of ``hf.exact``.
    """

    def __init__(self, slots: int, length: int, exact: bool) -> None:
        self.slots, self.length, self.exact = slots, length, exact
        self.layers: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}

    def written(self, module: torch.nn.Module, k: Tensor, v: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of a layer's tokens, and returns the ones of all slots."""
        if module not in self.layers:
            # Zeros, since hidden places are multiplied by zero, and zero times NaN is NaN.
            empty = [x.new_zeros(self.slots, x.shape[1], self.length, x.shape[2]) for x in (k, v)]
            self.layers[module] = empty[0], empty[1]
        for slots, x in zip(self.layers[module], (k, v), strict=True):
            if x.is_cuda:
                on_cuda().store(x, slots, where.slots, where.positions)
            else:
                slots.transpose(1, 2).index_put_((where.slots, where.positions), x)
        return self.layers[module]


class GeneralDecoder:
    """Runs any causal language model with packed rows through its own forward, with a cache of ``slots`` rows.

    Attributes:
        shapes: the shapes of the weights by name, tied ones once.
        model: transformers' model of the same folder.
        keeps_prompts: whether ``copy`` copies a prompt even after more tokens were appended to it.
    """

    # What the model is given as its mask.
    _mask: Tensor | None = None
    _cache: Cache

    with_own_attention = True  # in place of transformers'
    is_exact = False
    keeps_prompts = True

    def __init__(
        self, skeleton: Skeleton, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.skeleton, self.shapes, self.device = skeleton, shapes, device
        self.vocab = skeleton.output_layer.weight.shape[0]
        model: Any = skeleton.model
        self.model = model
        if self.with_own_attention:
            register(NAME, slot_attention)
            model.set_attn_implementation(attentions(model.config, NAME))
        skeleton.move_buffers(device)
        self._dtype = dtype
        self._weights: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        # The names of a state's own tensors that this publication may take, and of the ones that were taken, with the
        # version that each had.
        self._frozen: frozenset[str] = frozenset()
        self._taken: dict[str, int] = {}
        self.drop_cache()
        # For each slot, how far the positions of text lie behind its places, since images have fewer positions than
        # tokens.
        self._behind = torch.zeros(0, dtype=torch.int64, device=device)

    def begin(self, frozen: Collection[str] = (), kept: Collection[str] = ()) -> None:
        """Allocates places for all of ``shapes``; their contents are lost, but for ``kept``.

        Args:
            frozen: the names of tensors that nobody writes, so the decoder may compute with them without a copy.
            kept: the names of weights that stay as they are and are not written; a model with images has some.
        """
        self._frozen = frozenset(frozen).difference(kept)
        # A tensor of a state is never written to, so what is copied needs a place of its own.
        stays = {name: t for name, t in self._weights.items() if name in kept or name not in self._taken}
        self._taken = {name: version for name, version in self._taken.items() if name in kept}
        self._weights = {
            name: stays[name] if name in stays else torch.empty(shape, dtype=self._dtype, device=self.device)
            for name, shape in self.shapes.items()
            if name not in self._frozen
        }

    def write(self, chunk: Chunk) -> None:
        """Copies rows of a weight into its place, in the decoder's dtype."""
        if chunk.name in self._frozen:
            if self._fits(chunk):
                self._weights[chunk.name] = chunk.values.view(self.shapes[chunk.name])
                self._taken[chunk.name] = version_of(chunk.values)
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

    @property
    def intact(self) -> bool:
        """Whether nothing was written to the tensors of a state with which the decoder computes without a copy."""
        return all(version_of(self._weights[name]) == version for name, version in self._taken.items())

    def finish(self) -> None:
        """Makes the weights that were written since ``begin`` the model's weights."""
        self._buffers = {name: whole_of_parts(self._weights[name]) for name in self.skeleton.constants}

    def reserve(self, slots: int, length: int) -> None:
        """Makes the cache at least this large; a larger one loses the contents."""
        if slots > self._cache.slots or length > self._cache.length:
            self._cache = Cache(slots, length, self.is_exact)
            self._behind = torch.zeros(slots, dtype=torch.int64, device=self.device)

    def prefill(self, rows: Batch, slots: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """Writes whole rows into ``slots``, and returns the logits after the last token of each."""
        where = Where.of_rows(rows, slots, self.device)
        rows = rows.to(self.device)
        behind = rows[POSITIONS][rows.last] if POSITIONS in rows else rows.last.new_zeros(len(rows), 2)
        self._behind[slots.to(self.device)] = behind[:, 0] - behind[:, 1:].amax(1)
        seen = Seen.of(self.skeleton.family, self.skeleton.config, rows)
        if seen is not None and where.packing is not None:
            where.packing = attrs.evolve(where.packing, blocks=seen.blocks)
        return self._logits(rows.tokens, where, rows.last, seen)

    def step(self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], longest: int) -> Float[Tensor, "n V"]:
        """Appends a token to each of the first n slots, and returns the logits after it.

        Args:
            tokens: one for each slot.
            positions: where they go in the slots.
            longest: no slot has more tokens.
        """
        slots = torch.arange(len(tokens), device=self.device)
        return self._logits(tokens, Where(slots, positions, None, longest), None)

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies the first ``length`` tokens of slots into others."""
        for tensors in self._cache.layers.values():
            for t in tensors:
                t[targets, :, :length] = t[sources, :, :length]
        self._behind[targets] = self._behind[sources]

    def drop_cache(self) -> None:
        """Frees the cache's memory."""
        self._cache = Cache(0, 0, self.is_exact)

    def drop_weights(self) -> None:
        """Frees the weights' memory."""
        self._weights, self._taken = {}, {}

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
            return self._head(skeleton, hidden if last is None else hidden[last])

        return self._run(forward)

    def _head(self, skeleton: Skeleton, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        return skeleton.logits(hidden)

    def _run(self, fn: Callable[[Skeleton], Tensor]) -> Tensor:
        logits: Tensor = self.skeleton.run(self._weights | self._buffers, fn)
        return logits


class RowDecoder(GeneralDecoder):
    """Runs any causal language model with padded rows; see ``GeneralDecoder``.

    It holds the tokens of the slots instead of a cache, whose layout differs from family to family, and computes
    whole rows: n tokens take n passes over up to n tokens.
    """

    with_own_attention = False
    _texts: Int[Tensor, "slots length"]

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

        return self._run(lambda skeleton: skeleton.logits(skeleton.hidden_states(*given)[last]))


class PastDecoder(GeneralDecoder):
    """Runs a causal language model whose rows go on from transformers' own cache; see ``GeneralDecoder``.

    Such are models with linear attention or Mamba layers.
    """

    with_own_attention = False
    # A state has taken in all tokens so far.
    keeps_prompts = False

    def reserve(self, slots: int, length: int) -> None:
        """Forgets what earlier rows have read; the cache grows with its rows."""
        self.drop_cache()

    def prefill(self, rows: Batch, slots: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        rows, past = rows.to(self.device), self._past
        return self._run(lambda skeleton: skeleton.logits(past.read(skeleton, rows, slots)))

    def step(self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], longest: int) -> Float[Tensor, "n V"]:
        past = self._past
        return self._run(lambda skeleton: skeleton.logits(past.step(skeleton, tokens, positions, longest)))

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        self._past.copy(sources, targets)

    def drop_cache(self) -> None:
        self._past = Past(self.skeleton)


class Run:
    """The decoding of requests whose sampling differs only in ``max_tokens``.

    Args:
        draws: draws their tokens.
        slots: the most rows that are decoded at a time.
    """

    def __init__(
        self, requests: Sequence[Request], draws: Draws, slots: int, end_tokens: Set[int], device: torch.device
    ) -> None:
        self.draws, self.device = draws, device
        self.prompts = [request.prompt for request in requests]
        first: dict[Any, int] = {}
        # For each request, the first one with the same prompt. Images are equal only if they are one object.
        self.same = [first.setdefault((one.prompt, one.images), i) for i, one in enumerate(requests)]
        sampling, self.n = requests[0].sampling, requests[0].sampling.n
        self.limits = [request.sampling.max_tokens for request in requests]
        self.seeds = torch.tensor(seeds_of(requests), device=device)
        self.stops = end_tokens | set(sampling.stop_token_ids)
        self.slots = min(slots, len(self.seeds))
        self.length = max(len(p) + limit for p, limit in zip(self.prompts, self.limits, strict=True))
        self.begun = self.step = 0
        # The rows that are decoded, by slot.
        self.rows: Collection[int] = []
        # Of the next step's weights, the version, and the number of the publication.
        self.version = self.weights = -1
        self.finished: set[int] = set()
        # If experts are recorded, for each row the experts of the prompt's tokens but the last.
        self.before: dict[int, Tensor] = {}

    @property
    def unfinished(self) -> bool:
        """Whether a row has not ended."""
        return bool(self.rows) or self.begun < len(self.seeds)

    def due(self) -> int:
        """Returns how many rows are to begin now."""
        free, waiting = self.slots - len(self.rows), len(self.seeds) - self.begun
        return min(free, waiting) if free >= min(waiting, max(1, self.slots // REFILL_PART)) else 0

    def begin(self, slots: Sequence[int], held: Mapping[int, int], budget: int) -> Begun:
        """Gives slots to rows that wait, until the prompts to compute have ``budget`` tokens; one is always computed.

        Args:
            slots: free ones.
            held: prompts that lie in the cache, with a slot of each.
            budget: the most tokens of all prompts to compute, if they are several.
        """
        begun, slot_of = Begun([], {}, [], []), dict(held)
        for row, slot in zip(range(self.begun, len(self.seeds)), slots, strict=False):
            prompt = self.same[row // self.n]
            if prompt in slot_of:
                begun.sources.append(slot_of[prompt])
                begun.targets.append(slot)
            else:
                budget -= len(self.prompts[prompt])
                if budget < 0 and begun.fresh:
                    break
                begun.fresh[prompt] = slot_of[prompt] = slot
            begun.rows.append(row)
        self.begun += len(begun.rows)
        return begun


@attrs.frozen
class Begun:
    """Rows that begin together. Prompts are named by the first request that has them.

    Attributes:
        rows: their numbers.
        fresh: the prompts to compute, with the slot of each.
        sources: slots that hold the prompts of other rows.
        targets: the slots of these rows.
    """

    rows: list[int]
    fresh: dict[int, int]
    sources: list[int]
    targets: list[int]


class ExactDecoder(GeneralDecoder):
    """Runs a model with the kernels of ``hf.exact``; see ``GeneralDecoder``."""

    is_exact = True

    def __init__(
        self, skeleton: Skeleton, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(skeleton, shapes, device, dtype)
        exact.adopt(skeleton, NAME)
        # transformers reads no mask of four dimensions; without one it waits for the positions, to look for rows.
        self._mask = torch.empty(1, 1, 1, 1, device=device)

    def reserve(self, slots: int, length: int) -> None:
        # Whole blocks of keys.
        super().reserve(slots, -(-length // exact.KEYS) * exact.KEYS)

    def compute_with(self, weights: dict[str, Tensor]) -> None:
        """Takes all weights, without a copy."""
        self._weights = weights
        self.finish()

    def _head(self, skeleton: Skeleton, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Returns logits in the dtype of the output layer, in which the trainer reduces them."""
        logits: Tensor = skeleton.output_layer(hidden.to(skeleton.output_layer.weight.dtype))
        return logits

    def activations(self, batch: Batch, log_probs: Callable[[Tensor, Tensor], Tensor]) -> Activations:
        """Returns the activations of rows whose responses are appended token by token, as in a rollout.

        Args:
            batch: the rows; ``response_mask`` begins the responses.
            log_probs: ``(logits, tokens) -> log-probs``.
        """
        found, head = Activations(batch.num_tokens), self.skeleton.output_name
        starts, lengths = batch.cu_seqlens[:-1].long(), batch.lengths
        prompts = torch.stack([row.nonzero()[0, 0] for row in batch["response_mask"].split(lengths.tolist())])
        # Rows with the most steps first, since those that are left have the first slots.
        order = (prompts - lengths).argsort(stable=True)
        starts, lengths, prompts = starts[order], lengths[order], prompts[order]

        def write(tokens: Tensor, ends: Tensor, logits: Tensor) -> None:
            for name, output in outputs.items():
                found.write(name, ends if name == head else tokens, output)
            drawn = batch["response_mask"][ends + 1] != 0
            if bool(drawn.any()):
                targets = batch.tokens[ends + 1].to(self.device)
                found.write(LOG_PROBS, ends[drawn] + 1, log_probs(logits, targets)[drawn.to(self.device)])

        self.reserve(len(batch), int(lengths.max()))
        with recorded(self.skeleton.model) as outputs:
            spans = [torch.arange(start, start + n) for start, n in zip(starts, prompts, strict=True)]
            rows = Batch.from_rows([batch.tokens[span] for span in spans])
            logits = self.prefill(rows, torch.arange(len(spans)))
            write(torch.cat(spans), starts + prompts - 1, logits)
            for step in range(int((lengths - prompts).max()) - 1):
                at = (prompts + step)[lengths - prompts - 1 > step]
                index = starts[: len(at)] + at
                logits = self.step(batch.tokens[index].to(self.device), at.to(self.device), int(at.max()) + 1)
                write(index, index, logits)
        return found
