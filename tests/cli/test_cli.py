"""The command line as a user meets it."""

import subprocess

import pytest

from verl_fn.cli import main


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
    from verl_fn.cli.commands import COMMANDS

    def fails(args):
        error = OutOfMemory("too many tokens")
        error.add_note("raised in trainer rank 1")
        raise error

    monkeypatch.setitem(COMMANDS, "list", fails)
    assert main(["list"]) == 1
    assert capsys.readouterr().err == "error: too many tokens\nraised in trainer rank 1\n"


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


def test_an_evaluation_of_a_folder_asks_for_its_problems(tmp_path, capsys):
    assert main(["eval", str(tmp_path)]) == 2
    assert "set data.val_files to a file, or data.task to a task of verl-fn list" in capsys.readouterr().err
