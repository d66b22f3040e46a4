"""What a checkpoint's folder holds beside weights: the files of the model's own folder, whatever happens to that."""

import json
import re
import shutil
from pathlib import Path

import pytest
from ragged_rows import OPTIMIZER
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_fn.atomic import check_empty
from verl_fn.backends.checkpoint import export_adapter, export_model
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.folder import is_carried
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.errors import UsageError, UserError
from verl_fn.state import Key

GENERATION = "generation_config.json"
# transformers reads each of these and refuses to write it.
ODD_SETTINGS = [
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 20},
    {"typical_p": 0.5},
    {"min_p": 0.1},
    {"length_penalty": 2.0},
    {"early_stopping": True},
    {"temperature": 0.0, "do_sample": True},
    {"num_return_sequences": 4},
    {"pad_token_id": -1},
    {"cache_implementation": "nothing"},
    {"early_stopping": "maybe"},
    {"unheard_of": [1]},
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16)


@pytest.fixture
def model(plain, tmp_path):
    return shutil.copytree(plain, tmp_path / "model")


def saved(folder, into, **options):
    backend = Local(folder, OPTIMIZER, **options)
    backend.save(backend.load_pretrained(key=Key.from_seed(0)), into)
    return into


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_settings_of_generation_are_copied_as_they_are(model, tmp_path):
    for number, settings in enumerate(ODD_SETTINGS):
        written = json.dumps({"eos_token_id": 2, **settings})
        (model / GENERATION).write_text(written)
        checkpoint, out = saved(model, tmp_path / f"saved_{number}"), tmp_path / f"out_{number}"
        export_model(checkpoint, out)
        assert [(folder / GENERATION).read_text() for folder in (checkpoint, out)] == [written] * 2, settings
        assert load_file(out / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()


def test_generation_settings_in_the_config_do_not_stop_a_save(model, tmp_path):
    config = json.loads((model / "config.json").read_text()) | {"temperature": 0.7, "num_beams": 3, "max_length": 9}
    (model / "config.json").write_text(json.dumps(config))
    (model / GENERATION).unlink()
    export_model(saved(model, tmp_path / "saved"), tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_every_file_that_a_tokenizer_reads_is_carried(model, tmp_path):
    """By the names that all tokenizers of transformers declare."""
    import transformers

    names = {
        "tekken.json",
        "added_tokens.json",
        "special_tokens_map.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "vocab.bpe",
        "processor_config.json",
    }
    for file in Path(transformers.__file__).parent.rglob("tokenization_*.py"):
        for table in re.findall(r"VOCAB_FILES_NAMES = \{([^}]*)\}", file.read_text()):
            names |= set(re.findall(r': "([^"]+)"', table))
    assert len(names) > 20 and [name for name in sorted(names) if not is_carried(name)] == []
    (model / "additional_chat_templates").mkdir()
    odd = {"tekken.json": b"{}", "added_tokens.json": b"{}", "additional_chat_templates/rag.jinja": b"{{ messages }}"}
    for name, content in odd.items():
        (model / name).write_bytes(content)
    backend = Local(model, OPTIMIZER)
    state = backend.init(Key.from_seed(0))
    for _ in range(2):  # also over an earlier save
        backend.save(state, tmp_path / "saved")
    written = contents(tmp_path / "saved")
    kept = contents(model)
    assert odd.items() <= written.items()
    assert {name for name in kept if written.get(name) != kept[name]} <= {"config.json", "model.safetensors"}


def test_other_weights_and_trainings_are_left(model, tmp_path):
    left = ("model.safetensors.index.json", "trainer_state.json", "adapter_config.json", "lora.json", "code.py")
    for name in left:
        (model / name).write_text("{}")
    backend = Local(model, OPTIMIZER)
    backend.save(backend.init(Key.from_seed(0)), tmp_path / "saved")
    assert not set(left) & contents(tmp_path / "saved").keys()


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_folder_that_is_gone_costs_nothing(model, tmp_path, head):
    """Nothing that a save needs is read after the state was made."""
    backend = Local(model, OPTIMIZER, head=head)
    state = backend.load_pretrained()
    backend.save(state, tmp_path / "before")
    shutil.rmtree(model)
    backend.save(state, tmp_path / "after")
    assert contents(tmp_path / "after") == contents(tmp_path / "before")
    assert AutoTokenizer.from_pretrained(tmp_path / "after").decode([4, 5]) == "ab"


# Exports


def test_an_export_needs_a_tokenizer(model, tmp_path):
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokenizer that can be read"):
        export_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_of_a_model_without_all_weights_is_refused(model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights of the model, such as model\.norm\.weight"):
        export_model(model, tmp_path / "out")


@pytest.mark.parametrize("made", [False, True])
def test_an_export_that_fails_leaves_the_folder_as_it_was(model, tmp_path, monkeypatch, made):
    adapted = saved(model, tmp_path / "adapted", lora=Lora(2))
    out = tmp_path / "out"
    if made:
        out.mkdir()
    for module, export, source in (
        ("verl_fn.backends.checkpoint.write_carried", export_model, model),
        ("safetensors.torch.save_file", export_adapter, adapted),
    ):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="No space left"):
            patch.setattr(
                module, lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "No space left on device"))
            )
            export(source, out)
        assert out.exists() == made and (not made or not list(out.iterdir()))
        export(source, out)
        shutil.rmtree(out)
        if made:
            out.mkdir()


