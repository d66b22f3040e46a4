"""Files of a run that hold anything: whatever reads them answers or names the file, and never shows a traceback."""

import copy
import importlib
import json
import random
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w
from run_configs import tiny_run
from safetensors.torch import load_file, save_file

from verl_fn.cli import main
from verl_fn.config import keys
from verl_fn.errors import UserError
from verl_fn.report import page
from verl_fn.report.plots import charts, window
from verl_fn.runs import RunError
from verl_fn.runs.checkpoints import checkpoints, verify
from verl_fn.runs.continuing import changes, find_origin, finished
from verl_fn.runs.folder import Run
from verl_fn.runs.history import run_config
from verl_fn.runs.journal import Recorded, first_difference, read_samples
from verl_fn.runs.logs import read_journal
from verl_fn.runs.loop import train
from verl_fn.state import unpack

SILENT = lambda line: None  # noqa: E731
OTHER_VALUES = [None, True, -1, 10**400, 1e308, float("nan"), "", "text\x1b\ud800", [], [1, [2]], {}, {"a": None}]
FILES = ["inputs.json", "config.toml", "checkpoints/step_1/checkpoint.json"]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run of one step with every kind of file."""
    folder = tmp_path_factory.mktemp("run") / "a"
    train(plan(tiny, folder), SILENT)
    return folder


def plan(tiny, folder, *more):
    options = ["algorithm.name=grpo", "rollout.n=2", "trainer.journal=samples", "trainer.total_training_steps=1"]
    return tiny_run(tiny, folder, *options, *more)


def places(value, path=()):
    """All places in nested lists and tables."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value, rng):
    """A value with another value at one place, or without it."""
    # Every depth is as likely as any other; most places lie deep.
    found = list(places(value))
    depth = rng.choice(sorted({len(path) for path in found}))
    path = rng.choice([path for path in found if len(path) == depth])
    if not path:
        return rng.choice(OTHER_VALUES)
    value = inner = copy.deepcopy(value)
    for key in path[:-1]:
        inner = inner[key]
    if isinstance(inner, dict) and rng.random() < 0.3:
        del inner[path[-1]]
    else:
        inner[path[-1]] = rng.choice(OTHER_VALUES)
    return value


def damage(file, rng):
    if file.suffix == ".toml":
        try:
            text = tomli_w.dumps(changed(tomllib.loads(file.read_text()), rng))
        except (TypeError, ValueError, AttributeError):
            text = rng.choice(["a = = 1", "\x00", "algorithm = 3", "[trainer]\nx"])
        file.write_text(text, errors="surrogatepass")
    else:
        file.write_text(json.dumps(changed(json.loads(file.read_text()), rng)))


def read_everything(folder, continued):
    """Reads a run as continuing, replaying and reporting it do, without models and drawings."""
    saver = Run(continued)
    yield lambda: changes(saver, continued)
    yield lambda: finished(continued, find_origin(continued, saver))
    yield lambda: saver.start(1, origin=checkpoints(folder)[0])
    yield lambda: run_config(folder, 1)
    yield lambda: verify(checkpoints(folder)[0])
    yield lambda: [first_difference(a, b, "state") for a in read_journal(folder).values() for b in [a]]

    def show():
        record = page._read(folder, "a")
        page._page([record], page._phases([record]) and "", "")
        return charts([record.rows]), window([record.rows])

    yield show


@pytest.mark.parametrize("file", FILES)
def test_json_of_another_shape_is_read_or_named(tiny, run, tmp_path, file):
    rng = random.Random(file)
    continued = plan(tiny, tmp_path / "a", "trainer.total_training_steps=2")
    refusals = 0
    for _ in range(30):
        for reader in range(7):
            if not (tmp_path / "a").exists():
                shutil.copytree(run, tmp_path / "a", symlinks=True)
                state = rng.getstate()
            rng.setstate(state)
            shutil.copy(run / file, tmp_path / "a" / file)
            damage(tmp_path / "a" / file, rng)
            held = (tmp_path / "a" / file).read_text(errors="replace")
            try:
                list(read_everything(tmp_path / "a", continued))[reader]()
            except UserError as error:
                refusals += 1
                assert Path(file).stem in str(error) or "config" in file, error
            except Exception as error:
                raise AssertionError(f"{type(error).__name__} from reader {reader} of {held:.2000}") from error
        state = rng.getstate()
    assert refusals > 5 or file == "inputs.json"


