"""A rollout engine whose samples are conversations with an environment, and the problems that they begin with."""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from verl_fn.backends.protocol import Handle, Ref, Request, RolloutBackend, Sample, Through, WeightSource
from verl_fn.config.names import VERIFIERS, verifiers_name
from verl_fn.config.schema import DataConfig, EnvConfig
from verl_fn.data.encoded import longest_prompt, short_enough
from verl_fn.data.files import FileData
from verl_fn.data.reading import encoded_problems
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import Problem
from verl_fn.errors import ArgumentError
from verl_fn.rewards.reward import texts_of

from . import Done
from .processes import Call, EnvError, EnvProcesses, Failure, Opening, Result
from .rendering import (
    Conversation,
    Groups,
    Renderer,
    TokenRow,
    Turns,
    check_no_marks,
    with_image_parts,
)
from .verifiers import ROW


def environment_data(table: DataConfig, env: EnvConfig, tokenizer: Any, say: Callable[[str], None]) -> FileData:
    """Returns the datasets of the environment of verifiers that ``data.task`` names as a source of problems.

    Each problem keeps its row in ``extra_info``. Prompts are checked without the tools: the rollout adds them.

    Args:
        say: prints a line; it reports prompts that were left out, and that there are no problems for evaluation.

    Raises:
        EnvError: the environment cannot be loaded, or its rows cannot be read.
        DataError: it has no training problems, or a prompt cannot be used or is too long.
    """
    processes = EnvProcesses(
        env.name, env.timeout, 1, None, env.variables, python=env.python, arguments=env.arguments
    )
    parts: dict[str, list[Problem]] = {"train": [], "held_out": []}
    for part, row in processes.problems():
        parts[part].append(_problem(row, len(parts[part]), verifiers_name(table.task)))
    if not parts["train"]:
        raise DataError(f"data.task: the environment {table.task} has no training dataset; give it one")
    if not parts["held_out"]:
        say(f"note: {table.task} has no evaluation dataset, so nothing is evaluated; give it an eval_dataset")
    training, validation = (
        short_enough("data.task", encoded_problems(problems, tokenizer), table, say) for problems in parts.values()
    )
    return FileData(training.problems, validation.problems, table.shuffle, longest_prompt([training, validation]))


def _problem(row: Mapping[str, Any], number: int, name: str) -> Problem:
    source = f"{VERIFIERS.removesuffix(':')}/{Path(name).name}"
    prompt, answer = row.get("prompt"), row.get("answer")
    if isinstance(prompt, list):
        # A dataset gives all its messages the same keys, of which some are None.
        prompt = tuple({k: v for k, v in message.items() if v is not None} for message in prompt)
    if not prompt or not isinstance(prompt, str | tuple):
        raise DataError(f"data.task: row {number} of {source} has the prompt {prompt!r:.80}; it must have messages")
    return Problem(
        prompt=prompt,
        answer=answer if isinstance(answer, str) else "",
        id=number,
        data_source=source,
        extra_info={ROW: dict(row)},
        place=f"{source}, row {number}",
    )


@attrs.frozen
class Limits:
    """The limits of conversations.

    Attributes:
        turns: the most replies.
        reply: the longest reply in tokens, with its end token.
        prompt: the longest opening in tokens.
    """

    turns: int
    reply: int
    prompt: int


