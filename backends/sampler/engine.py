"""The embedded rollout engine: a batched decoding loop in this process, on any of torch's devices.

Each active row has a slot of a cache. The slot of a row that ends goes to a prompt that waits, or else to the last
row, so that a step computes active rows and no others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl_fn.backends.draws import NOISE, Answers, Draws
from verl_fn.backends.hf.config import ModelError, read_config
from verl_fn.backends.hf.exact import Activations, token_logprobs
from verl_fn.backends.hf.exact import check as check_exact
from verl_fn.backends.hf.experts import Recorder
from verl_fn.backends.hf.logprobs import on_cuda
from verl_fn.backends.hf.skeleton import dtype_of
from verl_fn.backends.protocol import Handle, Request, Sample, WeightSource, here
from verl_fn.backends.sampler.decoder import (
    PREFILL_TOKENS,
    Begun,
    ExactDecoder,
    GeneralDecoder,
    PastDecoder,
    RowDecoder,
    Run,
)
from verl_fn.backends.sampler.fused import ExactFusedDecoder, FusedDecoder, GraphRun
from verl_fn.backends.sampler.llama import LlamaDecoder, misfit
from verl_fn.backends.serving import NotFiniteError, Serving, longest_of, model_of, not_finite
from verl_fn.backends.weight_sync import form_of, receive
from verl_fn.state import Batch, isolated, uniform_at, with_images

Decoder: TypeAlias = "GeneralDecoder | LlamaDecoder"


def decoder_for(folder: str | Path, device: torch.device, dtype: torch.dtype, *, exact: bool = False) -> Decoder:
    """Returns the fastest decoder for the model of a Hugging Face folder, without weights.

    Args:
        exact: the decoder's log-probs must equal an exact trainer's in every bit.

    Raises:
        ModelError: the folder or the architecture cannot be used.
        ExactError: the model cannot be exact.
    """
    skeleton, shapes = model_of(folder, device=device)
    if exact:
        check_exact(skeleton, dtype, device, folder)
        fits = device.type == "cuda" and misfit(skeleton.config, shapes) is None
        return (ExactFusedDecoder if fits else ExactDecoder)(skeleton, shapes, device, dtype)
    if skeleton.padded or skeleton.fit.repeats:
        return (PastDecoder if skeleton.fit.cached else RowDecoder)(skeleton, shapes, device, dtype)
    if misfit(skeleton.config, shapes) is not None:
        return GeneralDecoder(skeleton, shapes, device, dtype)
    # Triton has no bf16 products on older GPUs.
    fused = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return (FusedDecoder if fused else LlamaDecoder)(skeleton, shapes, device, dtype)


class Sampler(Serving):
    """A rollout engine in this process; see ``RolloutBackend``.

    Draws do not depend on the order, the size or the slots of a batch, except where the rounding of logits decides a
    draw, and that does depend on them; ``near_ties`` counts such draws.

    Args:
        folder: a Hugging Face model folder; its config and end tokens are read, never its weights.
        device: the device to compute on.
        dtype: of weights and cache, by name or as torch's: ``float32`` or ``bfloat16``. Log-probs are fp32 in both
            cases.
        slots: the most rows that are decoded at a time.
        verify: ``first`` compares checksums at the first publication, ``always`` at each.
        in_flight: a publication during a call arrives between two steps. Rows that have begun go on with the new
            weights, and these compute the cache of their tokens again.
        routed_experts: record the experts of each token.
        exact: log-probs equal those of a trainer with ``exact`` in every bit.

    Raises:
        ModelError: the folder or the architecture cannot be used, or its experts cannot be recorded.
        ExactError: the model cannot be exact.
        ValueError: experts are to be recorded or log-probs to be exact, and weights to arrive in flight.

    Example:
        >>> import tempfile
        >>> from verl_fn.backends.hf.folder import build
        >>> from verl_fn.backends.hf.new_model import new_model
        >>> from verl_fn.backends.weight_sync import Weights
        >>> from verl_fn.state import Key, Sampling, requests_for
        >>> folder = new_model(tempfile.mkdtemp(), chars="ab")
        >>> sampler = Sampler(folder)
        >>> skeleton, params = build(folder, "lm", pretrained=True, key=Key.from_seed(0))
        >>> sampler.publish(0, Weights.of(params))
        >>> requests = requests_for([[1, 4], [1, 5, 4]], Sampling(max_tokens=3, n=2), Key.from_seed(0))
        >>> [(sample.request, sample.number) for sample in sampler.generate(requests, version=0)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "float32",
        slots: int = 64,
        verify: str = "first",
        in_flight: bool = False,
        routed_experts: bool = False,
        exact: bool = False,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; it must be at least 1")
        if exact and in_flight:
            raise ValueError("weights that arrive in flight are not the trainer's, so exact needs in_flight=False")
        self.device = torch.device(device)
        self.dtype = dtype_of(dtype, "dtype")
        self.slots = slots
        self.exact = exact
        self.decoder: Decoder = decoder_for(folder, self.device, self.dtype, exact=exact)
        super().__init__(
            folder, longest_of(read_config(folder)), self.decoder.vocab, verify, in_flight, routed_experts
        )
        self.reads_images = type(self.decoder) is GeneralDecoder and self.decoder.skeleton.family is not None
        if routed_experts and isinstance(self.decoder, RowDecoder | PastDecoder):
            raise ModelError(
                f"{folder}: experts are recorded for packed rows only, and this model's rows are padded; set "
                "actor.router_replay.mode=R2"
            )
        self.recorder = Recorder(self.decoder.model, folder) if routed_experts else None

    def publish(self, version: int, weights: Handle[WeightSource]) -> None:
        """Copies these weights, tied ones once, and compares the first ones by checksums; see ``RolloutBackend``."""
        given = here(weights)
        with self._publication(), isolated(), torch.inference_mode():
            if not self.decoder.intact:
                self._base = None
            source, base = self._part(given, form_of(given, "kept"), self.decoder.shapes)
            if not self.capabilities.versions_per_token:
                self._calls += 1
            self.version = None
            if base != self._base:
                self._base = None
            kept = self.decoder.shapes.keys() - {spec.name for spec in source.specs}
            self.decoder.begin(getattr(source, "frozen", ()), kept)
            receive(source, self.decoder.write, checked=self._checked)
            self.decoder.finish()
            self._published, self._base = self._published + 1, base
            self.version = version

    def sleep(self, level: int = 2) -> None:
        """Frees the memory of caches at level 1, and the memory of weights too at level 2."""
        with self._alone():
            self._calls += 1
            self.decoder.drop_cache()
            if level > 1:
                self.decoder.drop_weights()
                self.version, self._base, self._failure = None, None, ""

    def wake(self, tags: Sequence[str] = ()) -> None:
        """Does nothing, since publishing and generating allocate the memory that they need."""

    def activations(self, batch: Batch) -> Activations:
        """Returns the activations of rows, computed as in a rollout; for an engine with ``exact``.

        Args:
            batch: rows with ``response_mask``, all of one ``temperature``.
        """
        assert isinstance(self.decoder, ExactDecoder | ExactFusedDecoder), "Sampler(exact=True)"
        temperature = float(batch["temperature"][0]) if "temperature" in batch else 1.0
        with self._alone(), isolated(), torch.inference_mode():
            self._calls += 1
            return self.decoder.activations(batch, self._log_probs(temperature))

    def _log_probs(self, temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns ``(logits, tokens) -> log-probs`` as an exact trainer has them, of logits in the engine's dtype."""
        return lambda logits, tokens: token_logprobs(logits.to(self.dtype), tokens, temperature)

    def _abort(self) -> None:
        """Does nothing, since a run keeps its rows itself."""

    def _run(self, requests: Sequence[Request], call: int, as_they_end: bool) -> Iterator[tuple[int, Sample]]:
        sampling = requests[0].sampling
        log_probs = self._log_probs(sampling.temperature) if self.exact else None
        kernel = on_cuda().draw if self.device.type == "cuda" or isinstance(self.decoder, FusedDecoder) else None
        draws = Draws(sampling, self.decoder.vocab, NOISE[self.dtype], log_probs, kernel)
        if isinstance(self.decoder, FusedDecoder):
            run: GraphRun | _Run = GraphRun(self.decoder, requests, draws, self.slots, self.end_tokens)
        else:
            run = _Run(self, requests, draws)
        answers = Answers(requests)
        ended = self._guarded(run, call)
        for rows in ended if as_they_end else [list(itertools.chain.from_iterable(ended))]:
            answers.collect(*run.take())
            yield from (
                (row, answers.sample(row, row in run.finished, None, run.before.pop(row, None))) for row in rows
            )

    def _guarded(self, run: _Run | GraphRun, call: int) -> Iterator[list[int]]:
        """Yields the rows that end at each step of a run, as long as no other call has changed weights or cache."""
        steps = run.loop()
        while run.unfinished:
            run.version, run.weights = self._continue(call), self._published
            try:
                rows = next(steps)
            except NotFiniteError:
                # NaN in the cache would spread to the next request.
                self.decoder.drop_cache()
                raise
            if rows:
                yield rows


class _Run(Run):
    """A run of any decoder; see ``Run``.

    Slot i of the cache holds row ``rows[i]``; active rows always have the first slots.
    """

    def __init__(self, sampler: Sampler, requests: Sequence[Request], draws: Draws) -> None:
        super().__init__(requests, draws, sampler.slots, sampler.end_tokens, sampler.device)
        self.decoder, self.recorder = sampler.decoder, sampler.recorder
        self.in_flight = sampler.capabilities.versions_per_token
        self.images = [request.images for request in requests]
        # What follows them is text, also what the model drew in earlier turns of a conversation.
        self.seen = [0 if one.images is None else one.images.length or len(one.prompt) for one in requests]
        self.rows: list[int] = []
        # For each slot, the step of its last draw, and the difference between its length and the step.
        self.ends: list[int] = []
        self.offsets: list[int] = []
        # Of each draw, its row and the version of the weights.
        self.drawn: list[int] = []
        self.versions: list[int] = []
        # If experts are recorded: for each draw the experts of the token before it.
        self.routed: list[Tensor] = []
        # The number of the row after the last one with each prompt.
        self.until = {prompt: (i + 1) * self.n for i, prompt in enumerate(self.same)}
        # Of prompts with rows in slots and rows that wait: the logits after it, and the experts of its tokens.
        self.known: dict[int, tuple[Tensor, Tensor | None]] = {}

    @torch.inference_mode()
    def loop(self) -> Iterator[list[int]]:
        """Draws tokens until every row has ended, and yields the rows that end at each step."""
        self.decoder.reserve(self.slots, self.length)
        self.tokens = torch.zeros(self.slots, dtype=torch.int64, device=self.device)
        # The position of each slot's last token in the cache; the next token goes to the position after it.
        self.positions = torch.zeros_like(self.tokens)
        self.uniforms = torch.zeros(self.slots, self.length, dtype=torch.float64, device=self.device)
        # Where weights may arrive in flight: the prompts, and what was drawn after them.
        width = self.length if self.in_flight else 0
        self.texts = torch.zeros(self.slots, width, dtype=torch.int64, device=self.device)
        cached_by = self.weights
        while self.unfinished:
            logits = []
            if cached_by != self.weights:
                self.known.clear()
            if active := len(self.rows):
                self.positions[:active] += 1
                if cached_by == self.weights:
                    logits.append(self.decoder.step(self.tokens[:active], self.positions[:active], self._longest()))
                    if self.recorder is not None:
                        self.routed.append(self.recorder.take())
                else:
                    logits += self._again()
            cached_by = self.weights
            if count := self.due():
                logits.append(self._begin(count))
            ended = self._draw(logits[0] if len(logits) == 1 else torch.cat(logits))
            self.step += 1
            yield ended

    def take(self) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Returns the draws since the last call; see ``Answers.collect``."""
        columns, rows, versions = self.draws.results(), torch.tensor(self.drawn), torch.tensor(self.versions)
        if self.routed:
            columns = (*columns, torch.cat(self.routed).cpu())
        for taken in (self.routed, self.drawn, self.versions):
            taken.clear()
        return rows, columns, versions

    def _longest(self) -> int:
        return max(self.offsets) + self.step

    def _begin(self, count: int) -> Float[Tensor, "m V"]:
        """Prefills up to ``count`` rows into free slots and returns their logits; a prompt is computed once."""
        first = len(self.rows)
        slot_of = {self.same[row // self.n]: slot for slot, row in enumerate(self.rows)}
        self.known = {prompt: one for prompt, one in self.known.items() if prompt in slot_of}
        held = {prompt: slot_of[prompt] for prompt in self.known}
        begun = self.begin(range(first, first + count), held, PREFILL_TOKENS)
        requests = [row // self.n for row in begun.rows]
        self.rows += begun.rows
        self.ends += [self.step + self.limits[i] - 1 for i in requests]
        self.offsets += [len(self.prompts[i]) - self.step for i in requests]
        logits = self._logits(begun, requests)
        if begun.sources:
            self.decoder.copy(begun.sources, begun.targets, max(len(self.prompts[i]) for i in requests))
        fresh = slice(first, len(self.rows))
        self.positions[fresh] = torch.tensor([len(self.prompts[i]) - 1 for i in requests], device=self.device)
        places = torch.arange(1, self.length + 1, device=self.device)
        if self.in_flight:
            texts = pad_sequence([torch.tensor(self.prompts[i]) for i in requests], batch_first=True)
            self.texts[fresh, : texts.shape[1]] = texts.to(self.device)
        self.uniforms[fresh] = uniform_at(self.seeds[begun.rows][:, None], places)
        return logits

    def _logits(self, begun: Begun, requests: list[int]) -> Float[Tensor, "m V"]:
        """Computes the fresh prompts of rows that begin, and returns the logits after the prompt of each row."""
        known, prompts = dict(self.known), [self.same[i] for i in requests]
        if begun.fresh:
            batch = self._rows([self.prompts[prompt] for prompt in begun.fresh], list(begun.fresh))
            logits = self.decoder.prefill(batch, torch.tensor(list(begun.fresh.values())))
            experts: Sequence[Tensor | None] = [None] * len(batch)
            if self.recorder is not None:
                experts = self.recorder.take().cpu().split(batch.lengths.tolist())
            known |= zip(begun.fresh, zip(logits.split(1), experts, strict=True), strict=True)
        if routes := {prompt: picked for prompt, (_, picked) in known.items() if picked is not None}:
            self.routed.append(torch.cat([routes[prompt][-1:] for prompt in prompts]).to(self.device))
            self.before |= {row: routes[prompt][:-1] for row, prompt in zip(begun.rows, prompts, strict=True)}
        if self.decoder.keeps_prompts:
            # Draws overwrite the logits.
            self.known = {
                prompt: (after.clone() if prompt in begun.fresh else after, picked)
                for prompt, (after, picked) in known.items()
                if self.until[prompt] > self.begun
            }
        return torch.cat([known[prompt][0] for prompt in prompts]) if begun.sources else logits

    def _again(self) -> Iterator[Float[Tensor, "m V"]]:
        """Computes the cache of all active rows with new weights, and yields their logits, in parts."""
        first, texts = 0, self.texts[: len(self.rows)].cpu()
        ends = (self.positions[: len(self.rows)] + 1).tolist()
        while first < len(ends):
            last, budget = first, PREFILL_TOKENS
            while last < len(ends) and (last == first or ends[last] <= budget):
                budget -= ends[last]
                last += 1
            rows = [text[:end] for text, end in zip(texts[first:last], ends[first:last], strict=True)]
            batch = self._rows(rows, [row // self.n for row in self.rows[first:last]])
            yield self.decoder.prefill(batch, torch.arange(first, last))
            first = last

    def _rows(self, rows: Sequence[Sequence[int] | Tensor], prompts: list[int]) -> Batch:
        """Returns rows with the images of the prompts that they begin with; what follows a prompt is text."""
        batch = Batch.from_rows(rows)
        if all(self.images[prompt] is None for prompt in prompts):
            return batch
        lengths = batch.spread(torch.tensor([self.seen[prompt] for prompt in prompts]))
        batch = batch.with_tokens(response_mask=(batch.positions >= lengths).float())
        return with_images(batch, [self.images[prompt] for prompt in prompts])

    def _draw(self, logits: Float[Tensor, "n V"]) -> list[int]:
        """Draws a token for every active row, and returns the rows that end with it."""
        n = len(self.rows)
        tokens = self.draws.draw(logits, self.uniforms[:n].gather(1, self.positions[:n, None]))
        self.tokens[:n] = tokens
        if self.in_flight:
            self.texts[:n].scatter_(1, self.positions[:n, None] + 1, tokens[:, None])
        self.drawn += self.rows
        self.versions += [self.version] * n
        drawn = tokens.tolist()
        if self.draws.nothing in drawn:
            raise not_finite(self.rows[drawn.index(self.draws.nothing)], self.n)
        stops, step = self.stops, self.step
        done = [i for i, (t, end) in enumerate(zip(drawn, self.ends, strict=True)) if end == step or t in stops]
        ended = [self.rows[i] for i in done]
        if done:
            self.finished.update(self.rows[i] for i in done if drawn[i] in stops)
            self._close(done)
        return ended

    def _close(self, done: list[int]) -> None:
        """Removes the rows in these slots, and moves the last rows into the slots."""
        active = len(self.rows) - len(done)
        targets = [i for i in done if i < active]
        if targets:
            sources = [i for i in range(active, len(self.rows)) if i not in done]
            self.decoder.copy(sources, targets, self._longest())
            for state in (self.tokens, self.positions, self.uniforms, self.texts):
                state[targets] = state[sources]
            for source, target in zip(sources, targets, strict=True):
                for by_slot in (self.rows, self.ends, self.offsets):
                    by_slot[target] = by_slot[source]
        del self.rows[active:], self.ends[active:], self.offsets[active:]
