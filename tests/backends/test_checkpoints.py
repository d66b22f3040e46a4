"""Folders of states: the same bytes whoever writes them, for transformers too, and refused by name where they do not fit."""

import json

import pytest
import torch
from rank_cases import optimizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from verl_fn.backends.checkpoint import MODEL, TENSORS, CheckpointError
from verl_fn.backends.local import Local
from verl_fn.models import export_model, new_model
from verl_fn.state import Key, tree
from verl_fn.steps import ppo_clip, sgd
from verl_fn.testing import tiny_batch

MOE = {"arch": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "options", [{}, {"replicate": 2}, {"sp": 2}, {"replicate": 4}, {"head": "value", "sp": 4}], ids=str
)
def test_the_same_bytes_whoever_writes(four, folder, tmp_path, options):
    """Four ranks and one process write the same files, and safetensors itself would write these."""
    four.run("save", folder, tmp_path / "four", options)
    local = Local(folder, optimizer(), head=options.get("head", "lm"))
    local.save(local.restore(tmp_path / "four"), tmp_path / "one")
    written = contents(tmp_path / "four")
    assert written == contents(tmp_path / "one")
    assert {MODEL, TENSORS, "train_state.json", "config.json", "tokenizer.json"} <= written.keys()
    for name in (MODEL, TENSORS):
        save_file(load_file(tmp_path / "four" / name), tmp_path / "again", metadata={"format": "pt"})
        assert (tmp_path / "again").read_bytes() == written[name]


@pytest.mark.parametrize("options", [{}, {"head": "value"}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_ranks_wrote(two, tmp_path, options, tied):
    model = new_model(tmp_path / "model", chars="abcd", hidden_size=16, tie_word_embeddings=tied)
    two.run("save", model, tmp_path / "saved", options)
    auto = AutoModelForTokenClassification if options else AutoModelForCausalLM
    found, told = auto.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    state = Local(model, optimizer(), **options).restore(tmp_path / "saved")
    assert all(torch.equal(p, state.params[name]) for name, p in found.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("abcd")
    if not options:
        assert found.generation_config.eos_token_id == AutoModelForCausalLM.from_pretrained(model).config.eos_token_id


@pytest.mark.parametrize("options", [{}, {"replicate": 2}], ids=str)
def test_no_rank_holds_a_whole_tensor(four, folder, tmp_path, options):
    written = four.run("rank_checks.gathers_nothing", folder, tmp_path / "a", options)
    data = sum(4 * t.numel() for name in (MODEL, TENSORS) for t in load_file(tmp_path / "a" / name).values())
    assert sum(written) == data
    assert max(written) < data / 2


def test_mixtures_of_experts(two, tmp_path):
    """In the layout that transformers computes with; an export has the files that others know."""
    model = new_model(tmp_path / "model", chars="abcd", hidden_size=32, **MOE)
    backend = Local(model, optimizer())
    state = backend.load_pretrained()
    backend.save(state, tmp_path / "saved")
    assert tree.equal(backend.restore(tmp_path / "saved"), state)
    assert tree.equal(Local(tmp_path / "saved", optimizer()).load_pretrained(), state)
    assert two.run("rank_checks.restored", model, tmp_path / "saved") == [None, None]
    export_model(tmp_path / "saved", tmp_path / "out")
    assert load_file(tmp_path / "out" / MODEL).keys() == load_file(model / MODEL).keys()


def edited(source, folder, file, change):
    """A copy of a checkpoint with the tensors of one file changed."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    backend = Local(folder, optimizer(), max_tokens=24)
    state = backend.init(Key.from_seed(0))
    grads, _ = backend.forward_backward(state, tiny_batch(), ppo_clip())
    backend.save(backend.apply_update(state, grads)[0], tmp_path_factory.mktemp("saved"))
    return tmp_path_factory.getbasetemp() / "saved0"


NORM, MOMENT = "model.norm.weight", ".optimizer.exp_avg['model.norm.weight']"


@pytest.mark.parametrize(
    ("file", "name", "change", "says"),
    [
        (MODEL, NORM, lambda t: t.pop(NORM), "lacks 1 of"),
        (MODEL, NORM, lambda t: t.update({"more": torch.ones(1)}), "has 1 tensors too many, such as ['more']"),
        (MODEL, NORM, lambda t: t.update({NORM: torch.ones(3)}), "as F32(3,), not F32(16,)"),
        (MODEL, NORM, lambda t: t.update({NORM: t[NORM].bfloat16()}), "as BF16(16,), not F32(16,)"),
        (TENSORS, MOMENT, lambda t: t.pop(MOMENT), "lacks 1 of"),
        (TENSORS, MOMENT, lambda t: t.update({"more": torch.ones(1)}), "has 1 tensors too many, such as ['more']"),
        (TENSORS, MOMENT, lambda t: t.update({MOMENT: torch.ones(3)}), "as F32(3,), not F32(16,)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(two, folder, saved, tmp_path, file, name, change, says):
    odd = edited(saved, tmp_path / "odd", file, change)
    with pytest.raises(CheckpointError) as error:
        Local(folder, optimizer()).restore(odd)
    told = str(error.value)
    assert told.startswith(f"{odd} does not hold this training state: {file}") and says in told
    assert "more" in says or name in told
    assert two.run("rank_checks.restored", folder, odd) == [f"CheckpointError: {told}"] * 2


@pytest.mark.parametrize("file", [MODEL, TENSORS, "train_state.json"])
def test_files_that_are_cut_or_missing(two, folder, saved, tmp_path, file):
    whole = (saved / file).read_bytes()
    odd = edited(saved, tmp_path / "odd", MODEL, lambda t: None)
    for harm in (lambda p: p.write_bytes(whole[:-7]), lambda p: p.write_bytes(b""), lambda p: p.unlink()):
        harm(odd / file)
        with pytest.raises(CheckpointError, match="does not hold this training state"):
            Local(folder, optimizer()).restore(odd)
        told = two.run("rank_checks.restored", folder, odd)
        assert told[0].startswith("CheckpointError") and told[0] == told[1]


def test_states_of_another_optimizer_or_run(folder, saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"train_state.safetensors has \d+ tensors too many"):
        Local(folder, sgd(lambda count: 0.1)).restore(saved)
    odd = edited(saved, tmp_path / "odd", MODEL, lambda t: None)
    scalars = json.loads((odd / "train_state.json").read_text())
    (odd / "train_state.json").write_text(json.dumps({k: v for k, v in scalars.items() if k != ".step"}))
    with pytest.raises(CheckpointError, match="lacks 1 of"):
        Local(folder, optimizer()).restore(odd)
