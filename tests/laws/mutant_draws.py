"""Rollout engines that draw from another distribution or with other seeds, each with the promise that it breaks."""

import random
from functools import partial
from typing import ClassVar
from unittest import mock

import attrs
import torch
from mock_rollouts import rekeyed, resampled, rollout

from verl_fn.backends.mock import MockRollout, Response, sample_table
from verl_fn.backends.protocol import Capabilities
from verl_fn.state import Key


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


class CachesByPrompt(MockRollout):
    """Equal prompts get the answers of the first one. It does not promise that draws are independent."""

    def generate(self, requests, *, version=None):
        first = {}
        keyed = rekeyed(requests, lambda i, r: first.setdefault(r.prompt, r.key))
        return super().generate(keyed, version=version)


class Ignores(MockRollout):
    """Promises a cut, and draws from all tokens; the log-probs are those of its draws."""

    changes: ClassVar = {}

    def generate(self, requests, *, version=None):
        samples = super().generate(resampled(requests, **self.changes), version=version)
        cuts = {request.id: request.sampling.cuts for request in requests}
        return [self._with_full(s) if cuts[s.request] else s for s in samples]

    def _with_full(self, s):
        return s if s.full_log_probs is not None else attrs.evolve(s, full_log_probs=s.log_probs)


class IgnoresTopK(Ignores):
    changes: ClassVar = {"top_k": -1}


class IgnoresTopP(Ignores):
    changes: ClassVar = {"top_p": 1.0}


class AnswersWhatItDoesNotPromise(MockRollout):
    """Promises no top_k, and answers a request for it without."""

    def generate(self, requests, *, version=None):
        return super().generate(resampled(requests, top_k=-1), version=version)


def _log_probs_at(turn, tokens, temperature, **cuts):
    """The log-probs of ``tokens`` at another temperature."""
    table = (turn.weights["logits"].double() / temperature).log_softmax(-1)
    return table[[turn.prompt[-1], *tokens[:-1]], list(tokens)].tolist()


def raw_log_probs(turn):
    """Log-probs before the temperature."""
    answer = sample_table(turn)
    raw = _log_probs_at(turn, answer.tokens, 1.0)
    return Response(answer.tokens, raw, raw, answer.finished)


def draws_colder(turn):
    """The right log-probs of the wrong draws."""
    temperature = turn.sampling.temperature
    answer = sample_table(attrs.evolve(turn, sampling=attrs.evolve(turn.sampling, temperature=0.5 * temperature)))
    if not temperature:
        return answer
    full = _log_probs_at(turn, answer.tokens, temperature)
    return Response(answer.tokens, full, full, answer.finished)


def does_not_renormalise(turn):
    answer = sample_table(turn)
    return Response(answer.tokens, answer.full_log_probs, answer.full_log_probs, answer.finished)


def changed(turn, **fields):
    """The turn with another way of sampling."""
    return attrs.evolve(turn, sampling=attrs.evolve(turn.sampling, **fields))


def draws_once(turn):
    """One random number for all positions; at each position alone the distribution is right."""
    dice = random.Random(turn.key.seed()).random()
    with mock.patch.object(random.Random, "random", lambda self: dice):
        return sample_table(turn)


def samples_at_temperature_zero(turn):
    return sample_table(turn if turn.sampling.temperature else changed(turn, temperature=1.0))


def takes_the_least_likely(turn):
    """At temperature 0."""
    if turn.sampling.temperature:
        return sample_table(turn)
    turned = attrs.evolve(turn, weights={"logits": -turn.weights["logits"]})
    tokens = sample_table(turned).tokens
    log_probs = _log_probs_at(turn, tokens, 1.0)
    return Response(tokens, log_probs, log_probs, tokens[-1] in turn.sampling.stop_token_ids)


def cuts_the_first_token_only(turn):
    """Each later token is drawn from all tokens."""
    if not turn.sampling.cuts:
        return sample_table(turn)
    first = sample_table(changed(turn, max_tokens=1))
    if first.finished or turn.sampling.max_tokens == 1:
        return first
    rest = changed(turn, max_tokens=turn.sampling.max_tokens - 1, top_k=-1, top_p=1.0)
    later = sample_table(attrs.evolve(rest, prompt=(*turn.prompt, *first.tokens), key=turn.key.fold_in("later")))
    return Response(
        [*first.tokens, *later.tokens],
        [*first.log_probs, *later.log_probs],
        [*first.full_log_probs, *later.full_log_probs],
        later.finished,
    )


def ignores_top_p_beside_top_k(turn):
    return sample_table(changed(turn, top_p=1.0) if turn.sampling.top_k > 0 else turn)


def cuts_too_much(turn):
    """Keeps less probability than top_p asks for."""
    return sample_table(changed(turn, top_p=0.4 * turn.sampling.top_p) if turn.sampling.top_p < 1.0 else turn)


DRAWS = [
    (partial(rollout, SeedsFromPosition), "Purity"),
    (partial(rollout, SeedsFromCount), "Purity"),
    (partial(rollout, SeedsFromGlobalGenerator), "Purity"),
    (partial(rollout, IgnoresKey), "Purity"),
    (partial(rollout, OneDrawAPrompt), "Purity"),
    (partial(rollout, IgnoresTopK), "Capabilities"),
    (partial(rollout, IgnoresTopP), "Capabilities"),
    (
        partial(rollout, AnswersWhatItDoesNotPromise, capabilities=Capabilities(top_k=False)),
        "Capabilities",
    ),
    (partial(rollout, script=raw_log_probs), "Log-probs"),
    (partial(rollout, script=draws_colder), "Log-probs"),
    (partial(rollout, script=does_not_renormalise), "Log-probs"),
    (
        partial(rollout, CachesByPrompt, capabilities=Capabilities(batch_independent=False)),
        "Purity",
    ),
    (partial(rollout, script=draws_once), "Log-probs"),
    (partial(rollout, script=samples_at_temperature_zero), "Log-probs"),
    (partial(rollout, script=takes_the_least_likely), "Log-probs"),
    (partial(rollout, script=cuts_the_first_token_only), "Capabilities"),
    (partial(rollout, script=ignores_top_p_beside_top_k), "Capabilities"),
    (partial(rollout, script=cuts_too_much), "Capabilities"),
]
