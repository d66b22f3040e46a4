"""Torchrun's processes: what the others repeat of the first one's calls, and what is told if something goes wrong."""

import gc
import os
import signal
import subprocess
from pathlib import Path

import pytest
from ray import cloudpickle

from verl_fn import torchrun
from verl_fn.backends import agreement
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.driver.ranks import ActorDied, ActorHangs
from verl_fn.driver.remote import RemoteTrain
from verl_fn.state import Batch, DonatedError, Key, TrainState, tree
from verl_fn.steps import adamw, cross_entropy
from verl_fn.torchrun import Torchrun

ROOT = Path(__file__).parents[2]


def faulty(python, fault, folder, *more):
    command = [
        python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(Path(__file__).with_name("torchrun_faults.py")), "train", str(ROOT / "recipes/sft_reverse.toml"),
        "actor.strategy=fsdp", f"trainer.dir={folder}", "data.train_batch_size=8", "trainer.total_training_steps=4",
        "trainer.save_freq=-1", "trainer.test_freq=100", "trainer.val_before_train=false", "data.val_size=8",
        "driver.device=cpu", "driver.num_threads=1", *more,
    ]  # fmt: skip
    env = os.environ | {"FAULT": fault, "PYTHON_EXEC": python}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)


@pytest.mark.parametrize("later", ["false", "true"])
def test_a_run_that_only_one_process_is_told_to_stop_is_saved_before_any_ends(warm, tmp_path, later):
    """The first process still writes when the other has long written its part."""
    said = faulty(warm, "slow save, stopped by rank 1", tmp_path, f"trainer.async_save={later}").stderr
    assert said.count("stopped after step 2 and saved") == 1, said
    assert (tmp_path / "checkpoints/step_2/checkpoint.json").is_file()


@pytest.mark.parametrize(
    ("fault", "more", "message"),
    [
        ("no model on rank 1", [], "error: /data/model cannot be read"),
        ("no room on rank 0", [], "No space left on device"),
        ("slow update", ["ray.timeout=4"], "longer than ray.timeout; raise ray.timeout if"),
        ("rank 0 is interrupted", [], "error: stopped at once; the same command continues"),
        ("rank 1 ends", [], "another of torchrun's processes has ended"),
    ],
)
def test_the_cause_is_told_once_and_without_a_traceback_of_gloo(warm, fault, more, message, tmp_path):
    said = faulty(warm, fault, tmp_path, *more).stderr
    # Before its report, torchrun may say that it ends the other process; that process may have an error to tell yet.
    ours = said.partition("] failed (exitcode: ")[0]
    assert ours.count("error: ") == 1 and message in ours and "Traceback" not in ours, said


ECHO = """
import os
from pathlib import Path

from verl_fn.environments import Done


class Echo:
    def reset(self, problem):
        Path(__file__).with_name(f"asked_{os.environ['RANK']}").touch()
        return [{"role": "user", "content": problem.prompt}]

    def step(self, reply):
        return Done(0.25)
"""


def test_only_the_first_process_talks_to_environments(warm, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    more = [f"env.name={tmp_path}/echo.py:Echo", "trainer.val_before_train=true", "data.max_prompt_length=64"]
    more.append("env.variables=['RANK']")
    ended = faulty(warm, "", tmp_path / "run", *more)
    assert ended.returncode == 0 and "done: 4 steps" in ended.stdout, ended.stderr
    assert [file.name for file in tmp_path.glob("asked_*")] == ["asked_0"]


def test_processes_wait_for_the_first_as_long_as_it_prepares(warm, tmp_path):
    ended = faulty(warm, "slow preparation", tmp_path, "ray.timeout=4")
    assert ended.returncode == 0 and "done: 4 steps" in ended.stdout, ended.stderr


BATCH = Batch.from_rows([[1, 2, 1]], {"response_mask": [[0.0, 1.0, 1.0]], "loss_weight": [[0.0, 0.5, 0.5]]})


@pytest.fixture
def actor(tmp_path, monkeypatch):
    """A backend with adapters as the first process calls it, and what another process has; both are this one."""
    model, ranks, other = new_model(tmp_path, chars="ab"), Torchrun(None), Torchrun(None)
    monkeypatch.setattr(ranks, "_broadcast", other._make)
    for one in (ranks, other):
        monkeypatch.setattr(one, "_gather", agreement.alone)
    ranks.run("build", "actor", lambda: Local(model, adamw(1e-1), lora=Lora(rank=2)))
    return RemoteTrain(ranks, ranks, "actor"), model, other.host


def test_calls_are_repeated_on_values_of_their_own(actor):
    backend, model, other = actor
    state = backend.load_pretrained(model, key=Key.from_seed(0))
    grads, _ = backend.forward_backward(state, BATCH, cross_entropy())
    after, _ = backend.apply_update(state, grads)
    with pytest.raises(DonatedError):
        backend.forward(state.params, BATCH)
    del state, grads
    gc.collect()
    own = backend.map(lambda own, state: state if isinstance(own, Local) else None, backend, after)
    assert backend.forward(after.params.base, BATCH).logprobs.shape == (3,)
    backend.map(len, "")
    states = [value for value in other.values.values() if isinstance(value, TrainState)]
    assert len(states) == 1 and states[0] is not own and tree.equal(states[0], own)
    assert len(other.values) == 1, "dropped values stay"


def test_a_value_that_two_calls_returned_is_there_until_it_is_dropped(actor):
    backend, model, other = actor
    state = backend.load_pretrained(model, key=Key.from_seed(0))
    same = backend.map(lambda state: state, state, keep=True)
    del state
    gc.collect()
    assert backend.forward(same.params, BATCH).logprobs.shape == (3,)
    del same
    gc.collect()
    backend.map(len, "")
    assert not other.values


def under_torchrun(monkeypatch, rank, size=2):
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setenv("RANK", str(rank))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["driver.kind=ray"], "driver.kind=ray starts its training processes itself: run it without torchrun"),
        (["driver.kind=ray", "algorithm.name=sft"], "driver.kind=ray starts its training processes itself"),
        (["algorithm.name=ppo"], "for ppo set driver.kind=ray and ray.ranks=2, and run it without torchrun"),
    ],
)
def test_torchrun_is_for_algorithms_that_sample_nothing(words, message, monkeypatch):
    under_torchrun(monkeypatch, 0)
    plan = make_plan(load(overrides=["model.path=m", *words]))
    with pytest.raises(ConfigError, match=message), torchrun.leading(plan):
        pytest.fail("the plan was taken")


