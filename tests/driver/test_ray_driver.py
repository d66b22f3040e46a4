"""The Ray driver: the same run as in one process, and an actor's death told at once."""

import contextlib
import functools
import os
import signal
import time

import attrs
import pytest
import ray
from run_configs import paced

from verl_fn import build
from verl_fn.algorithms import make
from verl_fn.backends.local import Local
from verl_fn.benchmarks import ppo_layouts
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.data.examples import pack_examples
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import TASKS
from verl_fn.driver import cluster, processes, serialization
from verl_fn.driver import ray as driver
from verl_fn.driver.ranks import ActorDied, local_workers
from verl_fn.driver.ray import ray_started, ray_workers
from verl_fn.runs import loop
from verl_fn.runs.logs import TIMED, read_metrics
from verl_fn.runs.loop import train
from verl_fn.runs.prepare import prepare
from verl_fn.runs.state import algorithm_of, initial_state
from verl_fn.runs.steps import advance
from verl_fn.state import DonatedError, Key, requests_for, tree
from verl_fn.steps import LossError, aggregate, cross_entropy, frozen

OVERRIDES = [
    "data.train_batch_size=8", "data.val_size=16", "algorithm.ppo_mini_batch_size=4", "rollout.n=2",
    "actor.optim.lr=1e-3", "critic.optim.lr=1e-3", "driver.num_threads=1", "algorithm.use_kl_loss=true",
    "algorithm.use_kl_in_reward=true", "trainer.total_training_steps=3", "trainer.test_freq=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def remote(ray_cluster, model, tmp_path_factory):
    """Actors shared by the tests that leave them alive; every tensor travels as an array."""

    def small():
        from verl_fn.driver import serialization

        serialization.SMALL_BYTES = 1

    folder = tmp_path_factory.mktemp("run")
    cfg = load(overrides=[*OVERRIDES, f"model.path={model}", f"trainer.dir={folder}", "rollout.engines=2"])
    with ray_workers(make_plan(cfg)) as w:
        ray.get([member.host.map.remote(small, None) for member in w.get.__self__.members.values()])
        yield w


def numbers(folder):
    timed = ("timing_s/", "perf/time_per_step", "perf/throughput")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_metrics(folder)]


def test_ray_and_one_process_are_the_same_run(ray_cluster, model, tmp_path):
    """Every metric of every step, and every byte of the checkpoint, resumed on the other driver halfway."""
    for kind in ("local", "ray"):
        train(
            make_plan(
                load(
                    overrides=[
                        *OVERRIDES,
                        f"driver.kind={kind}",
                        f"trainer.async_save={str(kind == 'ray').lower()}",
                        f"model.path={model}",
                        f"trainer.dir={tmp_path / kind}",
                    ]
                )
            ),
            lambda line: None,
        )
    assert numbers(tmp_path / "ray") == numbers(tmp_path / "local")
    mine, theirs = tmp_path / "ray/checkpoints/step_3", tmp_path / "local/checkpoints/step_3"
    found = [p.relative_to(mine) for p in mine.rglob("*") if p.is_file()]
    assert len(found) > 10
    assert [str(p) for p in found if (mine / p).read_bytes() != (theirs / p).read_bytes()] == []


def test_losses_and_estimators_of_files_travel_with_what_they_import(ray_cluster, model, tmp_path):
    """Actors cannot import these files by name."""
    (tmp_path / "beside.py").write_text("def doubled(x):\n    return 2.0 * x\n")
    (tmp_path / "own.py").write_text(
        "from beside import doubled\n"
        "from verl_fn.steps import loss, token_mean\n"
        "@loss(needs=['logprobs'])\n"
        "def reinforce(outputs, batch):\n"
        "    values = doubled(-batch['advantages'] * outputs.logprobs)\n"
        "    return values, {'actor/mine': token_mean(batch, outputs.logprobs)}\n"
        "@loss(needs=['logprobs'])\n"
        "def wrong(outputs, batch):\n"
        "    wrong_in_training = outputs.logprobs.requires_grad\n"
        "    return (outputs.logprobs.mean() if wrong_in_training else outputs.logprobs), {}\n"
        "def signs(batch):\n"
        "    a = doubled(batch['response_mask'])\n"
        "    return batch.with_tokens(advantages=a, returns=a)\n"
    )
    settings = [
        "algorithm.name=grpo", "rollout.n=2", "data.train_batch_size=4", "data.val_size=4", "driver.kind=ray",
        "actor.optim.lr=1e-3", "driver.num_threads=1", "algorithm.ppo_mini_batch_size=4", f"model.path={model}",
        "trainer.total_training_steps=1", f"algorithm.adv_estimator={tmp_path}/own.py:signs", "driver.device=cpu",
    ]  # fmt: skip

    def run(name):
        more = [f"algorithm.policy_loss={tmp_path}/own.py:{name}", f"trainer.dir={tmp_path / name}"]
        train(make_plan(load(overrides=[*settings, *more])), lambda line: None)

    run("reinforce")
    assert read_metrics(tmp_path / "reinforce")[-1]["actor/mine"] < 0
    with pytest.raises(LossError, match=r"the loss wrong \(.*own.py:7\) has the shape \(\)"):
        run("wrong")


