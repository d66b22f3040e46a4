"""The decoding of requests on a GPU, in graphs: the host looks at rows every few steps, and never at a token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set

import torch
from torch import Tensor

from verl_fn.backends.draws import NOISE, Draws
from verl_fn.backends.protocol import Request
from verl_fn.backends.sampler.fused import FusedDecoder
from verl_fn.backends.sampler.lanes import Lanes
from verl_fn.backends.serving import not_finite, seeds_of
from verl_fn.state import Batch, uniform_at

# The steps between two looks of the host: rows that end meanwhile keep their slots until the next look.
STEPS = 8
# The most tokens of prompts that are computed at a time: a bound of the memory that this takes.
PREFILL_TOKENS = 16384
# Slots are filled again when one in so many is free, since a prefill of few rows takes as long as a step.
REFILL_PART = 8


class GraphRun:
    """The decoding of requests whose sampling differs only in ``max_tokens``.

    Args:
        decoder: never asks the host.
        requests: are checked.
        slots: the most rows that are decoded at a time.
        end_tokens: end a row.
    """

    def __init__(
        self, decoder: FusedDecoder, requests: Sequence[Request], *, slots: int, end_tokens: Set[int]
    ) -> None:
        self.decoder, self.device = decoder, decoder.device
        self.prompts = [request.prompt for request in requests]
        sampling, self.n = requests[0].sampling, requests[0].sampling.n
        self.limits = [request.sampling.max_tokens for request in requests]
        self.seeds = torch.tensor(seeds_of(requests), device=self.device)
        self.stops = end_tokens | set(sampling.stop_token_ids)
        self.draws = Draws(sampling, decoder.vocab, NOISE[decoder.dtype])
        self.slots = min(slots, len(self.seeds))
        self.length = max(len(p) + limit for p, limit in zip(self.prompts, self.limits, strict=True))
        self.begun = self.step = 0
        # Of the rows that are decoded, by slot: the row, and the step of its last draw.
        self.rows: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.free = list(range(self.slots))
        # Of the next steps' weights, the version, and the number of the publication.
        self.version = self.weights = -1
        self.finished: set[int] = set()
        self.before: dict[int, Tensor] = {}
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
            waiting = len(self.seeds) - self.begun
            if waiting and len(self.free) >= min(waiting, max(1, self.slots // REFILL_PART)):
                self._begin(lanes, min(len(self.free), waiting))
            lanes.version.fill_(self.version)
            steps = min(STEPS, max(self.last.values()) - self.step)
            self.decoder.decode(list(self.rows), steps, self.draws)
            self.step += steps
            yield self._ended(lanes)

    @property
    def unfinished(self) -> bool:
        """Whether a row has not ended."""
        return bool(self.rows) or self.begun < len(self.seeds)

    def take(self) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Returns the draws of rows that have ended since the last call; see ``Answers.collect``."""
        rows, *columns, versions = (torch.cat(column) for column in zip(*self._taken, strict=True))
        self._taken.clear()
        return rows, tuple(columns), versions

    def _begin(self, lanes: Lanes, count: int) -> None:
        """Gives slots to up to ``count`` rows; a prompt is computed once, all but its last token."""
        slot_of: dict[int, int] = {}
        fresh, sources, targets, budget = [], [], [], PREFILL_TOKENS
        for row in range(self.begun, self.begun + count):
            prompt = row // self.n
            if prompt not in slot_of:
                budget -= len(self.prompts[prompt])
                if budget < 0 and slot_of:
                    break
            slot = self.free.pop()
            if slot_of.setdefault(prompt, slot) != slot:
                sources.append(slot_of[prompt])
                targets.append(slot)
            fresh.append(slot)
            self.rows[slot], self.last[slot] = row, self.step + self.limits[prompt]
        rows = torch.arange(self.begun, self.begun + len(fresh))
        self.begun += len(fresh)
        self._fill([self.prompts[prompt][:-1] for prompt in slot_of], list(slot_of.values()))
        if sources:
            self.decoder.copy(sources, targets, max(len(self.prompts[prompt]) for prompt in slot_of))
        lengths, limits, lasts = (
            torch.tensor([of[prompt] for prompt in (rows // self.n).tolist()], device=self.device)
            for of in ([len(p) for p in self.prompts], self.limits, [p[-1] for p in self.prompts])
        )
        at = torch.tensor(fresh, device=self.device)
        lanes.tokens[at], lanes.places[at], lanes.ends[at] = lasts, lengths - 1, lengths + limits - 1
        lanes.alive[at] = True
        places = torch.arange(1, lanes.uniforms.shape[1] + 1, device=self.device)
        lanes.uniforms[at] = uniform_at(self.seeds[rows.to(self.device)][:, None], places)

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
        places, drawn = lanes.places[slots].tolist(), lanes.drawn[slots].tolist()
        prompts = [self.prompts[self.rows[slot] // self.n] for slot in slots]
        texts = [
            [*prompt, *tokens[len(prompt) :]][:place]
            for prompt, place, tokens in zip(prompts, places, drawn, strict=True)
        ]
        self._fill(texts, slots)

    def _ended(self, lanes: Lanes) -> list[int]:
        """Returns the rows that have ended, and keeps their draws."""
        alive = lanes.alive.tolist()
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