def test_one_process_leads_none_and_others_are_led_once(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with torchrun.leading(make_plan(load(overrides=["model.path=m"]))) as led:
        assert led is None
    under_torchrun(monkeypatch, 0)
    monkeypatch.setattr(torchrun, "_ranks", led := Torchrun(None))
    with torchrun.leading(make_plan(load(overrides=["model.path=m"]))) as again:
        assert again is led, "an evaluation within a run has its processes"


@pytest.fixture
def heard(monkeypatch):
    """What a process hears from the first one, which is nothing at first; errors are raised. No signal is set."""
    calls = []

    def broadcast(self, message):
        call = calls.pop(0)
        if isinstance(call, Exception):
            raise call
        return call

    monkeypatch.setattr(Torchrun, "_broadcast", broadcast)
    monkeypatch.setattr(Torchrun, "_gather", staticmethod(agreement.alone))
    monkeypatch.setattr(torchrun.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(torchrun.time, "sleep", lambda seconds: None)
    return calls


def test_a_process_follows_the_first_until_it_ends(heard):
    ranks = Torchrun(None)
    ranks.host.values[4] = "a value"
    # After an error, which the first process tells, the others wait for its end.
    heard += [
        cloudpickle.dumps(([4], "map", (divmod, None, 1, 0))),
        cloudpickle.dumps(([], "map", (len, None, "ab"))),
    ]
    heard += [None]
    assert ranks.follow() == 0 and not heard and not ranks.host.values
    heard += [ActorDied("the first one has ended")]
    assert ranks.follow() == 1
    heard += [ActorHangs("the first one hangs")]
    with pytest.raises(ActorHangs):
        ranks.follow()


def test_the_first_process_lets_the_others_end_only_if_they_wait_for_a_call(heard):
    for error in (ActorDied("one has ended"), ActorHangs("one hangs"), None):
        heard.append(error)
        Torchrun(None).end()
        assert not heard
    # An error between sending a call and its end leaves the others in the call.
    ranks = Torchrun(None)
    heard.append(ActorDied("one has ended"))
    with pytest.raises(ActorDied):
        ranks.run("map", len, None, "ab")
    ranks.end()
    assert not heard


@pytest.mark.parametrize(("rank", "ignores", "stops"), [(0, False, True), (1, False, False), (0, True, False)])
def test_the_first_process_stops_if_another_is_told_to(rank, ignores, stops, monkeypatch):
    under_torchrun(monkeypatch, rank)
    sent = []
    monkeypatch.setattr(agreement, "gathered", lambda own: [own, (ValueError("of another"), True)])
    monkeypatch.setattr(torchrun.os, "kill", lambda pid, number: sent.append((pid, number)))
    handler = signal.default_int_handler if ignores else (lambda number, frame: None)
    monkeypatch.setattr(torchrun.signal, "getsignal", lambda number: handler)
    own, other = Torchrun(None)._gather(None)
    assert own is None and str(other) == "of another"
    assert sent == [(os.getpid(), signal.SIGTERM)] * stops


def test_what_errors_of_gloo_mean(monkeypatch):
    under_torchrun(monkeypatch, 1)
    ignored = []
    monkeypatch.setattr(torchrun.signal, "signal", lambda *given: ignored.append(given))
    gone, late = RuntimeError("Connection closed by peer"), RuntimeError("Timed out waiting 4000ms for recv")
    for errors, kind in (
        ((gone,), ActorDied),
        ((gone, None), ActorDied),
        ((late,), ActorHangs),
        ((gone, late), ActorHangs),
    ):
        meant = torchrun._ended(*errors)
        assert type(meant) is kind and ("rank 1 waited" in str(meant)) == (kind is ActorHangs)
    assert ignored == [(signal.SIGTERM, signal.SIG_IGN)] * 4, "torchrun ends processes before they have said why"
