"""The start of a run: what it waits for, and what is refused before anything is paid for."""

import importlib
import json
import shutil
import subprocess
from collections import namedtuple

import attrs
import pytest
import torch
from run_configs import TINY, tiny_run

from verl_fn.config import ConfigError, load, make_plan
from verl_fn.runs.checkpoints import check_disk, checkpoint_bytes, checkpoints, checkpoints_at_once
from verl_fn.runs.loop import train
from verl_fn.runs.prepare import make_model_folder, workers
from verl_fn.runs.progress import LONG_PART, PARTS, Start

loop, prepare = (importlib.import_module(f"verl_fn.runs.{name}") for name in ("loop", "prepare"))
Usage = namedtuple("Usage", "total used free")
SAVED = ["algorithm.name=grpo", "rollout.n=2", "trainer.total_training_steps=2", "data.val_size=2"]


def written(folder):
    """The bytes of the weights and moments in a checkpoint."""
    return sum(file.stat().st_size for file in folder.rglob("*/*.safetensors"))


@pytest.mark.parametrize(
    "more",
    [
        ["algorithm.name=ppo"],
        ["algorithm.use_kl_loss=true"],
        ["algorithm.use_kl_loss=true", "actor.dtype=bfloat16"],
        ["actor.lora_rank=4"],
        ["actor.lora_rank=4", 'actor.target_modules=["q_proj", "v_proj"]', "actor.dtype=bfloat16"],
    ],
    ids=str,
)
def test_a_plan_knows_the_bytes_of_a_checkpoint(tiny, tmp_path, more):
    plan = tiny_run(tiny, tmp_path / "run", *SAVED, *more)
    train(plan, lambda line: None)
    for checkpoint in checkpoints(tmp_path / "run"):
        # Headers and the counters of optimizers are the rest.
        assert 0 <= written(checkpoint) - checkpoint_bytes(plan) < 40_000


@pytest.mark.parametrize(
    ("keep", "every", "steps", "most"), [(2, 1, 3, 3), (9, 1, 3, 4), (1, -1, 50, 2), (5, 20, 50, 4)]
)
def test_the_most_checkpoints_at_a_time(tiny, tmp_path, keep, every, steps, most):
    settings = [f"trainer.max_ckpt_to_keep={keep}", f"trainer.save_freq={every}"]
    plan = tiny_run(tiny, tmp_path, *settings, f"trainer.total_training_steps={steps}")
    assert checkpoints_at_once(plan) == most


def test_a_disk_that_is_too_small_is_refused_before_the_run(tiny, tmp_path, monkeypatch):
    plan = tiny_run(tiny, tmp_path / "run", *SAVED, "trainer.max_ckpt_to_keep=1")
    each = checkpoint_bytes(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2 * each - 1))
    lines = []
    with pytest.raises(ConfigError, match=r"a checkpoint of this run takes .* MiB, .* room for 2 more") as error:
        train(plan, lines.append)
    assert str(tmp_path) in str(error.value) and "lower trainer.max_ckpt_to_keep" in str(error.value)
    assert not (tmp_path / "run" / "checkpoints").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2 * each))
    check_disk(plan)


def test_a_run_that_continues_needs_room_for_what_is_not_there(tiny, tmp_path, monkeypatch):
    plan = tiny_run(tiny, tmp_path / "run", *SAVED)
    train(plan, lambda line: None)
    longer = attrs.evolve(plan, trainer=attrs.evolve(plan.trainer, total_training_steps=3))
    assert checkpoints_at_once(longer) == 4 and len(checkpoints(tmp_path / "run")) == 3
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, checkpoint_bytes(plan)))
    check_disk(longer)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, checkpoint_bytes(plan) - 1))
    with pytest.raises(ConfigError, match="room for 1 more"):
        check_disk(longer)


def test_the_first_line_comes_before_the_imports(warm, tmp_path, tiny):
    """And the first step has the seconds of each part of the start; no other step has."""
    recipe = tmp_path / "run.toml"
    recipe.write_text("")
    words = [*TINY, *SAVED, f"model.path={tiny}", f"trainer.dir={tmp_path / 'run'}"]
    command = [warm, "-m", "verl_fn.cli", "train", str(recipe), *words]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0].startswith("verl-fn ") and str(recipe) in found.stdout.splitlines()[0]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    of_step = {row["step"]: {name for name in row if name.startswith("timing_s/start/")} for row in rows}
    assert of_step == {0: set(), 1: {f"timing_s/start/{part}" for part in (*PARTS, "total")}, 2: set()}
    first = next(row for row in rows if row["step"] == 1)
    parts = sum(first[f"timing_s/start/{part}"] for part in PARTS)
    assert 0 < parts <= first["timing_s/start/total"]


