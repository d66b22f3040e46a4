"""The turns of conversations, which go on while the engine draws the replies of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import TypeAlias

from verl_fn.backends.protocol import Request, Sample

from .conversation import Conversation

Advance: TypeAlias = Callable[[Sequence[Conversation], Sequence[Sample], Callable[[Conversation], None]], list[str]]


class Turns:
    """Takes replies from an engine, and gives it requests for the next ones as soon as the environment has answered.

    All conversations that wait for the environment are given to it together, once it has answered those before.

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
