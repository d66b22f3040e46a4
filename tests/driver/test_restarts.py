"""Engines die, hang or lose buckets while they draw; the answers are those of engines that did not."""

import importlib.util
import os
import signal
import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest
import ray
import torch
from vision_cases import encoded, seeing, seen_batch

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.protocol import PublicationFailed, StaleWeightsError
from verl_fn.backends.weight_sync import IncompleteWeights
from verl_fn.backends.weight_sync.channel import SenderFailed
from verl_fn.benchmarks import faults
from verl_fn.benchmarks.crash import numbers
from verl_fn.benchmarks.faults import Fault, disturbed, injected, open_rows, plan_of
from verl_fn.driver import remote
from verl_fn.driver.cluster import Watch
from verl_fn.driver.group import Call, Group, curable
from verl_fn.driver.ranks import ActorDied
from verl_fn.driver.ray import ray_workers
from verl_fn.driver.remote import RemoteRollout
from verl_fn.errors import UserError
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train
from verl_fn.state import Key, Sampling, requests_for
from verl_fn.steps import cross_entropy
from verl_fn.testing import tiny_batch

REQUESTS = requests_for([[1, 4 + i % 5] for i in range(6)], Sampling(24, n=2), Key.from_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def workers(ray_cluster, model, folder):
    """A trainer and two engines, each restarted once without an answer in between."""
    with injected(folder), ray_workers(plan_of(folder / "run", model, 1, "rollout.max_restarts=1")) as w:
        yield w


def named(samples):
    return [(s.request, s.number, s.tokens.tolist(), s.log_probs.tolist(), s.versions.tolist()) for s in samples]


def pids(w):
    return [member.pid for member in w.rollout._group.members]


@pytest.fixture(scope="module")
def drawn(workers, model):
    """The state whose weights are published as version 0, and the samples of engines without faults."""
    state = workers.trainers["actor"].load_pretrained(model, Key.from_seed(0))
    workers.get(workers.rollout.publish(0, workers.trainers["actor"].weights(state.params)))
    return state, named(workers.get(workers.rollout.generate(REQUESTS, version=0)))


@pytest.mark.parametrize(
    ("kind", "why"),
    [("kill", "died: "), ("stuck", "hangs"), ("memory", "failed: OutOfMemoryError: out of memory, on purpose;")],
)
def test_rows_in_flight_are_answered_by_a_restarted_engine(workers, drawn, folder, kind, why, monkeypatch):
    """As before, and the other engine keeps its answers."""
    if kind == "stuck":
        monkeypatch.setattr(workers.get.__self__, "_watch", Watch(8.0))
    before = pids(workers)
    (folder / Fault(kind, 0, 3).name).touch()
    refs = workers.rollout.generate(REQUESTS, version=0)
    assert named(workers.get(refs)) == drawn[1]
    assert sum(now != then for now, then in zip(pids(workers), before, strict=True)) == 1
    (reason,) = workers.processes.restarts()
    assert why in reason and "1 of 1" in reason
    assert workers.rollout.version == 0 and workers.processes.restarts() == []


def test_a_stream_goes_on_and_gives_each_sample_once(workers, drawn):
    stream = workers.rollout.stream(REQUESTS, version=0)
    samples = [next(stream) for _ in range(3)]
    os.kill(pids(workers)[samples[-1].request % 2], signal.SIGKILL)
    samples += stream
    assert sorted(named(samples)) == sorted(drawn[1])
    assert len(workers.processes.restarts()) <= 1


def test_an_engine_that_dies_idle_gets_its_weights_again(workers, drawn):
    w = workers
    os.kill(pids(w)[0], signal.SIGKILL)
    assert named(w.get(w.rollout.generate(REQUESTS, version=0))) == drawn[1]
    assert len(w.processes.restarts()) == 1


def test_weights_older_than_the_trainers_are_published_again(workers, drawn, folder):
    """An update while an engine draws keeps a copy of what the engine holds; one while it is idle keeps nothing."""
    w, actor, (state, expected) = workers, workers.trainers["actor"], drawn
    (publication,) = w.rollout._past
    (folder / Fault("kill", 0, 20).name).touch()
    refs = w.rollout.generate(REQUESTS, version=0)
    for copied in (True, True):
        grads, _ = actor.forward_backward(state, tiny_batch(), cross_entropy())
        state, metrics = actor.apply_update(state, grads)
        assert publication.copied == copied
    assert named(w.get(refs)) == expected and len(w.processes.restarts()) == 1
    assert w.get(metrics)["perf/residency_copies"].value == 0
    grads, _ = actor.forward_backward(state, tiny_batch(), cross_entropy())
    state, _ = actor.apply_update(state, grads)
    assert publication.weights is None
    # Nobody has the weights of version 0 any more.
    os.kill(pids(w)[0], signal.SIGKILL)
    while not w.processes.restarts():
        w.get(actor.map(time.sleep, 0.2))
    while w.rollout.version is not None:
        w.get(actor.map(time.sleep, 0.2))
    w.get(w.rollout.publish(3, actor.weights(state.params)))
    samples = w.get(w.rollout.generate(REQUESTS, version=3))
    assert {v for s in samples for v in s.versions.tolist()} == {3} and named(samples) != expected


def test_an_engine_that_dies_again_and_again_ends_the_run(workers, drawn, folder):
    """With its own error; so does one whose weights nobody has."""
    w = workers
    for step in range(2):
        (folder / Fault("memory", w.rollout.version, step).name).touch()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory, on purpose") as caught:
        w.get(w.rollout.generate(REQUESTS[:1], version=w.rollout.version))
    raised, limit = caught.value.__notes__
    assert raised.startswith("raised in rollout rank ") and "restarted 1 times (rollout.max_restarts)" in limit


def test_a_run_with_faults_is_the_run_without(ray_cluster, model, tmp_path):
    """A lost bucket, a repeated one, and a publication that is made twice."""
    whole, run = (plan_of(tmp_path / name, model, 1, "trainer.total_training_steps=4") for name in ("whole", "run"))
    train(whole, lambda line: None)
    wanted = [Fault("drop", 1, 2), Fault("repeat", 2, 1), Fault("twice", 0, 0), Fault("twice", 2, 0)]
    happened = disturbed(run, wanted)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert sorted(happened) == ["drop", "repeat", "twice", "twice"]
    assert open_rows(tmp_path / "run") == []
    assert sum(row.get("perf/engine_restarts", 0) for row in read_metrics(tmp_path / "run")) >= 2


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_vllm_engine_that_is_killed_while_it_draws(vllm_actors, tmp_path):
    """The same tokens, of the same version, from another process."""
    # vLLM's attention on CPUs wants heads of at least 32.
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = new_model(tmp_path / "model", chars="abcdefgh>", initializer_range=0.2, **sizes)
    plan = plan_of(tmp_path / "run", folder, 0, "rollout.name=vllm", "rollout.engines=1", "rollout.slots=16")
    with injected(tmp_path), ray_workers(plan) as w:
        actor = w.trainers["actor"]
        state = actor.load_pretrained(folder, Key.from_seed(0))
        w.get(w.rollout.publish(5, actor.weights(state.params)))
        requests = requests_for([[1, 4 + i] for i in range(4)], Sampling(12, n=2), Key.from_seed(1))
        expected = w.get(w.rollout.generate(requests, version=5))
        (tmp_path / Fault("kill", 5, 6).name).touch()
        (before,) = pids(w)
        core = psutil.Process(before).children(recursive=True)
        samples = w.get(w.rollout.generate(requests, version=5))
        assert pids(w) != [before] and len(w.processes.restarts()) == 1
        # vLLM's core does not outlive the engine.
        _, alive = psutil.wait_procs(core, timeout=20)
        for process in alive:
            process.kill()
        assert core and not alive
    for sample, other in zip(samples, expected, strict=True):
        assert (sample.request, sample.number) == (other.request, other.number)
        assert sample.tokens.tolist() == other.tokens.tolist() and set(sample.versions.tolist()) == {5}
        assert (sample.log_probs - other.log_probs).abs().max() < 1e-4


def test_faults_are_drawn_from_a_seed():
    drawn = faults.draw(50, seed=3)
    assert drawn == faults.draw(50, seed=3) != faults.draw(50, seed=4)
    assert {fault.kind for fault in drawn} == set(faults.KINDS)


def test_calls_of_another_thread_wait_until_a_restarted_engine_has_its_weights(ray_cluster, model, tmp_path):
    with injected(tmp_path), ray_workers(plan_of(tmp_path / "run", model, 1, "rollout.max_restarts=2")) as w:
        actor, engines = w.trainers["actor"], w.rollout._group
        state = actor.load_pretrained(model, Key.from_seed(0))
        w.get(w.rollout.publish(0, actor.weights(state.params)))
        whole = named(w.get(w.rollout.generate(REQUESTS, version=0)))
        first = engines.members[1]

        def sample():
            """Asks one engine until the other one is replaced, and then both, as DAPO's further draws do."""
            while engines.members[1] is first:
                w.get(w.rollout.generate(REQUESTS[:1], version=0))
            return named(w.get(w.rollout.generate(REQUESTS, version=0)))

        drawn = w.processes.submit(sample)
        os.kill(first.pid, signal.SIGKILL)
        assert w.get(drawn) == whole


@pytest.mark.parametrize("lag", [0, 1])
def test_a_restarted_engine_gets_a_frozen_tower_again(ray_cluster, tmp_path, lag):
    """One of two engines is killed after a publication without the tower; both answer as before."""
    folder = seeing(tmp_path / "model", "smolvlm")
    frozen = ("actor.freeze_vision_tower=true", "rollout.max_restarts=2")
    with injected(tmp_path), ray_workers(plan_of(tmp_path / "run", folder, lag, *frozen)) as w:
        actor, batch = w.trainers["actor"], seen_batch(folder)
        state = actor.load_pretrained(folder, Key.from_seed(0))
        w.get(w.rollout.publish(0, actor.weights(state.params)))
        grads, _ = w.get(actor.forward_backward(state, batch, cross_entropy()))
        state, _ = w.get(actor.apply_update(state, grads))
        w.get(w.rollout.publish(1, actor.weights(state.params)))
        ids, images = zip(*encoded(folder)[0], strict=True)
        requests = requests_for(ids, Sampling(6, n=2), Key.from_seed(1), images=images)
        whole, before = named(w.get(w.rollout.generate(requests, version=1))), pids(w)
        os.kill(before[0], signal.SIGKILL)
        assert named(w.get(w.rollout.generate(requests, version=1))) == whole
        assert pids(w)[0] != before[0] and pids(w)[1:] == before[1:]


def test_an_engine_is_restarted_a_few_times_without_an_answer(monkeypatch):
    cluster = SimpleNamespace(
        replace=lambda group, number: None, get=lambda ref: [None], address=lambda member: "", secret=b"",
        before_update=[], reasons=[],
    )  # fmt: skip
    member = SimpleNamespace(name="rollout", host=None, sentinel=None)
    monkeypatch.setattr(remote.ray, "kill", lambda host: None)
    monkeypatch.setattr(remote.ray, "wait", lambda refs, timeout: None)
    monkeypatch.setattr(RemoteRollout, "_made", lambda self, member, calls: [("new", 1)])

    def restarts(*errors):
        calls = {
            "run": lambda *args: None,
            "scatter": lambda *args: None,
            "one_thread": nullcontext(),
            "lose": lambda member: 0,
            "again": lambda number: None,
        }
        cluster.reasons.clear()
        group = SimpleNamespace(name="rollout", members=[member], restarts=Counter(), calls=[], made=[], **calls)
        engines = RemoteRollout(cluster, group, "rollout", 3)
        for error in errors:
            engines.restart(member, error)
        assert engines._addresses == [("new", 1)], "weights are sent to the new process"
        return len(cluster.reasons)

    def died():
        return ActorDied("rollout died")

    assert restarts(died(), RuntimeError("y"), died()) == 3
    with pytest.raises(ActorDied, match="rollout died"):
        restarts(died(), died(), died(), died())


@pytest.mark.parametrize(("draws", "counted"), [(True, 0), (False, 2)])
def test_only_answers_to_requests_end_the_count_of_an_engines_restarts(monkeypatch, draws, counted):
    """An engine that dies in every draw answers publications in between."""
    group = Group("rollout", ())
    call = Call(group, "invoke", [()], list, range(1), draws=draws)
    call.open[0], group.calls, group.restarts[0] = "end", [call], 2
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs, []))
    monkeypatch.setattr(ray, "get", lambda ref: None)
    assert group.idle and group.restarts[0] == counted


