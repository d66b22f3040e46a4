"""Models with images over ranks, beside ``Local``."""

import pytest
from vision_cases import seeing
from vision_ranks import OPTIONS

ALONE = [2, 1, 4, 5]  # one row with images, and rows for the other rank


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def of(arch):
        if arch not in made:
            made[arch] = seeing(tmp_path_factory.mktemp(arch), arch)
        return made[arch]

    return of


@pytest.mark.parametrize(
    ("arch", "name"), [("gemma3", "full"), ("smolvlm", "full"), *(("qwen3_vl", name) for name in OPTIONS)]
)
def test_a_rank_without_images_takes_part(two, model, arch, name):
    """Of models that are trained whole, also a batch with images for both ranks."""
    for rows in ([list(range(6))] if name == "full" else []) + [ALONE]:
        found = two.run("vision_ranks.beside_local", model(arch), name, rows)
        for one in found:
            assert one["logprobs"] <= 1e-5 and one["gradients"] <= 1e-4 and one["weights"] <= 1e-5, one
    assert [all(one["blank"]) for one in found] == [False, True]
    trained = found[0]["trained"]
    in_tower = [n for n in trained if "visual." in n or "vision_" in n]
    assert bool(in_tower) == ("frozen" not in name)
    assert all("lora" in n for n in trained) == ("adapters" in name)


@pytest.mark.parametrize("lora", [False, True])
def test_a_frozen_tower_is_sent_once_to_each_engine(two, model, lora):
    found = two.run("vision_ranks.tower_sent_once", model("qwen3_vl"), lora)
    assert found[0] == ([[True, True], [False, False], [False, True], [True, True]], True)


def test_a_frozen_tower_is_sent_once_in_one_process(one, two, model):
    """Ranks that gather tensors for engines of their own read all of them each time."""
    assert one.run("vision_ranks.tower_in_one_process", model("qwen3_vl")) == [[True, False]]
    assert two.run("vision_ranks.tower_in_one_process", model("qwen3_vl")) == [[True, True], [True, True]]
