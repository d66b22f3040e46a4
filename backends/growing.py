"""Rollout engines that take requests while they draw the responses of others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs

from verl_fn.backends.protocol import Request, Sample, Sampling
from verl_fn.backends.serving import Serving
from verl_fn.state import check_ids, isolated

More: TypeAlias = Callable[[list[Sample]], Sequence[Request] | None]
"""Gets the samples that have ended since the last call; returns requests to add, or None at the end."""

# How long an engine without requests releases its weights before it looks for new ones.
REST_SECONDS = 0.001


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

    def _rest(self) -> None:
        """Waits a moment with nothing to draw, in which a publication may arrive."""
        self._weights.wait(REST_SECONDS)
