"""Checkpoints of adapters refer to the frozen weights in the model's folder, if the state has these."""

import shutil

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_lora import LORA, TX, ragged, trained

from verl_fn.backends import tensor_file
from verl_fn.backends.checkpoint import export_adapter, export_model
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.lora import Lora, LoraError, Reference
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.tensor_file import checksum
from verl_fn.state import Key, tree

WEIGHTS, ADAPTERS, REST = "model.safetensors", "adapter_model.safetensors", "train_state.safetensors"


@pytest.fixture
def base(tiny, tmp_path):
    """A folder of weights that a test may change."""
    return shutil.copytree(tiny, tmp_path / "base")


def written(folder):
    return {file.name for file in folder.glob("*.safetensors")}


def edit(folder):
    """Changes one bit of one weight, and neither the size nor the names of files."""
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("head", ["lm", "value"])
def test_what_came_from_a_folder_is_not_written(tiny, tmp_path, head):
    backend = Local(tiny, TX, head=head, lora=LORA)
    state = backend.load_pretrained()
    moved = {name: state.params[name] + 0.1 for name in state.params.trained()}
    state = attrs.evolve(state, params=attrs.evolve(state.params, leaves={**state.params.leaves, **moved}))
    backend.save(state, tmp_path / "saved")
    assert written(tmp_path / "saved") == {ADAPTERS, REST}
    own = tree.map_tensors(lambda t: t, [state.params[name] for name in state.params.trained()])
    moments = tree.paths(state.optimizer).values()
    needed = sum(t.nbytes for t in [*own, *(t for t in moments if isinstance(t, torch.Tensor))])
    size = sum((tmp_path / "saved" / name).stat().st_size for name in (ADAPTERS, REST))
    assert size < needed + 20_000
    for one in (backend, Local(tiny, TX, head=head, lora=LORA)):
        assert tree.equal(one.restore(tmp_path / "saved"), state)
    # Saved and restored again, nothing has changed.
    again = Local(tiny, TX, head=head, lora=LORA)
    again.save(again.restore(tmp_path / "saved"), tmp_path / "again")
    for name in (ADAPTERS, REST, "train_state.json", "lora.json", "adapter_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_frozen_tower_is_referred_to_beside_adapters_only(tmp_path):
    """Without adapters a checkpoint is a Hugging Face folder, so it holds the tower."""
    folder = new_model(tmp_path / "model", chars="abcd", arch="smolvlm", hidden_size=32, num_attention_heads=2)
    for options, files in (({"lora": LORA}, {ADAPTERS, REST}), ({}, {WEIGHTS, REST})):
        backend = Local(folder, TX, freeze_vision_tower=True, **options)
        state, saved = backend.load_pretrained(), tmp_path / f"saved {len(options)}"
        backend.save(state, saved)
        assert written(saved) == files
        held = [name for file in saved.glob("*.safetensors") for name in load_file(file) if "vision_model" in name]
        assert bool(held) == (not options)
        assert tree.equal(Local(folder, TX, freeze_vision_tower=True, **options).restore(saved), state)
    tensors = load_file(folder / WEIGHTS)
    next(t for name, t in tensors.items() if "vision_model" in name).view(torch.int32).view(-1)[3] ^= 1
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match="another file than it was"):
        Local(folder, TX, freeze_vision_tower=True, lora=LORA).restore(tmp_path / "saved 1")


def changed_leaf(state):
    name = "model.norm.weight"
    leaves = {n: t + 1 if n == name else t.clone() for n, t in state.params.items()}
    return attrs.evolve(tree.map_tensors(torch.clone, state), params=attrs.evolve(state.params, leaves=leaves))


def in_place(state):
    state.params["model.norm.weight"].view(torch.int32)[5] ^= 1
    return state


