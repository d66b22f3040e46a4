"""Ctrl-C: the step is finished, the state saved, and the same command goes on from there."""

import contextlib
import importlib
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from run_configs import TINY, tiny_run
from warm_python import GROUP

from verl_fn.cli import run
from verl_fn.runs.checkpoints import checkpoints
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train

loop = importlib.import_module("verl_fn.runs.loop")


def start(python, folder, model, *more):
    command = [python, "-m", "verl_fn.cli", "train", "recipes/sft_reverse.toml", *TINY, *more]
    command += [f"trainer.dir={folder}", f"model.path={model}", "trainer.save_freq=-1", "trainer.stop_at=1.0"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", GROUP: "1"},
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_an_interrupted_run_saves_and_goes_on(kind, warm, warm_ray, tiny, tmp_path):
    """The signal goes to the whole group of processes, as a terminal sends it."""
    more = [f"driver.kind={kind}", warm_ray]
    process = start(warm, tmp_path / "a", tiny, *more, "trainer.total_training_steps=100000")
    while len(read_metrics(tmp_path / "a")) < 3 and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    last = len(read_metrics(tmp_path / "a")) - 1
    assert [p.name for p in checkpoints(tmp_path / "a")] == [f"step_{last}", "step_0"]
    assert "stopping after this step" in out
    assert f"stopped after step {last} and saved" in err and "the same command continues from there" in err
    assert "Traceback" not in err
    if kind == "ray":  # which driver continues makes no difference, and starting one is slow
        return
    process = start(warm, tmp_path / "a", tiny, f"trainer.total_training_steps={last + 1}")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert f"after step {last}" in out
    assert [row["step"] for row in read_metrics(tmp_path / "a")] == list(range(last + 2))


@pytest.mark.parametrize(
    "last", [["trainer.total_training_steps=1"], ["trainer.stop_at=0.0", "trainer.test_freq=1"]], ids=str
)
def test_a_run_that_is_asked_to_stop_in_its_last_step_is_done(tiny, tmp_path, monkeypatch, last):
    """The step may be the last one because it has reached the goal."""
    signals, lines = contextlib.nullcontext([signal.SIGTERM]), []
    monkeypatch.setattr(loop, "stop_requests", lambda say, *reply: contextlib.nullcontext([]) if reply else signals)
    more = ["algorithm.name=sft", "trainer.val_before_train=false", *last]
    train(tiny_run(tiny, tmp_path / "a", *more), lines.append)
    assert lines[-1].startswith("done: 1 steps") and checkpoints(tmp_path / "a")[0].name == "step_1"


def test_ctrl_c_after_the_last_step_ends_nothing_in_the_middle(tiny, tmp_path, monkeypatch):
    """The signal comes while processes are closed, and then again while Python ends."""
    lines, right = [], loop.workers

    @contextlib.contextmanager
    def interrupted(plan, begun=None):
        with right(plan) as w:
            yield w
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop, "workers", interrupted)
    before, other = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(tiny_run(tiny, tmp_path / "a", "algorithm.name=sft", "trainer.total_training_steps=1"), lines.append)
    assert lines[-2].startswith("done: 1 steps") and lines[-1].startswith("the run is done and saved")
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(importlib.import_module("verl_fn.cli.main"), "main", lambda: 0)
    try:
        assert run() == 0
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(SystemExit, match="143"):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, other)


def test_a_second_signal_stops_at_once_and_what_handled_them_comes_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    said = []
    try:
        with loop.stop_requests(said.append, "stopping") as requests:
            os.kill(os.getpid(), signal.SIGTERM)
            assert (requests, said) == ([signal.SIGTERM], ["stopping"])
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert {number: signal.getsignal(number) for number in before} == before and len(said) == 1
        # A handler of somebody else's stays.
        with loop.stop_requests(said.append):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_in_another_thread_goes_on_without_signals():
    def handlers():
        with loop.stop_requests(print) as requests:
            return requests, signal.getsignal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handlers).result() == ([], before)
