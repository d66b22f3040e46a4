"""What a run says while it goes on: a line a step, and what a long step is doing."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
from run_configs import tiny_run

from verl_fn.algorithms.workers import Clock, get_here
from verl_fn.backends.memory import RUNNING
from verl_fn.runs import progress
from verl_fn.runs.folder import _share_written
from verl_fn.runs.loop import train
from verl_fn.runs.progress import LONG, Lines, Live, Pulse, numbers, waiting


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


def test_a_line_comes_every_few_steps_at_the_last_one_and_with_an_evaluation():
    said = []
    lines = Lines(0, 7, 3, said.append)
    for step in range(1, 8):
        lines.show(step, {"train/loss": 1.0}, "held-out acc 0.5" if step == 5 else "")
    assert [line.split("  ")[0] for line in said] == [f"step {step}/7" for step in (3, 5, 6, 7)]
    assert [line.endswith("  held-out acc 0.5") for line in said] == [False, True, False, False]
    assert all("  loss 1.000  left 0m00s" in line for line in said)
    ten = []
    Lines(0, 10, 1, ten.append).show(2, {}, "")
    assert ten[0].startswith("step  2/10  left ")


def test_a_terminal_has_one_live_line_with_evaluations_above_it(monkeypatch):
    shown, printed = [], []
    live = Live(2, 5, ["actor/ppo_kl"])
    monkeypatch.setattr(live._bar, "print", lambda line, **more: printed.append(line))
    (task,) = live._bar.tasks
    assert (task.completed, task.total) == (2, 5)
    live.show(3, {"train/loss": 1.0, "actor/ppo_kl": 0.5}, "")
    shown.append((task.completed, task.fields["numbers"], task.fields["doing"]))
    live._told -= 2.0
    monkeypatch.setattr(progress, "RUNNING", ["gen"])
    live.beat(time.perf_counter())
    shown.append(task.fields["doing"])
    live.show(4, {}, "held-out acc 0.500")
    assert shown == [(3, "loss 1.000", ""), "gen for 0m00s, 0m00s into the step"]
    assert (task.completed, task.fields["doing"], printed) == (4, "", ["step 4  held-out acc 0.500"])


def test_a_step_after_the_last_one_and_one_without_metrics_tell_nothing_new():
    lines = []
    pulse = Pulse(0, 2, 10.0, lines.append)
    pulse.done(1, {"timing_s/gen": 40.0, "timing_s/step": 70.0})
    pulse.done(1, {})  # the step before is the measure
    Clock(get_here).run("gen", lambda: [pulse.beat(pulse._began + at) for at in (0, 20.5)])
    assert lines == ["step 2/2  gen 51%, about 0m49s left of the step"]
    pulse.done(2, {})
    Clock(get_here).run("testing", lambda: pulse.beat(time.perf_counter() + 100))
    assert len(lines) == 1


def test_odd_steps_are_told_from_their_limits_on():
    """A limit itself is not odd."""
    at = progress.GAP, progress.SETTLED, progress.MOST
    above = [limit * 1.01 for limit in at]
    for (gap, entropy, share), odd in ((at, False), (above, True)):
        assert bool(progress.wide_gap(1, {"rollout_corr/k3_kl": gap})) is odd
        assert bool(progress.cut_off(1, {"response_length/clip_ratio": share})) is odd
        turns = {"env/ended/turn_limit": share - 0.25, "env/ended/length": 0.25, "response_length/clip_ratio": 1.0}
        assert bool(progress.cut_off(1, turns)) is odd
        rewards = {"critic/score/mean": 0.0, "critic/score/max": 1.0}
        assert bool(progress.settled(1, rewards | {"actor/entropy": 2 * progress.SETTLED - entropy})) is odd
    low = {"actor/entropy": 0.0}
    for mean, most, odd in ((0.9, 1.0, False), (0.89, 1.0, True), (-1.0, -1.0, False), (-1.2, -1.0, True)):
        found = progress.settled(1, low | {"critic/score/mean": mean, "critic/score/max": most})
        assert bool(found) is odd, (mean, most)
    # One of the two reasons of conversations is not both.
    assert progress.cut_off(1, {"env/ended/turn_limit": 0.9, "response_length/clip_ratio": 0.1}) == ""


def test_parts_of_one_name_add_up_and_say_when_they_are_long(monkeypatch):
    told = []
    monkeypatch.setattr(progress, "waiting", lambda say, what: told.append(what) or contextlib.nullcontext())
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0, 21.0, 30.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    start = progress.Start(print, began=-5.0)
    for name in ("load", "load", "save"):
        with start.part(name):
            pass
    assert start.report() == {
        "timing_s/start/imports": 5.0, "timing_s/start/load": 6.0, "timing_s/start/save": 1.0,
        "timing_s/start/total": 35.0,
    }  # fmt: skip
    assert told == ["models", "models"], "a save tells more of itself"


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


def test_each_line_about_a_wait_takes_twice_as_long_as_the_one_before(monkeypatch):
    lines, asked = [], []
    ended = SimpleNamespace(set=lambda: None, wait=lambda seconds: asked.append(round(seconds, 1)) or len(asked) > 4)
    monkeypatch.setattr(progress.threading, "Event", lambda: ended)
    monkeypatch.setattr(progress.threading, "Thread", lambda target, **more: SimpleNamespace(start=target, join=set))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: 100.0)
    with waiting(lines.append, "models"):
        pass
    assert asked == [5.0, 10.0, 20.0, 40.0, 80.0]
    assert lines == [f"models: {at} so far" for at in ("0m05s", "0m10s", "0m20s", "0m40s")]


def test_a_phase_that_comes_again_in_the_next_step_begins_anew(monkeypatch):
    lines = []
    pulse = Pulse(0, 9, 10.0, lines.append)
    monkeypatch.setattr(progress, "RUNNING", ["gen"])
    began = pulse._began
    pulse.beat(began)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: began + 100)
    pulse.done(1, {})
    pulse.beat(began + 111)
    assert lines == ["step 2/9  gen for 0m00s, 0m11s into the step"]


def test_updates_are_skipped_if_any_is_and_not_if_none_is():
    assert numbers({"train/loss": 1.0, "actor/update_skipped": 0.0}) == "loss 1.000"
    assert numbers({"actor/update_skipped": 0.0, "critic/update_skipped": 0.25}) == "updates skipped"


def test_held_out_answers_that_are_cut_off_are_counted_over_all_sources_alike():
    """Also if the answers to one source all are."""
    name = "response_length/clip_ratio"
    for last, share in ((0.0, None), (0.04, 52)):
        said = progress.held_out_cut_off({f"val-aux/x/{name}": 1.0, f"val-aux/y/{name}": last, name: 1.0})
        assert bool(said) == (share is not None)
        assert not share or said.startswith(f"in the evaluation {share}% of the responses were cut off at data.max_r")
    ends = {f"val-aux/{source}/env/ended/{end}": 0.5 for source in "xy" for end in ("turn_limit", "length")}
    assert progress.held_out_cut_off(ends, 3) == (
        "in the evaluation after step 3 50% of the conversations were cut off at env.max_turns, 50% of the "
        "conversations were cut off at env.max_turn_length or data.max_response_length; raise the limit"
    )


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
