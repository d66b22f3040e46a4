"""The protocol of rollout engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs

from verl_fn.state import Request, Sample

from .handles import Handle, Ref
from .weights import WeightSource


@attrs.frozen
class Capabilities:
    """What an engine promises beyond the protocol; ``verl_fn.testing.check_rollout`` tests each promise.

    Attributes:
        repeatable: a request drawn again gives the same tokens.
        batch_independent: neither the order nor the number of the other requests changes a response, except at draws
            that ``near_ties`` counts.
        versions_per_token: new weights may arrive during a response, and it goes on with them. Each token has the
            version that drew it, and the log-prob of those weights given the tokens before it. Without this, all
            tokens of a response have one version.
        top_k: the field of ``Sampling`` is obeyed; otherwise a request that sets it is refused.
        top_p: as ``top_k``.
        stop_token_ids: as ``top_k``.
        routed_experts: samples have the experts of their tokens.
    """

    repeatable: bool = True
    batch_independent: bool = True
    versions_per_token: bool = False
    top_k: bool = True
    top_p: bool = True
    stop_token_ids: bool = True
    routed_experts: bool = False


class StaleWeightsError(RuntimeError):
    """The engine's weights are incomplete, or not of the version that a request asked for."""


class PublicationFailed(StaleWeightsError):
    """A publication in flight has failed, so there are no weights to answer requests with until another succeeds."""


class UnsupportedSampling(ValueError):
    """A request asks for a way of sampling that the engine's ``capabilities`` exclude."""


class RolloutBackend(Protocol):
    """Answers prompts of token ids with responses of token ids and their log-probabilities."""

    @property
    def version(self) -> int | None:
        """The version of the weights that requests are answered with; None where there are none."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What the engine promises beyond this protocol."""
        ...

    def publish(self, version: int, weights: Handle[WeightSource]) -> Ref[None]:
        """Replaces the engine's weights.

        Weights with other names or shapes than the model's are refused before any weight is overwritten. After a
        later failure, the engine answers no request until a publication succeeds.

        An engine with ``versions_per_token`` lets requests wait between two tokens meanwhile, which go on with the
        new weights; after a failure they end with ``PublicationFailed``. So another thread may publish during a call.

        Raises:
            ValueError: the names or shapes are not the model's.
            IncompleteWeights: a part is missing, arrived twice, or has other values than were sent.
        """
        ...

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        """Returns the samples of all requests, ordered by request and by number.

        Sample i of a request draws from ``request.key.fold_in(i)``.

        Args:
            requests: prompts, with their way of sampling.
            version: the version that the weights must have; with ``versions_per_token``, the oldest that they may
                have. None accepts any.

        Raises:
            StaleWeightsError: the engine holds another version than ``version``, or none.
            UnsupportedSampling: a request uses a field of ``Sampling`` that ``capabilities`` excludes.
        """
        ...

    def stream(self, requests: Sequence[Request], *, version: int | None = None) -> Iterator[Sample]:
        """Returns an iterator over the samples that ``generate`` would return, in the order in which they end.

        Another call of the engine may interrupt a stream that was not read to its end. Its next sample then raises
        ``StaleWeightsError``.

        Args:
            requests: as for ``generate``. Their ids differ, since only the id tells whose sample it is.
            version: as for ``generate``.

        Raises:
            StaleWeightsError: as ``generate``, at the latest where the first sample is read.
            UnsupportedSampling: as ``generate``, at the latest where the first sample is read.
        """
        ...

    def sleep(self, level: int = 2) -> Ref[None]:
        """Frees the memory of caches at level 1, of caches and weights at level 2."""
        ...

    def wake(self, tags: Sequence[str] = ()) -> Ref[None]:
        """Gets ready for requests after ``sleep``; after level 2, weights must be published again.

        Args:
            tags: which of ``weights`` and ``cache`` to allocate; by default both.
        """
        ...


def serves(held: int | None, version: int | None, capabilities: Capabilities) -> bool:
    """Returns whether an engine may answer a request.

    Args:
        held: the version of the engine's weights; None where there are none.
        version: the version that the request asks for; None for any.
        capabilities: the engine's. With ``versions_per_token``, newer weights than the ones asked for will do.

    Example:
        >>> plain, in_flight = Capabilities(), Capabilities(versions_per_token=True)
        >>> serves(4, 3, plain), serves(4, 3, in_flight), serves(4, 5, in_flight), serves(None, None, in_flight)
        (False, True, False, False)
    """
    if held is None or version is None:
        return held is not None
    return held >= version if capabilities.versions_per_token else held == version


def check_sampling(requests: Sequence[Request], capabilities: Capabilities) -> None:
    """Raises an error for requests that an engine does not support.

    Raises:
        UnsupportedSampling: a request uses a field of ``Sampling`` that ``capabilities`` exclude.

    Example:
        >>> from verl_fn.state import Key, Sampling, requests_for
        >>> asked = requests_for([[1]], Sampling(8, top_k=5), Key.from_seed(0))
        >>> check_sampling(asked, Capabilities(top_k=False))
        Traceback (most recent call last):
        verl_fn.backends.protocol.rollout.UnsupportedSampling: request 0 sets top_k=5, which this
        engine does not support
    """
    for request in requests:
        s = request.sampling
        for name, used, allowed in (
            ("top_k", s.top_k > 0, capabilities.top_k),
            ("top_p", s.top_p < 1.0, capabilities.top_p),
            ("stop_token_ids", bool(s.stop_token_ids), capabilities.stop_token_ids),
        ):
            if used and not allowed:
                value = getattr(s, name)
                raise UnsupportedSampling(
                    f"request {request.id} sets {name}={value}, which this engine does not support"
                )
