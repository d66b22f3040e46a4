"""A decoder whose log-probs equal the trainer's in every bit: the trainer's kernels, over a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from verl_fn.backends.hf import exact
from verl_fn.backends.hf.exact import LOG_PROBS, Activations, head_name, recorded
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.sampler.decoder import Cache, GeneralDecoder, Where
from verl_fn.state import Batch

NAME = "verl_fn_exact_decode"


@attrs.frozen(eq=False)
class Recorded:
    """A step for so many rows as a CUDA graph, with the tensors that it reads and writes."""

    tokens: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]
    logits: Float[Tensor, "n V"]
    graph: torch.cuda.CUDAGraph


class ExactDecoder(GeneralDecoder):
    """Runs a model with the kernels of ``hf.exact``; see ``Decoder``.

    On CUDA a step is a graph, recorded for powers of two of rows: the result of a row does not depend on how many
    others there are, so a step of fewer rows computes some that nothing reads.
    """

    def __init__(
        self, skeleton: Skeleton, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(skeleton, shapes, device, dtype)
        exact.register(NAME, slot_attention)
        exact.adopt(skeleton, NAME)
        self.graphs = device.type == "cuda"
        self._recorded: dict[int, Recorded] = {}
        self._places: list[int] = []
        # transformers reads no mask of four dimensions; without one it waits for the positions, to look for rows.
        self._mask = torch.empty(1, 1, 1, 1, device=device)

    def reserve(self, slots: int, length: int) -> None:
        # Whole blocks of keys.
        before = self._cache
        super().reserve(slots, -(-length // exact.KEYS) * exact.KEYS)
        if self._cache is not before:
            self._recorded.clear()

    def finish(self) -> None:
        super().finish()
        # A graph reads weights where they lay when it was recorded.
        places = [t.data_ptr() for t in (self._weights | self._buffers).values()]
        if places != self._places:
            self._recorded.clear()
        self._places = places

    def drop_cache(self) -> None:
        self._recorded.clear()
        super().drop_cache()

    def drop_weights(self) -> None:
        self._recorded.clear()
        super().drop_weights()

    def step(self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], longest: int) -> Float[Tensor, "n V"]:
        if not self.graphs:
            return super().step(tokens, positions, longest)
        n = len(tokens)
        size = min(1 << (n - 1).bit_length(), self._cache.slots)
        rest = (0, size - n)
        if size not in self._recorded:
            self._recorded[size] = self._record(pad(tokens, rest), pad(positions, rest))
        one = self._recorded[size]
        # Rows beyond the active ones write into slots that nothing reads before they are filled again.
        one.tokens.copy_(pad(tokens, rest))
        one.positions.copy_(pad(positions, rest))
        one.graph.replay()
        return one.logits[:n]

    def _record(self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"]) -> Recorded:
        """Records a step; the one that is run first writes the same into the cache as the one that is replayed."""
        longest = self._cache.length
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            super().step(tokens, positions, longest)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = super().step(tokens, positions, longest)
        return Recorded(tokens, positions, logits, graph)

    def activations(self, batch: Batch, log_probs: Callable[[Tensor, Tensor], Tensor]) -> Activations:
        """Returns the activations of rows whose responses are appended token by token, as in a rollout.

        Args:
            batch: the rows; ``response_mask`` begins the responses.
            log_probs: ``(logits, tokens) -> log-probs``.
        """
        found, head = Activations(batch.num_tokens), head_name(self.skeleton)
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
                # A graph has no hooks.
                logits = super().step(batch.tokens[index].to(self.device), at.to(self.device), int(at.max()) + 1)
                write(index, index, logits)
        return found


def slot_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 heads T dim"],
    key: Float[Tensor, "1 kv_heads T dim"],
    value: Float[Tensor, "1 kv_heads T dim"],
    attention_mask: Tensor | None,
    *,
    cache: Cache,
    where: Where,
    scaling: float,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 T heads dim"], None]:
    """Computes transformers' attention over the cache: writes the tokens' keys and values, then reads the slots."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    keys, values = cache.layer(module, k, v)
    keys.transpose(1, 2).index_put_((where.slots, where.positions), k)
    values.transpose(1, 2).index_put_((where.slots, where.positions), v)
    if where.packing is not None:
        return exact.packed_attention(q, k, v, where.packing, scaling, sliding_window)[None], None
    places = -(-where.longest // exact.KEYS) * exact.KEYS
    k, v = (x[: len(q), :, :places] for x in (keys, values))
    return exact.step_attention(q, k, v, where.positions, scaling, sliding_window)[None], None
