"""Broken rollout engines, each with the promise that it breaks."""

from functools import partial
from typing import ClassVar

import attrs
import torch

from verl_fn.backends.mock.rollout import MockRollout, Response, sample_table
from verl_fn.backends.protocol import Capabilities
from verl_fn.backends.weight_sync import IncompleteWeights
from verl_fn.state import Key


def rollout(cls=MockRollout, script=sample_table, **options):
    return cls(script, **options)


def rekeyed(requests, key):
    """The same requests with other keys, ``key(place, request)``."""
    return [attrs.evolve(request, key=key(i, request)) for i, request in enumerate(requests)]


def resampled(requests, **changes):
    return [attrs.evolve(r, sampling=attrs.evolve(r.sampling, **changes)) for r in requests]


class SeedsFromPosition(MockRollout):
    """Request i draws the numbers of request i, whichever prompt it holds."""

    def generate(self, requests, *, version=None):
        return super().generate(rekeyed(requests, lambda i, r: Key.from_seed(i)), version=version)


class SeedsFromCount(MockRollout):
    """Other draws where more samples are asked for."""

    def generate(self, requests, *, version=None):
        keyed = rekeyed(requests, lambda i, r: r.key.fold_in(r.sampling.n))
        return super().generate(keyed, version=version)


class SeedsFromGlobalGenerator(MockRollout):
    def generate(self, requests, *, version=None):
        seed = int(torch.randint(2**31, ()))
        keyed = rekeyed(requests, lambda i, r: Key.from_seed(seed).fold_in(r.id))
        return super().generate(keyed, version=version)


class IgnoresKey(MockRollout):
    def generate(self, requests, *, version=None):
        return super().generate(rekeyed(requests, lambda i, r: Key.from_seed(r.id)), version=version)


class OneDrawAPrompt(MockRollout):
    def _key(self, request, number):
        return super()._key(request, 0)


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


class TellsItsVersionEarly(MockRollout):
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


class SaysAnotherVersion(Edits):
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
    """Without saying that an environment does."""

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


class PassesOver(MockRollout):
    """Promises a cut, and draws from all tokens; the log-probs are those of its draws."""

    changes: ClassVar = {}

    def generate(self, requests, *, version=None):
        samples = super().generate(resampled(requests, **self.changes), version=version)
        cuts = {request.id: request.sampling.cuts for request in requests}
        return [self._told(s) if cuts[s.request] else s for s in samples]

    def _told(self, s):
        return s if s.full_log_probs is not None else attrs.evolve(s, full_log_probs=s.log_probs)


class PassesOverTopK(PassesOver):
    changes: ClassVar = {"top_k": -1}


class PassesOverTopP(PassesOver):
    changes: ClassVar = {"top_p": 1.0}


class AnswersWhatItDoesNotPromise(MockRollout):
    """Says that it has no top_k, and passes a request for it over."""

    def generate(self, requests, *, version=None):
        return super().generate(resampled(requests, top_k=-1), version=version)


def _said(turn, tokens, temperature, **cuts):
    """The log-probs of ``tokens`` at another temperature."""
    table = (turn.weights["logits"].double() / temperature).log_softmax(-1)
    return table[[turn.prompt[-1], *tokens[:-1]], list(tokens)].tolist()


def raw_log_probs(turn):
    """Log-probs before the temperature."""
    answer = sample_table(turn)
    raw = _said(turn, answer.tokens, 1.0)
    return Response(answer.tokens, raw, raw, answer.finished)


def draws_colder(turn):
    """The right log-probs of the wrong draws."""
    temperature = turn.sampling.temperature
    answer = sample_table(attrs.evolve(turn, sampling=attrs.evolve(turn.sampling, temperature=0.5 * temperature)))
    if not temperature:
        return answer
    full = _said(turn, answer.tokens, temperature)
    return Response(answer.tokens, full, full, answer.finished)


def does_not_renormalise(turn):
    answer = sample_table(turn)
    return Response(answer.tokens, answer.full_log_probs, answer.full_log_probs, answer.finished)


ROLLOUTS = [
    (partial(rollout, SeedsFromPosition), "Purity"),
    (partial(rollout, SeedsFromCount), "Purity"),
    (partial(rollout, SeedsFromGlobalGenerator), "Purity"),
    (partial(rollout, IgnoresKey), "Purity"),
    (partial(rollout, OneDrawAPrompt), "Purity"),
    (partial(rollout, ServesStaleWeights), "Version"),
    (partial(rollout, SleepsLightly), "Version"),
    (partial(rollout, KeepsFirstWeights), "Log-probs"),
    (partial(rollout, KeepsReferences), "Version"),
    (partial(rollout, WritesToPublished), "Version"),
    (partial(rollout, IgnoresWhatIsMissing), "Version"),
    (partial(rollout, CountsRowsOnly), "Version"),
    (partial(rollout, TellsItsVersionEarly), "Version"),
    (partial(rollout, FallsBackToOldWeights), "Version"),
    (partial(rollout, NeverCompares), "Version"),
    (partial(rollout, SaysAnotherVersion), "Version"),
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
    (partial(rollout, PassesOverTopK), "Capabilities"),
    (partial(rollout, PassesOverTopP), "Capabilities"),
    (
        partial(rollout, AnswersWhatItDoesNotPromise, capabilities=Capabilities(top_k=False)),
        "Capabilities",
    ),
    (partial(rollout, script=raw_log_probs), "Log-probs"),
    (partial(rollout, script=draws_colder), "Log-probs"),
    (partial(rollout, script=does_not_renormalise), "Log-probs"),
]