def batch_of(w):
    return aggregate(pack_examples(TASKS["reverse"].train(Key.from_seed(0), 0, 4), w.tokenizer, w.end_tokens[0]))


def test_handles_stand_for_values(remote, model, tmp_path):
    """Purity, persistence and donation through handles; the driver never holds a tensor of the state."""
    w = remote
    state, batch = w.trainers["actor"].load_pretrained(model, Key.from_seed(0)), batch_of(w)
    grads, first = w.trainers["actor"].forward_backward(state, batch, cross_entropy())
    new, _ = w.trainers["actor"].apply_update(state, grads, donate=False)
    _, again = w.trainers["actor"].forward_backward(state, batch, cross_entropy())
    _, other = w.trainers["actor"].forward_backward(new, batch, cross_entropy())
    first, again, other = w.get((first, again, other))
    assert tree.equal(first, again)
    assert first["loss"].value != other["loss"].value
    reference = new.params
    grads, _ = w.trainers["actor"].forward_backward(new, batch, cross_entropy())
    before = w.get(w.trainers["actor"].forward(reference, batch, ["logprobs"]))
    newer, found = w.trainers["actor"].apply_update(new, grads)
    assert w.get(found)["update_skipped"].value == 0
    with pytest.raises(DonatedError, match="remote TrainState was donated"):
        w.trainers["actor"].forward_backward(new, batch, cross_entropy())
    assert tree.equal(w.get(w.trainers["actor"].forward(reference, batch, ["logprobs"])), before)
    after = w.get(w.trainers["actor"].forward(newer.params, batch, ["logprobs"]))
    assert not tree.equal(before, after)
    w.trainers["actor"].save(newer, tmp_path)
    restored = w.trainers["actor"].restore(tmp_path)
    assert tree.equal(w.get(w.trainers["actor"].forward(restored.params, batch, ["logprobs"])), after)


def test_engines_of_a_plan_share_its_prompts(remote, model):
    """And give the samples of one engine, in its order or as they end."""
    w, one = remote, build.rollout(make_plan(load(overrides=[f"model.path={model}"])).rollout, "cpu")
    assert [name for name in w.get.__self__.members if name.startswith("rollout")] == [
        "rollout rank 0",
        "rollout rank 1",
    ]
    actor, local = w.trainers["actor"], Local(model, frozen())
    w.get(w.rollout.publish(0, actor.weights(actor.load_pretrained(model, Key.from_seed(0)).params)))
    one.publish(0, local.weights(local.load_pretrained().params))
    requests = requests_for([[1, 4], [1, 5, 6], [1, 7]], w.sampling, Key.from_seed(1), [5, 3, 8])

    def named(samples):
        return [(s.request, s.number, s.tokens.tolist(), s.finish_reason) for s in samples]

    expected = named(one.generate(requests))
    assert named(w.get(w.rollout.generate(requests, version=0))) == expected
    assert sorted(named(w.rollout.stream(requests, version=0))) == sorted(expected)


@pytest.mark.parametrize(("name", "max_lag"), [("remax", 1), ("dapo", 0)])
def test_steps_of_several_calls_are_those_of_one_process(remote, model, tmp_path, name, max_lag):
    """The ledger included, and where sampling runs ahead."""
    settings = ["data.train_batch_size=4", "data.max_response_length=8", "rollout.n=4"]
    no_kl = ["algorithm.use_kl_loss=false", "algorithm.use_kl_in_reward=false"]
    folders = [f"model.path={model}", f"trainer.dir={tmp_path}"]
    overrides = [*OVERRIDES, f"algorithm.name={name}", *settings, *no_kl, *folders]
    plan = make_plan(load(overrides=overrides))
    source, algorithm, reports = prepare(plan, lambda line: None), algorithm_of(plan), []
    with local_workers(plan) as local:
        for w in (attrs.evolve(remote, sampling=local.sampling), local):
            w = attrs.evolve(w, trainers={"actor": w.trainers["actor"]})
            state = initial_state(plan, w)
            # The engines have weights of other tests under the same version.
            w.get(w.rollout.publish(9, w.trainers["actor"].weights(state.role("actor").params)))
            for _ in range(2):
                state, report, _ = advance(algorithm, state, source, w, paced(plan, 2, max_lag))
                reports.append({k: v for k, v in report.items() if not k.startswith(TIMED)})
    for ours, theirs in zip(reports[:2], reports[2:], strict=True):
        # Two engines round the log-probs of their shares otherwise.
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert reports[0]["rollout/rows_asked"] > reports[0]["rollout/rows_learned"]


