"""Models with images: each row as transformers computes it by itself, and batches that are refused."""

import attrs
import pytest
import torch
from transformers import AutoModelForImageTextToText
from vision_cases import ARCHS, BUDGET, cut_into_tiles, encoded, own_logprobs, seeing, seen_batch

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.hf.vision import axis_positions
from verl_fn.backends.local import Local
from verl_fn.state import Batch, tree
from verl_fn.steps import cross_entropy, entropy, ppo_clip, sgd
from verl_fn.testing import check_backend


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Makes the model of an architecture once."""
    made = {}

    def of(arch):
        if arch not in made:
            made[arch] = seeing(tmp_path_factory.mktemp(arch), arch)
        return made[arch]

    return of


def local(folder, **options):
    return Local(folder, sgd(0.1), **options)


def apart(found, expected):
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


@pytest.mark.parametrize("arch", ARCHS)
def test_each_row_is_what_transformers_computes_by_itself(model, arch):
    """In one micro-batch and in several; every parameter, the tower's too."""
    batch, own = seen_batch(model(arch)), AutoModelForImageTextToText.from_pretrained(model(arch)).eval()
    expected = own_logprobs(own, arch, batch)
    (-(expected * batch["loss_weight"]).sum()).backward()
    wanted = {name: p.grad for name, p in own.named_parameters()}
    blind = own_logprobs(own, arch, seen_batch(model(arch), blank=True))
    assert float((blind - expected).detach().abs().max()) > 0.1, "the answers do not depend on the images"
    for budget in (16384, BUDGET):
        backend = local(model(arch), max_tokens=budget)
        state = backend.load_pretrained()
        found = backend.forward(state.params, batch).logprobs
        assert float((found - expected.detach()).abs().max()) <= 1e-5
        grads, _ = backend.forward_backward(state, batch, cross_entropy())
        worst = {name: apart(grads[name], wanted[name]) for name in wanted if wanted[name] is not None}
        assert max(worst.values()) <= 1e-4, max(worst, key=worst.get)
        assert all(not grads[name].any() for name in wanted.keys() - worst.keys())


def test_the_laws(model):
    folder, batch = model("qwen2_5_vl"), seen_batch(model("qwen2_5_vl"))
    one, other = local(folder, max_tokens=BUDGET), local(folder, max_tokens=60, checkpointing="offload")
    check_backend(one, other, loss=ppo_clip() - 0.01 * entropy(), batch=batch)


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_in_another_order(model, arch):
    batch, backend = seen_batch(model(arch)), local(model(arch))
    params = backend.load_pretrained().params
    order = [3, 2, 5, 0, 1, 4]
    expected = backend.forward(params, batch).logprobs.split(batch.lengths.tolist())
    found = backend.forward(params, batch.take(order)).logprobs
    assert torch.allclose(found, torch.cat([expected[row] for row in order]), atol=1e-5)


def test_a_micro_batch_without_images(model):
    """Its rows are what they are in one micro-batch with the others, and so are the gradients."""
    batch, results = seen_batch(model("qwen3_vl")).take([2, 1, 4, 5]), []
    for budget in (16384, 42):
        backend = local(model("qwen3_vl"), max_tokens=budget)
        state = backend.load_pretrained()
        assert [0 in part["pixels"].shape for part in backend._split(batch)] == [False, True][: 1 + (budget < 100)]
        grads, _ = backend.forward_backward(state, batch, cross_entropy())
        results.append((backend.forward(state.params, batch).logprobs, grads))
    (expected, wanted), (found, grads) = results
    assert torch.allclose(found, expected, atol=1e-5)
    assert max(apart(grads[name], t) for name, t in wanted.items()) <= 1e-4


def test_an_image_token_that_was_drawn_is_text(model):
    """As any token with the same embedding would be."""
    backend, batch = local(model("qwen3_vl")), seen_batch(model("qwen3_vl"), ["<image>a"], ["bdbc"])
    state, token = backend.load_pretrained(), backend._built().config.image_token_id
    place = batch.num_tokens - 3
    drawn = attrs.evolve(batch, tokens=batch.tokens.index_fill(0, torch.tensor([place]), token))
    name = "model.language_model.embed_tokens.weight"
    table = state.params[name].clone()
    table[token] = table[batch.tokens[place]]
    params = attrs.evolve(state.params, leaves={**state.params.leaves, name: table})
    found, expected = (backend.forward(params, rows).logprobs for rows in (drawn, batch))
    assert torch.allclose(found, expected, atol=1e-5)


def test_adapters_and_a_frozen_tower(model):
    """An update moves what is trained, and nothing else."""
    folder, batch = model("smolvlm"), seen_batch(model("smolvlm"))
    for lora, frozen in ((None, True), (Lora(rank=2), False), (Lora(rank=2), True)):
        backend = local(folder, lora=lora, freeze_vision_tower=frozen)
        before = backend.load_pretrained()
        grads, _ = backend.forward_backward(before, batch, cross_entropy())
        after, _ = backend.apply_update(before, grads, donate=False)
        moved = {name for name, t in after.params.items() if not torch.equal(t, before.params[name])}
        assert all("lora" in name for name in moved) == (lora is not None)
        assert any("vision_model" in name for name in moved) == (not frozen)
        assert all("lora" in name for name in grads.leaves) == (lora is not None)


