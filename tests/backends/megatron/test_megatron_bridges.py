"""What a bridge of the user's own may do, and what a model folder may have, that the Megatron backend refuses."""

import pytest
from megatron_support import EXPERTS, MARKS

from verl_fn.backends.hf.new_model import new_model

pytestmark = MARKS
UNTIED = {"tie_word_embeddings": False}


def call(ranks, name, *args):
    return ranks.run(f"megatron_bridge_cases.{name}", *args)


@pytest.fixture(scope="module")
def two(megatron_ranks):
    return megatron_ranks(2)


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_mappings_that_change_values(two, small, options):
    for values, places in call(two, "computing_mappings", small(**UNTIED), options):
        assert "the mappings of 1 parameters, such as model.norm.weight, change their values" in values
        assert "model.norm.weight: MyNorm changes values, not only their places" in places


def test_hooks_that_a_bridge_registers_are_called(two, small):
    assert call(two, "hooks", small()) == [1, 1]


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"cp": 2}, {"checkpointing": True}], ids=str)
def test_a_loss_cannot_call_the_backend_that_computes_it(two, small, options):
    for error, same in call(two, "calls_inside_a_loss", small(), options):
        assert "a loss calls the Megatron backend that computes it; compute before" in error and same


def test_tensors_of_other_shapes(two, small):
    for errors in call(two, "other_shapes", small(**UNTIED)):
        assert all("model.embed_tokens.weight has the shape [" in error for error in errors)


MODELS = {
    "activation": (
        {"arch": "mistral", "sliding_window": None, "hidden_act": "gelu"},
        "activation GELUActivation",
    ),
    "biases": (
        {"attention_bias": True},
        "maps nothing to 8 parameters of transformers' model, such as",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_which_a_bridge_makes_another(two, tmp_path, name):
    settings, message = MODELS[name]
    folder = new_model(tmp_path / "model", chars="abcd", hidden_size=16, **settings)
    assert all(message in error for error in call(two, "other_model", folder))


def test_a_routers_loss_is_declared(two, small):
    asked = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    for inherited, declared in call(two, "declared", small(**EXPERTS), asked):
        assert inherited == [] and len(declared) == 1
        assert "routers add losses of their own to the gradients" in declared[0]


def test_groups_have_the_timeout_of_the_default_group(two, small):
    for default, own in call(two, "timeout", small()):
        assert own == default != 1800
