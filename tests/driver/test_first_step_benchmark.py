"""The first step's benchmark: its ranks end together, and nothing that is wrong counts as held."""

import json
import math
import os
import shutil
import sys
from unittest import mock

import pytest
import torch

from verl_fn.backends.hf.new_model import new_model
from verl_fn.benchmarks import first_step
from verl_fn.benchmarks.first_step_errors import compare_tensors
from verl_fn.benchmarks.first_step_layout import Layout
from verl_fn.benchmarks.together import RanksFailed, run_together
from verl_fn.config import ConfigError
from verl_fn.testing.compare import loss_scale

FAILS = """
import os, sys, time
if os.environ["RANK"] == "0":
    open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(600)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit("broken on purpose")
"""
TALKS = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("x" * 2**20)
    open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def test_rows_that_are_longer_than_the_models_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(first_step, "prepare", mock.Mock(side_effect=InterruptedError))
    own = new_model(tmp_path / "own", chars="ab", max_position_embeddings=128)
    for model, most in (((), 4096), (("--model", str(own)), 128)):
        argv = [*model, "--layouts", "local", "--rows", "1", "--longest"]
        with pytest.raises(ConfigError, match=f"--longest {most + 1}: the model's rows have at most {most} tokens"):
            first_step.main([*argv, str(most + 1)])
        with pytest.raises(InterruptedError):
            first_step.main([*argv, str(most)])


def run(code, path):
    run_together([sys.executable, "-S", "-c", code, str(path)], 2, "layout")


def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path):
    with pytest.raises(RanksFailed, match=r"layout: rank 1 failed with status 1\nbroken on purpose") as raised:
        run(FAILS, tmp_path / "pid")
    assert raised.value.cause == "rank 1 failed with status 1"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_rank_that_prints_much_lets_none_wait(tmp_path):
    run(TALKS, tmp_path / "done")
    assert (tmp_path / "done").exists()


def test_layouts_after_one_that_fails_are_measured(tmp_path, monkeypatch, capsys):
    inside = first_step.run_layout

    def run_layout(folder, shape, text, *args):
        if text == "fsdp:3":
            raise RanksFailed("all that was printed", "ModelError: too large")
        return inside(folder, shape, text, *args)

    monkeypatch.setattr(first_step, "run_layout", run_layout)
    monkeypatch.setattr(first_step, "run_together", lambda command, *_: rank_here(command))
    path = tmp_path / "result.json"
    options = ["--losses", "sft", "--rows", "4", "--longest", "8", "--device", "cpu", "--json", str(path)]
    assert first_step.main(["--layouts", "local", "fsdp:3", "local:bf16", *options]) == 1
    result, shown = json.loads(path.read_text()), capsys.readouterr()
    assert result["failed"] == {"fsdp:3": "ModelError: too large"}
    assert [(r["layout"], r["missed"]) for r in result["results"]] == [("local", []), ("local:bf16", [])]
    assert "\nfsdp:3: FAILED ModelError: too large\n" in shown.out
    lines = shown.out.splitlines()
    rows = [line.split() for line in lines if line.startswith(("  sft", "  float32", "  bfloat16"))]
    assert max(map(len, lines)) < 120 and list(map(len, rows)) == [11, 11, 11, 12, 12]
    assert rows[1][:7] == ["bfloat16", "-", "-", "1e-03", "5e-03", "-", "-"] and rows[3][-1] == "held"
    assert "all that was printed" in shown.err


def test_a_model_of_the_users(tmp_path, monkeypatch, capsys):
    folder = new_model(tmp_path / "mine", chars="abc", hidden_size=16)
    monkeypatch.setattr(first_step, "run_together", lambda command, *_: rank_here(command))
    options = ["--rows", "6", "--longest", "8", "--device", "cpu", "--json", str(tmp_path / "result.json")]
    first_step.main(["--model", str(folder), "--layouts", "local", *options, "--losses", "sft", "value"])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["model"] == str(folder) and [r["missed"] for r in result["results"]] == [[], []]
    assert "random" not in capsys.readouterr().out
    (bare := tmp_path / "bare").mkdir()
    shutil.copy(folder / "config.json", bare)
    first_step.main(["--model", str(bare), "--layouts", "local", *options, "--losses", "sft"])
    assert f"{bare} has no *.safetensors, so the weights are random\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        first_step.main(["--model", str(tmp_path), *options])
    assert "is no model folder: it has no config.json" in capsys.readouterr().err


def test_losses_that_share_a_name_keep_their_numbers(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from verl_fn.steps import cross_entropy\ndef times(factor=1.0):\n    return factor * cross_entropy()\n"
    )
    monkeypatch.setattr(first_step, "run_together", lambda command, *_: rank_here(command))
    losses = [f"{tmp_path}/mine.py:times(factor={factor})" for factor in (1.0, 3.0)]
    options = ["--rows", "6", "--longest", "8", "--device", "cpu", "--json", str(tmp_path / "result.json")]
    assert first_step.main(["--layouts", "local", *options, "--losses", *losses]) == 0
    one, three = json.loads((tmp_path / "result.json").read_text())["results"]
    assert three["found"]["loss"] == pytest.approx(3 * one["found"]["loss"], rel=1e-4)
    out = capsys.readouterr().out
    assert "times(factor=1.0) " in out and "times(factor=3.0) " in out


