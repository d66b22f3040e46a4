"""Rows that go on from transformers' own cache are the rows that are computed whole for every token."""

import functools

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from verl_fn.backends.hf import past
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.sampler.decoder import PastDecoder, RowDecoder
from verl_fn.backends.serving import model_of
from verl_fn.benchmarks.tiny_models import tiny_folder
from verl_fn.state import Batch, Key, Sampling, pack, requests_for
from verl_fn.steps import sgd

# Linear attention; Mamba and attention in one layer; Mamba only; a window in the mask; one in the cache; ALiBi: its
# positions come from the mask.
FAMILIES = {
    "qwen3_5_text": {}, "falcon_h1": {}, "mamba2": {}, "gpt_neo": {"window_size": 4}, "phimoe": {}, "bloom": {},
}  # fmt: skip
PROMPTS = [[5, 9, 13, 7, 11, 3, 8], [4, 12], [33], [60, 14, 61, 15, 8], [9, 4, 22, 17, 10, 6, 40, 21, 3, 30, 2]]
REQUESTS = requests_for(PROMPTS, Sampling(max_tokens=9, n=2, temperature=0.8), Key.from_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tiny_folder(name, tmp_path_factory.mktemp(name), **own) for name, own in FAMILIES.items()}


def drawn(folder, decoder, requests):
    """The samples of an engine with three slots."""
    sampler = Sampler(folder, slots=3)
    if decoder is RowDecoder:
        skeleton, shapes = model_of(folder)
        sampler.decoder = RowDecoder(skeleton, shapes, torch.device("cpu"), torch.float32)
    assert type(sampler.decoder) is decoder
    backend = Local(folder, sgd(0.0))
    state = backend.load_pretrained()
    batches = []
    for version in range(2):
        sampler.publish(version, backend.weights(state.params))
        batches.append(pack(sampler.generate(requests, version=version)))
        sampler.sleep()
    assert torch.equal(batches[0].tokens, batches[1].tokens)
    return batches[0], backend.forward(state.params, batches[0]).logprobs


@pytest.fixture(scope="module")
def whole(folders):
    """Draws the samples of a family once, from rows that are computed whole for every token."""
    return functools.cache(lambda name: drawn(folders[name], RowDecoder, REQUESTS)[0])


@pytest.mark.parametrize("slack", [0, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_go_on_from_their_past(folders, whole, name, slack, monkeypatch):
    """Prompts of other lengths, each with two responses, wait for three slots; rows end at other times."""
    expected = whole(name)
    monkeypatch.setattr(past, "SLACK", slack)
    gone_on, again = drawn(folders[name], PastDecoder, REQUESTS)
    assert torch.equal(gone_on.tokens, expected.tokens) and len(set(gone_on.lengths.tolist())) > 3
    mask = gone_on["response_mask"].bool()
    assert (gone_on["rollout_log_probs"] - again)[mask].abs().max() < 1e-4


def test_what_rows_before_have_read_is_forgotten(folders):
    """A slot that is taken again has nothing of its last row: a request is answered alike, whoever came before."""
    requests = requests_for(PROMPTS, Sampling(max_tokens=6), Key.from_seed(2))
    alone = drawn(folders["qwen3_5_text"], PastDecoder, requests[-1:])[0]
    among = drawn(folders["qwen3_5_text"], PastDecoder, requests)[0]
    assert torch.equal(list(among.rows())[-1], next(iter(alone.rows())))


def test_columns_before_all_rows_are_removed(folders, monkeypatch):
    monkeypatch.setattr(past, "SLACK", 4)
    skeleton, _ = model_of(folders["bloom"])
    held = past.Past(skeleton)
    backend = Local(folders["bloom"], sgd(0.0))
    params = backend.load_pretrained().params

    def read(skeleton):
        return held.read(skeleton, Batch.from_rows([PROMPTS[4], PROMPTS[1]]), torch.tensor([0, 1]))

    weights = dict(params.items())
    with torch.no_grad():
        skeleton.run(weights, read)
        held.copy([1], [0])
        for step in range(4):
            tokens, positions = torch.tensor([5]), torch.tensor([2 + step])
            skeleton.run(weights, lambda s, t=tokens, p=positions: held.step(s, t, p, int(p) + 1))
    keys = held._cache.layers[0].keys
    assert keys.shape[0] == 1 and keys.shape[2] < len(PROMPTS[4])


def test_a_cache_of_another_kind_is_refused(folders):
    skeleton, _ = model_of(folders["bloom"])
    assert skeleton.fit.cached

    class Compressed(DynamicLayer):
        """A layer that keeps more than keys and values."""

    cache = type("Cache", (), {"layers": [Compressed(None)]})()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(past.ModelError, match=r"has a cache of its own"):
        patch.setattr("transformers.cache_utils.DynamicCache", lambda config: cache)
        past._new_cache(skeleton.config)


def test_states_are_kept_in_float32(folders):
    """They are rounded at every token otherwise. Products of other sizes round otherwise too, so log-probs differ."""
    sampler = Sampler(folders["qwen3_5_text"], slots=3, dtype="bfloat16")
    backend = Local(folders["qwen3_5_text"], sgd(0.0), dtype="bfloat16")
    sampler.publish(0, backend.weights(backend.load_pretrained().params))
    list(sampler.generate(requests_for(PROMPTS, Sampling(max_tokens=6), Key.from_seed(3)), version=0))
    layers = sampler.decoder._past._cache.layers
    assert {layer.recurrent_states.dtype for layer in layers if hasattr(layer, "conv_states")} == {torch.float32}


def test_rows_beyond_what_transformers_computes_right_are_refused(tmp_path):
    folder = tiny_folder("nemotron_h", tmp_path)
    sampler, backend = Sampler(folder, slots=2), Local(folder, sgd(0.0))
    assert type(sampler.decoder) is PastDecoder
    sampler.publish(0, backend.weights(backend.load_pretrained().params))
    for prompt, answer in ((40, 2), (10, 30)):
        requests = requests_for([[5] * prompt], Sampling(max_tokens=answer), Key.from_seed(3))
        with pytest.raises(ValueError, match="right only up to chunk_size, 16 tokens"):
            list(sampler.generate(requests, version=0))


def test_each_call_begins_without_the_rows_of_the_last_one(folders):
    sampler, backend = Sampler(folders["bloom"], slots=8), Local(folders["bloom"], sgd(0.0))
    sampler.publish(0, backend.weights(backend.load_pretrained().params))
    for prompts in ([[7] * 50], [[8, 9]] * 8):
        list(sampler.generate(requests_for(prompts, Sampling(max_tokens=2), Key.from_seed(3)), version=0))
    assert sampler.decoder._past._cache.layers[0].keys.shape[2] < 10


def test_the_experts_of_padded_rows_are_not_recorded(tmp_path):
    with pytest.raises(past.ModelError, match=r"experts are recorded for packed rows only"):
        Sampler(tiny_folder("qwen3_5_moe_text", tmp_path), routed_experts=True)
