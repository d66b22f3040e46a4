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
from verl_fn.cli.main import parse
from verl_fn.config.names import load_object
from verl_fn.errors import UsageError, UserError


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


def test_settings_without_a_file_apply_in_the_order_of_the_command(capsys, tmp_path):
    assert main(["config", "trainer.seed=1", "trainer.seed=2"]) == 0
    assert "\nseed = 2 " in capsys.readouterr().out
    (file := tmp_path / "a=b.toml").write_text("[trainer]\nseed = 3\n")
    for settings, seed in (([], 3), (["trainer.seed=1", "trainer.seed=2"], 2)):
        assert main(["config", str(file), *settings]) == 0
        assert f"\nseed = {seed} " in capsys.readouterr().out


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
    ("words", "values"),
    [
        (
            "train a.toml x.y=1 --quiet z.w=2 --debug",
            {"config": "a.toml", "overrides": ["x.y=1", "z.w=2"], "quiet": True, "check": False, "debug": True},
        ),
        ("train a.toml", {"overrides": [], "quiet": False, "check": False, "gpus": None, "debug": False}),
        ("train a.toml --check --gpus 8 --gpu-memory 80GB", {"check": True, "gpus": 8, "gpu_memory": 80.0}),
        ("train a.toml --check --gpu-memory .5", {"gpus": None, "gpu_memory": 0.5}),
        ("train a.toml --check --gpus 65535 --gpu-memory 999999", {"gpus": 65535, "gpu_memory": 999999.0}),
        ("fork r --step 3 a.b=1 --check", {"run": "r", "step": 3, "overrides": ["a.b=1"], "check": True}),
        ("replay r --step 3", {"step": 3, "recorded": False}),
        ("replay r --step 3 --recorded", {"recorded": True}),
        ("eval m a.b=1 n --out o c.d=2", {"models": ["m", "n"], "overrides": ["a.b=1", "c.d=2"], "out": "o"}),
        ("eval m --config c.toml", {"config": "c.toml", "out": None}),
        ("config", {"config": None, "from_verl": None, "overrides": []}),
        ("config --from-verl a.yaml b=1 --check", {"from_verl": ["a.yaml", "b=1", "--check"]}),
        ("report r s", {"runs": ["r", "s"], "out": "report.html"}),
        (
            "new-model m",
            {"task": "reverse", "chars": None, "arch": "qwen3", "seed": 0, "chat_template": False, "overrides": []},
        ),
        ("new-model m hidden_size=64 --chat-template", {"overrides": ["hidden_size=64"], "chat_template": True}),
        ("export m o", {"dtype": None, "adapter": False}),
        ("export m o --adapter --dtype float16", {"dtype": "float16", "adapter": True}),
        ("prepare gsm8k raw --out d", {"dataset": "gsm8k", "source": "raw", "out": "d"}),
        ("list", {"algorithm": None}),
        ("bench step --steps 3", {"what": "step", "rest": ["--steps", "3"]}),
        (
            "levels --model m",
            {"levels": [], "tiny": False, "bridge": "", "bridge_tests": [], "skip_bridge_tests": "", "device": "cuda",
             "gpus": 1, "features": [], "engine": None, "ray": "", "data": "", "reward_model": "", "steps": 20,
             "margin": 0.05, "seed": 0, "out": "runs/levels"},
        ),
        ("levels 5 0 --model m --tiny --ray", {"levels": [5, 0], "tiny": True, "ray": "local"}),
        ("levels --model m --ray a:1 --features moe qat", {"ray": "a:1", "features": ["moe", "qat"]}),
    ],
)  # fmt: skip
def test_arguments_and_their_defaults(words, values):
    given = words.split()
    args = parse(given)
    assert {name: getattr(args, name) for name in values} == values and args.argv == given


def test_a_tilde_after_an_equals_sign_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    args = parse(["report", "~/run", "--out=~/x.html"])
    assert (args.runs, args.out) == (["/h/run"], "/h/x.html")


