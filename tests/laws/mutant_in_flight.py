"""Rollout engines that take weights in the middle of responses wrongly, each with the promise that it breaks."""

from functools import partial

import attrs
import torch
from mock_rollouts import rollout

from verl_fn.backends.mock import MockRollout
from verl_fn.backends.protocol import Capabilities, StaleWeightsError

IN_FLIGHT = Capabilities(versions_per_token=True)


class Restamps(MockRollout):
    """Changes the versions of a stream's samples."""

    def stream(self, requests, *, version=None):
        for s in super().stream(requests, version=version):
            yield attrs.evolve(s, versions=torch.full_like(s.versions, self.stamp(s.versions.tolist())))


class StampsTheNewVersion(Restamps):
    stamp = staticmethod(max)


class StampsTheOldVersion(Restamps):
    stamp = staticmethod(min)


class LogProbsOfTheOldVersion(MockRollout):
    def stream(self, requests, *, version=None):
        for s in super().stream(requests, version=version):
            old = self._tables[int(s.versions[0])].log_softmax(-1)
            before = torch.cat([s.prompt[-1:], s.tokens[:-1]])
            yield attrs.evolve(s, log_probs=old[before, s.tokens])

    def publish(self, version, weights):
        super().publish(version, weights)
        self._tables = getattr(self, "_tables", {}) | {version: self._weights["logits"]}


class UpdatesLate(MockRollout):
    """Responses that have begun never see the new weights."""

    def stream(self, requests, *, version=None):
        return reversed(self.generate(requests, version=version))


class SwapsInThePublication(MockRollout):
    """Responses go on with weights of which half have come."""

    def publish(self, version, weights):
        before = self._weights
        try:
            super().publish(version, weights)
        except Exception:
            new = next(iter(weights.buckets()))[0].values
            self._weights = before | {"logits": torch.cat([new, before["logits"][len(new) :]])}
            self._half = self.version = version
            raise

    def generate(self, requests, *, version=None):
        if self.version is not None and self.version == getattr(self, "_half", None):
            raise StaleWeightsError("only responses that have begun go on")
        return super().generate(requests, version=version)


class GoesOnWithOldWeights(MockRollout):
    """A publication that fails changes nothing for responses that have begun."""

    def stream(self, requests, *, version=None):
        samples = self.generate(requests, version=version)
        for sample in self._in_flight(requests, reversed(samples)) if self.version else samples:
            yield sample
            if self.version is None:
                yield from samples[:-1][::-1]
                return


class RefusesOlderRequests(MockRollout):
    def generate(self, requests, *, version=None):
        if version not in (None, self.version):
            raise StaleWeightsError("another version")
        return super().generate(requests, version=version)


class LosesRowsInFlight(MockRollout):
    def stream(self, requests, *, version=None):
        return (s for s in super().stream(requests, version=version) if len(set(s.versions.tolist())) == 1)


FLIGHTS = [
    (partial(rollout, cls, capabilities=IN_FLIGHT), law)
    for cls, law in (
        (StampsTheNewVersion, "Log-probs"),
        (StampsTheOldVersion, "Log-probs"),
        (LogProbsOfTheOldVersion, "Log-probs"),
        (UpdatesLate, "Version"),
        (SwapsInThePublication, "Log-probs"),
        (GoesOnWithOldWeights, "Version"),
        (RefusesOlderRequests, "Version"),
        (LosesRowsInFlight, "Signature"),
    )
]
