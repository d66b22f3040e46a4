"""Broken rollout engines, each with the promise that it breaks."""

from functools import partial

import attrs
import torch

from verl_fn.backends.mock.rollout import MockRollout, Response, sample_table
from verl_fn.state import (
    Key,
)


def rollout(cls=MockRollout, script=sample_table):
    return cls(script)


class SeedsFromPosition(MockRollout):
    """Row i of a batch draws the numbers of row i, whichever prompt it holds."""

    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, version=version)
        names = torch.tensor(range(len(prompts)) if ids is None else ids)
        return batch.with_rows(group=names.repeat_interleave(sampling.n))


class SeedsFromCount(MockRollout):
    """Other draws where more samples are asked for."""

    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        return super().generate(prompts, sampling, key.fold_in(sampling.n), ids=ids, version=version)


class SeedsFromGlobalGenerator(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        key = Key.from_seed(int(torch.randint(2**31, ())))
        return super().generate(prompts, sampling, key, ids=ids, version=version)


class IgnoresKey(MockRollout):
    def _key(self, key, name, sample):
        return super()._key(Key.from_seed(0), name, sample)


class OneDrawAPrompt(MockRollout):
    def _key(self, key, name, sample):
        return super()._key(key, name, 0)


class ServesStaleWeights(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        return super().generate(prompts, sampling, key, ids=ids)


class SleepsLightly(MockRollout):
    """Goes on with the weights it had."""

    def sleep(self):
        pass


class KeepsFirstWeights(MockRollout):
    def publish(self, version, named_tensors):
        super().publish(version, self._weights.items() or named_tensors)


class KeepsReferences(MockRollout):
    def publish(self, version, named_tensors):
        super().publish(version, [])
        self._weights = dict(named_tensors)


class WritesToPublished(MockRollout):
    def publish(self, version, named_tensors):
        super().publish(version, [(name, t.div_(1.5)) for name, t in named_tensors])


class SaysAnotherVersion(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_rows(version=torch.full((len(batch),), 3))


class InterleavesSamples(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.take(torch.arange(len(batch)).view(-1, sampling.n).t().flatten())


class NumbersGroupsByPosition(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_rows(group=torch.arange(len(prompts)).repeat_interleave(sampling.n))


class NeverFinishes(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_rows(finished=torch.zeros(len(batch)))


class AlwaysFinishes(MockRollout):
    """Nobody would notice truncation."""

    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_rows(finished=torch.ones(len(batch)))


class RunsOn(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        longer = attrs.evolve(sampling, max_tokens=sampling.max_tokens + 1, stop_token_ids=())
        return super().generate(prompts, longer, key, ids=ids, version=version)


class RunsPastStops(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        on = attrs.evolve(sampling, stop_token_ids=())
        return super().generate(prompts, on, key, ids=ids, version=version)


class SpeaksOfPrompt(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_tokens(rollout_log_probs=batch["rollout_log_probs"] + batch["response_mask"] - 1.0)


class ForgetsTemperature(MockRollout):
    def generate(self, prompts, sampling, key, *, ids=None, version=None):
        batch = super().generate(prompts, sampling, key, ids=ids, version=version)
        return batch.with_rows(temperature=torch.ones(len(batch)))


def _said(request, tokens, temperature, **cuts):
    """The log-probs of ``tokens`` at another temperature."""
    table = (request.weights["logits"].double() / temperature).log_softmax(-1)
    return table[[request.prompt[-1], *tokens[:-1]], list(tokens)].tolist()


def raw_log_probs(request):
    """Log-probs before the temperature."""
    answer = sample_table(request)
    raw = _said(request, answer.tokens, 1.0)
    return Response(answer.tokens, raw, raw, answer.finished)


def draws_colder(request):
    """The right log-probs of the wrong draws."""
    temperature = request.sampling.temperature
    answer = sample_table(
        attrs.evolve(request, sampling=attrs.evolve(request.sampling, temperature=0.5 * temperature))
    )
    if not temperature:
        return answer
    full = _said(request, answer.tokens, temperature)
    return Response(answer.tokens, full, full, answer.finished)


def does_not_renormalise(request):
    answer = sample_table(request)
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
    (partial(rollout, SaysAnotherVersion), "Version"),
    (partial(rollout, InterleavesSamples), "Signature"),
    (partial(rollout, NumbersGroupsByPosition), "Signature"),
    (partial(rollout, NeverFinishes), "Signature"),
    (partial(rollout, AlwaysFinishes), "Signature"),
    (partial(rollout, RunsOn), "Signature"),
    (partial(rollout, RunsPastStops), "Signature"),
    (partial(rollout, SpeaksOfPrompt), "Signature"),
    (partial(rollout, ForgetsTemperature), "Signature"),
    (partial(rollout, script=raw_log_probs), "Log-probs"),
    (partial(rollout, script=draws_colder), "Log-probs"),
    (partial(rollout, script=does_not_renormalise), "Log-probs"),
]
