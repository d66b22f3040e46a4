"""What rollout engines have in common: one call at a time, checked requests, and streams that other calls end.

Weights that are published in flight arrive between two decoding steps: the publication announces itself, the running
call lets go of the weights before its next step, and goes on with the new ones. A ``Growing`` engine also takes
requests while it draws the responses of others.
"""

from __future__ import annotations

import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch

from verl_fn.backends.hf.config import ModelError, longest_row
from verl_fn.backends.hf.folder import hollow
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.hf.tokenizer import end_tokens
from verl_fn.backends.protocol import (
    Capabilities,
    PublicationFailed,
    Request,
    Sample,
    Sampling,
    StaleWeightsError,
    WeightSource,
    check_sampling,
    serves,
)
from verl_fn.backends.weight_sync.publication import PARTS, Apart, check_specs
from verl_fn.errors import ArgumentError
from verl_fn.state import Key, check_ids, isolated

More: TypeAlias = Callable[[list[Sample]], Sequence[Request] | None]
"""Gets the samples that have ended since the last call; returns requests to add, or None at the end."""


class NotFiniteError(ModelError, FloatingPointError):
    """A model's logits are NaN or infinite, so no token can be drawn."""


class Serving(ABC):
    """A rollout engine without the engine; see ``RolloutBackend`` and, for other arguments, ``Sampler``.

    Args:
        max_length: the most tokens of a row.

    Raises:
        ValueError: both ``in_flight`` and ``routed_experts``: new weights may send tokens to other experts.

    Attributes:
        version: the version of the weights; None where there are none.
        reads_images: whether prompts may have images.
    """

    reads_images = False

    def __init__(
        self,
        folder: str | Path,
        max_length: float,
        vocab: int,
        verify: str,
        in_flight: bool = False,
        routed_experts: bool = False,
    ) -> None:
        if in_flight and routed_experts:
            raise ValueError(
                "new weights that arrive in flight may send earlier tokens to other experts than those that were "
                "recorded; set in_flight=False or routed_experts=False"
            )
        self.capabilities = Capabilities(versions_per_token=in_flight, routed_experts=routed_experts)
        self.folder = Path(folder)
        self.max_length, self.vocab = max_length, vocab
        self.end_tokens = set(end_tokens(self.folder))
        self.version: int | None = None
        # How many publications have succeeded.
        self.verify, self._published = verify, 0
        # Identifies the frozen weights that the engine keeps; None if it has none.
        self._base: str | None = None
        # Calls of several threads would share the cache.
        self._lock = threading.RLock()
        # A step has the weights for itself, and a publication too. Taken after ``_lock``.
        self._weights = threading.Condition(threading.RLock())
        # Has an entry for each publication in flight that waits for the weights, or has them.
        self._arriving: deque[None] = deque()
        self._failure = ""
        # A run has the cache and the weights for itself; another call ends it.
        self._calls = 0
        self._steps = 0

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> list[Sample]:
        """Returns the samples of ``requests``, on the CPU; see ``RolloutBackend``.

        Raises:
            StaleWeightsError: the engine holds another version than ``version``, or none.
            ValueError: there are no requests, two have the same id, or a prompt is empty, too long for the model or
                holds unknown tokens.
            NotFiniteError: the model's logits for a row are not finite.
        """
        with self._alone(), isolated():
            drawn = self._admitted(requests, version, as_they_end=False)
            samples = {(place, sample.number): sample for place, sample in drawn}
        return [samples[place] for place in sorted(samples)]

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """Returns an iterator over the same samples, in the order in which they end; see ``RolloutBackend``.

        Raises:
            StaleWeightsError: as ``generate``, and in the iterator if the engine was called meanwhile.
        """
        with self._alone():
            return self._one_by_one(self._admitted(requests, version, as_they_end=True))

    @abstractmethod
    def _run(self, requests: Sequence[Request], call: int, as_they_end: bool) -> Iterator[tuple[int, Sample]]:
        """Yields the samples of requests whose sampling differs only in ``max_tokens``, with the numbers of rows.

        Sample i of a request has the row ``n`` times the place of the request, plus i.

        Args:
            requests: are checked, and differ in no other part of their sampling.
            call: the number of this call; ``_continue`` raises an error once there is a later one.
            as_they_end: whether samples are yielded as they end, or all together.
        """

    def _draw(self, requests: Sequence[Request], call: int, as_they_end: bool) -> Iterator[tuple[int, Sample]]:
        """Yields every sample with the place of its request; see ``_run``."""
        # Requests that are drawn the same way are decoded together; draws never depend on other requests.
        ways = [attrs.evolve(request.sampling, max_tokens=1) for request in requests]
        for sampling in dict.fromkeys(ways):
            places = [i for i, way in enumerate(ways) if way == sampling]
            with self._emptied(call):
                for row, sample in self._run([requests[i] for i in places], call, as_they_end):
                    yield places[row // sampling.n], sample

    @contextlib.contextmanager
    def _emptied(self, call: int) -> Iterator[None]:
        """Removes what is left of a call that fails, unless a later one has begun."""
        try:
            yield
        except GeneratorExit:
            # The caller closed the stream early and does not hold the engine, so nothing is aborted here.
            raise
        except BaseException as error:
            if self._calls == call:
                try:
                    self._abort()
                except Exception as another:
                    error.add_note(f"removing its requests failed too: {type(another).__name__}: {another}")
            raise

    @abstractmethod
    def _abort(self) -> None:
        """Removes requests of earlier calls from the engine."""

    @property
    def steps(self) -> int | None:
        """How many decoding steps were begun: a sign that the engine makes progress.

        None while a call waits for weights that arrive in flight.
        """
        return None if self._arriving else self._steps

    def _part(
        self, source: WeightSource, apart: Apart | None, shapes: Mapping[str, torch.Size]
    ) -> tuple[WeightSource, str | None]:
        """Returns what the engine needs of a source, and what identifies the frozen weights; None if it keeps none.

        Args:
            apart: the same weights, with the frozen ones apart.
            shapes: the shapes of the model's weights by name.

        Raises:
            ValueError: the names or shapes are not the model's.
        """
        check_specs(source.specs if apart is None else apart.whole.specs, shapes, self.folder)
        if apart is None:
            return source, None
        base = apart.identify()
        return apart.changing if base == self._base else apart.whole, base

    @property
    def _checked(self) -> bool:
        """Whether the next publication compares checksums."""
        return self.verify == "always" or not self._published

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Has cache and weights without any other call."""
        with self._lock, self._weights:
            yield

    @contextlib.contextmanager
    def _publication(self) -> Iterator[None]:
        """Has the weights, to replace them: in flight between two steps of a call, otherwise after it.

        Another call cannot begin while the running one lets go of the weights, since that one keeps ``_lock``.
        """
        if not self.capabilities.versions_per_token:
            with self._alone():
                yield
            return
        self._arriving.append(None)
        try:
            with self._weights:
                yield
                self._failure = ""
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._arriving.popleft()
            with self._weights:
                self._weights.notify_all()

    def _continue(self, call: int) -> int:
        """Begins a step, after publications that have arrived; returns the version of the weights that draw.

        Raises:
            StaleWeightsError: the engine was called between two steps.
            PublicationFailed: a publication has failed.
        """
        self._weights.wait_for(lambda: not self._arriving)
        if self._calls != call:
            raise StaleWeightsError("this stream was interrupted by another call; read streams to their end")
        self._require_weights()
        assert self.version is not None
        self._steps += 1
        return self.version

    def _require_weights(self) -> None:
        """Raises an error where a publication has failed and none has succeeded since.

        Raises:
            PublicationFailed: it has; whoever calls again later has weights to go on with.
        """
        if self.version is None and self._failure:
            raise PublicationFailed(f"a publication failed, so there are no weights to go on with: {self._failure}")

    def _admitted(
        self, requests: Sequence[Request], version: int | None, *, as_they_end: bool
    ) -> Iterator[tuple[int, Sample]]:
        """Checks requests at once, and returns an iterator that draws their samples; see ``_draw``."""
        self._require_version(version)
        self._check(requests)
        self._calls += 1
        return self._draw(requests, self._calls, as_they_end)

    def _require_version(self, version: int | None) -> None:
        """Raises an error unless the engine has weights that may answer a request for a version."""
        self._require_weights()
        if not serves(self.version, version, self.capabilities):
            requested = "any version" if version is None else f"version {version}"
            present = "none; publish them first" if self.version is None else f"version {self.version}"
            name = type(self).__name__.lower()
            raise StaleWeightsError(f"the request asks for weights of {requested}, and the {name} holds {present}")

    def _one_by_one(self, drawn: Iterator[tuple[int, Sample]]) -> Iterator[Sample]:
        """Yields samples, and has the engine for itself only while it draws the next one."""
        while True:
            with self._alone(), isolated():
                _, sample = next(drawn, (0, None))
            if sample is None:
                return
            yield sample

    def _check(self, requests: Sequence[Request]) -> None:
        if not requests:
            raise ValueError("there are no requests: generate needs at least one")
        for request in requests:
            if not isinstance(request, Request):
                raise ArgumentError(
                    f"generate takes requests, not a {type(request).__name__}; make them with requests_for(prompts, "
                    "sampling, key)"
                )
        check_ids([request.id for request in requests])
        check_sampling(requests, self.capabilities)
        for i, request in enumerate(requests):
            prompt, longest = request.prompt, request.sampling.max_tokens
            if not prompt:
                raise ValueError(f"prompt {i} is empty; it needs at least one token to go on from")
            if len(prompt) + longest > self.max_length:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens: with max_tokens={longest} that is more than "
                    f"the {self.max_length} positions of the model"
                )
            if request.images is not None and not self.reads_images:
                raise ValueError(f"prompt {i} has images, and this engine reads none")
            if min(prompt) < 0 or max(prompt) >= self.vocab:
                raise ValueError(f"prompt {i} holds tokens outside the vocabulary of {self.vocab}")


def model_of(
    folder: str | Path, lora: Lora | None = None, device: str | torch.device = "cpu"
) -> tuple[Skeleton, dict[str, torch.Size]]:
    """Returns the skeleton of a folder, and the shapes of the tensors that have to be published.

    Buffers are published in parts; see ``weight_sync.in_parts``.

    Args:
        lora: adapters that are published beside the model, not merged into it.

    Raises:
        ModelError: the folder or the architecture cannot be used.
    """
    model = hollow(folder, "lm", key=Key.from_seed(0), lora=lora, device=device)
    skeleton = model.skeleton
    # A rollout engine saves nothing.
    skeleton.files = {}
    buffers = {name: torch.Size([PARTS, *b.shape]) for name, b in skeleton.constants.items()}
    return skeleton, {name: t.shape for name, t in model.shapes.items()} | buffers


def seeds_of(requests: Sequence[Request]) -> list[int]:
    """Returns the seed of each row of requests."""
    return [r.key.fold_in(number).seed() for r in requests for number in range(r.sampling.n)]


def not_finite(row: int, n: int) -> NotFiniteError:
    """Returns the error about a row whose logits are not finite.

    Args:
        row: the number of the row.
        n: the samples of each prompt.
    """
    prompt, sample = divmod(row, n)
    return NotFiniteError(
        f"row {row} (sample {sample} of prompt {prompt}): the model's logits are not finite, so its weights "
        "have diverged or are incomplete; lower the learning rate (actor.optim.lr), or use other weights"
    )


def longest_of(config: Any) -> float:
    """Returns the most tokens of a row of a model."""
    positions: float = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    # Beyond the other limit, a row's frequencies depend on the longest row beside it.
    return min(positions, longest_row(config))


class Growing(Serving):
    """A rollout engine that also answers requests as they arrive; see ``Serving``."""

    def grow(self, more: More, *, version: int | None = None) -> None:
        """Answers requests that arrive while others are drawn.

        Args:
            more: is called between two steps, also while nothing is drawn, and should return at once. Its requests
                have one sample each. Their sampling differs only in ``max_tokens``.
            version: as for ``generate``.

        Raises:
            StaleWeightsError: as ``generate``.
            ValueError: as ``generate``, or requests are to be drawn in different ways, have the id of one that is
                being drawn, or ``more`` returns None while some are.
        """
        ways: set[Sampling] = set()
        drawing: set[int] = set()

        def checked(samples: list[Sample]) -> Sequence[Request] | None:
            drawing.difference_update(sample.request for sample in samples)
            requests = more(samples)
            if requests is None and drawing:
                raise ValueError(
                    f"more returned None while {len(drawing)} requests are still drawn; return [] until they end"
                )
            if requests:
                self._check(requests)
                check_ids([*drawing, *(request.id for request in requests)])
                drawing.update(request.id for request in requests)
                ways.update(attrs.evolve(request.sampling, max_tokens=1) for request in requests)
                if len(ways) > 1 or any(sampling.n > 1 for sampling in ways):
                    raise ValueError("requests of one call of grow must have n=1, and differ only in max_tokens")
            return requests

        with self._alone(), isolated():
            self._require_version(version)
            self._calls += 1
            with self._emptied(self._calls):
                self._grow(checked, self._calls)

    @abstractmethod
    def _grow(self, more: More, call: int) -> None:
        """Answers requests that are checked; see ``grow``."""
