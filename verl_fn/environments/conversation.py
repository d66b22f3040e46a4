"""Conversations while they go on: their rows of tokens, their turns, and their groups."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from itertools import groupby
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from verl_fn.state import EndReason, Key, Outcome, Request, RowImages, Sample

from . import Message
from .processes import Call, Failure, Job, Result, Scores, Scoring
from .rendering import TemplateArguments


@attrs.define(eq=False)
class TokenRow:
    """A row of tokens that the model has seen as they are.

    Attributes:
        prompt: the tokens before the first reply.
        parts: for each reply and each part between two replies: tokens, log-probs, log-probs before the cut or None,
            mask and versions.
        near_ties: of all replies.
        routed: the experts of the tokens that the model computed, or None where the engine does not give them.
        images: of the prompt, if it has any.
    """

    prompt: list[int]
    parts: list[tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]] = attrs.field(factory=list)
    near_ties: int = 0
    routed: Tensor | None = None
    images: RowImages | None = None

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
        """Returns the experts of all tokens; tokens after the last computed one have its experts, as in a sample."""
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
        number: its number among the conversations of the request.
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
    rows: list[TokenRow] = attrs.field(factory=list)
    limit: int = 0
    reason: EndReason | None = None
    score: float = 0.0
    acc: float = 0.0

    @property
    def key(self) -> Key:
        """Returns the key of this conversation. It depends only on its request and number."""
        return self.request.key.fold_in(self.number)

    @property
    def problem(self) -> Mapping[str, Any]:
        """Returns what the environment begins with."""
        assert self.request.problem is not None
        return self.request.problem

    @property
    def template_arguments(self) -> TemplateArguments:
        """Returns what the chat template gets besides the messages."""
        return TemplateArguments(self.tools, self.problem.get("chat_template_kwargs") or {})

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
        row, ids = self.rows[-1], self.rows[-1].ids
        sampling = attrs.evolve(self.request.sampling, max_tokens=min(longest, self.limit - len(ids)), n=1)
        return Request(self.place, ids, sampling, self.key.fold_in(len(self.replies)), images=row.images)

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
                    images=row.images,
                )
            )
        return samples


Advance: TypeAlias = Callable[[Sequence[Conversation], Sequence[Sample], Callable[[Conversation], None]], list[str]]


class Turns:
    """Takes replies from an engine, and gives it requests for the next ones as soon as the environment has answered.

    All conversations that wait for the environment are given to it together, once it has answered earlier ones.

    Args:
        conversations: begin together.
        longest: the longest reply in tokens.
        advance: adds a reply to each of some conversations, and then the environment's answer, and reports each
            conversation that goes on; returns failures. It runs in the thread.
        thread: runs one call after the other.

    Attributes:
        failures: a sentence about each conversation that failed.
    """

    def __init__(
        self, conversations: Sequence[Conversation], longest: int, advance: Advance, thread: Executor
    ) -> None:
        self.failures: list[str] = []
        self._longest, self._advance, self._thread = longest, advance, thread
        self._drawing: dict[int, Conversation] = {}
        self._waiting: list[tuple[Conversation, Sample]] = []
        # The other thread appends to it.
        self._ready: deque[Conversation] = deque()
        self._answers: Future[list[str]] | None = thread.submit(advance, conversations, (), self._ready.append)

    def more(self, samples: Sequence[Sample]) -> list[Request] | None:
        """Takes samples of earlier requests; returns new requests, or None once all conversations have ended.

        Raises:
            EnvError: messages of the environment cannot be rendered.
        """
        self._waiting += [(self._drawing.pop(sample.request), sample) for sample in samples]
        if self._answers is not None and self._answers.done():
            self.failures += self._answers.result()
            self._answers = None
        requests = []
        for _ in range(len(self._ready)):
            one = self._ready.popleft()
            self._drawing[one.place] = one
            requests.append(one.ask(self._longest))
        if self._answers is None and self._waiting:
            conversations, drawn = zip(*self._waiting, strict=True)
            self._waiting = []
            self._answers = self._thread.submit(self._advance, conversations, drawn, self._ready.append)
        return requests if self._drawing or self._answers is not None else None

    def wait(self) -> None:
        """Waits until the environment has answered, so that all that are ready are asked for together."""
        if self._answers is not None:
            wait([self._answers])


class Groups:
    """Has the environment score each group once, when the last of its conversations has ended.

    The environment gets the conversations that it has ended, in the order of their numbers. Others of the group keep
    their reward of 0, or have failed. If the scoring fails, so have all conversations that were to be scored.

    Args:
        conversations: of all groups.
        environments: answers jobs; without the attribute ``scores_groups``, or where it is false, nothing is scored.
    """

    def __init__(
        self, conversations: Sequence[Conversation], environments: Callable[[Sequence[Call]], list[Result]]
    ) -> None:
        self._environments = environments
        together = getattr(environments, "scores_groups", False)
        by_number = groupby(conversations, lambda one: one.group)
        self._open = {number: list(group) for number, group in by_number} if together else {}

    def score(self, advanced: Sequence[Conversation]) -> list[str]:
        """Scores the groups that have ended with these conversations.

        Returns:
            A sentence about each conversation that failed.
        """
        numbers = sorted({one.group for one in advanced if one.group in self._open})
        ended = [n for n in numbers if all(one.reason is not None for one in self._open[n])]
        groups = [[one for one in self._open.pop(n) if one.reason == "done"] for n in ended]
        groups = [group for group in groups if group]
        if not groups:
            return []
        failures = []
        results = self._environments([_scoring(group) for group in groups])
        for group, result in zip(groups, results, strict=True):
            if isinstance(result, Failure):
                for one in group:
                    one.reason, one.score, one.acc = result.reason, 0.0, 0.0
                    failures.append(f"{one.label} first: in scoring its group the environment {result.problem}")
                continue
            assert isinstance(result, Scores)
            for one, end in zip(group, result.ends, strict=True):
                one.score, one.acc = end.reward, end.acc
        return failures


def _scoring(group: Sequence[Conversation]) -> Scoring:
    """Returns the job that scores conversations of a request."""
    seed = group[0].request.key.fold_in("environment").fold_in("group").seed() % 2**32
    return Scoring(seed, tuple(one.job() for one in group))
