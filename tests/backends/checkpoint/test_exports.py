"""Exports hold what the model holds, with its head, or are refused: compared by name and by bit, both ways."""

import json
import re
import shutil

import attrs
import pytest
import torch
from ragged_rows import OPTIMIZER
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from verl_fn.backends import checkpoint
from verl_fn.backends.checkpoint import export_adapter, export_model
from verl_fn.backends.hf.config import ModelError, compute_dtype, read_config
from verl_fn.backends.hf.folder import computed_in
from verl_fn.backends.hf.lora import Lora, LoraError
from verl_fn.backends.hf.new_model import char_tokenizer, new_model
from verl_fn.backends.local import Local
from verl_fn.backends.vllm.loading import in_files
from verl_fn.benchmarks.tiny_models import tiny_folder
from verl_fn.state import Key

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model by whether its embeddings are its head too."""
    folder = tmp_path_factory.mktemp("models")
    return {
        tied: new_model(folder / str(tied), chars="abcd", hidden_size=16, tie_word_embeddings=tied)
        for tied in (True, False)
    }


def trained(model, folder, head, rank, dtype="float32"):
    """A saved state of a model whose head and adapters are not zero."""
    backend = Local(model, OPTIMIZER, head=head, lora=Lora(rank) if rank else None, dtype=dtype)
    state = backend.load_pretrained(key=Key.from_seed(0))
    moved = {n: p + 0.1 if n in state.params.trained() else p for n, p in state.params.items()}
    backend.save(attrs.evolve(state, params=attrs.evolve(state.params, leaves=moved)), folder)
    return folder


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_the_model_with_its_head(models, tmp_path, tied, head, rank):
    source = trained(models[tied], tmp_path / "saved", head, rank)
    export_model(source, tmp_path / "out")
    backend = Local(models[tied], OPTIMIZER, head=head, lora=Lora(rank) if rank else None)
    ours, theirs = load_file(tmp_path / "out" / FILE), dict(backend.weights(backend.restore(source).params).read())
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in ours.items())
    assert ("score.weight" in ours) == (head == "value") and ("lm_head.weight" in ours) == (head == "lm" and not tied)
    if head == "value":
        assert ours["score.weight"].abs().min() > 0
        model = Local(tmp_path / "out", OPTIMIZER, head="value").load_pretrained()
        assert torch.equal(model.params["score.weight"], theirs["score.weight"])
    export_model(source, tmp_path / "half", "bfloat16")
    assert all(torch.equal(t, theirs[n].bfloat16()) for n, t in load_file(tmp_path / "half" / FILE).items())


def test_the_adapters_of_a_critic_are_exported_with_its_head(models, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForTokenClassification

    source = trained(models[True], tmp_path / "saved", "value", 2)
    export_adapter(source, tmp_path / "adapter")
    export_model(source, tmp_path / "merged")
    load = lambda folder: AutoModelForTokenClassification.from_pretrained(folder, num_labels=1).eval()  # noqa: E731
    with torch.no_grad():
        ids = torch.arange(3, 7)[None]
        merged = load(tmp_path / "merged")(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(load(models[True]), tmp_path / "adapter").eval()(input_ids=ids).logits
    assert merged.abs().max() > 1e-3 and (adapted - merged).abs().max() < 1e-5


def test_adapters_that_are_not_those_of_the_state_are_refused(models, tmp_path):
    source = trained(models[True], tmp_path / "saved", "lm", 2)
    about = json.loads((source / "lora.json").read_text())
    (source / "lora.json").write_text(json.dumps(about | {"layers": about["layers"][1:]}))
    with pytest.raises(LoraError, match=r"does not hold the adapters that lora.json lists: 2 differ, such as "):
        export_adapter(source, tmp_path / "out")


def test_weights_that_the_model_lacks_are_not_left_out(models, tmp_path):
    """As where an editor made a reward model a language model, or config.json is of another model."""
    source = trained(models[True], tmp_path / "saved", "value", 0)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ModelError, match=r"has 2 weights that Qwen3ForCausalLM has not, such as score\."):
        export_model(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("harm", ["lost", "changed", "narrower"])
def test_what_was_written_is_compared_with_the_model(models, tmp_path, monkeypatch, harm):
    write = checkpoint.write_carried

    def harmed(contents, folder):
        tensors = load_file(folder / FILE)
        if harm == "lost":
            del tensors["model.norm.weight"]
        elif harm == "changed":
            tensors["model.norm.weight"][3] += 1e-3
        else:
            tensors = {name: t.bfloat16() for name, t in tensors.items()}
        save_file(tensors, folder / FILE, metadata={"format": "pt"})
        write(contents, folder)

    monkeypatch.setattr(checkpoint, "write_carried", harmed)
    with pytest.raises(ModelError, match="lacks 1 weights" if harm == "lost" else "lost, added or changed"):
        export_model(models[False], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_names_the_dtype_that_its_model_computes_in(models, tmp_path, dtype):
    """Whatever dtype the folder names. The weights are fp32, and a run that begins from them computes in it."""
    source, config = tmp_path / "source", models[True] / "config.json"
    shutil.copytree(models[True], source)
    (source / "config.json").write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    saved = trained(source, tmp_path / "saved", "lm", 0, dtype)
    assert json.loads((saved / "config.json").read_text())["dtype"] == compute_dtype(None, saved, "cuda") == dtype
    assert {t.dtype for t in load_file(saved / FILE).values()} == {torch.float32}
    export_model(saved, tmp_path / "out")
    assert compute_dtype(None, tmp_path / "out", "cuda") == "float32"


def test_the_dtype_of_a_model_inside_another_is_named_too():
    config = {"dtype": "float32", "text_config": {"dtype": "float32"}, "vision_config": {"dtype": "float32"}}
    named = json.loads(computed_in(torch.bfloat16, {"config.json": json.dumps(config).encode()})["config.json"])
    assert named == {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
        "vision_config": {"dtype": "bfloat16"},
    }


def test_the_dtype_of_a_model_is_the_one_of_most_elements(tmp_path):
    """In many models the norms are in fp32: many tensors with few elements."""
    norms = {f"norm.{i}": torch.ones(4) for i in range(3)}
    save_file(norms | {"w": torch.ones(8, 8, dtype=torch.bfloat16)}, tmp_path / FILE)
    assert checkpoint.dtype_of_weights(tmp_path) == torch.bfloat16


def test_as_it_is_means_the_dtype_of_the_weights(models, tmp_path):
    """config.json names another one, as of a model that was saved by hand."""
    source = trained(models[True], tmp_path / "saved", "lm", 0)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    export_model(source, tmp_path / "out")
    ours, theirs = load_file(tmp_path / "out" / FILE), load_file(source / FILE)
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


@pytest.mark.parametrize("name", ["embedding", "embeddings"])
def test_the_embedding_of_nemotron_h_is_written_as_published_files_name_it(name, tmp_path):
    """transformers 5.9 writes a name that vLLM does not read, and others wrote files by it."""
    folder = tiny_folder("nemotron_h", tmp_path / "model")
    char_tokenizer("abc").save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {re.sub("embeddings?[.]", f"{name}.", key): value for key, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    written = load_file(export_model(folder, tmp_path / "out") / "model.safetensors")
    assert torch.equal(written["backbone.embeddings.weight"], tensors[f"backbone.{name}.weight"])
    rules = get_checkpoint_conversion_mapping("nemotron_h")
    ((sent, _),) = in_files("model.embeddings.weight", torch.zeros(2, 2), rules, read_config(folder))
    assert sent == "backbone.embeddings.weight"
