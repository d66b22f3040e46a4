"""Engine and ranks that share a GPU, over Ray: the order of the calls, and the error of a run out of memory."""

import functools
import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import attrs
import pytest

from verl_fn import build
from verl_fn.backends.hf.new_model import new_model
from verl_fn.config import load, make_plan
from verl_fn.data.tasks import TASKS
from verl_fn.driver.remote import RemoteRollout
from verl_fn.runs.logs import TIMED, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.memory import RunOutOfMemory, phases

SETTINGS = [
    "algorithm.name=grpo", "rollout.n=2", "data.train_batch_size=8", "data.val_size=8", "driver.kind=ray",
    "algorithm.ppo_mini_batch_size=4", "actor.optim.lr=1e-3", "driver.num_threads=1", "driver.device=cpu",
    "data.max_response_length=8", "trainer.test_freq=1", "trainer.total_training_steps=2", "rollout.name=vllm",
]  # fmt: skip
CALLS = ("publish", "generate", "sleep", "wake")
MESSAGE = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"


def noting_engine(folder, name, wakes, made, plan, *args):
    """The engine of a plan, which notes its calls in a file, and has no memory for one of its stages of waking."""
    engine = made(attrs.evolve(plan, name=name), *args)

    def noting(call):
        method = getattr(engine, call)

        def noted(*args, **kwargs):
            with (folder / "calls").open("a") as file:
                word = args[0] if call in ("publish", "sleep", "wake") else kwargs["version"]
                file.write(f"{call} {' '.join(word) if isinstance(word, (list, tuple)) else word}\n")
            if call == "wake" and (folder / "calls").read_text().count("wake cache") == wakes:
                raise RuntimeError(MESSAGE)
            return method(*args, **kwargs)

        return noted

    for call in CALLS:
        setattr(engine, call, noting(call))
    return engine


def run(folder, model, monkeypatch, name, *more, wakes=-1):
    """Trains, and returns the plan and the engine's calls."""
    plan = make_plan(load(overrides=[*SETTINGS, f"model.path={model}", f"trainer.dir={folder}/run", *more]))
    monkeypatch.setattr(build, "conversing", functools.partial(noting_engine, folder, name, wakes, build.conversing))
    (folder / "calls").touch()
    return plan, lambda: train(plan, lambda line: None), lambda: (folder / "calls").read_text().splitlines()


def step(version):
    return [f"publish {version}", "wake cache", f"generate {version}"]


ORDER = [
    "sleep 2",
    *("wake weights", *step(0), "generate 0", "sleep 2"),
    *("wake weights", *step(1), "generate 1", "sleep 2"),
    *("wake weights", *step(2)),
]


def test_the_order_of_calls_and_the_same_numbers(ray_cluster, model, tmp_path, monkeypatch):
    logs = []
    for name, more in (("turns", []), ("awake", ["rollout.free_cache_engine=false"])):
        folder = tmp_path / name
        folder.mkdir()
        with monkeypatch.context() as patch:
            _, go, calls = run(folder, model, patch, "sampler", *more)
            go()
        logs.append([{k: v for k, v in r.items() if not k.startswith(TIMED)} for r in read_metrics(folder / "run")])
        awake = [call for call in ORDER if call.startswith(("publish", "generate"))]
        assert calls() == (ORDER if name == "turns" else awake)
    assert logs[0] == logs[1] and len(logs[0]) == 3


def test_a_lack_of_memory_names_the_process_and_the_phase(ray_cluster, model, tmp_path, monkeypatch):
    plan, go, calls = run(tmp_path, model, monkeypatch, "sampler", "rollout.max_restarts=0", wakes=2)
    with pytest.raises(RunOutOfMemory) as raised:
        go()
    assert calls()[-1] == "wake cache" and calls().count("generate 0") == 2
    text = str(raised.value)
    assert text.startswith(f"out of memory in gen (generation): {MESSAGE}\n")
    generation = next(phase for phase in phases(plan) if phase.name == "gen")
    assert generation.describe() in text
    assert raised.value.__notes__ == ["raised in rollout"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup installs it")
def test_vllm_takes_turns(vllm_actors, tmp_path, monkeypatch):
    # vLLM's attention on CPUs wants heads of at least 32.
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = new_model(tmp_path / "model", chars=TASKS["reverse"].alphabet, **heads)
    _, go, calls = run(tmp_path, model, monkeypatch, "vllm")
    go()
    assert calls() == ORDER
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 3 and max(row.get("training/rollout_probs_diff_max", 0.0) for row in rows) < 1e-4


def test_an_engine_that_is_restarted_sleeps_and_wakes_like_the_others():
    """It makes the calls again that changed its state, in their order, without the ones that others have undone."""

    def scatter(method, arguments, **_):
        return SimpleNamespace(method=method, arguments=arguments, succeeded=True, succeeded_on=lambda number: True)

    calls = {"run": lambda *_: None, "scatter": scatter, "idle": False, "one_thread": nullcontext()}
    group = SimpleNamespace(members=[1], **calls)
    capabilities = SimpleNamespace(versions_per_token=False)
    cluster = SimpleNamespace(get=lambda ref: capabilities, before_update=[], address=str, secret=b"")
    engines = RemoteRollout(cluster, group, "rollout", max_restarts=1)

    def restored():
        return [call[2:3] + call[5:] for call in engines._restored(0)]

    assert restored() == []
    engines.sleep(2)
    assert restored() == [("sleep", 2)]
    engines.wake(["weights"])
    engines.publish(3, "weights")
    assert restored() == [("sleep", 2), ("wake", ("weights",)), ("publish", 3, "weights")]
    engines.wake(["cache"])
    engines.publish(4, "newer")
    assert restored() == [("publish", 4, "newer")]
    engines.sleep(1)
    assert restored() == [("publish", 4, "newer"), ("sleep", 1)]
    engines.wake()
    assert restored() == [("publish", 4, "newer")]
    engines.sleep(2)
    assert restored() == [("sleep", 2)]