OTHERS = {
    "random": lambda backend, state: backend.init(Key.from_seed(3)),
    "a changed leaf": lambda backend, state: changed_leaf(state),
    "an edit in place": lambda backend, state: in_place(state),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_frozen_weights_are_written(tiny, tmp_path, other):
    backend = Local(tiny, TX, lora=LORA)
    state = backend.load_pretrained()
    backend.save(state, tmp_path / "saved")
    state = trained(backend, OTHERS[other](backend, state), steps=1)
    # Into the same folder: nothing of the state before stays.
    backend.save(state, tmp_path / "saved")
    assert written(tmp_path / "saved") == {WEIGHTS, REST} and Reference.read(tmp_path / "saved") is None
    assert not (tmp_path / "saved" / "adapter_config.json").exists()
    assert tree.equal(Local(tiny, TX, lora=LORA).restore(tmp_path / "saved"), state)
    whole = trained(backend, backend.load_pretrained(), steps=1)
    backend.save(whole, tmp_path / "saved")
    assert written(tmp_path / "saved") == {ADAPTERS, REST}
    assert tree.equal(backend.restore(tmp_path / "saved"), whole)


def test_weights_that_moved_to_the_cpu_and_back_are_still_the_folders(tiny, tmp_path):
    backend = Local(tiny, TX, lora=LORA)
    state = backend.load_pretrained()
    copied = attrs.evolve(state, params=tree.map_tensors(torch.clone, state.params))
    backend.save(copied, tmp_path / "saved")
    assert written(tmp_path / "saved") == {ADAPTERS, REST}


def test_a_base_that_was_rounded_stays_rounded(tiny, tmp_path):
    """The folder has float32, and the state's frozen weights are bfloat16."""
    backend = Local(tiny, TX, dtype="bfloat16", lora=LORA)
    state = trained(backend, backend.load_pretrained())
    name = "model.embed_tokens.weight"
    assert not torch.equal(state.params[name].float(), load_file(tiny / WEIGHTS)[name])
    backend.save(state, tmp_path / "saved")
    assert written(tmp_path / "saved") == {ADAPTERS, REST}
    other = Local(tiny, TX, lora=LORA)
    wide = other.restore(tmp_path / "saved")
    assert tree.equal(wide.params.leaves, {name: t.float() for name, t in state.params.items()})
    # That backend's frozen weights are no longer its folder's.
    other.save(wide, tmp_path / "wide")
    assert written(tmp_path / "wide") == {WEIGHTS, REST}
    export_model(tmp_path / "saved", tmp_path / "out")
    merged = {name: t.float() for name, t in dict(backend.weights(state.params).read()).items()}
    exported = load_file(tmp_path / "out" / WEIGHTS)
    assert tree.equal({name: exported[name] for name in merged}, merged) and len(exported) == len(merged)
    loaded = Local(tmp_path / "saved", TX).load_pretrained().params.leaves
    assert tree.equal({name: loaded[name] for name in merged}, merged)


def test_a_folder_that_changed_since_it_was_read_is_not_referred_to(base, tmp_path):
    backend = Local(base, TX, lora=LORA)
    state = backend.load_pretrained()
    edit(base)
    backend.save(state, tmp_path / "saved")
    assert written(tmp_path / "saved") == {WEIGHTS, REST}
    assert tree.equal(Local(base, TX, lora=LORA).restore(tmp_path / "saved"), state)


USES = {
    "restore": lambda base, saved, out: Local(base, TX, lora=LORA).restore(saved),
    "load": lambda base, saved, out: Local(saved, TX).load_pretrained(),
    "export": lambda base, saved, out: export_model(saved, out),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("how", ["changed", "removed", "moved"])
def test_frozen_weights_that_are_not_there_are_named_and_never_replaced(base, tmp_path, use, how):
    backend = Local(base, TX, lora=LORA)
    state = trained(backend, backend.load_pretrained(), steps=1)
    saved = tmp_path / "saved"
    backend.save(state, saved)
    kept = shutil.copytree(base, tmp_path / "kept")
    if how == "changed":
        edit(base)
    elif how == "removed":
        (base / WEIGHTS).unlink()
    else:
        base.rename(tmp_path / "elsewhere")
        if use == "restore":  # the backend is made for a folder
            assert tree.equal(Local(tmp_path / "elsewhere", TX, lora=LORA).restore(saved), state)
            return
    why = "is another file than it was" if how == "changed" else "does not exist"
    with pytest.raises(ModelError, match=rf"saved.* holds adapters, .*{WEIGHTS} {why}"):
        USES[use](base, saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.copytree(kept, base, dirs_exist_ok=True)
    USES[use](base, saved, tmp_path / "out")


def test_a_folder_that_holds_both_may_be_moved(tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny, run / "model")
    backend = Local(run / "model", TX, lora=LORA)
    state = trained(backend, backend.load_pretrained(), steps=1)
    backend.save(state, run / "checkpoints" / "actor")
    run.rename(tmp_path / "moved")
    saved = tmp_path / "moved" / "checkpoints" / "actor"
    merged = Local(saved, TX)
    gap = merged.forward(merged.load_pretrained().params, ragged()).logprobs
    assert (gap - backend.forward(state.params, ragged()).logprobs).abs().max() < 1e-5
    edit(tmp_path / "moved" / "model")
    with pytest.raises(
        ModelError, match=r"moved/checkpoints/\.\./model/.* is another file|model\.safetensors is another"
    ):
        Local(saved, TX).load_pretrained()


def test_adapters_on_a_checkpoint_of_adapters(tiny, tmp_path):
    """Its frozen weights are the sum of both, and what it refers to is checked through."""
    first = Local(tiny, TX, lora=LORA)
    first.save(trained(first, first.load_pretrained()), tmp_path / "first")
    second = Local(tmp_path / "first", TX, lora=LORA)
    state = trained(second, second.load_pretrained(key=Key.from_seed(5)), steps=1)
    second.save(state, tmp_path / "second")
    assert written(tmp_path / "second") == {ADAPTERS, REST}
    assert tree.equal(second.restore(tmp_path / "second"), state)
    merged = Local(tmp_path / "second", TX)
    gap = merged.forward(merged.load_pretrained().params, ragged()).logprobs
    assert (gap - second.forward(state.params, ragged()).logprobs).abs().max() < 1e-5


def test_a_state_in_the_models_own_folder_is_whole(base, tmp_path):
    """A save replaces the weights there, so nothing may refer to them; nor through another checkpoint."""
    first = Local(base, TX, lora=LORA)
    state = trained(first, first.load_pretrained(), steps=1)
    first.save(state, tmp_path / "first")
    second = Local(tmp_path / "first", TX, lora=LORA)
    on_top = trained(second, second.load_pretrained(key=Key.from_seed(5)), steps=1)
    second.save(on_top, base)
    assert written(base) == {WEIGHTS, REST} and tree.equal(second.restore(base), on_top)
    third = Local(base, TX, lora=LORA)
    again = third.load_pretrained()
    third.save(again, base)
    assert written(base) == {WEIGHTS, REST} and tree.equal(third.restore(base), again)


def test_a_chain_of_small_adapters_has_the_weights_of_its_last_folder(tmp_path):
    """Each folder holds only adapters, and names the folder before it."""
    folder = new_model(tmp_path / "model", chars="abcdefgh>", hidden_size=128, max_position_embeddings=256)
    few = Lora(rank=1, targets=("q_proj",))
    for name in ("first", "second", "third"):
        backend = Local(folder, TX, lora=few)
        backend.save(backend.load_pretrained(), folder := tmp_path / name)
    assert len(Local(folder, TX).load_pretrained().params) > 0


def test_damaged_files_of_adapters_are_named(tiny, tmp_path):
    backend = Local(tiny, TX, lora=LORA)
    backend.save(backend.load_pretrained(), tmp_path / "saved")
    file = tmp_path / "saved" / ADAPTERS
    tensors = load_file(file)
    save_file({name: t for name, t in tensors.items() if "layers.0" not in name}, file, {"format": "pt"})
    for use in (
        lambda: Local(tmp_path / "saved", TX).load_pretrained(),
        lambda: export_model(tmp_path / "saved", tmp_path / "out"),
        lambda: export_adapter(tmp_path / "saved", tmp_path / "out"),
    ):
        with pytest.raises(LoraError, match=rf"{ADAPTERS}.* (lacks|14 differ|14 adapters)"):
            use()
    about = tmp_path / "saved" / "lora.json"
    about.write_text(about.read_text().replace('"files"', '"filez": 1, "files"').replace('"dtype"', '"dtipe"'))
    with pytest.raises(LoraError, match=r"lora\.json cannot be read"):
        backend.restore(tmp_path / "saved")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_bit_of_a_tensor_counts(data):
    shape = data.draw(st.lists(st.integers(1, 9), max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64]))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    count = int(torch.tensor(shape).prod()) if shape else 1
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=seed)
    t = bits.view(dtype).reshape(shape)
    other = bits.clone()
    other[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(t) == checksum(t.clone()) != checksum(other.view(dtype).reshape(shape))


@pytest.mark.parametrize("places", [(0, 1), (2, 5), (3, 9), (1, 10)])
def test_numbers_that_change_places_are_noticed(monkeypatch, places):
    monkeypatch.setattr(tensor_file, "SLICE", 4)
    t = torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other = t.clone()
    other[list(places)] = t[list(places[::-1])]
    assert checksum(t) != checksum(other)
