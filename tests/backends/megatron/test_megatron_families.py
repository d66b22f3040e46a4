"""Families with layers of transformer-engine's classes, on CPUs with a stand-in for it, beside transformers' own."""

import functools

import pytest
from megatron_support import HELPERS, MARKS
from ranks import ranks_by_size
from vision_cases import seeing
from warm_python import warm_python

from verl_fn.benchmarks.families import FOR_MEGATRON, ROWS, batch_of, compared, reference
from verl_fn.benchmarks.tiny_models import tiny_folder

pytestmark = MARKS
# What each has that others have not.
FAMILIES = {
    "mistral": "windows",
    "gpt_oss": "sinks, windows in every other layer, stacks of experts with biases",
    "gemma2": "soft-capped scores and logits, rows in a table",
    "gemma3_text": "two rotary embeddings",
    "gemma4_text": "constants among the weights, layers of two kinds",
    "exaone4": "norms after the layers",
    "nemotron": "norms that are layer norms, another activation",
    "olmoe": "norms over all heads",
    "deepseek_v3": "latent attention, biases of routers",
    "glm4_moe": "shared experts, half of each head rotated",
    "glm4_moe_lite": "norms with another epsilon",
    "exaone_moe": "no rotation in some layers",
    "hy_v3": "kinds of MLPs instead of a number of dense layers",
    "minimax_m2": "experts under other names",
    "qwen3_next": "linear attention, gates, a norm that Megatron centres",
    "qwen3_5_text": "linear attention in dense layers",
}
LAYOUTS = [
    ("gpt_oss", {"tp": 2, "sp": True}),
    ("gpt_oss", {"ep": 2}),
    ("gemma3_text", {"tp": 2}),
    ("deepseek_v3", {"ep": 2}),
    ("deepseek_v3", {"pp": 2}),
    ("qwen3_next", {"tp": 2, "sp": True}),
    ("qwen3_5_text", {"tp": 2}),
    ("gemma2", {"tp": 2, "sp": True}),
    ("glm4_moe", {"tp": 2, "sp": True}),
]


@pytest.fixture(scope="module")
def ranks(warm):
    """Processes that have imported Megatron with the stand-in for transformer-engine."""
    with warm_python(HELPERS / "transformer_engine_imports.py", python=warm) as python, ranks_by_size(python) as of:
        yield of


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Makes a family's model once; returns its folder, a batch, and what transformers computes of that."""

    @functools.cache
    def of(name):
        folder = tiny_folder(name, tmp_path_factory.mktemp("model") / name, **FOR_MEGATRON.get(name, {}))
        batch = batch_of(ROWS)
        return folder, batch, reference(folder, batch)

    return of


def check(ranks, known, name, size, options):
    folder, batch, expected = known(name)
    found = ranks(size).run("megatron_cases.with_layers_of_transformer_engine", folder, options, batch)[0]
    result = compared(found, expected)
    assert result["weights"] and result["logprobs"] <= 1e-4, result
    # The gradients of transformers' own linear attention are no more exact in fp32.
    assert result["gradient"] <= (1e-3 if "linear" in FAMILIES[name] else 1e-4), result


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_that_of_transformers(ranks, known, name):
    check(ranks, known, name, 1, {})


@pytest.mark.parametrize(("name", "options"), LAYOUTS, ids=str)
def test_a_family_on_two_ranks_is_that_of_transformers(ranks, known, name, options):
    check(ranks, known, name, 2, options)


@pytest.mark.parametrize(
    ("arch", "options"), [("qwen2_5_vl", {"tp": 2}), ("qwen3_vl", {"tp": 2, "sp": True})], ids=str
)
def test_models_with_images(ranks, tmp_path, arch, options):
    """Images and positions of three axes, beside one process of transformers' layers."""
    folder = seeing(tmp_path / arch, arch, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    for worst in ranks(2).run("megatron_image_cases.with_layers_of_transformer_engine", folder, options):
        assert worst["logprobs"] <= 1e-5 and worst["gradients"][0] <= 2e-5 and worst["weights"][0] <= 1e-5, worst


@pytest.mark.parametrize("options", [{"tp": 2, "sp": True, "ep": 2}, {"pp": 2}], ids=str)
def test_a_states_own_buffers_decide(ranks, known, tmp_path, options):
    """Biases of routers, which no gradient changes."""
    folder, *_ = known("glm4_moe")
    found = ranks(2).run("buffer_checks.on_ranks", "megatron", folder, options, tmp_path / "saved")
    for facts, worst, different in found:
        assert all(facts.values()), facts
        assert worst <= 1e-5 and different > 1e-2


@pytest.mark.parametrize(("size", "options"), [(1, {}), (2, {"tp": 2, "sp": True})], ids=str)
def test_experts_of_padded_rows_are_recorded_and_replayed(ranks, known, size, options):
    """The routers of a table see the first tokens of all rows, then the second ones, and so on."""
    folder, batch, _ = known("qwen3_next")
    found = ranks(size).run("megatron_cases.routes_in_a_table", folder, options, batch)
    for different, error, change in found:
        assert different == 0 and error <= 1e-4 and change > 1e-2


def test_ranks_cannot_share_padded_rows(ranks, known):
    folder, *_ = known("qwen3_5_text")
    for error in ranks(2).run("megatron_cases.refused_with_transformer_engine", folder, {"cp": 2}):
        assert "some layers need padded rows, and ranks cannot share them; set cp to 1" in error
