"""With LoRA, an embedded engine beside the trainer computes with the trainer's frozen parameters, without a copy."""

import pytest
import torch
from megatron_support import EXPERTS

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Key, Sampling, pack, requests_for
from verl_fn.steps import adamw, chain, ppo_clip
from verl_fn.testing import tiny_batch

LORA = Lora(rank=2, alpha=4.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16, **EXPERTS)


def places(tensors):
    return {name: t.untyped_storage().data_ptr() for name, t in tensors.items()}


def shared(engine, params):
    """The names of the engine's tensors that are the state's own."""
    own = places(params)
    return {name for name, place in places(engine.decoder._weights).items() if own.get(name) == place}


def gap(backend, engine, params, version):
    requests = requests_for([[1, 3], [1, 4, 2]], Sampling(max_tokens=8, n=4), Key.from_seed(version))
    batch = pack(engine.generate(requests, version=version))
    found = backend.forward(params, batch).logprobs
    return float((found - batch["rollout_log_probs"])[batch["response_mask"] > 0].abs().max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_parameters_are_the_trainers(folder, dtype):
    """Experts and embeddings; what adapters are added to is made for each publication."""
    backend = Local(folder, chain(adamw(1e-1)), max_tokens=24, lora=LORA, dtype=dtype)
    engine, state = Sampler(folder, dtype=dtype), backend.load_pretrained()
    frozen = {*state.params.base} - {f"{layer}.weight" for layer in backend._built().adapters.layers}
    assert any("experts" in name for name in frozen)
    for version in range(3):
        engine.publish(version, backend.weights(state.params))
        assert shared(engine, state.params) == frozen
        assert gap(backend, engine, state.params, version) <= (1e-5 if dtype == "float32" else 0.1)
        grads, _ = backend.forward_backward(state, tiny_batch(), ppo_clip())
        state, metrics = backend.apply_update(state, grads)
        # What the engine refers to is not copied, since no update writes it.
        assert metrics["perf/residency_copies"].value == 0


def test_an_engine_with_other_weights_before_and_after(folder):
    """Its own places are not a state's tensors, and a state's tensors are never written."""
    backend, engine = Local(folder, chain(adamw(1e-1)), lora=LORA), Sampler(folder)
    state, plain = backend.load_pretrained(), Local(folder, chain(adamw(1e-1)))
    before = {name: t.clone() for name, t in state.params.items()}
    other = plain.init(Key.from_seed(5)).params
    for version, (trainer, params) in enumerate(2 * [(backend, state.params), (plain, other)]):
        engine.publish(version, trainer.weights(params))
        assert bool(shared(engine, params)) == (trainer is backend)
        assert gap(trainer, engine, params, version) <= 1e-5
    assert all(torch.equal(t, before[name]) for name, t in state.params.items())
    engine.publish(9, backend.weights(state.params))
    engine.sleep()
    assert not engine.decoder._weights
    engine.publish(10, backend.weights(state.params))
    assert shared(engine, state.params) and gap(backend, engine, state.params, 10) <= 1e-5


def test_tensors_of_another_dtype_are_copied(folder):
    backend, engine = Local(folder, chain(adamw(1e-1)), lora=LORA), Sampler(folder, dtype="bfloat16")
    state = backend.load_pretrained()
    for version in range(2):
        engine.publish(version, backend.weights(state.params))
        assert not shared(engine, state.params) and gap(backend, engine, state.params, version) <= 0.1


def test_without_lora_nothing_is_shared(folder):
    backend, engine = Local(folder, chain(adamw(1e-1))), Sampler(folder)
    state = backend.load_pretrained()
    source = backend.weights(state.params)
    assert source.frozen == frozenset() and Weights.of(state.params).frozen == frozenset()
    engine.publish(0, source)
    assert not shared(engine, state.params)