def test_an_export_that_was_killed_can_be_repeated(model, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        patch.setattr(
            "verl_fn.backends.checkpoint.write_carried", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        export_model(model, out)
    assert list(out.iterdir())
    export_model(model, out)
    assert ".unfinished" not in contents(out) and "config.json" in contents(out)
    with pytest.raises(UsageError, match="not empty"):
        check_empty(out)


# A folder's own code


CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("run")
from transformers import LlamaConfig as OwnConfig, LlamaForCausalLM as OwnModel
OwnTokenizer = OwnConfig
"""
OWN = {
    "AutoConfig": "own.OwnConfig",
    "AutoModelForCausalLM": "own.OwnModel",
    "AutoTokenizer": ["own.OwnTokenizer"] * 2,
    "AutoModelForTokenClassification": "own.OwnModel",
}


@pytest.mark.parametrize("model_type", ["qwen3", "unknown_to_transformers"])
def test_a_folders_own_code_is_never_run(model, tmp_path, monkeypatch, model_type):
    """Not even where somebody would answer yes."""
    from verl_fn.backends.hf.config import read_config
    from verl_fn.backends.hf.folder import build, hollow
    from verl_fn.backends.hf.tokenizer import read_tokenizer
    from verl_fn.backends.sampler import Sampler
    from verl_fn.runs.memory import model_sizes

    asked = []
    monkeypatch.setattr("builtins.input", lambda *args: asked.append(args) or "y")
    (model / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    for name, fields in (("config.json", {"model_type": model_type}), ("tokenizer_config.json", {})):
        content = json.loads((model / name).read_text()) | fields | {"auto_map": OWN}
        (model / name).write_text(json.dumps(content))
    if model_type != "qwen3":
        content = json.loads((model / "tokenizer_config.json").read_text()) | {"tokenizer_class": "OwnTokenizer"}
        (model / "tokenizer_config.json").write_text(json.dumps(content))
    for use in (
        read_config,
        read_tokenizer,
        Sampler,
        lambda f: model_sizes(f, "lm"),
        lambda f: Local(f, OPTIMIZER).load_pretrained(),
        lambda f: build(f, "value", pretrained=False, key=Key.from_seed(0)),
        lambda f: hollow(f, "lm", key=Key.from_seed(0)),
        lambda f: export_model(f, tmp_path / "out"),
    ):
        if model_type == "qwen3":
            use(model)
        else:
            with pytest.raises(ModelError):
                use(model)
    assert not asked and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("fields", [{"auto_map": OWN}, {"use_cache": False}, {}], ids=["code", "no cache", "plain"])
def test_a_config_that_a_save_changes_is_that_of_the_same_model(fields, model, tmp_path):
    table = json.loads((model / "config.json").read_text()) | fields
    (model / "config.json").write_text(json.dumps(table))
    backend = Local(model, OPTIMIZER)
    folder = saved(model, tmp_path / "out")
    backend.restore(folder)
    told = json.loads((folder / "config.json").read_text())
    assert "auto_map" not in told and told["use_cache"]


def test_every_call_that_loads_says_that_code_is_not_run():
    """Calls of from_pretrained and from_config name the option, or pass options that do; adapters have no code."""
    import ast

    from test_house import FILES, name_of

    for file in FILES:
        if name_of(file).startswith("benchmarks/"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("from_pretrained", "from_config"):
                if ast.unparse(node.func) == "PeftModel.from_pretrained":
                    continue
                passed = {keyword.arg for keyword in node.keywords}
                assert passed & {"trust_remote_code", None}, f"{name_of(file)}, line {node.lineno}"
