"""Decoding on a GPU without the host: models of the Llama shape in eight kernels a layer, and graphs of whole steps.

The host looks at rows every few steps, and never at a token. ``ExactFusedDecoder`` has the trainer's kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding, linear

from verl_fn.backends.draws import Draws
from verl_fn.backends.hf import exact
from verl_fn.backends.hf.attention import packed_attention
from verl_fn.backends.hf.exact import Activations
from verl_fn.backends.hf.logprobs import on_cuda
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.protocol import Request
from verl_fn.backends.sampler.decoder import PREFILL_TOKENS, ExactDecoder, Run, Where
from verl_fn.backends.sampler.llama import LlamaDecoder, LlamaWeights, window_of
from verl_fn.backends.serving import not_finite
from verl_fn.state import Batch, uniform_at

if TYPE_CHECKING:
    from .fused_kernels import Lanes

# The cache has a multiple of so many places, so that a somewhat longer call needs no other graphs.
PLACES = 32
# The steps between two looks of the host: rows that end meanwhile keep their slots until the next look.
STEPS = 8
# The most rows for which halves of the last product of a layer are computed side by side.
HALVED = 256


class FusedLayer(NamedTuple):
    """A layer's weights; projections of the same input are one."""

    before: Tensor
    qkv: Tensor
    bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    out: Tensor
    out_bias: Tensor | None
    after: Tensor
    gate_up: Tensor
    down: Tensor
    window: int | None


