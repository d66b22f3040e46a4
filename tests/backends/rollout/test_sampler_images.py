"""The embedded engine on prompts with images, beside the trainer."""

import itertools
from unittest import mock

import attrs
import pytest
import torch
from vision_cases import ARCHS, encoded, seeing, seen_batch

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import PublicationFailed, Sampling
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.sampler.decoder import GeneralDecoder
from verl_fn.backends.weight_sync import IncompleteWeights, Weights
from verl_fn.state import Key, pack, requests_for, tree, unpack
from verl_fn.steps import cross_entropy, sgd

KEY = Key.from_seed(4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def of(arch):
        if arch not in made:
            made[arch] = seeing(tmp_path_factory.mktemp(arch), arch)
        return made[arch]

    return of


def asked(folder, n=3, tokens=6):
    prompts = encoded(folder)[0]
    ids, images = [ids for ids, _ in prompts], [images for _, images in prompts]
    return requests_for(ids, Sampling(max_tokens=tokens, n=n), KEY, images=images)


def engine(folder, **options):
    trainer, sampler = Local(folder, sgd(0.1)), Sampler(folder, **options)
    state = trainer.load_pretrained()
    sampler.publish(0, trainer.weights(state.params))
    return trainer, state, sampler


@pytest.mark.parametrize("arch", ARCHS)
def test_log_probs_are_the_trainers(model, arch):
    """With few slots, so that prompts wait and slots are filled again."""
    trainer, state, sampler = engine(model(arch), slots=5)
    batch = pack(sampler.generate(asked(model(arch))))
    own = trainer.forward(state.params, batch).logprobs
    assert batch.ragged["pixels"].counts.sum() > 0
    assert float((own - batch["rollout_log_probs"]).abs().max()) <= 1e-4
    # Without its images a prompt is answered otherwise.
    gray = batch.with_ragged(pixels=[torch.full_like(row, 0.25) for row in batch.rows("pixels")])
    assert float((trainer.forward(state.params, gray).logprobs - own).abs().max()) > 0.1


def test_draws_depend_on_no_other_prompt(model):
    _, _, sampler = engine(model("qwen3_vl"), slots=4)
    requests = asked(model("qwen3_vl"))
    whole = [s.tokens.tolist() for s in sampler.generate(requests)]
    each = [s.tokens.tolist() for request in requests[::-1] for s in sampler.generate([request])]
    assert [*itertools.chain(*[each[i : i + 3] for i in range(len(each) - 3, -1, -3)])] == whole


def test_prompts_of_equal_tokens_and_other_images_are_computed_apart(model):
    """As the same question about pictures of one size."""
    trainer, state, sampler = engine(model("qwen3_vl"))
    request = next(one for one in asked(model("qwen3_vl"), n=1) if one.images is not None)
    pixels = request.images.fields["pixels"]
    inverted = attrs.evolve(request.images, fields={**request.images.fields, "pixels": -pixels})
    batch = pack(sampler.generate([request, attrs.evolve(request, id=request.id + 1, images=inverted)]))
    own = trainer.forward(state.params, batch).logprobs
    assert float((own - batch["rollout_log_probs"]).abs().max()) <= 1e-4


def test_new_weights_in_flight_compute_images_again(model):
    trainer, state, sampler = engine(model("qwen2_5_vl"), in_flight=True)
    other = trainer.init(Key.from_seed(9))
    stream = sampler.stream(asked(model("qwen2_5_vl"), n=1, tokens=8))
    samples = [next(stream)]
    sampler.publish(1, trainer.weights(other.params))
    samples += stream
    batch = pack(samples)
    assert set(batch["versions"][batch["response_mask"] == 1].tolist()) == {0, 1}
    for version, params in enumerate((state.params, other.params)):
        drawn = batch["versions"] == version
        own = trainer.forward(params, batch).logprobs
        assert float((own - batch["rollout_log_probs"])[drawn].abs().max()) <= 1e-4


def arriving(sampler, version, weights):
    """Publishes, and returns the names of the tensors that the engine got."""
    names = []
    with mock.patch.object(GeneralDecoder, "write", autospec=True, side_effect=GeneralDecoder.write) as write:
        sampler.publish(version, weights)
    for call in write.call_args_list:
        names.append(call.args[1].name)
    return set(names)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_tower_is_published_once(model, arch, dtype):
    """And again if it was edited, if weights were dropped, and to another engine; tensors are shared in fp32."""
    trainer = Local(model(arch), sgd(0.1), freeze_vision_tower=True)
    sampler, state = Sampler(model(arch), dtype=dtype), trainer.load_pretrained()
    tower = state.params.keys() - set(state.params.trained())
    assert tower and all("vis" in name for name in tower)
    first, others = set(sampler.decoder.shapes), set(sampler.decoder.shapes) - tower
    assert arriving(sampler, 0, trainer.weights(state.params)) == first
    grads, _ = trainer.forward_backward(state, seen_batch(model(arch)), cross_entropy())
    state, _ = trainer.apply_update(state, grads)
    assert arriving(sampler, 1, trainer.weights(state.params)) == others
    same_as_whole(sampler, trainer, state)
    with torch.no_grad():
        state.params[min(tower)].add_(1.0)
    assert arriving(sampler, 2, trainer.weights(state.params)) == first
    same_as_whole(sampler, trainer, state)
    assert arriving(sampler, 3, trainer.weights(state.params)) == others
    sampler.sleep()
    assert arriving(sampler, 4, trainer.weights(state.params)) == first
    assert arriving(Sampler(model(arch)), 4, trainer.weights(state.params)) == first


def test_a_tower_that_is_shared_is_never_written(model):
    """Two states have towers of their own; the engine computes with the first one's, and then with a copy."""
    folder = model("smolvlm")
    trainer, sampler = Local(folder, sgd(0.1), freeze_vision_tower=True), Sampler(folder)
    first = trainer.load_pretrained()
    tower = {name: first.params[name] for name in first.params.keys() - set(first.params.trained())}
    before = {name: t.clone() for name, t in tower.items()}
    for version in range(2):
        sampler.publish(version, trainer.weights(first.params))
    assert all(sampler.decoder._weights[name].data_ptr() == t.data_ptr() for name, t in tower.items())
    others = {name: t + 1.0 for name, t in first.params.items()}
    sampler.publish(2, Weights.of(others))
    assert tree.equal(tower, before)
    assert all(torch.equal(t, sampler.decoder._weights[name]) for name, t in others.items())
    # The tower of a state that was edited gives way to another state's with the values of before.
    sampler = Sampler(folder)
    sampler.publish(0, trainer.weights(first.params))
    second = trainer.load_pretrained()
    with torch.no_grad():
        first.params[min(tower)].add_(1.0)
    sampler.publish(1, trainer.weights(second.params))
    same_as_whole(sampler, trainer, second)


def same_as_whole(sampler, trainer, state):
    """The engine's weights are the ones of an engine that gets all of them."""
    other = Sampler(sampler.folder, dtype=sampler.dtype)
    other.publish(0, attrs.evolve(trainer.weights(state.params), kept=None))
    assert sampler.decoder._weights.keys() == other.decoder._weights.keys()
    assert all(torch.equal(t, other.decoder._weights[name]) for name, t in sampler.decoder._weights.items())


def test_a_publication_that_fails_leaves_a_frozen_tower_where_it_was(model):
    trainer = Local(model("smolvlm"), sgd(0.1), freeze_vision_tower=True)
    sampler, state = Sampler(model("smolvlm"), in_flight=True), trainer.load_pretrained()
    weights = trainer.weights(state.params)
    changing = weights.kept.changing

    def lost(what):
        """The source without its last tensor."""
        return attrs.evolve(what, read=lambda: list(what.read())[:-1])

    sampler.publish(0, weights)
    for broken in (
        attrs.evolve(weights, kept=attrs.evolve(weights.kept, changing=lost(changing))),
        attrs.evolve(weights, kept=attrs.evolve(weights.kept, whole=lost(weights), identify=lambda: "another")),
    ):
        with pytest.raises(IncompleteWeights, match="the publication ended early"):
            sampler.publish(1, broken)
        with pytest.raises(PublicationFailed):
            sampler.generate(asked(model("smolvlm")))
        kept = sampler._base is not None
        names = arriving(sampler, 2, weights)
        assert names == {spec.name for spec in (changing if kept else weights).specs}
        same_as_whole(sampler, trainer, state)
    assert not kept


def test_samples_are_unpacked_with_their_images(model):
    _, _, sampler = engine(model("qwen2_5_vl"))
    batch = pack(sampler.generate(asked(model("qwen2_5_vl"), n=1)))
    assert tree.equal(pack(unpack(batch)), batch)


def test_engines_that_read_no_images(model, tmp_path):
    request = asked(model("smolvlm"), n=1)[0]
    _, _, sampler = engine(new_model(tmp_path / "text", chars="abcd?"))
    with pytest.raises(ValueError, match="prompt 0 has images, and this engine reads none"):
        sampler.generate([attrs.evolve(request, prompt=(1, 4))])
