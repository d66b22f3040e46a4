"""Rollout engines with wrong versions, weights or samples, each with the promise that it breaks."""

from functools import partial

import attrs
import torch
from mock_rollouts import rekeyed, resampled, rollout

from verl_fn.backends.mock import MockRollout
from verl_fn.backends.protocol import Capabilities
from verl_fn.backends.weight_sync import IncompleteWeights


class ServesStaleWeights(MockRollout):
    def generate(self, requests, *, version=None):
        return super().generate(requests)


class SleepsLightly(MockRollout):
    """Goes on with the weights it had."""

    def sleep(self, level=2):
        pass


class KeepsFirstWeights(MockRollout):
    def publish(self, version, weights):
        before = self._weights
        super().publish(version, weights)
        self._weights = before or self._weights


class KeepsReferences(MockRollout):
    def publish(self, version, weights):
        super().publish(version, weights)
        self._weights = {c.name: c.values for bucket in weights.buckets() for c in bucket}


class WritesToPublished(MockRollout):
    def publish(self, version, weights):
        super().publish(version, weights)
        for bucket in weights.buckets():
            for chunk in bucket:
                chunk.values.div_(1.5)


class IgnoresWhatIsMissing(MockRollout):
    """Fills what did not come with what it finds."""

    def publish(self, version, weights):
        self._weights = {spec.name: torch.zeros(spec.shape) for spec in weights.specs}
        for bucket in weights.buckets(checked=True):
            for chunk in bucket:
                self._weights[chunk.name][chunk.start : chunk.start + len(chunk.values)] = chunk.values
        self.version = version


class CountsRowsOnly(IgnoresWhatIsMissing):
    """A bucket that came twice passes for one that did not come."""

    def publish(self, version, weights):
        wanted = sum(spec.shape[0] for spec in weights.specs)
        super().publish(None, weights)
        rows = sum(len(c.values) for bucket in weights.buckets() for c in bucket)
        if rows < wanted:
            raise IncompleteWeights("rows are missing")
        self.version = version


class ReportsItsVersionEarly(MockRollout):
    def publish(self, version, weights):
        try:
            super().publish(version, weights)
        finally:
            self.version = version


class FallsBackToOldWeights(MockRollout):
    """Half of the new weights and half of the old ones, under the old version."""

    def publish(self, version, weights):
        before = self.version
        try:
            super().publish(version, weights)
        except Exception:
            self.version = before
            raise


class NeverCompares(MockRollout):
    def publish(self, version, weights):
        self._weights, self.version = {}, None
        done = {spec.name: 0 for spec in weights.specs}
        made = {spec.name: torch.zeros(spec.shape) for spec in weights.specs}
        for bucket in weights.buckets():
            for chunk in bucket:
                if chunk.start != done[chunk.name]:
                    raise IncompleteWeights("a bucket is missing")
                done[chunk.name] += len(chunk.values)
                made[chunk.name][chunk.start : done[chunk.name]] = chunk.values
        if any(done[spec.name] < spec.shape[0] for spec in weights.specs):
            raise IncompleteWeights("rows are missing")
        self._weights, self.version = made, version


class Edits(MockRollout):
    """Changes every sample that it gives."""

    def edit(self, sample):
        raise NotImplementedError

    def generate(self, requests, *, version=None):
        return [self.edit(sample) for sample in super().generate(requests, version=version)]


class ReportsAnotherVersion(Edits):
    def edit(self, sample):
        return attrs.evolve(sample, versions=torch.full_like(sample.versions, 3))


class InterleavesSamples(MockRollout):
    def generate(self, requests, *, version=None):
        return sorted(super().generate(requests, version=version), key=lambda s: s.number)


class NumbersGroupsByPosition(MockRollout):
    def generate(self, requests, *, version=None):
        places = {request.id: i for i, request in enumerate(requests)}
        samples = super().generate(requests, version=version)
        return [attrs.evolve(s, request=places[s.request]) for s in samples]


class DropsSamples(MockRollout):
    """Though no environment takes part."""

    def generate(self, requests, *, version=None):
        return super().generate(requests, version=version)[:-1]


class MasksAToken(Edits):
    """As if an environment had written the first token."""

    def edit(self, sample):
        mask = sample.mask.clone()
        mask[0] = 0.0
        return attrs.evolve(sample, mask=mask, log_probs=sample.log_probs * mask)


class StreamLosesSamples(MockRollout):
    def stream(self, requests, *, version=None):
        return iter(self.generate(requests, version=version)[1:])


class StreamRepeatsSamples(MockRollout):
    def stream(self, requests, *, version=None):
        samples = self.generate(requests, version=version)
        return iter([samples[0], *samples])


class StreamNumbersByArrival(MockRollout):
    def stream(self, requests, *, version=None):
        samples = super().stream(requests, version=version)
        return (attrs.evolve(sample, number=number) for number, sample in enumerate(samples))


