"""Every rollout engine that runs in this process."""

import attrs
import mutants
import pytest
import torch
from hypothesis import given
from mock_rollouts import rollout
from mutant_rollouts import ROUTES, GivesRoutes
from properties import KEYS, examples

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.mock import Mock, MockRollout, sample_table
from verl_fn.backends.protocol import Capabilities, Sampling, StaleWeightsError
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Key, requests_for
from verl_fn.steps import constant, sgd
from verl_fn.testing import LawViolation, check_rollout

PROMPTS = [(3, 4), (5,), (1, 6, 1), (3, 4)]


@given(key=KEYS)
@examples(4)
def test_mock_that_samples_a_table(key):
    trainer = Mock(mutants.VOCAB, sgd(constant(0.1)))
    check_rollout(MockRollout(sample_table), trainer, key=key)


def test_mock_that_gets_weights_in_flight():
    check_rollout(
        MockRollout(sample_table, Capabilities(versions_per_token=True)), Mock(mutants.VOCAB, sgd(constant(0.1)))
    )


@pytest.mark.parametrize(
    "script",
    [
        {(3, 4): [5, 2], (5,): [4] * 9, (1, 6, 1): [2]},
        lambda turn: [3 + turn.key.seed() % 5, *turn.prompt, 2, 7],
        lambda turn: [4, 5, turn.sample],
    ],
    ids=["mapping", "by key", "by sample"],
)
def test_mock_with_a_script(script):
    check_rollout(lambda: MockRollout(script), prompts=PROMPTS)


def test_mock_refuses_a_prompt_that_its_script_lacks():
    engine = MockRollout({(1,): [2]})
    with pytest.raises(StaleWeightsError, match="none"):
        engine.generate(requests_for([[1]], Sampling(4), Key.from_seed(0)))
    engine.publish(0, Weights.of({}))
    with pytest.raises(KeyError, match="no answer"):
        engine.generate(requests_for([[3]], Sampling(4), Key.from_seed(0)))


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        ({}, "float32", 1e-5),
        ({"slots": 3, "in_flight": True}, "float32", 1e-5),
        ({"dtype": "bfloat16"}, "bfloat16", 0.1),
    ],
    ids=["all at a time", "three at a time, in flight", "bf16"],
)
def test_sampler(tmp_path, options, dtype, tolerance):
    # Larger weights than a new model has, so that its distributions are far from uniform.
    folder = new_model(tmp_path, chars="abcd", hidden_size=16, initializer_range=0.3)
    trainer = Local(folder, sgd(constant(0.1)), dtype=dtype)
    check_rollout(lambda: Sampler(folder, **options), trainer, tolerance=tolerance)


def test_mock_that_gives_experts():
    check_rollout(rollout(GivesRoutes, capabilities=ROUTES), Mock(mutants.VOCAB, sgd(constant(0.1))))


class Unrepeatable(MockRollout):
    """As engines are whose draws depend on what else they do; it promises nothing of them."""

    calls = 0

    def generate(self, requests, *, version=None):
        self.calls += 1
        keyed = [attrs.evolve(request, key=request.key.fold_in(self.calls)) for request in requests]
        return super().generate(keyed, version=version)


def test_an_engine_is_held_to_what_it_promises():
    trainer = Mock(mutants.VOCAB, sgd(constant(0.1)))
    modest = Capabilities(repeatable=False, batch_independent=False)
    check_rollout(Unrepeatable(sample_table, modest), trainer)
    with pytest.raises(LawViolation, match="Purity"):
        check_rollout(Unrepeatable(sample_table), trainer)
    less = Capabilities(top_k=False, top_p=False, stop_token_ids=False)
    check_rollout(MockRollout(sample_table, less), trainer, stop_token_ids=())


class WithTools(MockRollout):
    """An environment answers each first token with a token of its own, and drops every fourth sample."""

    def generate(self, requests, *, version=None):
        samples = super().generate(requests, version=version)
        return [self._answered(s) for s in samples if (s.request + s.number) % 4]

    def _answered(self, s):
        def inserted(t, value):
            return torch.cat([t[:1], t.new_full((1,), value), t[1:]])

        full = None if s.full_log_probs is None else inserted(s.full_log_probs, 0)
        return attrs.evolve(
            s,
            tokens=inserted(s.tokens, 3),
            mask=inserted(s.mask, 0),
            log_probs=inserted(s.log_probs, 0),
            full_log_probs=full,
            versions=inserted(s.versions, self.version),
        )


def test_masks_with_holes_and_unequal_numbers_of_samples():
    def script(turn):
        return [3 + turn.key.seed() % 5, *turn.prompt, 2]

    check_rollout(WithTools(script), prompts=PROMPTS, environment=True)
    with pytest.raises(LawViolation, match="Signature"):
        check_rollout(WithTools(script), prompts=PROMPTS)
