"""What a rollout engine promises."""

from __future__ import annotations

from collections.abc import Sequence
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
        batch_independent: neither the order nor the number of requests beside it changes a response, except at
            draws that ``near_ties`` counts.
        versions_per_token: new weights may arrive in the middle of a response, and each token says which drew it;
            without this, all tokens of a response are of one version.
        top_k, top_p, stop_token_ids: fields of ``Sampling`` that are obeyed; a request that uses another one is
            refused.
    """

    repeatable: bool = True
    batch_independent: bool = True
    versions_per_token: bool = False
    top_k: bool = True
    top_p: bool = True
    stop_token_ids: bool = True


class StaleWeightsError(RuntimeError):
    """The engine's weights are not of the version that a request asked for, or were never whole."""


class UnsupportedSampling(ValueError):
    """A request asks for a way of sampling that the engine's ``capabilities`` exclude."""


class RolloutBackend(Protocol):
    """Token ids in, token ids and log-probs out."""

    @property
    def version(self) -> int | None:
        """The version of the weights that requests are answered with; None where there are none."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What the engine promises beyond this protocol."""
        ...

    def publish(self, version: int, weights: Handle[WeightSource]) -> Ref[None]:
        """Take over these weights.

        Weights whose names or shapes are not the model's are refused before anything is overwritten. Where it fails
        later, the engine answers no request until a whole publication succeeds.

        Raises:
            ValueError: the names or shapes are not the model's.
            IncompleteWeights: a part is missing, came twice, or arrived with other values.
        """
        ...

    def generate(self, requests: Sequence[Request], *, version: int | None = None) -> Ref[list[Sample]]:
        """Returns the responses, request by request, those of one request by their numbers.

        Sample i of a request draws from ``request.key.fold_in(i)``.

        Args:
            version: the weights asked for; another version is an error. None takes what is there.

        Raises:
            StaleWeightsError: the engine holds another version than ``version``, or none.
            UnsupportedSampling: a request uses a field of ``Sampling`` that ``capabilities`` excludes.
        """
        ...

    def sleep(self, level: int = 2) -> Ref[None]:
        """Give back memory: of caches at level 1, of caches and weights at level 2."""
        ...

    def wake(self, tags: Sequence[str] = ()) -> Ref[None]:
        """Be ready again; after level 2, weights must be published anew.

        Args:
            tags: of ``weights`` and ``cache``, what to take memory for at once; by default both.
        """
        ...


def check_sampling(requests: Sequence[Request], capabilities: Capabilities) -> None:
    """Refuse requests that ask for what an engine does not do.

    Raises:
        UnsupportedSampling: one does.

    >>> from verl_fn.state import Key, Sampling, requests_for
    >>> asked = requests_for([[1]], Sampling(8, top_k=5), Key.from_seed(0))
    >>> check_sampling(asked, Capabilities(top_k=False))
    Traceback (most recent call last):
    verl_fn.backends.protocol.rollout.UnsupportedSampling: request 0 sets top_k=5, which this engine does not support
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