def test_damaged_samples_are_named(run, tmp_path):
    (tmp_path / "samples").mkdir()
    file, good = tmp_path / "samples/step_1.safetensors", run / "samples/step_1.safetensors"
    tensors, data = load_file(good), good.read_bytes()
    rng = random.Random(0)
    for name in tensors:
        save_file({n: t for n, t in tensors.items() if n != name}, file)
        read_or_refuse(tmp_path, file)
        save_file(tensors | {name: tensors[name].flatten()[:1].clone()}, file)
        read_or_refuse(tmp_path, file)
    for _ in range(50):
        at = rng.randrange(len(data))
        file.write_bytes(rng.choice([data[:at], data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :], b""]))
        read_or_refuse(tmp_path, file)


def read_or_refuse(folder, file):
    try:
        calls = read_samples(folder, 1)
    except RunError as error:
        assert f"{file} is damaged" in str(error)
        return
    unpack(calls[0])
    with pytest.raises(RunError, match="of other prompts"):
        Recorded(calls).generate([])


PATHS = ["trainer.dir", "trainer.resume_from_path", "model.path", "critic.path", "data.train_files", "data.val_files",
         "reward.functions", "ray.runtime_env", "algorithm.policy_loss", "algorithm.adv_estimator",
         "algorithm.name"]  # fmt: skip


@pytest.mark.parametrize("path", ["a\0b", "~nosuchuser/x", "", "\udcff", "x" * 5000])
@pytest.mark.parametrize("key", PATHS)
def test_paths_that_no_file_can_have(capsys, tmp_path, key, path):
    assert key in set(keys())
    value = f"{path}/x.py:name" if key in ("reward.functions", *PATHS[-3:]) and path else path
    more = ["driver.kind=ray"] if key == "ray.runtime_env" else []
    folder = [f"trainer.dir={tmp_path}/run"] if key != "trainer.dir" else []
    # Only the folder of a run is made; the check ends before any model is.
    args = ["train", "recipes/sft_reverse.toml", "algorithm.name=ppo", *folder, *more, f"{key}={value}", "--check"]
    args += ["data.task=count", "actor.ppo_max_token_len_per_gpu=1"]
    status = main(args)
    said = capsys.readouterr().err
    assert status in (1, 2) and said.startswith("error: ") and "Traceback" not in said
    if path in ("a\0b", "~nosuchuser/x"):
        assert "null byte" in said or "a user who does not exist" in said, said


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ("verl_fn.runs.evaluate.prepare", "eval"),
        ("verl_fn.cli.commands.load", "eval"),
        ("verl_fn.runs.evaluate.evaluate_model", "eval"),
        ("verl_fn.runs.checkpoints.check_model_folder", "export"),
    ],
)
def test_a_model_that_is_pruned_while_it_is_read(run, tmp_path, monkeypatch, capsys, place, command):
    """At whatever moment after its folder was found."""
    shutil.copytree(run, tmp_path / "a", symlinks=True)
    module, _, name = place.rpartition(".")
    right = getattr(importlib.import_module(module), name)

    def pruned(*args, **kwargs):
        shutil.rmtree(tmp_path / "a/checkpoints/step_1", ignore_errors=True)
        return right(*args, **kwargs)

    monkeypatch.setattr(place, pruned)
    assert main([command, str(tmp_path / "a"), *([str(tmp_path / "out")] if command == "export" else [])]) == 1
    said = capsys.readouterr().err
    assert "step_1/actor was removed meanwhile" in said and "run the command again" in said
