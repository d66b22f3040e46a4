"""Calls of the embedded sampler: publications, versions, refusals and streams."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from sampler_models import KEY, PROMPTS, SAMPLINGS, draw, make, responses

from verl_fn.backends.protocol import Sampling, StaleWeightsError
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.serving import Growing, not_finite
from verl_fn.backends.weight_sync import IncompleteWeights, Weights, specs_of
from verl_fn.state import requests_for


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("qwen3"), "qwen3", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def general(tmp_path_factory):
    return make(tmp_path_factory.mktemp("olmo2"), "olmo2")


@pytest.fixture(scope="module")
def sampler(made):
    return made.sampler(slots=5)


def test_rows_of_different_limits_are_drawn_as_alone(made):
    """Turns of conversations differ in the room that is left, and are decoded together."""
    requests = [
        attrs.evolve(request, sampling=Sampling(limit))
        for request, limit in zip(requests_for(PROMPTS[:4], Sampling(1), KEY), (3, 11, 1, 7), strict=True)
    ]
    together, alone = made.sampler(slots=3), made.sampler(slots=3)
    for got, request in zip(together.generate(requests), requests, strict=True):
        (want,) = alone.generate([request])
        assert torch.equal(got.tokens, want.tokens) and got.finish_reason == want.finish_reason
        assert 1 <= len(got.tokens) <= request.sampling.max_tokens
    runs = []
    together._run = lambda requests, *others: runs.append(len(requests)) or iter(())
    list(together._draw(requests, 0, False))
    assert runs == [4]


def test_rows_of_different_stop_tokens_are_drawn_as_alone(made, sampler):
    """Each second row ends with a token from the middle of what it draws without that."""
    asked = requests_for(PROMPTS, Sampling(12), KEY)
    whole = [sample.tokens.tolist() for sample in sampler.generate(asked)]
    stops = [(tokens[len(tokens) // 2],) if i % 2 else () for i, tokens in enumerate(whole)]
    asked = [
        attrs.evolve(request, sampling=Sampling(12, stop_token_ids=stop))
        for request, stop in zip(asked, stops, strict=True)
    ]
    alone = [sampler.generate([request])[0].tokens.tolist() for request in asked]
    assert alone != whole and [sample.tokens.tolist() for sample in sampler.generate(asked)] == alone


def test_a_row_may_have_every_position_of_the_model(sampler):
    prompt = [4] * (int(sampler.max_length) - 1)
    (sample,) = sampler.generate(requests_for([prompt], Sampling(1), KEY))
    assert len(sample.tokens) == 1
    with pytest.raises(ValueError, match="positions of the model"):
        sampler.generate(requests_for([prompt], Sampling(2), KEY))


# Weights


def test_publishing_copies(made, sampler):
    mine = {name: t.clone() for name, t in made.weights.items()}
    other = Sampler(made.folder)
    other.publish(3, Weights.of(mine))
    for t in mine.values():
        t.zero_()
    sampling = Sampling(12, n=2)
    assert responses(draw(other, PROMPTS, sampling, KEY)) == responses(draw(sampler, PROMPTS, sampling, KEY))


@pytest.mark.parametrize("which", ["made", "general"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_of_any_size_make_the_same_weights(request, which, dtype):
    """Also in place of weights that were run: nothing is multiplied into them twice."""
    this = request.getfixturevalue(which)
    want = draw(this.sampler(dtype=dtype), PROMPTS, Sampling(6), KEY)

    @attrs.frozen
    class Small:
        specs: tuple
        size: int

        def buckets(self, max_bytes=0, *, checked=False):
            return Weights.of(this.weights).buckets(self.size, checked=checked)

    engine = this.sampler(dtype=dtype)
    for version, size in ((4, 1), (5, 1000), (6, 2**20)):
        engine.publish(version, Small(specs_of(this.weights), size))
        got = draw(engine, PROMPTS, Sampling(6), KEY, version=version)
        assert torch.equal(got.tokens, want.tokens)
        assert torch.equal(got["rollout_log_probs"], want["rollout_log_probs"])


def test_part_of_a_version_is_not_served(made):
    """Half a publication leaves no weights; a whole one heals the engine."""
    sampler, halved = made.sampler(), {n: t * 0.5 for n, t in made.weights.items()}
    source = Weights.of(halved)
    short = Weights(source.specs, lambda: list(halved.items())[:-1])
    with pytest.raises(IncompleteWeights, match="ended early"):
        sampler.publish(4, short)
    for version in (None, 3, 4):
        with pytest.raises(StaleWeightsError):
            draw(sampler, [[1]], Sampling(1), version=version)
    sampler.publish(5, Weights.of(made.weights))
    want = draw(made.sampler(), PROMPTS, Sampling(6)).tokens
    assert torch.equal(draw(sampler, PROMPTS, Sampling(6)).tokens, want)


@pytest.mark.parametrize("which", ["made", "general"])
def test_new_weights_take_over_and_odd_ones_do_not(request, which):
    this = request.getfixturevalue(which)
    sampler, sampling = this.sampler(slots=4), Sampling(12)
    before = responses(draw(sampler, PROMPTS, sampling, KEY))
    name = next(n for n in this.weights if "down_proj" in n)
    halved = {n: t * 0.5 for n, t in this.weights.items()}
    for odd, message in (
        ({n: t for n, t in halved.items() if n != name}, f"not published: {name}"),
        ({**halved, "extra.weight": torch.ones(2)}, "'extra.weight' is no parameter"),
        ({**halved, name: torch.ones(2, 3)}, rf"{name}' has shape \(2, 3\); the model's has \(32, 96\)"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.publish(4, Weights.of(odd))
        assert sampler.version == 3
    with pytest.raises(ValueError, match="twice"):
        twice = Weights.of(halved)
        sampler.publish(4, attrs.evolve(twice, specs=(*twice.specs, twice.specs[-1])))
    assert responses(draw(sampler, PROMPTS, sampling, KEY, version=3)) == before
    sampler.publish(4, Weights.of(halved))
    after = draw(sampler, PROMPTS, sampling, KEY, version=4)
    assert responses(after) != before and after["version"].tolist() == [4] * len(after)


def test_stale_weights_are_an_error(made):
    sampler = Sampler(made.folder)
    with pytest.raises(StaleWeightsError, match="any version, and the sampler holds none"):
        draw(sampler, [[1]], Sampling(1), KEY)
    sampler.publish(3, Weights.of(made.weights))
    with pytest.raises(StaleWeightsError, match="version 4, and the sampler holds version 3"):
        draw(sampler, [[1]], Sampling(1), KEY, version=4)
    want = draw(sampler, [[1]], Sampling(9), KEY, version=3).tokens
    sampler.sleep()
    sampler.wake()
    with pytest.raises(StaleWeightsError, match="version 3, and the sampler holds none"):
        draw(sampler, [[1]], Sampling(1), KEY, version=3)
    sampler.publish(3, Weights.of(made.weights))
    assert torch.equal(draw(sampler, [[1]], Sampling(9), KEY).tokens, want)


# What is refused


@pytest.mark.parametrize(
    "prompts, sampling, kwargs, message",
    [
        ([[1], []], Sampling(1), {}, "prompt 1 is empty"),
        ([], Sampling(1), {}, "at least one"),
        ([[1], [4]], Sampling(1), {"ids": [3]}, "2 prompts with 1 ids"),
        ([[1], [1] * 200], Sampling(3897), {}, "prompt 1 has 200 tokens.*max_tokens=3897.*4096 positions"),
        ([[1, 13]], Sampling(1), {}, "prompt 0 holds tokens outside the vocabulary of 13"),
        ([[-1]], Sampling(1), {}, "vocabulary"),
    ],
)
def test_odd_requests_are_refused(sampler, prompts, sampling, kwargs, message):
    with pytest.raises(ValueError, match=message):
        draw(sampler, prompts, sampling, KEY, **kwargs)


def test_the_longest_row_fits(sampler):
    batch = draw(sampler, [[1] * 250], Sampling(6, temperature=0.0), KEY)
    assert int(batch.lengths[0]) <= 256


@pytest.mark.parametrize("sampling", [Sampling(8), Sampling(8, top_k=3, top_p=0.9), Sampling(8, temperature=0.0)])
def test_logits_that_are_not_finite_name_the_row_and_leave_no_trace(made, sampling):
    # Afterwards a short row follows in the slot of the bad one, beside a longer row.
    sampler, bad_prompts, good_prompts = made.sampler(), [[1, 4], [1, 4, 5, 9, 6, 7]], [[1, 4, 5, 6, 6, 7], [1, 4]]
    want = responses(draw(sampler, good_prompts, sampling, KEY))
    bad = {name: t.clone() for name, t in made.weights.items()}
    bad["model.embed_tokens.weight"][9] = torch.nan
    sampler.publish(4, Weights.of(bad))
    with pytest.raises(FloatingPointError, match=r"row 1 \(sample 0 of prompt 1\)"):
        draw(sampler, bad_prompts, sampling, KEY)
    sampler.publish(5, Weights.of(made.weights))
    assert responses(draw(sampler, good_prompts, sampling, KEY)) == want


def test_odd_settings_are_refused(made):
    with pytest.raises(ValueError, match="dtype"):
        Sampler(made.folder, dtype="float16")
    with pytest.raises(ValueError, match="slots"):
        Sampler(made.folder, slots=0)


class Echo(Growing):
    """Ends each request in the step after it came, or never, without a model."""

    ends = True

    def _run(self, requests, call, as_they_end):
        raise NotImplementedError

    def _abort(self):
        self.aborted = True

    def _grow(self, more, call):
        ended = []
        while (requests := more(ended)) is not None:
            ended = [SimpleNamespace(request=request.id) for request in requests if self.ends]


def test_requests_that_arrive_are_checked(made):
    engine = Echo(made.folder, 8, 13, "first")
    engine.version = 3
    plain = requests_for([[1], [1, 4], [5]], Sampling(2), KEY)
    longer, twice, hotter = (
        attrs.evolve(plain[1], sampling=sampling)
        for sampling in (Sampling(7), Sampling(2, n=2), Sampling(2, temperature=0.5))
    )
    for parts, message in (
        ([plain[:2], None], "more returned None while 2 requests are still drawn"),
        ([plain[:1], [hotter]], "must have n=1, and differ only in max_tokens"),
        ([[twice]], "must have n=1"),
        ([[plain[0], plain[0]]], "the id 0 is given to 2 prompts"),
        ([[longer]], "with max_tokens=7 that is more than the 8 positions"),
    ):
        engine.aborted, engine.ends, arriving = False, False, iter(parts)
        with pytest.raises(ValueError, match=message):
            engine.grow(lambda ended, arriving=arriving: next(arriving), version=3)
        assert engine.aborted
    with pytest.raises(StaleWeightsError):
        engine.grow(lambda ended: None, version=4)
    # A request may come again after its end, and others may be as long as the model.
    engine.ends, arriving, ids = (
        True,
        iter([plain[:1], plain[:1], [attrs.evolve(longer, sampling=Sampling(6))], []]),
        [],
    )

    def more(ended):
        ids.extend(sample.request for sample in ended)
        return next(arriving, None)

    engine.grow(more, version=3)
    assert ids == [0, 0, 1]


def test_what_cannot_be_recorded_while_weights_arrive_is_refused(made):
    with pytest.raises(ValueError, match="set in_flight=False or routed_experts=False"):
        Echo(made.folder, 8, 13, "first", in_flight=True, routed_experts=True)


def test_logits_that_are_not_finite_are_of_a_sample_of_a_prompt():
    assert str(not_finite(5, 4)).startswith("row 5 (sample 1 of prompt 1): the model's logits are not finite")


# Streams


def test_a_stream_gives_samples_as_they_end(made):
    """Those of several samplings, and the caller's grad mode stays."""
    sampler = made.sampler(slots=4)
    requests = [
        *requests_for(PROMPTS[:3], SAMPLINGS[0], KEY),
        *requests_for(PROMPTS[3:5], attrs.evolve(SAMPLINGS[3], max_tokens=1), KEY, [7, 8]),
    ]
    streamed = []
    for sample in sampler.stream(requests, version=3):
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        streamed.append(sample)
    samples = sampler.generate(requests)

    def order(sample):
        return sample.request, sample.number

    assert [order(sample) for sample in streamed] != [order(sample) for sample in samples]
    for one, other in zip(sorted(streamed, key=order), samples, strict=True):
        assert order(one) == order(other) and one.tokens.tolist() == other.tokens.tolist()
        assert torch.equal(one.log_probs, other.log_probs) and one.finish_reason == other.finish_reason


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, made: engine.publish(4, Weights.of(made.weights)),
        lambda engine, made: draw(engine, [[1, 4]], Sampling(2)),
        lambda engine, made: next(engine.stream(requests_for([[1, 4]], Sampling(2), KEY))),
        lambda engine, made: engine.sleep(1),
    ],
    ids=["publish", "generate", "stream", "sleep"],
)
@pytest.mark.parametrize("begun", [False, True])
def test_another_call_interrupts_a_stream(made, call, begun):
    """No sample is drawn from other weights, or from a cache that another call has used."""
    engine = made.sampler(slots=2)
    stream = engine.stream(requests_for(PROMPTS, SAMPLINGS[0], KEY), version=3)
    if begun:
        next(stream)
    call(engine, made)
    with pytest.raises(StaleWeightsError, match="interrupted by another call"):
        for sample in stream:
            assert sample.versions.tolist() == [3] * len(sample.tokens)
    assert len(engine.generate(requests_for([[1, 4]], Sampling(2), KEY))) == 1
