"""A rollout engine that passes every call on, as a base of engines that change some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_fn.backends.protocol import Capabilities, Handle, Ref, Request, RolloutBackend, Sample, WeightSource


class Through:
    """A rollout engine that passes every call on to another one; see ``RolloutBackend``.

    Args:
        inner: the engine that answers.
    """

    def __init__(self, inner: RolloutBackend) -> None:
        self.inner = inner

    @property
    def version(self) -> int | None:
        """The version of the engine's weights."""
        return self.inner.version

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self.inner.capabilities

    def publish(self, version: int, weights: Handle[WeightSource]) -> Ref[None]:
        """Gives weights to the engine."""
        return self.inner.publish(version, weights)

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        """Asks the engine for samples."""
        return self.inner.generate(requests, version=version)

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """Asks the engine for samples as they end."""
        return self.inner.stream(requests, version=version)

    def sleep(self, level: int = 2) -> Ref[None]:
        """Has the engine free memory."""
        return self.inner.sleep(level)

    def wake(self, tags: Sequence[str] = ()) -> Ref[None]:
        """Has the engine allocate memory again."""
        return self.inner.wake(tags)