def test_a_loss_by_row_and_one_that_the_reference_cannot_compute(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "import verl_fn as vf\n"
        "@vf.loss(needs=['logprobs'], level='row')\n"
        "def of_rows(outputs, batch):\n"
        "    return batch['score'] * batch.sum_rows(outputs.logprobs), {}\n"
        "@vf.loss(needs=['logprobs'])\n"
        "def lacking(outputs, batch):\n    return batch['mine'] * outputs.logprobs, {}\n"
    )
    monkeypatch.setattr(first_step, "run_together", lambda command, *_: rank_here(command))
    path, scales = tmp_path / "result.json", []

    def scale(loss, outputs, batch):
        scales.append((loss.levels, len(batch)))
        return loss_scale(loss, outputs, batch)

    monkeypatch.setattr(first_step, "loss_scale", scale)
    options = ["--layouts", "local", "--rows", "6", "--longest", "8", "--device", "cpu", "--json", str(path)]
    assert first_step.main([*options, "--losses", f"{tmp_path}/mine.py:of_rows", "sft"]) == 0
    by_row, _ = json.loads(path.read_text())["results"]
    assert by_row["missed"] == [] and by_row["found"]["loss"] < 0
    assert scales[0] == ({"row"}, 6), "errors are relative to the scale that compare_backends has"

    def fails(command, *_):
        raise RanksFailed("all that was printed", "MissingField: the batch has no mine")

    monkeypatch.setattr(first_step, "run_together", fails)
    assert first_step.main([*options, "--losses", f"{tmp_path}/mine.py:lacking"]) == 1
    shown = capsys.readouterr()
    assert (
        "\nlocal, the reference: FAILED MissingField: the batch has no mine\n" in shown.out
        and "all that was" in shown.err
    )
    assert json.loads(path.read_text())["failed"] == {
        "local": "the reference local: MissingField: the batch has no mine"
    }


def rank_here(command):
    """The only rank of a layout, in this process."""
    with mock.patch.dict(os.environ, RANK="0"), mock.patch.object(os, "_exit", lambda status: None):
        first_step.rank_main(command[3:])


@pytest.mark.parametrize("kind", ["gradient", "update", "from_reference"])
def test_tensors_that_are_not_finite_miss_every_bar(kind):
    wanted = {f"{name}.w": torch.ones(4) for name in ("gradient", "update", "from_reference")}
    spoilt = {**wanted, f"{kind}.w": torch.tensor([math.nan, 1.0, 1.0, 1.0])}
    errors = compare_tensors(spoilt, wanted, {"w": torch.ones(4)}, "cpu")
    assert not errors["update_from_reference" if kind == "from_reference" else kind] < math.inf


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("fspd:2", "there is no backend 'fspd'"),
        ("fsdp:x", "'x' is neither a number of ranks nor fp32 nor bf16 nor key=value"),
        ("fsdp:0", "it must have at least one rank"),
        ("megatron:tp=x", "tp is 'x'; it must be a number from 1"),
        ("fsdp:2,lora=0", "lora is '0'; it must be a number from 1"),
        ("megatron:tp=2,foo=1", "megatron takes no option 'foo'"),
        ("local:head=value", "local takes no option 'head'"),
        ("megatron:tp=2,sp=yes", "sp is 'yes'; it must be true, false or a number"),
        ("megatron:tp=2,tp=2", "tp is given twice"),
        ("local:2", "local has one rank, and fsdp:2 has two"),
    ],
)
def test_layouts_that_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(layout)


def test_a_loss_of_the_users_is_named_or_made_with_its_defaults(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl_fn.steps import ppo_clip\n"
        "def made(low=0.1):\n    return 3.0 * ppo_clip()\n"
        "def asks(low):\n    return ppo_clip()\n"
        "whole = made()\n"
    )
    for name in ("made", "whole"):
        head, loss = first_step.loss_of(f"{file}:{name}")
        assert head == "lm" and [term.factor for term in loss.terms] == [3.0]
    with pytest.raises(ConfigError, match=r"asks is a function, .* that makes a loss with its options"):
        first_step.loss_of(f"{file}:asks")
    head, loss = first_step.loss_of(f"{file}:asks(low=0.5)")
    assert head == "lm" and len(loss.terms) == 1
    for wrong in ("asks(0.5)", "asks(low)", "asks(low=open('x'))", "asks(**{'low': 1})"):
        with pytest.raises(ConfigError, match="write options as in"):
            first_step.loss_of(f"{file}:{wrong}")
    with pytest.raises(ConfigError, match=r"--losses: .*made takes \(low\), and .* with \(lo\); did you mean low\?"):
        first_step.loss_of(f"{file}:made(lo=0.5)")
    with pytest.raises(ConfigError, match="whole is a loss and takes no options, but low are given"):
        first_step.loss_of(f"{file}:whole(low=1)")
