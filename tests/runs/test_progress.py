"""What a run says while it goes on: a line a step, and what a long step is doing."""

import threading
import time

import pytest
from run_configs import tiny_run

from verl_fn.algorithms.workers import Clock, get_here
from verl_fn.backends.memory import RUNNING
from verl_fn.runs import progress
from verl_fn.runs.folder import _share_written
from verl_fn.runs.loop import train
from verl_fn.runs.progress import LONG, Lines, Pulse, numbers, waiting


def test_a_long_step_tells_its_phase_its_share_and_the_time_left():
    lines = []
    pulse, clock = Pulse(2, 9, 10.0, lines.append), Clock(get_here)
    began = time.perf_counter()

    def beats(*times):
        for at in times:
            pulse.beat(began + at)

    clock.run("gen", beats, 0, 5, 11.5, 15)
    assert lines == ["step 3/9  gen for 0m11s, 0m11s into the step"]
    pulse.done(3, {"timing_s/gen": 40.0, "timing_s/update_actor": 20.0, "timing_s/step": 70.0})
    began = time.perf_counter()
    beats(11.5)  # between two phases
    clock.run("gen", beats, 12.5, 22.5, 24.5, 32.5, 62.5)
    clock.run("update_actor", beats, 63.5, 73.5)
    assert lines[1:] == [
        "step 4/9  gen 0%, about 0m57s left of the step",
        "step 4/9  gen 25%, about 0m47s left of the step",
        "step 4/9  gen 50%, about 0m37s left of the step",
        "step 4/9  gen 99%, about 0m07s left of the step",
        "step 4/9  update_actor 50%, about 0m00s left of the step",
    ]
    assert RUNNING == []


def test_the_time_that_is_left_counts_the_steps_of_this_start_alone():
    said = []
    lines = Lines(2, 6, 1, said.append)
    lines._opened -= 8.2
    lines.show(4, {}, "")
    assert said == ["step 4/6  left 0m08s"]


def test_the_thread_of_a_pulse_ends_with_it_and_errors_leave_no_phase():
    with Lines(0, 3, 1, print) as lines, pytest.raises(ZeroDivisionError):
        Clock(get_here).run("gen", lambda: 1 / 0)
    assert not lines._thread.is_alive() and RUNNING == [] and LONG >= 10


def test_what_takes_long_says_so_ever_more_rarely(monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    lines, told = [], threading.Event()

    def say(line):
        lines.append(line)
        if len(lines) == 3:
            told.set()

    file = tmp_path / "weights"
    with file.open("wb") as out:
        out.write(bytes(2**20))
        out.truncate(4 * 2**20)
    with waiting(say, "models", lambda: _share_written(tmp_path)):
        told.wait()
    alive = [thread for thread in threading.enumerate() if thread.name == "verl_fn waiting"]
    assert alive == [] and set(lines) == {"models: 0m00s so far, 25% done"}
    with pytest.raises(ZeroDivisionError), waiting(say, "models"):
        _ = 1 / 0
    # What ends at once says nothing.
    monkeypatch.setattr(progress, "PATIENCE", 1e6)
    with waiting(lines.append, "quick"):
        pass
    assert not any("quick" in line for line in lines)


def test_a_run_says_what_it_waits_for(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 1e-3)
    said = []
    train(tiny_run(tiny, tmp_path / "run", "trainer.total_training_steps=1"), said.append)
    for what in ("checks of config, data and models", "models", "evaluation", "the checkpoint of step 0"):
        assert any(line.startswith(f"{what}: 0m00s so far") for line in said), what


def test_the_line_of_a_step(tiny, tmp_path):
    report = {"response_length/mean": 812.4, "response_length/clip_ratio": 0.125, "perf/time_per_step": 61.23,
              "actor/ppo_kl": 0.0012}  # fmt: skip
    assert numbers(report) == "ppo_kl 0.0012  length 812  cut off 12%  s/step 61.2"
    assert numbers(report, ["actor/ppo_kl"]) == "length 812  cut off 12%  s/step 61.2"
    for size, epochs, shown in ((8, 1, False), (4, 1, True), (8, 2, True)):
        said = []
        more = [f"algorithm.ppo_mini_batch_size={size}", f"algorithm.ppo_epochs={epochs}", "rollout.n=2"]
        more += ["trainer.total_training_steps=1", "trainer.val_before_train=false", "algorithm.name=grpo"]
        train(tiny_run(tiny, tmp_path / f"{size}_{epochs}", *more), said.append)
        line = next(line for line in said if line.startswith("step 1/1"))
        assert ("ppo_kl" in line) == shown and all(f"  {name} " in line for name in ("length", "cut off", "s/step"))
