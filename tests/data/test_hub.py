"""Models and data sets of the hub, from a cache as the hub's library keeps it, without a network."""

import json
import shutil

import pytest
from huggingface_hub import constants
from run_configs import tiny_run

from verl_fn.cli import main
from verl_fn.data.hub import HubError, hub_name, recorded
from verl_fn.data.rows import DataError
from verl_fn.runs.history import changed_inputs, fingerprints

COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Adds snapshots to a cache folder; the hub cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def add(kind, name, source, commit=COMMIT, branch="main"):
        repo = tmp_path / "cache" / f"{kind}s--{name.replace('/', '--')}"
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / branch).write_text(commit)
        return shutil.copytree(source, repo / "snapshots" / commit)

    return add


def test_a_model_is_copied_and_a_run_records_its_commit(cache, tiny, tmp_path, capsys):
    snapshot = cache("model", "org/tiny", tiny)
    (snapshot / "modeling.py").write_text("raise SystemExit")
    out = tmp_path / "models" / "tiny"
    assert main(["prepare", "hub:org/tiny", "--out", str(out)]) == 0
    assert f"hub:org/tiny@{COMMIT}: model.safetensors" in capsys.readouterr().out
    assert (out / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert not (out / "modeling.py").exists() and recorded(out) == f"hub:org/tiny@{COMMIT}"
    data = out / "main" / "train.jsonl"
    data.parent.mkdir()
    data.write_text(json.dumps({"data_source": "s", "prompt": "a", "reward_model": {"ground_truth": "b"}}))
    plan = tiny_run(tiny, tmp_path / "run", f"data.train_files={data}")
    assert fingerprints(plan)[str(out)] == f"hub:org/tiny@{COMMIT}", "files of data lie below their folder's record"
    plan = tiny_run(out, tmp_path / "run")
    prints = fingerprints(plan)
    assert prints[str(out)] == f"hub:org/tiny@{COMMIT}"
    (out / ".hub.json").write_text(json.dumps({"source": f"hub:org/tiny@{OLDER}"}))
    assert changed_inputs(prints, fingerprints(plan)) == [f"another content of {out}"]


def test_a_data_set_at_a_revision(cache, tmp_path, capsys):
    for commit, branch, answer in ((COMMIT, "main", "1"), (OLDER, "v1", "2")):
        source = tmp_path / branch
        (source / "main").mkdir(parents=True)
        for split in ("train", "test"):
            (source / f"main/{split}.jsonl").write_text(json.dumps({"question": "?", "answer": f"#### {answer}"}))
        cache("dataset", "openai/gsm8k", source, commit, branch)
        cache("dataset", "me/mine", source, commit, branch)
    out = str(tmp_path / "out")
    assert main(["prepare", "hub:datasets/openai/gsm8k@v1", "--out", f"{out}/a"]) == 0
    assert f"@{OLDER}: train.parquet with 1 rows, test.parquet with 1 rows" in capsys.readouterr().out
    assert main(["prepare", "hub:datasets/me/mine", "--out", f"{out}/b"]) == 0
    assert (tmp_path / "out/b/main/train.jsonl").is_file()
    assert main(["prepare", "hub:datasets/me/mine", "--out", f"{out}/b"]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_what_the_cache_lacks_is_refused_and_nothing_is_left(cache, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "pytorch_model.bin").write_text("")
    (empty / "config.json").write_text("{}")
    cache("model", "org/pickles", empty)
    for name, said in (
        ("hub:org/none", "is not in the hub's cache"),
        ("hub:org/pickles@v9", "is not in the hub's cache"),
        ("hub:org/pickles", "has no weights as safetensors"),
        ("hub:datasets/org/pickles", "is not in the hub's cache"),
        ("hub:nonsense", "is no name of the hub"),
    ):
        assert main(["prepare", name, "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    with pytest.raises(HubError):
        hub_name("org/name")


@pytest.mark.parametrize("text", [None, "[]", "{}", "x", "null", "\xff"])
def test_a_folder_without_a_record_that_can_be_read_is_of_no_hub(tmp_path, text):
    if text is not None:
        (tmp_path / ".hub.json").write_text(text, encoding="latin-1")
    assert recorded(tmp_path) is None


def test_names_of_the_hub_are_no_files():
    from verl_fn.data.rows import read_rows

    with pytest.raises(DataError, match="prepare hub:datasets/"):
        next(read_rows("openai/gsm8k", ()))
