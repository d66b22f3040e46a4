"""Sampling that runs ahead of learning on engines apart: the run of one process, whatever happens meanwhile."""

import functools
import itertools
import json
import os
import signal
import subprocess
import time

import attrs
import pytest
from safetensors.torch import load_file
from warm_python import GROUP

from verl_fn import build
from verl_fn.config import load, make_plan
from verl_fn.runs.checkpoints import checkpoints
from verl_fn.runs.logs import TIMED, read_journal, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.replay import replay

SETTINGS = [
    "algorithm.name=grpo", "rollout.n=2", "data.train_batch_size=8", "data.val_size=8",
    "algorithm.ppo_mini_batch_size=4", "actor.optim.lr=1e-3", "driver.num_threads=1", "driver.device=cpu",
    "algorithm.use_kl_in_reward=true", "algorithm.rollout_is=token", "trainer.journal=samples", "trainer.save_freq=2",
    "trainer.max_ckpt_to_keep=9", "trainer.test_freq=3", "trainer.total_training_steps=6",
]  # fmt: skip
AHEAD = ["driver.kind=ray", "rollout.placement=apart", "driver.max_lag=2"]


def silent(line):
    pass


def logged(folder):
    rows = [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_metrics(folder)]
    samples = {file.name: load_file(file) for file in (folder / "samples").iterdir()}
    listed = {step: {name: (t.dtype, t.tolist()) for name, t in tensors.items()} for step, tensors in samples.items()}
    return rows, read_journal(folder), listed


def waits_for(file):
    for _ in range(3000):
        if file.exists():
            return
        time.sleep(0.02)
    raise RuntimeError(f"there is no {file.name}: the engine does not draw while the trainer learns")


def paired_engine(folder, made, *args):
    """An engine that ends the first batch of each round of two only when the trainer learns from the batch before."""
    engine = made(*args)
    generate, batches = engine.generate, itertools.count(1)

    def paired(requests, *, version=None):
        if requests[0].sampling.temperature > 0:  # no evaluation
            batch = next(batches)
            (folder / f"drawing_{batch}").touch()
            if batch % 2 == 0:
                waits_for(folder / f"learning_{batch - 1}")
        return generate(requests, version=version)

    engine.generate = paired
    return engine


def paired_trainer(folder, last, role, driver, device):
    """A trainer that learns from a batch, in two minibatches, only when the engine draws the next one."""
    backend = build.trainer(role, driver, device)
    forward_backward, calls = backend.forward_backward, itertools.count(2)

    def paired(*args):
        batch = next(calls) // 2
        (folder / f"learning_{batch}").touch()
        waits_for(folder / f"drawing_{min(batch + 1, last)}")
        return forward_backward(*args)

    backend.forward_backward = paired
    return backend


@pytest.fixture(scope="module")
def folders(ray_cluster, model, tmp_path_factory):
    """The folders of one run in one process and over Ray, where engine and trainer wait for each other."""
    tmp_path = tmp_path_factory.mktemp("ahead")
    folders = {name: tmp_path / name for name in ("one", "ray")}
    one, over_ray = (
        make_plan(load(overrides=[*SETTINGS, *more, f"model.path={model}", f"trainer.dir={folders[name]}"]))
        for name, more in (("one", []), ("ray", AHEAD))
    )
    train(attrs.evolve(one, driver=attrs.evolve(one.driver, max_lag=2)), silent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "conversing", functools.partial(paired_engine, tmp_path, build.conversing))
        patch.setattr(build, "trainer", functools.partial(paired_trainer, tmp_path, 6))
        train(over_ray, silent)
    return folders


def test_engines_draw_while_the_trainer_learns_with_the_numbers_of_one_process(folders):
    assert logged(folders["ray"]) == logged(folders["one"])
    rows = read_metrics(folders["ray"])[1:]
    assert [row["training/rollout_lag/max"] for row in rows] == [0, 1, 2, 1, 2, 1]
    assert all(row["perf/residency_copies/actor"] == 0 for row in rows)


def test_steps_are_replayed(folders):
    assert replay(folders["ray"], 3, say=silent).difference is None
    # Its config asks for max_lag = 0, and so does a replay of recorded samples.
    assert replay(folders["one"], 6, recorded=True, say=silent).difference is None


def start(python, folder, model, tmp_path, *more):
    (tmp_path / "empty.toml").touch()
    settings = [*SETTINGS, *AHEAD, "driver.max_lag=1", f"model.path={model}", f"trainer.dir={folder}", *more]
    command = [python, "-m", "verl_fn.cli", "train", str(tmp_path / "empty.toml"), *settings]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", GROUP: "1"},
    )  # fmt: skip


def steps_logged(folder, count, process):
    while len(read_metrics(folder)) <= count and process.poll() is None:
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_that_is_killed_and_interrupted_is_the_undisturbed_run(warm, warm_ray, model, tmp_path):
    """It learns from the very samples that waited when it was saved."""
    whole, folder = tmp_path / "whole", tmp_path / "a"
    one = make_plan(load(overrides=[*SETTINGS, f"model.path={model}", f"trainer.dir={whole}"]))
    one = attrs.evolve(one, driver=attrs.evolve(one.driver, max_lag=1))
    train(one, silent)
    process = start(warm, folder, model, tmp_path, warm_ray)
    steps_logged(folder, 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    saved = checkpoints(folder)[0]
    assert len(json.loads((saved / "checkpoint.json").read_text())["waiting"]) == 1
    # The signal goes to the whole group of processes.
    process = start(warm, folder, model, tmp_path, warm_ray)
    steps_logged(folder, 4, process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert "1 batch of samples wait" in out and "Traceback" not in err
    assert process.returncode in (0, 130), err
    # Which driver continues makes no difference, and starting Ray is slow.
    train(attrs.evolve(one, trainer=attrs.evolve(one.trainer, dir=str(folder))), silent)
    assert logged(folder) == logged(whole)
