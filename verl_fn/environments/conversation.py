"""A conversation while it goes on: its messages, and the tokens of its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.state import EndReason, Key, Outcome, Request, Sample

from .contract import Message
from .processes import Job


@attrs.define(eq=False)
class Row:
    """A row of tokens that the model has seen as they are.

    Attributes:
        prompt: the tokens before the first reply.
        parts: for each reply and each part between two replies: tokens, log-probs, log-probs before the cut or None,
            mask and versions.
        near_ties: of all replies.
        routed: the experts of the tokens that the model computed, or None where the engine does not give them.
    """

    prompt: list[int]
    parts: list[tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]] = attrs.field(factory=list)
    near_ties: int = 0
    routed: Tensor | None = None

    @property
    def ids(self) -> list[int]:
        """Returns all tokens so far."""
        return [*self.prompt, *(token for part in self.parts for token in part[0].tolist())]

    def draw(self, sample: Sample) -> None:
        """Adds a reply of the model."""
        self.near_ties += sample.near_ties
        if sample.routed_experts is not None:
            # Tokens keep the experts with which they were computed when the replies after them were drawn; a sample's
            # last token was not computed.
            known = sample.routed_experts[:0] if self.routed is None else self.routed
            self.routed = torch.cat([known, sample.routed_experts[len(known) : -1]])
        self.parts.append((sample.tokens, sample.log_probs, sample.full_log_probs, sample.mask, sample.versions))

    def routes(self) -> Tensor | None:
        """Returns the experts of all tokens; those after the last computed one have its experts, as in a sample."""
        if self.routed is None:
            return None
        rest = len(self.ids) - len(self.routed)
        return torch.cat([self.routed, self.routed[-1:].expand(rest, -1, -1)])

    def write(self, tokens: Sequence[int], version: int) -> None:
        """Adds tokens that the model did not draw."""
        zeros = torch.zeros(len(tokens))
        versions = torch.full((len(tokens),), version)
        self.parts.append((torch.tensor(tokens, dtype=torch.int64), zeros, None, zeros, versions))


@attrs.define(eq=False)
class Conversation:
    """A conversation of the model with an environment.

    Attributes:
        place: its place among all conversations of a call.
        request: asks for it.
        number: its number among those of the request.
        group: the number of the request; its conversations are a group.
        messages: all so far.
        tools: JSON schemas of the functions that the model can call.
        replies: the texts of the model's replies.
        rows: the rows so far; the last one goes on.
        limit: the most tokens of a row.
        reason: why the conversation ended; None while it goes on.
        score, acc: as the environment says; 0 until it does.
    """

    place: int
    request: Request
    number: int
    group: int
    messages: list[Message] = attrs.field(factory=list)
    tools: Sequence[Mapping[str, Any]] = ()
    replies: list[str] = attrs.field(factory=list)
    rows: list[Row] = attrs.field(factory=list)
    limit: int = 0
    reason: EndReason | None = None
    score: float = 0.0
    acc: float = 0.0

    @property
    def key(self) -> Key:
        """Returns the key of this conversation, which depends on its request and number alone."""
        return self.request.key.fold_in(self.number)

    @property
    def problem(self) -> Mapping[str, Any]:
        """Returns what the environment begins with."""
        assert self.request.problem is not None
        return self.request.problem

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """Returns the arguments of the chat template that the problem has."""
        return self.problem.get("chat_template_kwargs") or {}

    @property
    def label(self) -> str:
        """Returns the problem's name in error messages."""
        return f"problem {self.request.id} of {self.problem.get('data_source')!r}"

    def job(self) -> Job:
        """Returns the call of the environment that is due."""
        seed = self.key.fold_in("environment").seed() % 2**32
        return Job(self.place, seed, self.problem, tuple(self.replies), self.group)

    def ask(self, longest: int) -> Request:
        """Returns the request for the next reply.

        Args:
            longest: the limit of a reply, unless the row has less room.
        """
        ids = self.rows[-1].ids
        sampling = attrs.evolve(self.request.sampling, max_tokens=min(longest, self.limit - len(ids)), n=1)
        return Request(self.place, ids, sampling, self.key.fold_in(len(self.replies)))

    def samples(self, first: int) -> list[Sample]:
        """Returns a sample for each row, numbered from ``first``."""
        assert self.reason is not None
        said = json.dumps(list(map(dict, self.messages)))
        outcome = Outcome(self.number, self.reason, self.score, self.acc, len(self.replies), said)
        samples = []
        for i, row in enumerate(self.rows):
            tokens, log_probs, full, mask, versions = zip(*row.parts, strict=True)
            cuts = self.request.sampling.cuts
            cut_off = self.reason == "length" and i == len(self.rows) - 1
            samples.append(
                Sample(
                    request=self.request.id,
                    number=first + i,
                    prompt=torch.tensor(row.prompt),
                    tokens=torch.cat(tokens),
                    log_probs=torch.cat(log_probs),
                    full_log_probs=torch.cat(
                        [f if f is not None else p for f, p in zip(full, log_probs, strict=True)]
                    )
                    if cuts
                    else None,
                    mask=torch.cat(mask),
                    versions=torch.cat(versions),
                    finish_reason="length" if cut_off else "stop",
                    temperature=self.request.sampling.temperature or 1.0,
                    near_ties=row.near_ties,
                    outcome=outcome,
                    routed_experts=row.routes(),
                )
            )
        return samples
