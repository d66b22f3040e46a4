"""Experts with biases: their values and gradients equal what transformers' own code computes."""

import copy

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

from verl_fn.backends.hf import experts
from verl_fn.backends.hf.folder import hollow
from verl_fn.benchmarks.tiny_models import tiny_config, tiny_folder
from verl_fn.state import Key

TOKENS, EXPERTS = 23, 5


def made(kind, name="grouped_mm"):
    """A module of random experts."""
    torch.manual_seed(0)
    config = copy.deepcopy(tiny_config("gpt_oss", num_local_experts=EXPERTS))
    config._experts_implementation = name
    module = kind(config)
    for p in module.parameters():
        torch.nn.init.normal_(p)
    experts.use_grouped(module)
    return module


def given(module):
    """Hidden states, the two experts of each token, of which one is picked by none, and their weights."""
    picked = torch.rand(TOKENS, EXPERTS - 1).topk(2).indices
    picked = torch.where(picked == 2, EXPERTS - 1, picked)
    return (
        torch.randn(TOKENS, module.hidden_size, requires_grad=True),
        picked,
        torch.rand(TOKENS, 2, requires_grad=True),
    )


@pytest.mark.parametrize("kind", [GptOssExperts, OpenAIPrivacyFilterExperts])
def test_values_and_gradients_are_those_of_transformers(kind):
    module, own = made(kind), made(kind, "eager")
    hidden, picked, weights = given(module)
    grad, found = torch.randn(TOKENS, module.hidden_size), []
    for one in (module, own):
        out = one(hidden, picked, weights)
        found.append([out, *torch.autograd.grad(out, [hidden, weights, *one.parameters()], grad)])
    for value, expected in zip(*found, strict=True):
        assert (value - expected).norm() <= 1e-5 * expected.norm()


def test_no_gradient_is_added_to_zeros_row_by_row():
    """The gradient of an index adds the rows of an expert one after another on a GPU."""
    module = made(GptOssExperts)
    found = [module(*given(module)).grad_fn]
    for node in found:
        found += [n for n, _ in node.next_functions if n is not None and n not in found]
    assert not [node.name() for node in found if node.name().startswith("Index")]


def test_models_with_biases_compute_so_and_others_as_they_did(tmp_path):
    for name, expected in (("gpt_oss", experts.NAME), ("qwen3_moe", "grouped_mm")):
        skeleton = hollow(tiny_folder(name, tmp_path / name), "lm", key=Key.from_seed(0)).skeleton
        used = {m.config._experts_implementation for m in skeleton.modules() if hasattr(m, "has_bias")}
        assert used == {expected}, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_in_bf16_on_cuda_they_err_no_more_than_transformers():
    """Beside fp32: at most a tenth more than what its own grouped products do."""
    reference, own, module = made(GptOssExperts, "eager"), made(GptOssExperts), made(GptOssExperts)
    own.config._experts_implementation = "grouped_mm"
    hidden, picked, weights = given(module)
    grad, found = torch.randn(TOKENS, module.hidden_size), []
    for one, dtype in ((reference, torch.float32), (own, torch.bfloat16), (module, torch.bfloat16)):
        one = one.to("cuda", dtype)
        inputs = [t.detach().to("cuda", dtype).requires_grad_() for t in (hidden, weights)]
        out = one(inputs[0], picked.cuda(), inputs[1])
        found.append([out, *torch.autograd.grad(out, [*inputs, *one.parameters()], grad.to(out))])
    for exact, theirs, ours in zip(*found, strict=True):
        error, allowed = ((t.float() - exact).norm() / exact.norm() for t in (ours, theirs))
        assert error <= 1.1 * allowed + 1e-4
