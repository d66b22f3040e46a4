"""The loop at its edges: runs that have ended, were stopped or failed, and what they do when they go on."""

import contextlib
import importlib
import re
import shutil
import signal

import attrs
import pytest
from run_configs import tiny_run

from verl_fn.runs import RunError, continuing
from verl_fn.runs.checkpoints import checkpoints, seal, verify
from verl_fn.runs.continuing import changes, find_origin, finished, run_date
from verl_fn.runs.folder import FAILURE, Run
from verl_fn.runs.history import record
from verl_fn.runs.logs import EVALUATED, read_answers, read_metrics
from verl_fn.runs.loop import Interrupted, train
from verl_fn.runs.replay import replay

SILENT = lambda line: None  # noqa: E731
loop = importlib.import_module("verl_fn.runs.loop")


def plan(tiny, folder, steps, *more):
    settings = ["algorithm.name=sft", "trainer.test_freq=1", "data.val_size=2", "data.train_batch_size=4"]
    return tiny_run(tiny, folder, *settings, f"trainer.total_training_steps={steps}", *more)


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run of two steps, saved and evaluated before the first and after each."""
    folder = tmp_path_factory.mktemp("run") / "a"
    train(plan(tiny, folder, 2), SILENT)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "a", symlinks=True)


def evaluated(folder):
    return [row["step"] for row in read_answers(folder)]


def test_a_run_that_goes_on_repeats_no_evaluation_and_a_finished_one_returns_its_last(tiny, copy):
    longer = plan(tiny, copy, 3)
    last = train(longer, SILENT)
    assert last and evaluated(copy) == [step for step in range(4) for _ in range(2)]
    assert train(longer, SILENT) == last != {}
    row = read_metrics(copy)[-1]
    assert last.items() <= row.items() and row["timing_s/testing"] > 0
    assert all("timing_s/testing" in row for row in read_metrics(copy) if row["step"])


def test_loggers_get_an_evaluation_that_a_kill_had_cut_off(tiny, copy, monkeypatch):
    lines = read_metrics(copy)
    folder = Run(plan(tiny, copy, 2), SILENT)
    (copy / "logs.crc").unlink()
    (copy / "metrics.jsonl").unlink()
    for row in lines:
        kept = {k: v for k, v in row.items() if k != "step" and not (row["step"] == 2 and k.startswith(EVALUATED))}
        folder.log(row["step"], kept)
    got = []
    monkeypatch.setattr(loop, "loggers", lambda *args: contextlib.nullcontext([lambda *given: got.append(given)]))
    evaluation = train(plan(tiny, copy, 2), SILENT)
    ((step, report),) = got
    assert step == 2 and evaluation.items() <= report.items() and evaluated(copy) == [0, 0, 1, 1, 2, 2]


def test_a_run_that_was_asked_to_stop_has_not_failed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "stop_requests", lambda *args: contextlib.nullcontext([signal.SIGTERM]))
    more = ("trainer.save_freq=-1", "trainer.test_freq=0", "trainer.val_before_train=false")
    with pytest.raises(Interrupted, match=r"stopped after step 1 and saved .*step_1; the same command continues"):
        train(plan(tiny, tmp_path / "a", 3, *more), SILENT)
    assert [verify(one)["algorithm"] for one in checkpoints(tmp_path / "a")] == ["sft", "sft"]
    assert not (tmp_path / "a" / FAILURE).exists()
    # The last step is done anyway.
    train(plan(tiny, tmp_path / "a", 2, *more), SILENT)
    assert [row["step"] for row in read_metrics(tmp_path / "a")] == [1, 2]


def test_a_run_that_fails_keeps_the_checkpoint_that_is_being_written(tiny, tmp_path, monkeypatch):
    advance, sealed = loop.advance, []

    def fails(algorithm, state, *rest):
        if state.step == 2:
            assert [one.name for one in checkpoints(tmp_path / "a")] == ["step_1", "step_0"], "step 2 is on its way"
            raise MemoryError("out of luck")
        return advance(algorithm, state, *rest)

    monkeypatch.setattr(loop, "advance", fails)
    with pytest.raises(MemoryError, match="out of luck"):
        train(plan(tiny, tmp_path / "a", 3, "trainer.async_save=true"), sealed.append)
    newest = checkpoints(tmp_path / "a")[0]
    assert newest.name == "step_2" and verify(newest)["algorithm"] == "sft"
    assert "out of luck" in (tmp_path / "a" / FAILURE).read_text()


def test_a_goal_at_the_last_step_is_the_usual_end(tiny, tmp_path):
    said, goal = [], ["trainer.stop_at=0.0", "trainer.stop_metric=reward", "trainer.val_before_train=false"]
    train(tiny_run(tiny, tmp_path / "a", "trainer.total_training_steps=1", "trainer.test_freq=1", *goal), said.append)
    assert said[-1].startswith("done: 1 steps") and not any("is reached" in line for line in said)


def test_a_run_goes_on_without_the_weights_that_it_began_with(tiny, tmp_path):
    """They are in its checkpoints; the tokenizer is still read from there."""
    model = shutil.copytree(tiny, tmp_path / "model")
    train(plan(model, tmp_path / "a", 1), SILENT)
    for file in model.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:200])
    train(plan(model, tmp_path / "a", 2), SILENT)
    assert checkpoints(tmp_path / "a")[0].name == "step_2"


def test_the_steps_that_are_done_again_are_told_up_to_the_last(tiny, copy):
    for step in (1, 2):
        shutil.rmtree(copy / f"checkpoints/step_{step}")
    said = []
    train(plan(tiny, copy, 2), said.append)
    assert "the log goes on to step 2, but no checkpoint does: these steps are done again" in said
    assert read_metrics(copy)[-1]["step"] == 2


def test_a_replay_goes_through_steps_that_were_evaluated_by_a_loss(tiny, tmp_path):
    """The evaluation is repeated at the last step alone."""
    train(plan(tiny, tmp_path / "a", 2, "trainer.save_freq=2"), SILENT)
    assert all("val/loss" in row for row in read_metrics(tmp_path / "a"))
    found = replay(tmp_path / "a", 2, say=SILENT)
    assert found.difference is None and found.compared["metrics"] > len(read_metrics(tmp_path / "a")[0]) - 2
    (copy := tmp_path / "a/metrics.jsonl").write_text(
        re.sub(r'"val/loss": [^,}]*', '"val/loss": 7.5', copy.read_text())
    )
    assert replay(tmp_path / "a", 2, say=SILENT).difference.startswith("metric val/loss: logged 7.5, now ")


def test_updates_that_were_not_planned_are_told_after_the_first_step_of_each_start(tiny, tmp_path, monkeypatch):
    asked, said = [], []
    monkeypatch.setattr(
        loop, "unplanned", lambda role, plan, made, planned, step: asked.append((made, planned)) or "odd"
    )
    more = ("actor.optim.lr_scheduler_type=linear", "trainer.test_freq=0", "trainer.val_before_train=false")
    for steps in (1, 3):
        train(plan(tiny, tmp_path / "a", steps, *more), said.append)
    # One minibatch of four rows in each step.
    assert asked == [(1, 1), (2, 2)] and said.count("note: odd") == 2


def test_the_first_line_of_a_run_says_what_trains_where(tiny, tmp_path, monkeypatch):
    local = plan(tiny, tmp_path / "a", 1)
    assert loop._headline(local) == "sft on reverse, local driver, cpu"
    monkeypatch.setattr(loop.ranks, "torchrun_size", lambda: 2)
    files = attrs.evolve(local, data=attrs.evolve(local.data, train_files=("x.jsonl",)))
    assert loop._headline(files) == "sft on files, local driver, cpu, 2 processes"
    for ranks, processes in ((1, "1 training process"), (2, "2 training processes")):
        ray, driver = attrs.evolve(local.ray, ranks=ranks), attrs.evolve(local.driver, kind="ray")
        assert loop._headline(attrs.evolve(local, ray=ray, driver=driver)) == (
            f"sft on reverse, starting Ray actors with {processes}"
        )


# Where a run begins


def saved(folder, step, run):
    """A checkpoint without any model."""
    at = folder / f"checkpoints/step_{step}"
    at.mkdir(parents=True)
    seal(at, {"algorithm": "sft", "state": {".algorithm.step": step}}, run, None)
    return at


def test_a_fork_begins_where_it_is_told_to_and_only_in_a_folder_without_checkpoints(tiny, tmp_path):
    other, folder = tmp_path / "other", tmp_path / "fork"
    origin = saved(other, 4, None)

    def begins(*more):
        one = plan(tiny, folder, 9, *more)
        return find_origin(one, Run(one, SILENT))

    fork = f"trainer.resume_from_path={origin}"
    assert begins() is None and begins(fork) == origin == begins(fork, "trainer.resume_mode=disable")
    folder.mkdir()
    made = Run(plan(tiny, folder, 9), SILENT)
    made.log(4, {"loss": 1.0})  # copied from the other run, and then the fork was killed
    assert begins(fork) == origin
    with pytest.raises(RunError, match=r"has steps up to 4, but .* holds no checkpoint"):
        begins()
    made.log(5, {"loss": 1.0})
    with pytest.raises(RunError, match=r"has steps up to 5, but .* holds no checkpoint"):
        begins(fork)
    assert begins(fork, "trainer.resume_mode=disable") == origin
    own = saved(folder, 5, None)
    assert begins() == begins(fork) == own and begins("trainer.resume_mode=disable") is None
    with pytest.raises(RunError, match=r"fork holds checkpoints already, up to step_5; choose another trainer.dir"):
        begins(fork, "trainer.resume_mode=disable")


def test_a_role_that_is_added_is_no_setting_that_the_state_holds(tiny, tmp_path):
    """Its key is named, and no advice to fork: a fork lacks the role as well."""
    ppo = [tiny, tmp_path / "a", "algorithm.name=ppo"]
    (tmp_path / "a").mkdir()
    record(tmp_path / "a", None, tiny_run(*ppo).table, {})
    saved(tmp_path / "a", 1, None)
    other = tiny_run(*ppo, "algorithm.use_kl_in_reward=true", "trainer.seed=3")
    with pytest.raises(
        RunError, match=r"asks for .*reference \(algorithm.use_kl_in_reward: False -> True\)\. Set what decides"
    ):
        changes(Run(other, SILENT), other)
    only_seed = tiny_run(*ppo, "trainer.seed=3")
    with pytest.raises(RunError, match=r"trainer.seed cannot change in a run that is continued"):
        changes(Run(only_seed, SILENT), only_seed)


def test_a_run_that_starts_over_has_a_day_of_its_own(tiny, copy, monkeypatch):
    monkeypatch.setattr(continuing, "run_day", lambda: "2001-02-03")
    before = run_date(plan(tiny, copy, 3))
    assert before != "2001-02-03" == run_date(plan(tiny, copy, 3, "trainer.resume_mode=disable"))
    assert run_date(plan(tiny, copy, 3, "data.date=2004-05-06")) == "2004-05-06"


def test_a_fork_of_a_finished_run_has_nothing_to_evaluate(tiny, tmp_path):
    """A run itself that was killed in its last evaluation has."""
    origin = saved(tmp_path / "other", 4, None)
    own, fork, longer = (plan(tiny, tmp_path / name, steps) for name, steps in (("other", 4), ("b", 4), ("other", 5)))
    assert finished(own, origin) is None and finished(fork, origin).step == 4
    Run(own, SILENT).log(4, {"val-core/reverse/acc/mean@1": 0.5})
    assert (
        finished(own, origin).evaluation == {"val-core/reverse/acc/mean@1": 0.5} and finished(longer, origin) is None
    )
    for goal, ended in ((0.5, True), (0.6, False)):
        trainer = attrs.evolve(longer.trainer, stop_at=goal)
        assert (finished(attrs.evolve(longer, trainer=trainer), origin) is not None) is ended
    assert finished(attrs.evolve(own, algorithm="grpo"), origin) is None and finished(own, None) is None
    (origin / "checkpoint.json").write_text("{")
    assert finished(own, origin) is None, "what is wrong is told where it is read"
