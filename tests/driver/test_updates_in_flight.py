"""Weights that reach engines of other processes in the middle of responses."""

import functools
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from verl_fn import build
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.protocol import Sampling
from verl_fn.config import load, make_plan
from verl_fn.data.tasks import TASKS
from verl_fn.driver.ray import ray_workers
from verl_fn.runs import RunError
from verl_fn.runs.journal import read_samples
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.replay import replay
from verl_fn.state import Key, pack, requests_for

STEPS = 4
SETTINGS = [
    "algorithm.name=grpo", "rollout.n=2", "data.train_batch_size=4", "data.val_size=4", "driver.num_threads=1",
    "algorithm.ppo_mini_batch_size=4", "actor.optim.lr=1e-3", "driver.device=cpu", "trainer.journal=samples",
    f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false", "driver.kind=ray",
    "rollout.placement=apart", "driver.max_lag=1", "rollout.in_flight_weight_updates=true",
]  # fmt: skip


def waiting_engine(folder, made, *args):
    """An engine that waits for weights in the second step of a batch with a file, and later while there is "hold"."""
    engine = made(*args)
    computing = engine.decoder
    generate, step, counts = engine.generate, computing.step, {"batch": -1, "step": 0}

    def counting(requests, *, version=None):
        if requests[0].sampling.temperature > 0:  # no evaluation
            counts.update(batch=counts["batch"] + 1, step=0)
        return generate(requests, version=version)

    def stepping(*args):
        counts["step"] += 1
        if counts["step"] == 2 and (folder / f"batch_{counts['batch']}").exists():
            until(lambda: engine._arriving)
        elif counts["step"] == 3:
            until(lambda: not (folder / "hold").exists())
        return step(*args)

    engine.generate, computing.step = counting, stepping
    return engine


def waiting_vllm(folder, made, *args):
    """The same with vLLM, whose core waits for a file that this process makes."""
    sys.path.append(str(Path(__file__).parents[1] / "backends/helpers"))
    import vllm_worker_cases

    engine = made(*args)
    generate, step, counts = engine.generate, engine._engine.step, {"batch": -1, "step": 0}

    def counting(requests, *, version=None):
        if requests[0].sampling.temperature > 0:
            counts.update(batch=counts["batch"] + 1, step=0)
            file = folder / f"batch_{counts['batch']}"
            wait = (vllm_worker_cases.wait_for, f"{file}_arrived") if file.exists() else (None,)
            with engine._alone():
                engine._engine.call(vllm_worker_cases.before_steps, *wait)
        return generate(requests, version=version)

    def stepping():
        counts["step"] += 1
        if counts["step"] == 2 and (file := folder / f"batch_{counts['batch']}").exists():
            until(lambda: engine._arriving)
            Path(f"{file}_arrived").touch()
        return step()

    engine.generate, engine._engine.step = counting, stepping
    return engine


def until(ready):
    for _ in range(30_000):
        if ready():
            return
        time.sleep(0.002)
    raise RuntimeError("nothing arrives in the middle of a response")


@pytest.fixture
def waiting(ray_cluster, tmp_path, monkeypatch, request):
    """Makes the engines of this test wait as files in a folder say; returns the folder."""
    made = waiting_engine
    if "vllm" in request.node.name and importlib.util.find_spec("vllm") is not None:
        made = waiting_vllm
        request.getfixturevalue("vllm_actors")
    monkeypatch.setattr(build, "conversing", functools.partial(made, tmp_path, build.conversing))
    return tmp_path


def plan_of(folder, model, *more):
    return make_plan(load(overrides=[*SETTINGS, f"model.path={model}", f"trainer.dir={folder}", *more]))


@pytest.mark.parametrize("name", ["sampler", "vllm"])
def test_a_run_whose_responses_have_two_versions(waiting, name):
    """The first token is at most max_lag steps old, the ledger closes, and recorded samples replay bitwise."""
    for batch in range(1, STEPS - 1):
        (waiting / f"batch_{batch}").touch()
    folder = waiting / "run"
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    # vLLM's attention on CPUs wants heads of at least 32.
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = new_model(waiting / "model", chars=TASKS["reverse"].alphabet, **sizes)
    train(plan_of(folder, model, f"rollout.name={name}", "rollout.slots=16"), lambda line: None)
    rows = read_metrics(folder)
    for step, row in enumerate(rows, 1):
        (batch,) = read_samples(folder, step)
        starts = [
            int(v[m.bool()][0]) for v, m in zip(batch.rows("versions"), batch.rows("response_mask"), strict=True)
        ]
        assert min(starts) >= step - 2 and row["training/rollout_lag/max"] <= 1
        dropped = row["rollout/rows_dropped/engine"] + row["rollout/rows_dropped/algorithm"]
        assert row["rollout/rows_asked"] == row["rollout/rows_learned"] + dropped == 8
    mixed = [row["training/rollout_before_update"] for row in rows]
    assert mixed[0] == 0 and all(0 < share < 1 for share in mixed[1 : STEPS - 1])
    with pytest.raises(RunError, match=r"in_flight_weight_updates.*replay with --recorded"):
        replay(folder, 2)
    assert replay(folder, STEPS, recorded=True, say=lambda line: None).difference is None


def test_an_engine_that_dies_goes_on_with_the_newest_weights(waiting, model):
    """Those that were published in flight; its open requests, which asked for older ones, are drawn anew."""
    requests = requests_for([[1, 4 + i % 5] for i in range(4)], Sampling(12, n=2), Key.from_seed(1))
    with ray_workers(plan_of(waiting / "run", model, "rollout.max_restarts=1")) as w:
        actor = w.trainers["actor"]
        states = [actor.load_pretrained(model, Key.from_seed(0)), actor.init(Key.from_seed(1))]
        w.get(w.rollout.publish(0, actor.weights(states[0].params)))
        for name in ("batch_0", "hold"):
            (waiting / name).touch()
        refs = w.rollout.generate(requests, version=0)
        w.get(w.rollout.publish(1, actor.weights(states[1].params)))
        assert w.rollout.version == 1 and len(w.rollout._past) == 2
        os.kill(w.rollout._group.members[0].pid, signal.SIGKILL)
        for name in ("batch_0", "hold"):
            (waiting / name).unlink()
        samples = w.get(refs)
        assert len(samples) == 8 and {v for s in samples for v in s.versions.tolist()} == {1}
        assert len(w.processes.restarts()) == 1
        batch = pack(samples)
        exact = w.get(actor.forward(states[1].params, batch, ("logprobs",))).logprobs
        mask = batch["response_mask"].bool()
        torch.testing.assert_close(batch["rollout_log_probs"][mask], exact[mask], atol=1e-4, rtol=0)