class StreamDrawsAnew(MockRollout):
    def stream(self, requests, *, version=None):
        return super().stream(rekeyed(requests, lambda i, r: r.key.fold_in("stream")), version=version)


class StreamServesStaleWeights(MockRollout):
    def stream(self, requests, *, version=None):
        return super().stream(requests)


class NeverFinishes(Edits):
    def edit(self, sample):
        return attrs.evolve(sample, finish_reason="length")


class AlwaysFinishes(Edits):
    """Nobody would notice truncation."""

    def edit(self, sample):
        return attrs.evolve(sample, finish_reason="stop")


class RunsOn(MockRollout):
    def generate(self, requests, *, version=None):
        longer = [resampled([r], max_tokens=r.sampling.max_tokens + 1, stop_token_ids=())[0] for r in requests]
        return super().generate(longer, version=version)


class RunsPastStops(MockRollout):
    def generate(self, requests, *, version=None):
        return super().generate(resampled(requests, stop_token_ids=()), version=version)


class SpeaksOfPrompt(Edits):
    """Fields as long as prompt and response together."""

    def edit(self, sample):
        return attrs.evolve(sample, log_probs=torch.cat([torch.zeros(len(sample.prompt)), sample.log_probs]))


class ForgetsTemperature(Edits):
    def edit(self, sample):
        return attrs.evolve(sample, temperature=1.0)


ROUTES = Capabilities(routed_experts=True)


class GivesRoutes(Edits):
    """Two layers of eight experts, of which each token goes to two, by the tokens up to it. Nothing is broken."""

    def edit(self, sample):
        row = torch.cat([sample.prompt, sample.tokens])
        first = (row * torch.arange(1, 1 + len(row))).cumsum(0) % 8
        layers = torch.stack([first, (first + 3) % 8], 1)
        routed = torch.stack([layers, (layers + 1) % 8], 2)
        return attrs.evolve(sample, routed_experts=torch.cat([routed[:-1], routed[-2:-1]]))


class ShiftsRoutes(GivesRoutes):
    """Gives each token the experts of the next one."""

    def edit(self, sample):
        routed = super().edit(sample).routed_experts
        return attrs.evolve(sample, routed_experts=torch.cat([routed[1:], routed[-1:]]))


class RoutesTheResponse(GivesRoutes):
    def edit(self, sample):
        routed = super().edit(sample).routed_experts
        return attrs.evolve(sample, routed_experts=routed[len(sample.prompt) :])


class RoutesToOneExpert(GivesRoutes):
    """As layers without experts have in vLLM's answers."""

    def edit(self, sample):
        return attrs.evolve(sample, routed_experts=torch.zeros_like(super().edit(sample).routed_experts))


SAMPLES = [
    (partial(rollout, ServesStaleWeights), "Version"),
    (partial(rollout, SleepsLightly), "Version"),
    (partial(rollout, KeepsFirstWeights), "Log-probs"),
    (partial(rollout, KeepsReferences), "Version"),
    (partial(rollout, WritesToPublished), "Version"),
    (partial(rollout, IgnoresWhatIsMissing), "Version"),
    (partial(rollout, CountsRowsOnly), "Version"),
    (partial(rollout, ReportsItsVersionEarly), "Version"),
    (partial(rollout, FallsBackToOldWeights), "Version"),
    (partial(rollout, NeverCompares), "Version"),
    (partial(rollout, ReportsAnotherVersion), "Version"),
    (partial(rollout, InterleavesSamples), "Signature"),
    (partial(rollout, NumbersGroupsByPosition), "Signature"),
    (partial(rollout, DropsSamples), "Signature"),
    (partial(rollout, MasksAToken), "Signature"),
    (partial(rollout, StreamLosesSamples), "Signature"),
    (partial(rollout, StreamRepeatsSamples), "Signature"),
    (partial(rollout, StreamNumbersByArrival), "Signature"),
    (partial(rollout, StreamDrawsAnew), "Purity"),
    (partial(rollout, StreamServesStaleWeights), "Version"),
    (partial(rollout, NeverFinishes), "Signature"),
    (partial(rollout, AlwaysFinishes), "Signature"),
    (partial(rollout, RunsOn), "Signature"),
    (partial(rollout, RunsPastStops), "Signature"),
    (partial(rollout, SpeaksOfPrompt), "Signature"),
    (partial(rollout, ForgetsTemperature), "Signature"),
    (partial(rollout, GivesRoutes), "Capabilities"),
    (partial(rollout, capabilities=ROUTES), "Capabilities"),
    (partial(rollout, ShiftsRoutes, capabilities=ROUTES), "Capabilities"),
    (partial(rollout, RoutesTheResponse, capabilities=ROUTES), "Capabilities"),
    (partial(rollout, RoutesToOneExpert, capabilities=ROUTES), "Capabilities"),
]