def test_an_existing_file_with_an_equals_sign_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    args = parse(["eval", "lr=1", "data.task=count"])
    assert (args.models, args.overrides) == (["lr=1"], ["data.task=count"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train a.toml --gpus 8", "--gpus and --gpu-memory go with --check"),
        ("fork r --step 1 --gpu-memory 8", "--gpus and --gpu-memory go with --check"),
        ("train a.toml --check --gpus 8", "so --gpu-memory must say how many GiB each of its GPUs has"),
        ("train a.toml --check --gpus 0 --gpu-memory 8", "0 is no number of GPUs"),
        ("train a.toml --check --gpus 65536 --gpu-memory 8", "65536 is no number of GPUs"),
        ("train a.toml --check --gpu-memory 0", "0 is no size of a GPU's memory"),
        ("train a.toml --check --gpu-memory 1000000", "1000000 is no size of a GPU's memory"),
        ("train a.toml --fast", "train does not take --fast"),
        ("train a.toml --lr=3", "train does not take --lr=3"),
        ("train a.toml a.b=1 --quiet c", "train does not take c"),
        ("doctor a.b=1", "doctor does not take a.b=1"),
        ("eval a.b=1", "eval needs a model"),
        ("fork r", "--step"),
        ("levels 6 --model m", "6"),
    ],
)
def test_arguments_that_are_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


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
    given = [*sampling, "actor.optim.lr=1", "critic.dtype=float32", "trainer.seed=3"]
    given += ["data.val_size=1", "data.max_response_length=2"]
    assert main(["eval", str(tiny), "data.task=reverse", *given]) == 0
    out = capsys.readouterr().out
    said = [line for line in out.splitlines() if "has no effect in an evaluation" in line]
    keys = [one.partition("=")[0] for one in sampling]
    assert said == [
        *(f"note: {key} has no effect in an evaluation; set {key.replace('.', '.val_kwargs.')}" for key in keys),
        "note: actor.optim.lr has no effect in an evaluation",
        "note: critic.dtype has no effect in an evaluation",
    ]


def test_an_evaluation_shows_an_answer_to_each_of_three_problems(capsys):
    answers = [
        {"prompt": f"p{i}", "response": f"r{i}{j}", "answer": "a", "score": 0.5} for i in range(4) for j in range(2)
    ]
    commands._show({"m": {"x": 0.25}}, answers, 2)
    number, *shown = capsys.readouterr().out.splitlines()
    assert number.split() == ["x", "0.2500"]
    assert shown == [f"'p{i}' -> 'r{i}0' (reward 0.5; expected 'a')" for i in range(3)]
    commands._show({"m": {}}, [answers[0] | {"answer": "a" * 1_000_000}], 1)
    assert len(capsys.readouterr().out) < 300, "tests of code may have millions of characters"


def test_an_evaluation_of_a_folder_asks_for_its_problems(tiny, tmp_path, capsys):
    assert main(["eval", str(tiny)]) == 2
    assert "set data.val_files to a file, or data.task to a task of verl-fn list" in capsys.readouterr().err
    # As the folder of a run's checkpoints.
    for words in (["eval", str(tmp_path)], ["export", str(tmp_path), str(tmp_path / "out")]):
        assert main(words) == 1
        assert "config.json; name a run, a checkpoint or a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "error: stopped at once; the same command continues from the last checkpoint"),
        (OSError(2, "No such file", "/a/b"), 1, "error: /a/b: No such file\n"),
        (UsageError("no such key"), 2, "error: no such key\n"),
        (UserError("not so"), 1, "error: not so\n"),
    ],
)
def test_how_a_command_ends(error, status, said, monkeypatch, capsys):
    def fails(args):
        raise error

    monkeypatch.setitem(COMMANDS, "doctor", fails)
    for debug in ([], ["--debug"]):
        assert main(["doctor", *debug]) == status
        err = capsys.readouterr().err
        assert said in err and (err.startswith("Traceback") == bool(debug))