class FusedDecoder(LlamaDecoder):
    """Runs Llama, Mistral, Qwen2 and Qwen3 with kernels that do several operations each; see ``GeneralDecoder``.

    What a step computes depends on tensors of the device only. On CUDA it is a graph, recorded for a few numbers of
    lanes; on another device, where Triton interprets the kernels, the same step runs without one.
    """

    paired = False

    def __init__(
        self, skeleton: Skeleton, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(skeleton, shapes, device, dtype)
        self._turns = torch.empty(0, 2, self.dim // 2, dtype=dtype, device=device)
        self.lanes: Lanes | None = None
        self._forget()

    def finish(self) -> None:
        assert self._places is not None, "begin comes first"
        tensors = self._places.tensors
        embed = tensors["model.embed_tokens.weight"]
        layers = [_fused(tensors, i, window_of(self.config, i)) for i in range(self.config.num_hidden_layers)]
        self._weights = LlamaWeights(
            embed, layers, tensors["model.norm.weight"], tensors.get("lm_head.weight", embed)
        )

    def reserve(self, slots: int, length: int) -> None:
        from verl_fn.backends.sampler.fused_kernels import Lanes

        if slots > self._cache.shape[2] or length > self._cache.shape[4]:
            self._forget()
            length = -(-length // PLACES) * PLACES
            super().reserve(slots, length)
            self.lanes = Lanes.of(slots, length, self.vocab, self.device)

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        # Wide elements are copied several times as fast.
        width = self.dim * self.dtype.itemsize
        wide = next(kind for kind in (torch.complex128, torch.int64, torch.int32) if width % kind.itemsize == 0)
        for layer in self._cache.view(wide):
            layer[:, targets, :, :length] = layer[:, sources, :, :length]

    def drop_cache(self) -> None:
        self._forget()
        self.lanes = None
        super().drop_cache()

    def drop_weights(self) -> None:
        self._forget()
        super().drop_weights()

    def fill(self, rows: Batch, slots: Int[Tensor, " B"]) -> None:
        """Writes whole rows into ``slots``, without logits."""
        self._hidden(rows.tokens.to(self.device), Where.of_rows(rows, slots, self.device))

    def decode(self, slots: list[int], steps: int, draws: Draws) -> None:
        """Draws so many tokens for the rows in these slots that are alive, without waiting for them."""
        from verl_fn.backends.sampler.fused_kernels import lanes_for

        assert self.lanes is not None, "reserve comes first"
        n = lanes_for(len(slots))
        key = (n, draws.temperature, draws.top_k, draws.top_p, draws.cut)
        if self._pool is not None and key not in self._graphs:
            self._graphs[key] = self._recorded(self.lanes, n, draws)
        active = torch.tensor(slots + [-1] * (n - len(slots)), pin_memory=self.device.type == "cuda")
        self.lanes.active[:n].copy_(active, non_blocking=True)
        for _ in range(steps):
            if self._pool is None:
                self._step(self.lanes, n, draws)
            else:
                self._graphs[key].replay()

    def _forget(self) -> None:
        """Drops the graphs, which hold addresses of weights and cache, and their memory."""
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _recorded(self, lanes: Lanes, n: int, draws: Draws) -> torch.cuda.CUDAGraph:
        """Records a step; the one that runs first compiles kernels, and decodes no row."""
        lanes.active.fill_(-1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(lanes, n, draws)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(lanes, n, draws)
        return graph

    def _step(self, lanes: Lanes, n: int, draws: Draws) -> None:
        """Appends the last token of each active row to the cache, and draws the next one."""
        from verl_fn.backends.sampler.fused_kernels import advance, begin

        slots = lanes.active[:n]
        last, places, u = begin(lanes, slots)
        logits = self._product(self._hidden(last, Where(slots, places, None, 0)), self._loaded().head)
        tokens, log_probs, full, near = draws.columns(logits, u)
        advance(lanes, slots, places, tokens, log_probs, full, near)

    def _hidden(self, tokens: Int[Tensor, " T"], where: Where) -> Float[Tensor, "T H"]:
        kernels, T, eps, product = on_cuda(), len(tokens), self.config.rms_norm_eps, self._product
        weights = self._loaded()
        x = embedding(tokens, weights.embed)
        h = kernels.add_norm(x, None, weights.layers[0].before, eps)
        following = [*(layer.before for layer in weights.layers[1:]), weights.norm]
        for layer, cache, norm in zip(weights.layers, self._cache, following, strict=True):
            qkv = product(h, layer.qkv, layer.bias).view(T, self.heads + 2 * self.kv_heads, self.dim)
            attended = self._attended(qkv, cache, layer, where)
            h = kernels.add_norm(x, product(attended.reshape(T, -1), layer.out, layer.out_bias), layer.after, eps)
            gate, up = product(h, layer.gate_up).chunk(2, -1)
            h = kernels.add_norm(x, self._down(kernels.gated(gate, up), layer.down), norm, eps)
        return h

    def _product(self, x: Float[Tensor, "T K"], weight: Tensor, bias: Tensor | None = None) -> Float[Tensor, "T N"]:
        return linear(x, weight, bias)

    def _down(self, x: Float[Tensor, "T F"], weight: Float[Tensor, "H F"]) -> Float[Tensor, "*parts T H"]:
        """Returns the last product of a layer, or two parts whose sum it is.

        A few rows have too few tiles for all processors of a GPU. The library halves such products too, but adds the
        halves by a kernel of its own, and the norm that follows can do that.
        """
        T, half = len(x), x.shape[-1] // 2
        if T > HALVED or x.shape[-1] % 2 or not x.is_cuda:
            return self._product(x, weight)
        halves = x.view(T, 2, half).transpose(0, 1), weight.view(-1, 2, half).permute(1, 2, 0)
        return torch.bmm(*halves, out_dtype=torch.float32)

    def _attended(
        self, qkv: Float[Tensor, "T heads_and_2kv dim"], cache: Tensor, layer: FusedLayer, where: Where
    ) -> Float[Tensor, "T heads dim"]:
        """Rotates heads in place, writes keys and values into the cache, and returns the attention over it."""
        from verl_fn.backends.sampler.fused_kernels import rotate_and_store, step_attention

        slots, places, scaling = where.slots, where.positions, self.dim**-0.5
        rotate_and_store(qkv, cache, slots, places, self._turns, layer.norms, self.config.rms_norm_eps)
        if where.packing is None:
            assert self.lanes is not None, "reserve comes first"
            return step_attention(qkv, cache, slots, places, self.lanes, scaling, layer.window)
        q, k, v = (part.transpose(0, 1)[None] for part in self._split(qkv))
        attended, _ = packed_attention(
            self._rotary, q, k, v, None, packing=where.packing, scaling=scaling, sliding_window=layer.window
        )
        return attended[0]

    def _split(self, qkv: Float[Tensor, "T heads_and_2kv dim"]) -> tuple[Tensor, ...]:
        return qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)

    def _logits(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        return self._product(hidden, self._loaded().head).float()

    def _turns_to(self, length: int) -> Float[Tensor, "length 2 half"]:
        places = torch.arange(length, device=self.device)[None]
        like = torch.zeros(1, dtype=self.dtype, device=self.device)
        return torch.stack([x[0, :, : self.dim // 2] for x in self._rotary(like, places)], 1)


class ExactFusedDecoder(FusedDecoder):
    """A ``FusedDecoder`` whose results equal the trainer's in every bit: it has the kernels of ``hf.exact``."""

    def __init__(
        self, skeleton: Skeleton, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(skeleton, shapes, device, dtype)
        # Computes with modules, whose activations are compared with the trainer's.
        self._modules = ExactDecoder(skeleton, shapes, device, dtype)

    def activations(self, batch: Batch, log_probs: Callable[[Tensor, Tensor], Tensor]) -> Activations:
        """Returns the activations of the model's modules; see ``ExactDecoder``."""
        assert self._places is not None, "load comes first"
        self._modules.compute_with(self._places.views())
        try:
            return self._modules.activations(batch, log_probs)
        finally:
            self._modules.drop_weights()
            self._modules.drop_cache()

    def _product(self, x: Float[Tensor, "T K"], weight: Tensor, bias: Tensor | None = None) -> Float[Tensor, "T N"]:
        result: Tensor = on_cuda().product(x, weight, bias)
        return result

    def _down(self, x: Float[Tensor, "T F"], weight: Float[Tensor, "H F"]) -> Float[Tensor, "T H"]:
        return self._product(x, weight)

    def _attended(
        self, qkv: Float[Tensor, "T heads_and_2kv dim"], cache: Tensor, layer: FusedLayer, where: Where
    ) -> Float[Tensor, "T heads dim"]:
        from verl_fn.backends.sampler.fused_kernels import rotate_and_store

        slots, places, eps, scaling = where.slots, where.positions, self.config.rms_norm_eps, self.dim**-0.5
        q, k, v = self._split(qkv)
        if layer.norms is not None:
            for heads, weight in zip((q, k), layer.norms, strict=True):
                on_cuda().norm_heads(heads, weight, eps)
        rotate_and_store(qkv, cache, slots, places, self._turns, None, eps)
        if where.packing is not None:
            return exact.packed_attention(q, k, v, where.packing, scaling, layer.window)
        assert self.lanes is not None, "reserve comes first"
        lanes = slots, self.lanes.sources, self.lanes.shared
        attended: Tensor = on_cuda().step_attention(q, *cache, places, lanes, scaling, layer.window)
        return attended


def _fused(tensors: Mapping[str, Tensor], index: int, window: int | None) -> FusedLayer:
    prefix = f"model.layers.{index}."
    q_norm, k_norm = tensors.get(prefix + "q_norm"), tensors.get(prefix + "k_norm")
    return FusedLayer(
        before=tensors[prefix + "input_layernorm.weight"],
        qkv=tensors[prefix + "qkv.weight"],
        bias=tensors.get(prefix + "qkv.bias"),
        norms=None if q_norm is None or k_norm is None else (q_norm, k_norm),
        out=tensors[prefix + "self_attn.o_proj.weight"],
        out_bias=tensors.get(prefix + "self_attn.o_proj.bias"),
        after=tensors[prefix + "post_attention_layernorm.weight"],
        gate_up=tensors[prefix + "gate_up"],
        down=tensors[prefix + "mlp.down_proj.weight"],
        window=window,
    )


class GraphRun(Run):
    """A run on a decoder that never asks the host; see ``Run``."""

    def __init__(
        self, decoder: FusedDecoder, requests: Sequence[Request], draws: Draws, slots: int, end_tokens: Set[int]
    ) -> None:
        super().__init__(requests, draws, slots, end_tokens, decoder.device)
        self.decoder = decoder
        # Of the rows that are decoded, by slot: the row, and the step of its last draw.
        self.rows: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.free = list(range(self.slots))
        # For each slot, the one from which its row's prompt is read; both have it.
        self.source = list(range(self.slots))
        self._taken: list[tuple[Tensor, ...]] = []

    @torch.inference_mode()
    def loop(self) -> Iterator[list[int]]:
        """Draws tokens until every row has ended, and yields the rows that end within a few steps."""
        self.decoder.reserve(self.slots, self.length)
        lanes = self.decoder.lanes
        assert lanes is not None, "reserve allocates them"
        lanes.alive.fill_(False)
        lanes.stops.fill_(False)
        lanes.stops[[*self.stops, self.draws.nothing]] = True
        cached_by = self.weights
        while self.unfinished:
            if cached_by != self.weights:
                self._again(lanes)
            cached_by = self.weights
            if count := self.due():
                self._begin(lanes, count)
            lanes.version.fill_(self.version)
            slots, left = list(self.rows), max(self.last.values()) - self.step
            # The GPU computes the last step while the host looks. The last look comes after all steps, since they end
            # all rows.
            late = int(left > STEPS)
            steps = min(STEPS, left)
            self.decoder.decode(slots, steps - late, self.draws)
            alive = lanes.alive.to("cpu", non_blocking=True, copy=True)
            copied = torch.cuda.current_stream(self.device).record_event() if lanes.alive.is_cuda else None
            self.decoder.decode(slots, late, self.draws)
            self.step += steps
            if copied is not None:
                copied.synchronize()
            yield self._ended(lanes, alive.tolist())

    def take(self) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Returns the draws of rows that have ended since the last call; see ``Answers.collect``."""
        rows, *columns, versions = (torch.cat(column) for column in zip(*self._taken, strict=True))
        self._taken.clear()
        return rows, tuple(columns), versions

    def _begin(self, lanes: Lanes, count: int) -> None:
        """Gives slots to up to ``count`` rows; a prompt is computed once, all but its last token."""
        slots, held = self.free[::-1][:count], {self.same[row // self.n]: slot for slot, row in self.rows.items()}
        begun = self.begin(slots, held, PREFILL_TOKENS)
        fresh, requests = slots[: len(begun.rows)], [row // self.n for row in begun.rows]
        del self.free[-len(fresh) :]
        # Slots that get another prompt are no source any more.
        taken = set(fresh)
        left = [slot for slot in self.rows if self.source[slot] in taken]
        for slot in (*left, *begun.fresh.values()):
            self.source[slot] = slot
        for source, target in zip(begun.sources, begun.targets, strict=True):
            self.source[target] = self.source[source]
        for slot, row in zip(fresh, begun.rows, strict=True):
            self.rows[slot], self.last[slot] = row, self.step + self.limits[row // self.n]
        self._fill([self.prompts[prompt][:-1] for prompt in begun.fresh], list(begun.fresh.values()))
        if begun.sources:
            self.decoder.copy(begun.sources, begun.targets, max(len(self.prompts[i]) for i in requests))
        lengths, limits, lasts = (
            torch.tensor([of[i] for i in requests], device=self.device)
            for of in ([len(p) for p in self.prompts], self.limits, [p[-1] for p in self.prompts])
        )
        at = torch.tensor(fresh, device=self.device)
        lanes.tokens[at], lanes.places[at], lanes.ends[at] = lasts, lengths - 1, lengths + limits - 1
        lanes.alive[at], lanes.shared[at] = True, lengths - 1
        lanes.sources[: self.slots] = torch.tensor(self.source)
        places = torch.arange(1, lanes.uniforms.shape[1] + 1, device=self.device)
        lanes.uniforms[at] = uniform_at(self.seeds[begun.rows][:, None], places)

    def _fill(self, rows: Sequence[Sequence[int]], slots: list[int]) -> None:
        """Computes rows in parts; an empty one has nothing to compute."""
        there = [(row, slot) for row, slot in zip(rows, slots, strict=True) if len(row)]
        while there:
            ends = list(itertools.accumulate(len(row) for row, _ in there))
            count = max(1, sum(end <= PREFILL_TOKENS for end in ends))
            part, there = there[:count], there[count:]
            self.decoder.fill(Batch.from_rows([row for row, _ in part]), torch.tensor([slot for _, slot in part]))

    def _again(self, lanes: Lanes) -> None:
        """Computes the cache of all rows with new weights."""
        slots = list(self.rows)
        self.source = list(range(self.slots))
        lanes.sources[: self.slots] = torch.tensor(self.source)
        places, drawn = lanes.places[slots].tolist(), lanes.drawn[slots].tolist()
        prompts = [self.prompts[self.rows[slot] // self.n] for slot in slots]
        texts = [
            [*prompt, *tokens[len(prompt) :]][:place]
            for prompt, place, tokens in zip(prompts, places, drawn, strict=True)
        ]
        self._fill(texts, slots)

    def _ended(self, lanes: Lanes, alive: list[bool]) -> list[int]:
        """Returns the rows that have ended, and keeps their draws.

        Args:
            alive: of each slot.
        """
        slots = [slot for slot in self.rows if not alive[slot]]
        if not slots:
            return []
        at = torch.tensor(slots, device=self.device)
        ends = lanes.places[at]
        firsts = torch.tensor([len(self.prompts[self.rows[slot] // self.n]) for slot in slots], device=self.device)
        last = lanes.drawn[at, ends].tolist()
        rows = [self.rows.pop(slot) for slot in slots]
        if self.draws.nothing in last:
            raise not_finite(rows[last.index(self.draws.nothing)], self.n)
        counts = ends - firsts + 1
        of = torch.arange(len(slots), device=self.device).repeat_interleave(counts)
        before = counts.cumsum(0) - counts
        index = at[of] * lanes.drawn.shape[1] + firsts[of] + torch.arange(len(of), device=self.device) - before[of]
        columns = (lanes.drawn, lanes.log_probs, lanes.full_log_probs, lanes.near, lanes.versions)
        self._taken.append((torch.tensor(rows)[of.cpu()], *(column.flatten()[index].cpu() for column in columns)))
        self.finished.update(row for row, token in zip(rows, last, strict=True) if token in self.stops)
        self.free += slots
        for slot in slots:
            del self.last[slot]
        return rows