class Conversing(Through):
    """A rollout engine in front of another one: it answers requests that carry a problem with whole conversations.

    Where the inner engine takes requests while it draws others, each conversation goes on as soon as the environment
    has answered it; otherwise all conversations of a call advance together. The environment answers in another
    thread, one batch of replies after the other. The prompt of each turn is the row of tokens so far, in which drawn
    tokens are as they were drawn; the environment's messages have ``mask`` 0. Draws depend on the request's key, the
    number of the conversation and the turn. Where the chat template rewrites earlier messages, a conversation goes on
    in a new row.

    A conversation whose environment failed ends there; its rows say so. One that failed before its first reply has a
    row without drawn tokens. Requests without a problem are passed on.

    Where the environment scores groups, the conversations of a request are scored together once the last of them has
    ended; see ``Groups``.

    Args:
        inner: draws the replies.
        environments: answers jobs, such as ``EnvProcesses``.
        renderer: makes tokens of messages.
        tokenizer: makes texts of replies.
        end_tokens: of the model; they are no part of a reply's text.

    Raises:
        EnvError: in ``generate``: every conversation has failed, or messages cannot be rendered.
    """

    def __init__(
        self,
        inner: RolloutBackend,
        environments: Callable[[Sequence[Call]], list[Result]],
        renderer: Renderer,
        tokenizer: Any,
        end_tokens: Sequence[int],
        limits: Limits,
    ) -> None:
        super().__init__(inner)
        self._environments, self._renderer, self._tokenizer = environments, renderer, tokenizer
        self._end_tokens, self._limits = tuple(end_tokens), limits
        # Two calls at once would take each other's instances of environments.
        self._lock = threading.Lock()
        self._turns = 0
        # The engine has no version while a publication replaces its weights.
        self._last_version = 0

    @property
    def device(self) -> Any:
        """The device of the inner engine."""
        return getattr(self.inner, "device", "cpu")

    @property
    def dtype(self) -> Any:
        """The dtype of the inner engine's weights."""
        return getattr(self.inner, "dtype", None)

    @property
    def steps(self) -> int | None:
        """How many steps the engine and the environment have begun: a sign that they make progress.

        None as the inner engine's.
        """
        steps = getattr(self.inner, "steps", 0)
        return None if steps is None else steps + self._turns

    def publish(self, version: int, weights: Handle[WeightSource]) -> Ref[None]:
        """Gives weights to the engine, during conversations only if it takes them in flight; see ``RolloutBackend``.

        Raises:
            EnvError: conversations go on in another thread, and the engine takes no weights in flight. These would
                wait for the end of all conversations, and the environment decides when that is.
        """
        if self.capabilities.versions_per_token:
            return super().publish(version, weights)
        if not self._lock.acquire(blocking=False):
            raise EnvError(
                "weights cannot be published while conversations go on; publish them afterwards, or set "
                "rollout.in_flight_weight_updates=true"
            )
        try:
            return super().publish(version, weights)
        finally:
            self._lock.release()

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> list[Sample]:
        """Returns the rows of all conversations, ordered by request and by number; see ``RolloutBackend``."""
        carrying = [request.problem is not None for request in requests]
        if not any(carrying):
            return self._drawn(requests, version)
        if not all(carrying):
            raise ArgumentError("some requests carry a problem for the environment and others do not; ask separately")
        with self._lock:
            return self._played(requests, version)

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """Returns an iterator over the same samples; they all end together."""
        return iter(self.generate(requests, version=version))

    def probe(self, request: Request) -> str | None:
        """Begins a conversation and gives an empty reply, which any model may draw, without an engine.

        An environment that scores groups gets empty replies until the conversation ends, and then scores it.

        Returns:
            Why the environment has failed; None if it has answered.

        Raises:
            EnvError: its messages or tools cannot be rendered, or are too long.
        """
        one, ignored = Conversation(0, request, 0, 0), lambda _: None

        def reply() -> list[str]:
            return self._advance([one], [_empty_reply(one, self._end_tokens[0])], ignored)

        _check_json(one)
        with self._lock:
            if failures := self._advance([one], [], ignored):
                return failures[0]
            groups, failures = Groups([one], self._environments), reply()
            while not failures and one.reason is None and getattr(self._environments, "scores_groups", False):
                failures = reply()
            if not failures and (unscored := groups.score([one])):
                return unscored[0]
        return (
            f"{failures[0]}; the reply was empty, and step must answer whatever a model writes" if failures else None
        )

    def _played(self, requests: Sequence[Request], version: int | None) -> list[Sample]:
        self._last_version = version or 0
        pairs = [(i, number) for i, request in enumerate(requests) for number in range(request.sampling.n)]
        every = [Conversation(place, requests[i], number, i) for place, (i, number) in enumerate(pairs)]
        for one in every:
            _check_json(one)
        groups = Groups(every, self._environments)

        def advance(drawing: Sequence[Conversation], *others: Any) -> list[str]:
            return self._advance(drawing, *others) + groups.score(drawing)

        with ThreadPoolExecutor(1, "verl_fn environments") as thread, self._cancelling():
            turns = Turns(every, self._limits.reply, advance, thread)
            self._play(turns, version)
        if turns.failures:
            report = f"{len(turns.failures)} of {len(every)} conversations have failed, {turns.failures[0]}"
            if len(turns.failures) == len(every):
                raise EnvError(report)
            warnings.warn(f"{report}; nothing is learned from them", stacklevel=3)
        samples = []
        rows: Counter[int] = Counter()
        for one in every:
            of_one = one.samples(rows[one.request.id])
            rows[one.request.id] += len(of_one)
            samples += of_one
        return samples

    @contextlib.contextmanager
    def _cancelling(self) -> Iterator[None]:
        """Ends the environment's call after an error of the engine, so as not to wait for environments that hang."""
        cancelled = getattr(self._environments, "cancelled", None) or threading.Event()
        cancelled.clear()
        try:
            yield
        except BaseException:
            cancelled.set()
            raise

    def _play(self, turns: Turns, version: int | None) -> None:
        """Has all conversations."""
        if (grow := getattr(self.inner, "grow", None)) is not None:
            grow(turns.more, version=version)
            return
        samples: list[Sample] = []
        turns.wait()
        while (asked := turns.more(samples)) is not None:
            samples = self._drawn(asked, version) if asked else []
            turns.wait()

    def _drawn(self, requests: Sequence[Request], version: int | None) -> list[Sample]:
        # The inner engine lies in this process, so that its samples are values.
        return cast(list[Sample], self.inner.generate(requests, version=version))

    def _held(self) -> int:
        """Returns the version of the engine's weights, or of the ones before, while a publication replaces them."""
        version = self.inner.version
        if version is not None:
            self._last_version = version
        return self._last_version

    def _advance(
        self,
        drawing: Sequence[Conversation],
        samples: Sequence[Sample],
        ready: Callable[[Conversation], None],
    ) -> list[str]:
        """Adds replies of the model, and lets the environment answer; returns a sentence about each that failed.

        Args:
            drawing: the conversations.
            samples: a reply of each; empty where the conversations begin.
            ready: is called with each conversation that goes on.
        """
        replies = texts_of([sample.tokens for sample in samples], self._tokenizer, self._end_tokens)
        # All conversations begin without a reply.
        for one, sample, reply in zip(drawing, samples, replies, strict=bool(samples)):
            one.rows[-1].draw(sample)
            one.replies.append(reply)
            one.messages.append({"role": "assistant", "content": reply})
            if sample.finish_reason == "length":
                one.reason = "length"
        self._turns += 1
        failures = []
        waiting = [one for one in drawing if one.reason is None]
        results = self._environments([one.job() for one in waiting])
        for one, result in zip(waiting, results, strict=True):
            if isinstance(result, Done):
                one.reason, one.score, one.acc = "done", result.reward, result.acc
            elif isinstance(result, Failure):
                one.reason = result.reason
                failures.append(f"{one.label} first: the environment {result.problem}")
                if not one.rows:
                    one.rows.append(TokenRow([self._end_tokens[0]]))
                    one.rows[-1].write([self._end_tokens[0]], self._held())
            elif isinstance(result, Opening):
                one.tools = result.tools
                self._open(one, result.messages)
            else:
                assert isinstance(result, tuple)
                add = self._continue if one.rows else self._open
                add(one, result)
            if one.reason is None:
                ready(one)
        return failures

    def _open(self, one: Conversation, messages: Sequence[Any]) -> None:
        self._renderer.check_seen((), messages, one.template_arguments, one.label)
        one.messages += messages
        row = self._opening(one)
        if len(row.prompt) > self._limits.prompt:
            raise EnvError(
                f"{one.label}: the environment's first messages and tools have {len(row.prompt)} tokens, more than "
                f"{self._limits.prompt}; raise data.max_prompt_length"
            )
        one.limit = len(row.prompt) + one.request.sampling.max_tokens
        one.rows.append(row)

    def _opening(self, one: Conversation) -> TokenRow:
        """Returns a new row for the conversation so far, with the images of its first messages."""
        seen, arguments = one.request.images, one.template_arguments
        if seen is None:
            return TokenRow(self._renderer.opening(one.messages, arguments))
        prompt, images = self._renderer.opening_with_images(one.messages, arguments, seen, one.label)
        return TokenRow(prompt, images=images)

    def _continue(self, one: Conversation, messages: Sequence[Any]) -> None:
        """Adds the environment's messages, unless a limit ends the conversation."""
        if len(one.replies) == self._limits.turns:
            one.reason = "turn_limit"
            return
        self._renderer.check_seen(one.messages, messages, one.template_arguments, one.label)
        said: Sequence[Any] = one.messages
        if one.request.images is not None:
            check_no_marks(messages, one.label)
            said = with_image_parts(said)
        row = one.rows[-1]
        drawn = int(row.parts[-1][0][-1])
        tokens = self._renderer.continuation(said, messages, one.template_arguments, drawn)
        one.messages += messages
        new = self._opening(one) if tokens is None else None
        if len([*row.ids, *(tokens or ())] if new is None else new.prompt) >= one.limit:
            one.reason = "length"
        elif new is None:
            row.write(tokens or (), self._held())
        else:
            one.rows.append(new)


def _empty_reply(one: Conversation, end: int) -> Sample:
    """Returns the reply of a model that writes nothing but its end token."""
    zeros = torch.zeros(1)
    return Sample(
        request=one.request.id,
        number=0,
        prompt=torch.tensor(one.rows[-1].ids),
        tokens=torch.tensor([end]),
        log_probs=zeros,
        full_log_probs=None,
        mask=torch.ones(1),
        versions=torch.zeros(1, dtype=torch.int64),
        finish_reason="stop",
    )


def _check_json(one: Conversation) -> None:
    """Raises EnvError for a problem that cannot be JSON, and so not be sent to a process."""
    try:
        json.dumps(dict(one.problem))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(f"{one.label}: its fields cannot be JSON ({error})") from error
