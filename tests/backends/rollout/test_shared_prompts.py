"""Rows with the same prompt share what is computed of it, whatever request, refill or weights they belong to."""

import attrs
import pytest
import torch
from sampler_models import KEY, PROMPTS, draw, make, responses
from vision_cases import encoded, seeing

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import Sampling
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.sampler import engine as module
from verl_fn.backends.sampler.decoder import PastDecoder, RowDecoder
from verl_fn.backends.serving import model_of
from verl_fn.backends.weight_sync import Weights
from verl_fn.benchmarks.tiny_models import tiny_folder
from verl_fn.state import Key, pack, requests_for
from verl_fn.steps import adamw, sgd
from verl_fn.testing import check_exact

# Of three prompts, the first and the last are the same one.
TWICE = [PROMPTS[3], PROMPTS[6], PROMPTS[3]]


@pytest.fixture(scope="module", params=["qwen3", "olmo2"])
def made(tmp_path_factory, request):
    """A model for each of the two decoders."""
    return make(tmp_path_factory.mktemp(request.param), request.param)


@attrs.define
class Watched:
    """The prompts that an engine has computed, and how many rows began with one that was in the cache before."""

    computed: list = attrs.field(factory=list)
    later: int = 0


@pytest.fixture
def watch(monkeypatch):
    """Lets an engine note its prompts, and checks that none is computed while a row with it is decoded."""

    def of(sampler):
        seen, prefill, begin = Watched(), sampler.decoder.prefill, module._Run._begin

        def noting(rows, slots):
            seen.computed += [tuple(row.tolist()) for row in rows.rows()]
            return prefill(rows, slots)

        def beginning(run, count):
            decoded, before = {run.prompts[row // run.n] for row in run.rows}, len(seen.computed)
            first = len(run.rows)
            logits = begin(run, count)
            new = seen.computed[before:]
            if run.decoder.keeps_prompts:
                assert len(set(new)) == len(new) and not decoded & set(new)
            seen.later += sum(run.prompts[row // run.n] in decoded for row in run.rows[first:])
            return logits

        monkeypatch.setattr(sampler.decoder, "prefill", noting)
        monkeypatch.setattr(module._Run, "_begin", beginning)
        return seen

    return of


def alone(sampler, requests):
    """Tokens and log-probs of requests that are asked one after the other, by request and number."""
    return {
        (one.request, one.number): (one.tokens.tolist(), one.log_probs)
        for request in requests
        for one in sampler.generate([request])
    }


@pytest.mark.parametrize("slots", [3, 5, 64])
def test_a_prompt_is_computed_once_for_rows_that_begin_at_different_times(made, watch, slots):
    """More rows than slots, so that a part of a group begins while another part is decoded."""
    sampling = Sampling(12, n=7, top_k=5)
    sampler = made.sampler(slots=slots)
    seen = watch(sampler)
    got = responses(draw(sampler, PROMPTS[:4], sampling))
    assert (seen.later > 3) == (slots < 28)
    assert len(seen.computed) < 8
    assert got == responses(draw(made.sampler(slots=64), PROMPTS[:4], sampling))


@pytest.mark.parametrize("slots", [2, 5, 64])
def test_requests_with_the_same_prompt_share_it_and_draw_by_their_own_keys(made, watch, slots):
    """So begin the conversations of a group: requests of one sample each, with the same prompt and other limits."""
    limits = (12, 3, 9, 11, 7, 12)
    requests = [
        attrs.evolve(request, sampling=Sampling(limit))
        for request, limit in zip(requests_for(TWICE[:1] * 6, Sampling(1), KEY), limits, strict=True)
    ]
    sampler = made.sampler(slots=slots)
    seen = watch(sampler)
    samples = sampler.generate(requests)
    assert set(seen.computed) == {tuple(TWICE[0])} and len(seen.computed) < 4
    expected = alone(made.sampler(), requests)
    for one in samples:
        tokens, log_probs = expected[one.request, one.number]
        assert one.tokens.tolist() == tokens
        torch.testing.assert_close(one.log_probs, log_probs, atol=1e-5, rtol=0)
    assert len({tuple(one.tokens.tolist()) for one in samples}) > 3


def test_a_row_that_begins_later_has_the_logits_that_were_drawn_from(made, watch):
    requests = [
        attrs.evolve(request, sampling=Sampling(limit, temperature=0.7))
        for request, limit in zip(requests_for(TWICE, Sampling(1), KEY), (12, 2, 12), strict=True)
    ]
    sampler = made.sampler(slots=2)
    seen = watch(sampler)
    samples = sampler.generate(requests)
    assert len(seen.computed) == 2 and seen.later == 1
    expected = alone(made.sampler(), requests)
    for one in samples:
        tokens, log_probs = expected[one.request, one.number]
        assert one.tokens.tolist() == tokens
        torch.testing.assert_close(one.log_probs, log_probs, atol=1e-5, rtol=0)


def test_groups_that_have_the_same_prompt_by_chance_share_it(made, watch):
    requests = requests_for(TWICE, Sampling(12, n=3), KEY)
    sampler = made.sampler(slots=64)
    seen = watch(sampler)
    samples = sampler.generate(requests)
    assert seen.computed == [tuple(prompt) for prompt in TWICE[:2]]
    expected = alone(made.sampler(), requests)
    assert {(one.request, one.number): one.tokens.tolist() for one in samples} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
    assert [one.prompt.tolist() for one in samples] == [prompt for prompt in TWICE for _ in range(3)]


def test_a_prompt_without_a_row_in_a_slot_is_computed_again(made, watch):
    """With one slot no row is left from which the next one could take it."""
    sampler = made.sampler(slots=1)
    seen = watch(sampler)
    got = responses(draw(sampler, TWICE[:1], Sampling(4, n=3)))
    assert seen.computed == [tuple(TWICE[0])] * 3
    assert got == responses(draw(made.sampler(slots=64), TWICE[:1], Sampling(4, n=3)))


def test_rows_that_begin_after_a_publication_get_nothing_of_older_weights(made):
    """Every token's log-prob is the one of its version's weights, also a first token's."""
    sampler, halved = made.sampler(slots=5, in_flight=True), {name: t * 0.5 for name, t in made.weights.items()}
    begin = module._Run._begin

    def beginning(self, count):
        logits = begin(self, count)
        if self.begun > 6 and sampler.version == 3:
            sampler.publish(4, Weights.of(halved))
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Run, "_begin", beginning)
        samples = sampler.generate(requests_for(TWICE[:1], Sampling(12, n=40), KEY))
    assert {tuple(dict.fromkeys(one.versions.tolist())) for one in samples} == {(3,), (3, 4), (4,)}
    trainer = Local(made.folder, sgd(0.1))
    batch, params = pack(samples), trainer.load_pretrained().params
    for version, weights in ((3, made.weights), (4, halved)):
        own = trainer.forward(attrs.evolve(params, leaves=dict(weights)), batch).logprobs
        drawn = (batch["versions"] == version) & (batch["response_mask"] == 1)
        assert drawn.any()
        assert (own - batch["rollout_log_probs"])[drawn].abs().max() < 1e-4


def test_the_same_text_with_another_image_is_another_prompt(monkeypatch, tmp_path):
    folder = seeing(tmp_path, "qwen3_vl")
    ids, seen = encoded(folder, ["<image>ab?"])[0][0]
    gray = attrs.evolve(seen, fields=seen.fields | {"pixels": torch.full_like(seen.fields["pixels"], 0.25)})
    trainer, sampler = Local(folder, sgd(0.1)), Sampler(folder, slots=9)
    state = trainer.load_pretrained()
    sampler.publish(0, trainer.weights(state.params))
    prefill, computed = sampler.decoder.prefill, []
    monkeypatch.setattr(
        sampler.decoder, "prefill", lambda rows, slots: computed.append(len(rows)) or prefill(rows, slots)
    )
    requests = requests_for([ids] * 3, Sampling(6, n=3), KEY, images=[seen, gray, seen])
    batch = pack(sampler.generate(requests))
    own = trainer.forward(state.params, batch).logprobs
    assert (own - batch["rollout_log_probs"]).abs().max() < 1e-4
    assert computed == [2]


@pytest.mark.parametrize("kind", [PastDecoder, RowDecoder])
def test_a_state_that_has_read_more_than_the_prompt_is_no_prompt(watch, tmp_path, kind):
    """Hybrids share a prompt among rows that begin together; rows that begin later compute it again."""
    folder = tiny_folder("qwen3_5_text", tmp_path)
    backend = Local(folder, sgd(0.0))
    sampler = Sampler(folder, slots=3)
    if kind is RowDecoder:
        skeleton, shapes = model_of(folder)
        sampler.decoder = RowDecoder(skeleton, shapes, torch.device("cpu"), torch.float32)
    assert type(sampler.decoder) is kind
    sampler.publish(0, backend.weights(backend.load_pretrained().params))
    requests = [
        attrs.evolve(request, sampling=Sampling(4 + i))
        for i, request in enumerate(requests_for([[5, 9, 13, 7]] * 8, Sampling(1), Key.from_seed(1)))
    ]
    seen = watch(sampler)
    tokens = {(one.request, one.number): one.tokens.tolist() for one in sampler.generate(requests)}
    assert seen.later > 3 and len(seen.computed) < 8
    assert (len(seen.computed) == 1) == (kind is RowDecoder)
    assert tokens == {name: tokens for name, (tokens, _) in alone(sampler, requests).items()}


def test_shared_prompts_are_exact(watch, tmp_path):
    """Bit for bit the trainer's log-probs, for parts of groups and for groups with the same prompt."""
    folder = new_model(tmp_path, chars="abcdefghi", arch="qwen3", hidden_size=32, num_hidden_layers=2)
    trainer, engine = Local(folder, adamw(1e-2), exact=True), Sampler(folder, slots=5, exact=True)
    seen = watch(engine)
    samplings = [Sampling(20, n=7), Sampling(9, n=3, temperature=0.7)]
    assert check_exact(trainer, engine, TWICE, samplings=samplings, updates=1) > 200
    assert seen.later > 10
