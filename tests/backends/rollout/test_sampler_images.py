"""The embedded engine on prompts with images, beside the trainer."""

import itertools

import attrs
import pytest
import torch
from vision_cases import ARCHS, encoded, seeing

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import Sampling
from verl_fn.backends.sampler import Sampler
from verl_fn.state import Key, pack, requests_for, tree, unpack
from verl_fn.steps import sgd

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


def test_samples_are_unpacked_with_their_images(model):
    _, _, sampler = engine(model("qwen2_5_vl"))
    batch = pack(sampler.generate(asked(model("qwen2_5_vl"), n=1)))
    assert tree.equal(pack(unpack(batch)), batch)


def test_engines_that_read_no_images(model, tmp_path):
    request = asked(model("smolvlm"), n=1)[0]
    _, _, sampler = engine(new_model(tmp_path / "text", chars="abcd?"))
    with pytest.raises(ValueError, match="prompt 0 has images, and this engine reads none"):
        sampler.generate([attrs.evolve(request, prompt=(1, 4))])
