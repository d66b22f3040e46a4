"""The command line as a user meets it."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import verl_fn
from verl_fn import user_files
from verl_fn.cli import commands, main
from verl_fn.cli.commands import COMMANDS
from verl_fn.errors import UserError


def run(python, *args):
    return subprocess.run([python, "-m", "verl_fn.cli", *args], capture_output=True, text=True)


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert {"train", "bench"} <= set(
        capsys.readouterr().out.replace(",", " ").replace("{", " ").replace("}", " ").split()
    )


def test_a_users_mistake_is_one_line_without_a_traceback(warm, tmp_path):
    for args in (
        ["train", "nowhere.toml"],
        ["train", "recipes/ppo_reverse.toml", "algorithm.clip_ration=1"],
        ["train", "recipes/ppo_reverse.toml", f"model.path={tmp_path}", f"trainer.dir={tmp_path}/run"],
    ):
        found = run(warm, *args)
        assert found.returncode in (1, 2)
        assert found.stderr.startswith("error: ")
        assert "Traceback" not in found.stderr
        assert found.stderr.count("\n") == 1


def test_train_trains(warm, tmp_path):
    found = run(
        warm, "train", "recipes/sft_reverse.toml", f"trainer.dir={tmp_path}", "trainer.total_training_steps=2",
        "data.val_size=8", "driver.num_threads=1",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "step   2" in found.stdout or "step 2/2" in found.stdout
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_an_error_is_told_with_its_notes(monkeypatch, capsys):
    from verl_fn.backends.memory import OutOfMemory

    def fails(args):
        error = OutOfMemory("too many tokens")
        error.add_note("raised in trainer rank 1")
        raise error

    monkeypatch.setitem(COMMANDS, "list", fails)
    assert main(["list"]) == 1
    assert capsys.readouterr().err.startswith("error: too many tokens\nraised in trainer rank 1\n  File ")


OF_RAY = """\x1b[36mray::Host.run()\x1b[39m (pid=7468, ip=127.0.0.1)
           ^^^^^^^^^^^^^^^^
  File "{ours}/driver/host.py", line 3, in run
    return fn(*args)
           ^^^^^^^^^
  File "/home/me/mine.py", line 7, in loss
    return batch["nothing"]
KeyError: 'nothing'
raised in trainer
raised in trainer"""


@pytest.mark.parametrize("debug", [(), ("--debug",)])
@pytest.mark.parametrize(
    ("error", "shown", "hidden"),
    [
        (KeyError("nothing"), ["in fails", "    raise error", "KeyError: 'nothing'"], ["cli/main.py"]),
        (UserError("not so"), ["error: not so", "in fails", "    raise error"], ["Traceback", "cli/main.py"]),
        (
            RuntimeError(OF_RAY.format(ours=Path(verl_fn.__file__).parent)),
            ['"/home/me/mine.py", line 7', 'batch["nothing"]', "KeyError: 'nothing'", "ray::Host.run() (pid"],
            ["driver/host.py", "fn(*args)", "^^^", "raised in trainer\nraised", "\\x1b"],
        ),
    ],
    ids=["error", "user error", "over ray"],
)
def test_an_error_in_a_users_file_shows_the_lines_of_that_file(error, shown, hidden, debug, monkeypatch, capsys):
    def fails(args):
        raise error

    monkeypatch.setitem(COMMANDS, "list", fails)
    if debug and not isinstance(error, UserError):
        with pytest.raises(type(error)):
            main(["list", *debug])
        return
    assert main(["list", *debug]) == 1
    printed = capsys.readouterr().err
    assert all(part in printed for part in shown)
    assert debug or not any(part in printed for part in hidden)


def test_an_error_of_this_package_is_raised_with_its_whole_traceback(monkeypatch):
    monkeypatch.setitem(COMMANDS, "list", lambda args: next(user_files.code_files(3)))
    with monkeypatch.context() as patched, pytest.raises(AttributeError):
        patched.setattr(user_files, "LIBRARIES", (str(Path(__file__).parent),))
        main(["list"])


def test_list_has_every_choice_of_the_config(capsys):
    from verl_fn.config import algorithms, schema

    assert main(["list"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    listed = {line[:24].strip(): line[24:].split(", ") for line in lines}
    for kind, choices in {
        "algorithms": algorithms.BUILT_IN,
        "estimators": algorithms.GROUP_ESTIMATORS,
        "losses": algorithms.POLICY_LOSSES,
        "aggregation": algorithms.AGGREGATIONS,
        "training backends": schema.STRATEGIES,
        "rollout engines": schema.ROLLOUT_ENGINES,
    }.items():
        assert set(choices) <= set(listed[kind])
    assert "vllm" in listed["rollout engines"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["train", "recipes/sft_reverse.toml", "--trainer.seed=3"],
            "keys of the config have no dashes: trainer.seed=3",
        ),
        (["eval", "runs/x", "--data.val_files=x"], "keys of the config have no dashes: data.val_files=x"),
        (["prepare", "Qwen/Qwen3-8B", "--out", "m"], "of the Hugging Face hub: hub:Qwen/Qwen3-8B"),
    ],
)
def test_what_other_command_lines_take_gets_a_hint(words, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "spins"), [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
@pytest.mark.parametrize("start", ["run", "run_rank"])
def test_threads_that_wait_sleep_before_torch_is_imported_unless_the_user_says_otherwise(start, named, spins):
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | named
    code = (
        "import os, sys, verl_fn.cli\n"
        "cli = sys.modules['verl_fn.cli.main']\n"
        "cli.main = lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules) or 0\n"
        f"cli.{start}()"
    )
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == f"{spins} False\n"


@pytest.mark.parametrize(("place", "category", "note"), [("verl_fn/environments/rendering.py", UserWarning, True),
                                                         ("verl_fn/pool/pool.py", DeprecationWarning, False),
                                                         ("torch/nn.py", UserWarning, False)])  # fmt: skip
def test_a_warning_of_this_package_is_printed_as_a_note(place, category, note, monkeypatch):
    entry = sys.modules["verl_fn.cli.main"]
    file = str(Path(entry.__file__).parents[2] / place)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(entry, "main", lambda: 0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(entry, "_rest_early", lambda: None)
    assert entry.run() == 0
    shown = warnings.formatwarning("the model does not see name", category, file, 7, "warnings.warn(")
    assert (shown == "note: the model does not see name\n") is note
    assert note or "nn.py:7" in shown or "pool.py:7" in shown


def test_an_evaluation_names_settings_of_training(tiny, tmp_path, capsys):
    sampling = ["rollout.temperature=0.7", "rollout.n=4", "rollout.top_p=0.5", "rollout.top_k=3"]
    given = [*sampling, "actor.optim.lr=1", "trainer.seed=3", "data.val_size=1", "data.max_response_length=2"]
    assert main(["eval", str(tiny), "data.task=reverse", *given]) == 0
    out = capsys.readouterr().out
    said = [line for line in out.splitlines() if "has no effect in an evaluation" in line]
    keys = [one.partition("=")[0] for one in sampling]
    assert said == [
        *(f"note: {key} has no effect in an evaluation; set {key.replace('.', '.val_kwargs.')}" for key in keys),
        "note: actor.optim.lr has no effect in an evaluation",
    ]


def test_an_evaluation_shows_an_answer_to_each_of_three_problems(capsys):
    answers = [
        {"prompt": f"p{i}", "response": f"r{i}{j}", "answer": "a", "score": 0.5} for i in range(4) for j in range(2)
    ]
    commands._show({"m": {"x": 0.25}}, answers, 2)
    number, *shown = capsys.readouterr().out.splitlines()
    assert number.split() == ["x", "0.2500"]
    assert shown == [f"'p{i}' -> 'r{i}0' (reward 0.5; expected 'a')" for i in range(3)]


def test_an_evaluation_of_a_folder_asks_for_its_problems(tiny, tmp_path, capsys):
    assert main(["eval", str(tiny)]) == 2
    assert "set data.val_files to a file, or data.task to a task of verl-fn list" in capsys.readouterr().err
    # As the folder of a run's checkpoints.
    for words in (["eval", str(tmp_path)], ["export", str(tmp_path), str(tmp_path / "out")]):
        assert main(words) == 1
        assert "config.json; name a run, a checkpoint or a model" in capsys.readouterr().err
