"""Weights that reach the embedded sampler in the middle of responses."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sampler_models import KEY, PROMPTS, make

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import PublicationFailed, Sampling, StaleWeightsError
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.sampler import engine as module
from verl_fn.backends.weight_sync import IncompleteWeights, Weights
from verl_fn.state import requests_for
from verl_fn.steps import constant, sgd
from verl_fn.testing import LawViolation, check_rollout

ASKED = requests_for(PROMPTS, Sampling(12, n=2), KEY)


@pytest.fixture(scope="module", params=["qwen3", "olmo2"])
def made(tmp_path_factory, request):
    """A model for each of the two decoders."""
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def engine(made):
    engine = Sampler(made.folder, slots=5, in_flight=True)
    engine.publish(3, Weights.of(made.weights))
    return engine


def halved(made):
    return {name: t * 0.5 for name, t in made.weights.items()}


def calling(engine, number, call):
    """Lets another thread make a call in the middle of a step, and waits until it waits for the step."""
    pool, step, count = ThreadPoolExecutor(1), engine.decoder.step, 0
    results = []

    def stepping(*args):
        nonlocal count
        count += 1
        if count == number:
            results.append(pool.submit(call))
            while not engine._arriving and not results[0].done():
                threading.Event().wait(0.001)
        return step(*args)

    engine.decoder.step = stepping
    return results


def test_another_thread_publishes_in_the_middle_of_a_call(made, engine):
    """The call goes on with the new weights, also where a prefill of all its rows takes several parts."""
    before = engine.generate(ASKED)
    results = calling(engine, 4, lambda: engine.publish(7, Weights.of(halved(made))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PREFILL_TOKENS", 20)
        samples = engine.generate(ASKED, version=3)
    results[0].result()
    versions = [s.versions.tolist() for s in samples]
    assert {tuple(sorted(set(v))) for v in versions} == {(3,), (3, 7), (7,)}
    for sample, same in zip(samples, before, strict=True):
        kept = int((sample.versions == 3).sum())
        assert torch.equal(sample.tokens[:kept], same.tokens[:kept])
    assert engine.version == 7


def test_another_publication_of_the_same_version_computes_the_cache_anew(made, engine):
    results = calling(engine, 4, lambda: engine.publish(3, Weights.of(halved(made))))
    mixed = [s.log_probs for s in engine.generate(ASKED)]
    results[0].result()
    results = calling(engine, 4, lambda: engine.publish(7, Weights.of(halved(made))))
    engine.publish(6, Weights.of(made.weights))
    assert all(map(torch.equal, mixed, (s.log_probs for s in engine.generate(ASKED))))


def test_weights_that_are_refused_change_nothing(made, engine):
    before = engine.generate(ASKED)
    results = calling(engine, 4, lambda: engine.publish(7, Weights.of({"odd": torch.ones(1)})))
    samples = engine.generate(ASKED, version=3)
    with pytest.raises(ValueError, match="'odd' is no parameter"):
        results[0].result()
    assert [s.tokens.tolist() for s in samples] == [s.tokens.tolist() for s in before]
    assert {v for s in samples for v in s.versions.tolist()} == {3}


def test_a_call_ends_where_a_publication_fails(made, engine):
    source = Weights.of(halved(made))
    short = Weights(source.specs, lambda: list(halved(made).items())[:-1])
    results = calling(engine, 4, lambda: engine.publish(7, short))
    with pytest.raises(StaleWeightsError, match="a publication failed"):
        engine.generate(ASKED, version=3)
    with pytest.raises(PublicationFailed, match="IncompleteWeights"):
        engine.generate(ASKED)
    with pytest.raises(IncompleteWeights):
        results[0].result()
    engine.sleep(2)
    with pytest.raises(StaleWeightsError, match="publish them first"):
        engine.generate(ASKED)


def test_no_other_call_begins_while_one_waits_for_weights(made, engine):
    """A second call and a sleep wait for the first one, as they do without publications in flight."""
    begun, others = threading.Event(), ThreadPoolExecutor(2)
    waiting = []

    def buckets_later():
        waiting.extend([others.submit(engine.generate, ASKED), others.submit(engine.sleep, 1)])
        begun.wait(0.05)
        assert engine.steps is None, "a call that waits is not one that hangs"
        return halved(made).items()

    calling(engine, 4, lambda: engine.publish(7, Weights(Weights.of(made.weights).specs, buckets_later)))
    samples = engine.generate(ASKED)
    assert len(samples) == len(ASKED) * 2
    assert {v for s in waiting[0].result() for v in s.versions.tolist()} == {7}
    waiting[1].result()


def test_the_law_sees_a_cache_of_older_weights(tmp_path, monkeypatch):
    folder = new_model(tmp_path, chars="abcd", hidden_size=16, initializer_range=0.3)

    def kept(run):
        n = len(run.rows)
        yield run.decoder.step(run.tokens[:n], run.positions[:n], run._longest())

    monkeypatch.setattr(module._Run, "_again", kept)
    with pytest.raises(LawViolation, match=r"weights of each token's version.*keys and values that older weights"):
        check_rollout(Sampler(folder, in_flight=True), Local(folder, sgd(constant(0.1))), tolerance=1e-5)