def test_a_checkpoint_is_a_folder_with_images(model, tmp_path):
    backend = local(model("qwen2_5_vl"))
    state = backend.load_pretrained()
    backend.save(state, tmp_path / "saved")
    again = local(tmp_path / "saved")
    assert tree.equal(again.load_pretrained().params, state.params)
    assert encoded(tmp_path / "saved")[0][0][0] == encoded(model("qwen2_5_vl"))[0][0][0]


def test_positions_of_several_axes():
    """Of an image, the text goes on behind the larger side, not behind the number of tokens."""
    images = torch.tensor([0, 1, 1, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)
    found = axis_positions(images, torch.tensor([[1, 4, 4], [1, 2, 4]]), 2)
    assert found[:, 0].tolist() == list(range(10))
    assert found[:, 1].tolist() == [0, 1, 1, 1, 1, 3, 4, 5, 5, 7]
    assert found[:, 2].tolist() == [0, 1, 1, 2, 2, 3, 4, 5, 5, 7]
    assert found[:, 3].tolist() == [0, 1, 2, 1, 2, 3, 4, 5, 6, 7]


def test_patches_count_in_the_budget(model):
    """Rows of 15 and 18 tokens have 16 and 24 patches."""
    batch = seen_batch(model("qwen2_5_vl"))
    with pytest.raises(ValueError, match="row 2 has 42 tokens and patches of images, more than the budget of 41"):
        local(model("qwen2_5_vl"), max_tokens=41)._split(batch)


def swapped(batch, name):
    rows = batch.rows(name)
    return batch.with_ragged(**{name: [rows[3], *rows[1:3], rows[0], *rows[4:]]})


def cut(batch):
    """Without the last image token of the first row."""
    row = batch.take([0])
    keep = torch.arange(row.num_tokens) != int((row.tokens == 10).nonzero()[-1])
    fields = {name: [t[keep]] for name, t in row.per_token.items()}
    short = Batch.from_rows([row.tokens[keep]], fields)
    return attrs.evolve(short, ragged=row.ragged)


BAD = {
    "an image on the wrong row": (lambda b: swapped(swapped(b, "pixels"), "grids"), "position_ids that are not"),
    "grids in the wrong order": (
        lambda b: b.with_ragged(grids=[t.flip(0) for t in b.rows("grids")]), "row 2 has position_ids that are not"
    ),
    "three axes": (lambda b: b.with_tokens(position_ids=b["position_ids"][:, 1:]), r"\[\d+, 3\]; it must be"),
    "no axes": (lambda b: b.without("position_ids"), "has images without position_ids; make its rows"),
    "cut inside an image": (cut, "row 0 has 3 image tokens, and its images have 4 features; a row must keep"),
    "no grids": (lambda b: b.without("grids"), "the batch has pixels without grids"),
    "no images": (lambda b: b.without("pixels", "grids"), "row 0 has 4 image tokens, and its images have 0 features"),
    "too few patches": (lambda b: b.with_ragged(pixels=[t[:-1] for t in b.rows("pixels")]), "row 0 has pixels of 15"),
    "masks": (lambda b: b.with_ragged(pixel_masks=b.rows("pixels")), "pixel_masks, which is another family's"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_batches_that_are_refused(model, name):
    spoil, message = BAD[name]
    backend = local(model("qwen2_5_vl"))
    with pytest.raises(ValueError, match=message):
        backend.forward(backend.load_pretrained().params, spoil(seen_batch(model("qwen2_5_vl"))))


def test_models_that_cannot_read_images(model, tmp_path):
    text, batch = local(new_model(tmp_path / "text", chars="abcd?")), seen_batch(model("smolvlm"))
    with pytest.raises(ValueError, match="the batch has pixels, and this model reads no images"):
        text.forward(text.load_pretrained().params, attrs.evolve(batch, tokens=batch.tokens.clamp(max=5)))
    with pytest.raises(ModelError, match="has no tower for images that could be frozen"):
        local(tmp_path / "text", freeze_vision_tower=True).load_pretrained()
    padded = local(model("smolvlm"), row_layout="padded")
    with pytest.raises(ValueError, match="padded rows have no images here; set model"):
        padded.forward(padded.load_pretrained().params, batch)
    zeros = batch.with_ragged(pixels=[torch.zeros_like(row) for row in batch.rows("pixels")])
    backend = local(model("smolvlm"))
    with pytest.raises(ValueError, match="an image has zeros only"):
        backend.forward(backend.load_pretrained().params, zeros)


@pytest.mark.parametrize("arch", ["smolvlm", "idefics3"])
def test_images_that_are_cut_into_tiles(tmp_path, arch):
    folder = cut_into_tiles(seeing(tmp_path, arch, vocab_size=40))
    batch, own = seen_batch(folder), AutoModelForImageTextToText.from_pretrained(folder).eval()
    # Images that are wider than high, or higher, have fewer tiles.
    assert batch.ragged["pixels"].counts.tolist()[:3] == [5, 0, 6]
    expected = own_logprobs(own, arch, batch).detach()
    backend = local(folder)
    found = backend.forward(backend.load_pretrained().params, batch).logprobs
    assert float((found - expected).abs().max()) <= 1e-5
