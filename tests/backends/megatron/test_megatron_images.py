"""Models with images on Megatron beside one process: transformers' tower, and Megatron's language model.

The processes compute with megatron-core and Megatron-Bridge themselves, on CPUs; see ``megatron_on_cpu.py``.
"""

import re

import pytest
from megatron_support import MARKS
from safetensors.torch import load_file, save_file
from vision_cases import seeing

from verl_fn.backends.hf.lora import Lora

pytestmark = MARKS
ARCHS = ("qwen2_5_vl", "qwen3_vl")
EVERY, ALONE = list(range(6)), [2, 1, 4, 5]  # of the latter, one row has images, and the others go to another rank
FROZEN = {"freeze_vision_tower": True}
BY_ITSELF = {
    "full": {},
    "recomputed": {"checkpointing": True},
    "frozen tower": FROZEN,
    "adapters": {"lora": Lora(rank=2), **FROZEN},
    "Megatron's optimizer": {"updates_by": "megatron"},
}
SHARED = {
    "full": {"tp": 2},
    "recomputed": {"tp": 2, "sp": True, "checkpointing": True},
    "frozen tower": {"tp": 2, "sp": True, **FROZEN},
    "adapters": {"tp": 2, "lora": Lora(rank=2), "checkpointing": True, **FROZEN},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Makes the model of an architecture once, with heads that two ranks can share."""
    made = {}

    def of(arch, **options):
        key = (arch, *options.items())
        if key not in made:
            # What DeepStack adds behind the last layer reaches no token that is predicted.
            layers = {"num_hidden_layers": 3} if arch == "qwen3_vl" else {}
            sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, **layers, **options}
            made[key] = seeing(tmp_path_factory.mktemp(arch), arch, **sizes)
        return made[key]

    return of


def check(found, options):
    for worst in found:
        assert worst["logprobs"] <= 1e-5 and worst["gradients"][0] <= 2e-5, worst
        # Adam divides gradients of rounding's size by themselves.
        assert worst["weights"][0] <= (1e-3 if "updates_by" in options else 1e-5), worst
        assert any("visual." in name for name in worst["trained"]) == ("freeze_vision_tower" not in options)
        assert all("lora" in name for name in worst["trained"]) == ("lora" in options)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", BY_ITSELF)
def test_one_rank(megatron_ranks, model, arch, name):
    """Log-probs, gradients of every parameter and an update; weights bitwise, in and out."""
    options = BY_ITSELF[name]
    found = megatron_ranks(1).run("megatron_image_cases.beside_local", model(arch), options, EVERY)
    check(found, options)
    # Patches count in the budget.
    assert len(found[0]["blank"]) == (6 if "lora" in options else 3)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_matrices(megatron_ranks, model, arch, name):
    options = SHARED[name]
    check(megatron_ranks(2).run("megatron_image_cases.beside_local", model(arch), options, EVERY), options)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_rank_without_images(megatron_ranks, model, arch):
    found = megatron_ranks(2).run("megatron_image_cases.beside_local", model(arch), {}, ALONE)
    check(found, {})
    assert [all(one["blank"]) for one in found] == [False, True]


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_of_text(megatron_ranks, model, arch):
    """A batch without any images, and an output layer of its own, which ranks pad."""
    folder = model(arch, tie_word_embeddings=False, vocab_size=15)
    found = megatron_ranks(2).run("megatron_image_cases.beside_local", folder, {"tp": 2, "sp": True}, [1, 4, 5], True)
    check(found, {})
    assert all(found[0]["blank"])
    check(megatron_ranks(2).run("megatron_image_cases.beside_local", folder, {"tp": 2}, ALONE), {})


@pytest.mark.parametrize("arch", ARCHS)
def test_half_precision(megatron_ranks, model, arch):
    """Errors are of the same size as those of one process."""
    (ours, theirs), *_ = megatron_ranks(1).run("megatron_image_cases.rounded", model(arch))
    assert all(0 < error <= 1.5 * other for error, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_names_of_published_files(megatron_ranks, tmp_path):
    """The files of Qwen2.5-VL on the hub have older names."""
    folder = seeing(tmp_path / "model", "qwen2_5_vl", num_attention_heads=4, num_key_value_heads=2)
    file, older = folder / "model.safetensors", {"model.language_model.": "model.", "model.visual.": "visual."}
    weights = load_file(file)
    for prefix, old in older.items():
        weights = {name.replace(prefix, old): t for name, t in weights.items()}
    assert {name.partition(".")[0] for name in weights} == {"model", "visual"}
    save_file(weights, file, metadata={"format": "pt"})
    check(megatron_ranks(2).run("megatron_image_cases.beside_local", folder, {"tp": 2}, ALONE), {})


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_in_another_order_and_one_by_one(megatron_ranks, model, arch):
    assert megatron_ranks(1).run("megatron_image_cases.in_any_order", model(arch), {})[0] <= 1e-5


def test_the_laws(megatron_ranks, model):
    """Two ranks with rows of their own, of which one has no images."""
    megatron_ranks(2).run("megatron_image_cases.laws", model("qwen2_5_vl", num_hidden_layers=1), {}, ALONE)


REFUSED = {
    "stages": ({"pp": 2}, "pp = 2: .* has one pipeline stage here; set pp to 1"),
    "tokens": ({"cp": 2}, "cp = 2: .* cannot share the tokens of a row with images here; set cp to 1"),
    "Megatron-FSDP": ({"fsdp": True}, "Megatron-FSDP does not divide its tower; set use_megatron_fsdp=false"),
    "adapters of the tower": ({"lora": Lora(rank=2)}, "no adapters for its tower, .*; set actor.freeze_vision_tower"),
    "fused rotation": ({"provider": {"apply_rope_fusion": True}}, "apply_rope_fusion cannot be set for a model with"),
    "Bridge's own freezing": ({"provider": {"freeze_vision_model": True}}, "freeze_vision_model cannot be set for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(megatron_ranks, model, name):
    options, message = REFUSED[name]
    for error in megatron_ranks(2).run("megatron_image_cases.refused", model("qwen3_vl"), options):
        assert re.search(message, error), error


def test_other_families_are_refused(megatron_ranks, tmp_path):
    (error,) = megatron_ranks(1).run("megatron_image_cases.refused", seeing(tmp_path / "model", "smolvlm"), {})
    assert "of models with images only Qwen2.5-VL and Qwen3-VL run on Megatron here" in error


@pytest.mark.parametrize("arch", ARCHS)
def test_other_angles_are_refused(megatron_ranks, model, arch):
    """As if Bridge had sections of its own."""
    (error,) = megatron_ranks(1).run("megatron_image_cases.refused_sections", model(arch))
    assert "makes one with other angles for positions of three axes" in error


@pytest.mark.parametrize(("arch", "options"), [("qwen2_5_vl", {"tp": 2}), ("qwen3_vl", FROZEN)], ids=str)
def test_a_state_moves_between_backends(megatron_ranks, model, tmp_path, arch, options):
    found = megatron_ranks(2).run("megatron_image_cases.saved", model(arch), options, tmp_path)
    assert all(all(one.values()) for one in found), found


@pytest.mark.parametrize("options", [{"tp": 2}, {}], ids=str)
def test_a_frozen_tower_is_published_to_engines_that_lack_it(megatron_ranks, model, options):
    for rank, (got, same, edited) in enumerate(
        megatron_ranks(2).run("megatron_image_cases.published", model("qwen3_vl"), options)
    ):
        towers = {"none": False, "first": rank == 0, "others": rank != 0, "all": True}
        assert got == {name: (tower, True) for name, tower in towers.items()}
        assert same and not edited