def test_what_a_run_says_of_itself(tiny, tmp_path, monkeypatch):
    """Lines before its first step, at its goal, and what it leaves of an evaluation."""
    monkeypatch.setattr(loop, "check_memory", lambda plan, gpu: "the update may need more")
    monkeypatch.setattr(loop, "check_conversations", lambda plan, source: iter(["one conversation fails", "two"]))
    monkeypatch.setattr(prepare.checks, "check_code", lambda plan: ["the loss fails on a made-up batch"])
    said, more = [], ["trainer.stop_at=0.0", "trainer.test_freq=1", "trainer.val_before_train=false"]
    train(tiny_run(tiny, tmp_path / "run", *SAVED, *more), said.append)
    notes = [line for line in said if line.startswith("note: ")]
    assert notes[:4] == [
        "note: the loss fails on a made-up batch", "note: one conversation fails", "note: two",
        "note: the update may need more",
    ]  # fmt: skip
    assert f"grpo on reverse, local driver, cpu; folder {tmp_path}/run" in said
    assert "trainer.stop_at = 0.0 is reached at step 1" in said and said[-1].startswith("done: 1 steps; the model is")
    assert [path.name for path in (tmp_path / "run/answers").iterdir()] == ["step_1.parquet"]
    said.clear()
    train(tiny_run(tiny, tmp_path / "other", *SAVED, "trainer.total_training_steps=1", *more), said.append)
    assert not any("is reached" in line for line in said), "the run had no further steps"


@pytest.mark.parametrize(
    ("settings", "size", "line"),
    [
        ([], "1", "ppo on reverse, local driver, cpu"),
        ([], "3", "ppo on reverse, local driver, cpu, 3 processes"),
        (["driver.kind=ray"], "1", "ppo on reverse, starting Ray actors with 1 training process"),
        (
            ["driver.kind=ray", "ray.ranks=2", "actor.strategy=fsdp"], "1",
            "ppo on reverse, starting Ray actors with 2 training processes",
        ),
        (["data.train_files=a.jsonl"], "1", "ppo on files, local driver, cpu"),
    ],
)  # fmt: skip
def test_the_headline_of_a_run(settings, size, line, tiny, tmp_path, monkeypatch):
    plan = tiny_run(tiny, tmp_path, *settings)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    assert loop._headline(plan) == line


def test_only_a_long_start_is_announced(monkeypatch):
    lines = []
    Start(lines.append).announce()
    assert lines == []
    start = Start(lines.append, began=-1e6)
    with start.part("load"):
        pass
    start.announce()
    assert len(lines) == 1 and "imports" in lines[0] and "models 0.0" in lines[0]
    # The time between parts counts too.
    for seconds, told in ((LONG_PART - 0.01, False), (LONG_PART, True)):
        monkeypatch.setattr("time.monotonic", lambda seconds=seconds: 7.0 + seconds)
        lines.clear()
        start = Start(lines.append, began=7.0)
        start.seconds = {"imports": 1.0, "load": 2.5}
        start.announce()
        assert lines == (["started in 5.0 s: imports 1.0, models 2.5"] if told else [])


@pytest.mark.parametrize(("named", "settings", "threads"), [("3", [], 3), ("3", ["driver.num_threads=2"], 2)])
def test_a_run_in_one_process_takes_the_threads_that_the_environment_names(
    tiny, tmp_path, monkeypatch, named, settings, threads
):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", named)
    try:
        with workers(tiny_run(tiny, tmp_path, "driver.num_threads=0", *settings)):
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("task", "talks"), [("guess_number", True), ("calculator", True), ("count", False)])
def test_a_random_model_has_a_chat_template_for_dialogues_without_an_environment(tmp_path, task, talks):
    settings = ["algorithm.name=sft", f"data.task={task}", f"trainer.dir={tmp_path}"]
    plan = make_plan(load(overrides=settings))
    make_model_folder(plan)
    assert not plan.env.name and (tmp_path / "new_model/chat_template.jinja").exists() == talks


def test_a_random_model_is_one_of_its_seed(tmp_path):
    def weights(seed):
        plan = make_plan(load(overrides=["data.task=count", f"trainer.dir={tmp_path}/run", f"trainer.seed={seed}"]))
        make_model_folder(plan)
        return (tmp_path / "run/new_model/model.safetensors").read_bytes()

    first = weights(0)
    assert weights(1) != first == weights(0)
