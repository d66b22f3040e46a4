"""Buffers that a model's file contains, such as the biases of routers, are a part of a state."""

import attrs
import pytest
import torch
from buffer_checks import moved, observed, optimizer, sampled

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.local import Local
from verl_fn.backends.weight_sync import in_parts, whole_of_parts
from verl_fn.benchmarks.tiny_models import tiny_folder
from verl_fn.state import Buffers
from verl_fn.testing import tiny_batch

FAMILIES = ("deepseek_v3", "glm4_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tiny_folder(name, tmp_path_factory.mktemp("model")) for name in FAMILIES}


def local(folder, **options):
    return Local(folder, optimizer(), max_tokens=24, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_states_own_buffers_decide(folders, name, tmp_path):
    facts, worst, different = observed(local(folders[name]), folders[name], tmp_path)
    assert all(facts.values()), facts
    assert worst <= 1e-6 and different > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_computes_with_published_buffers(folders, name):
    assert max(sampled(local(folders[name]), folders[name])) <= 1e-5


def test_transformers_reads_what_was_saved(folders, tmp_path):
    from transformers import AutoModelForCausalLM

    backend = local(folders["deepseek_v3"])
    state = moved(backend.load_pretrained())
    backend.save(state, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert state.buffers and all(torch.equal(model.get_buffer(name), b) for name, b in state.buffers.items())


def test_a_frozen_base_has_the_states_buffers(folders):
    """As the reference of a KL term, whose routers pick experts by them."""
    folder = folders["deepseek_v3"]
    backend, plain = local(folder, lora=Lora(rank=2, alpha=4.0)), local(folder)
    state, batch = moved(backend.load_pretrained()), tiny_batch()
    base = attrs.evolve(plain.load_pretrained().params, buffers=state.buffers)
    found, wanted = backend.forward(state.params.base, batch).logprobs, plain.forward(base, batch).logprobs
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("buffers", [{}, {"router.bias": torch.zeros(4)}], ids=["none", "others"])
def test_other_buffers_are_refused(folders, buffers, tmp_path):
    backend = local(folders["deepseek_v3"])
    state = backend.load_pretrained()
    wrong = attrs.evolve(state, params=attrs.evolve(state.params, buffers=Buffers(buffers)))
    for call in (lambda: backend.forward(wrong.params, tiny_batch()), lambda: backend.save(wrong, tmp_path)):
        with pytest.raises(ValueError, match=r"params.buffers are not this model's: .* differ, such as .*; keep"):
            call()


def test_buffers_arrive_in_fp32_whatever_dtype_an_engine_has():
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(1000, generator=generator) * torch.logspace(-12, 12, 1000)
    (parts,) = in_parts({"b": b}).values()
    assert torch.equal(whole_of_parts(parts.bfloat16()), b) and torch.equal(whole_of_parts(parts), b)


def test_a_model_that_keeps_the_folders_buffers_is_noticed(folders, monkeypatch):
    monkeypatch.setattr(Skeleton, "_hold", lambda self, buffers: None)
    backend = local(folders["deepseek_v3"])
    first, batch = backend.load_pretrained(), tiny_batch()
    outputs = [backend.forward(state.params, batch).logprobs for state in (first, moved(first))]
    assert torch.equal(*outputs)
    assert max(sampled(backend, folders["deepseek_v3"])) > 1e-3