def test_an_error_in_the_users_code_ends_with_a_line_that_names_it(monkeypatch, capsys, tmp_path):
    (tmp_path / "mine.py").write_text("def fails(args):\n    return 1 / 0\n")
    monkeypatch.setitem(COMMANDS, "doctor", load_object(f"{tmp_path}/mine.py:fails", "a test"))
    assert main(["doctor"]) == 1
    *lines, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ZeroDivisionError in code of yours, whose lines are above; ")
    assert any(line.endswith('mine.py", line 2, in fails') for line in lines) and len(lines) <= 5
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_an_error_of_the_system_without_a_file_is_no_users_mistake(monkeypatch):
    def fails(args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(user_files, "own_traceback", lambda error: [])
    monkeypatch.setitem(COMMANDS, "doctor", fails)
    with pytest.raises(OSError):
        main(["doctor"])


@pytest.mark.parametrize(
    ("words", "function", "given", "line"),
    [
        ("hub:a/b", "data.hub.prepare_hub", ("hub:a/b", "out"), "done"),
        ("smollm2", "backends.hf.new_model.prepare_smollm2", ("out",), "wrote done"),
        ("gsm8k raw", "data.prepare.prepare_gsm8k", ("raw", "out"), "wrote out: a.parquet with 3 rows, b.parquet"),
        ("arithmetic", "data.prepare.prepare_arithmetic", ("out",), "wrote out: a.parquet with 3 rows"),
        ("squares", "data.prepare.prepare_squares", ("out",), "wrote out: a.parquet with 3 rows"),
    ],
)
def test_what_is_prepared_is_told(words, function, given, line, monkeypatch, capsys):
    asked, rows = [], {"a": 3, "b": 4} if "with" in line else "done"
    monkeypatch.setattr(f"verl_fn.{function}", lambda *names: asked.append(names) or rows)
    assert main(["prepare", *words.split(), "--out", "out"]) == 0
    assert asked == [given] and capsys.readouterr().out.startswith(line)


@pytest.mark.parametrize("words", ["gsm8k", "arithmetic raw", "hub:a/b raw"])
def test_raw_files_are_of_gsm8k_alone(words, capsys):
    assert main(["prepare", *words.split(), "--out", "out"]) == 2
    assert "prepare gsm8k needs the folder with its raw files" in capsys.readouterr().err


def test_a_benchmark_gets_the_options_that_follow_its_name(monkeypatch):
    from verl_fn.benchmarks import long_rows

    asked = []
    monkeypatch.setattr(long_rows, "main", lambda rest: asked.append(rest) or 5)
    assert main(["bench", "long-rows", "--steps", "3"]) == 5 and asked == [["--steps", "3"]]


def test_fields_of_a_model_are_json_or_words():
    assert [commands._field(f"a={value}") for value in ("3", "[1, 2]", "true", "gelu", "1.5.2")] == [
        ("a", 3), ("a", [1, 2]), ("a", True), ("a", "gelu"), ("a", "1.5.2"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "512 held-out problems of reverse, greedy"),
        (["data.val_size=3"], "3 held-out problems of reverse, greedy"),
        (
            ["rollout.val_kwargs.temperature=0.5", "rollout.val_kwargs.n=4"],
            "512 held-out problems of reverse, 4 at temperature 0.5",
        ),
        (["data.val_files=['/a/b.jsonl', 'c.parquet']"], "all problems of b.jsonl, c.parquet, greedy"),
        (["data.val_files=b.jsonl", "data.val_size=7"], "up to 7 problems of b.jsonl, greedy"),
        (["data.task=reasoning_gym:leg_counting"], "held-out questions of reasoning_gym:leg_counting, greedy"),
    ],
)
def test_an_evaluation_says_what_it_asks(settings, words):
    assert commands._summary(commands._plan(None, ["model.path=m", "data.task=reverse", *settings])) == words