def test_values_go_when_their_handles_go(remote, model):
    w = remote
    host = w.trainers["actor"].group.members[0].host
    states = [w.trainers["actor"].load_pretrained(model, Key.from_seed(i)) for i in range(3)]
    numbers = [s.id for s in states]
    del states
    keep = w.trainers["actor"].load_pretrained(model, Key.from_seed(9))
    alive = set(ray.get(host.__ray_call__.remote(lambda actor: list(actor.values))))
    assert keep.id in alive
    assert not alive & set(numbers)


def test_a_workers_error_is_its_own(remote):
    with pytest.raises(ValueError, match="no loss_weight"):
        state = remote.trainers["actor"].init(Key.from_seed(0))
        bare = batch_of(remote).without("loss_weight")
        remote.get(remote.trainers["actor"].forward_backward(state, bare, cross_entropy())[1])


def test_a_dead_actor_ends_the_run_at_once(ray_cluster, model, tmp_path):
    """While the driver waits for one actor, any actor's death ends the wait; the log's tail is told."""
    cfg = load(overrides=[*OVERRIDES, f"model.path={model}", f"trainer.dir={tmp_path}"])
    victim = "trainer"
    with ray_workers(make_plan(cfg)) as w:
        members = w.get.__self__.members
        groups = w.get.__self__.groups
        w.get(groups[victim].run("map", functools.partial(print, flush=True), None, "the last words"))
        waiting = groups["rollout"].run("map", time.sleep, None, 600)
        os.kill(members[victim].pid, signal.SIGKILL)
        with pytest.raises(ActorDied, match=rf"{victim} \(pid {members[victim].pid}\) died") as error:
            w.get(waiting)
        assert "the last words" in str(error.value)


def test_actors_start_while_a_plan_is_checked_and_end_if_the_check_fails(ray_cluster, model, tmp_path, monkeypatch):
    """Those that run take no part in a later run, and a start that is no longer needed does not go on."""
    plan = make_plan(
        load(overrides=[*OVERRIDES, f"model.path={model}", f"trainer.dir={tmp_path}", "driver.kind=ray"])
    )
    made = []
    monkeypatch.setattr(driver, "Cluster", lambda *args: made.append(cluster.Cluster(*args)) or made[-1])
    pids = []

    def checked(plan, say):
        while not (members := made[-1].members):
            time.sleep(0.01)
        pids.extend(member.pid for member in members.values())
        raise DataError("the check fails")

    monkeypatch.setattr(loop, "prepare", checked)
    with pytest.raises(DataError, match="the check fails"):
        train(plan, print)
    assert pids and not any(map(processes.runs, pids))
    monkeypatch.setattr(cluster.Cluster, "start", lambda *args: pids.clear())
    monkeypatch.setattr(driver, "connected", lambda table: contextlib.nullcontext(time.sleep(0.5)))
    monkeypatch.setattr(loop, "prepare", lambda plan, say: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(plan, print)
    assert pids


def test_what_a_start_raises_comes_from_the_workers(ray_cluster, model, tmp_path):
    plan = make_plan(load(overrides=[*OVERRIDES, f"model.path={model}", f"trainer.dir={tmp_path}"]))
    plan = attrs.evolve(plan, driver=attrs.evolve(plan.driver, device="cuda"))
    with ray_started(plan) as started, pytest.raises(ConfigError, match="GPUs"), ray_workers(plan, started):
        pass


def test_ppo_on_sharded_ranks_is_ppo_on_one_process(ray_cluster, model, tmp_path):
    """Losses and gradient norms of three steps on recorded samples; verl-fn bench ppo-layouts takes twenty."""
    layout = ["driver.kind=ray", "ray.ranks=2", "actor.strategy=fsdp"]
    rows = ppo_layouts.compare(tmp_path, model, 3, layout)
    assert len(rows) == 3
    assert max(error for row in rows for error in row["errors"].values()) <= ppo_layouts.BAR


def test_each_batch_is_stored_once_for_all_roles(ray_cluster, model, tmp_path, monkeypatch):
    """In a PPO step with a KL term, a critic of its own and two epochs: one batch and four minibatches."""
    more = [
        "data.train_batch_size=32", "rollout.n=4", "algorithm.ppo_epochs=2", "algorithm.ppo_mini_batch_size=16",
        "ray.separate=critic", f"model.path={model}", f"trainer.dir={tmp_path}", "driver.kind=ray",
    ]  # fmt: skip
    plan, stored = make_plan(load(overrides=[*OVERRIDES, *more])), []
    algorithm = make(plan.algorithm, plan.options)
    monkeypatch.setattr(cluster, "packed", lambda batch: stored.append(len(batch)) or serialization.packed(batch))
    with ray_workers(plan) as w:
        key = Key.from_seed(0)
        states = {name: w.trainers[name].load_pretrained(model, key.fold_in(name)) for name in plan.roles}
        algorithm.step(algorithm.init(states, key), TASKS["reverse"].train(key, 0, 32), w)
        assert len(w.get.__self__._stored) == 0
    assert stored == [128, 64, 64, 64, 64]