def test_an_engine_that_lacks_the_weights_that_were_asked_for_is_not_restarted():
    """It would lack them again."""
    error = StaleWeightsError("the engine holds version 1, not 2")
    assert not curable(error) and not curable(ray.exceptions.RayTaskError("generate", "", error))


class Told(UserError, RuntimeError):
    """As PyTorch's own errors are RuntimeErrors."""


@pytest.mark.parametrize(
    ("error", "cured"),
    [
        (MemoryError("no room"), True),
        (RuntimeError("CUDA error"), True),
        (IncompleteWeights("a tensor is missing"), True),
        (PublicationFailed("half of it"), True),
        # The process at the other end is a training rank. Only engines are restarted.
        (SenderFailed("the trainer ended"), False),
        (Told("a prompt is empty"), False),
        (NotImplementedError("no top_k"), False),
        (ValueError("a prompt is empty"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_an_engine_is_restarted_for_errors_that_another_process_may_not_have(error, cured):
    assert curable(error) == curable(ray.exceptions.RayTaskError("generate", "", error)) == cured
    assert curable(ray.exceptions.RayActorError())


def test_an_update_of_another_role_neither_drops_nor_copies_the_weights_of_engines():
    engines = object.__new__(RemoteRollout)
    engines._group = SimpleNamespace(idle=True)
    weights = SimpleNamespace(backend=SimpleNamespace(component="actor"))
    engines._past = [remote._Past(SimpleNamespace(succeeded=True), 1, weights)]
    engines._keep_weights("critic")
    assert engines._past[0].weights is weights
    engines._keep_weights("actor")
    assert engines._past[0].weights is None


@pytest.mark.parametrize("where", ["open", "again", "failed"])
def test_a_call_that_runs_has_to_run_again_or_failed_has_not_succeeded(where):
    call = Call(Group("rollout", ()), "publish", [(), ()], list, range(2))
    assert call.succeeded
    members = getattr(call, where)
    members.update({1: None} if where == "open" else {1})
    assert not call.succeeded and [call.succeeded_on(number) for number in (0, 1)] == [True, False]
    members.update({0: None} if where == "open" else {0})
    (members.pop if where == "open" else members.remove)(1)
    assert not call.succeeded and [call.succeeded_on(number) for number in (0, 1)] == [False, True]


def test_requests_are_shared_whole_and_in_order():
    engines = object.__new__(RemoteRollout)
    requests = requests_for([[1] * size for size in (9, 1, 2, 3, 1, 4)], Sampling(8, n=2), Key.from_seed(0))
    for count in (1, 2, 3, 6, 8):
        engines._group = SimpleNamespace(members=[None] * count)
        shares = engines._shares(requests)
        assert len(shares) == min(count, 6)
        assert sorted(request.id for share in shares for request in share) == [r.id for r in requests]
        assert all([r.id for r in share] == sorted(r.id for r in share) for share in shares)


def test_engines_that_dropped_their_weights_have_no_version():
    engines = object.__new__(RemoteRollout)
    engines._group = SimpleNamespace(restart=None, members=[None], scatter=lambda *call, **options: None)
    engines._component, engines._past = "rollout", []
    engines._published = remote._Past(SimpleNamespace(succeeded=True), 3)
    versions = [engines.sleep(level) or engines.version for level in (1, 2)]
    assert versions == [3, None]
