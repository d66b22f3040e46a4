"""Engine and ranks that share a GPU: who uses it when, for any order of calls, and in the steps of a run."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from run_configs import tiny_run

from verl_fn.algorithms import Workers
from verl_fn.backends.mock import Mock, MockRollout, sample_table
from verl_fn.backends.protocol import StaleWeightsError
from verl_fn.backends.through import Through
from verl_fn.driver import turns
from verl_fn.driver.local import local_workers
from verl_fn.driver.turns import by_turns, release
from verl_fn.runs.evaluate import validate
from verl_fn.runs.prepare import prepare
from verl_fn.runs.residency import on_one_gpu
from verl_fn.runs.state import algorithm_of, initial_state
from verl_fn.runs.steps import Pace, advance
from verl_fn.state import Batch, Key, Sampling, requests_for
from verl_fn.steps import aggregate, cross_entropy, sgd

COMPUTE = ("init", "load_pretrained", "restore", "place", "forward", "forward_backward", "apply_update")
REQUESTS = requests_for([[1], [2]], Sampling(3), Key.from_seed(0))


class Gpu:
    """Who uses the GPU. It refuses what a real one could not hold: the ranks' work beside an engine that is awake."""

    def __init__(self):
        self.calls, self.awake, self.kept, self.cached = [], {"weights", "cache"}, False, False

    def note(self, name, *details):
        self.calls.append(" ".join(map(str, (name, *details))))


class Engine(Through):
    """An engine that is refused memory while ranks compute, and refuses requests in the wrong state."""

    def __init__(self, inner, gpu):
        super().__init__(inner)
        self.gpu = gpu

    def publish(self, version, weights):
        assert "weights" in self.gpu.awake, "published to an engine whose weights sleep"
        self.gpu.note("publish", version)
        # The ranks gather what they send.
        self.gpu.cached = True
        return super().publish(version, weights)

    def generate(self, requests, *, version=None):
        assert self.gpu.awake == {"weights", "cache"}, "asked while asleep"
        self.gpu.note("generate", version)
        return super().generate(requests, version=version)

    def stream(self, requests, *, version=None):
        assert self.gpu.awake == {"weights", "cache"}, "asked while asleep"
        self.gpu.note("stream", version)
        return super().stream(requests, version=version)

    def sleep(self, level=2):
        assert self.gpu.awake, "vLLM ignores a second sleep"
        self.gpu.note("sleep", level)
        self.gpu.awake = set()
        return super().sleep(level)

    def wake(self, tags=()):
        assert not self.gpu.cached, "woken while torch keeps the ranks' memory"
        assert not set(tags) & self.gpu.awake, "woken twice"
        self.gpu.note("wake", *tags)
        self.gpu.awake |= set(tags)
        return super().wake(tags)


class Ranks:
    """A training backend that computes only while the engine sleeps."""

    def __init__(self, inner, gpu):
        self.inner, self.gpu = inner, gpu

    def __getattr__(self, name):
        method = getattr(self.inner, name)

        def call(*args, **kwargs):
            if name in COMPUTE:
                assert not self.gpu.awake, f"{name} beside an engine that is awake"
                self.gpu.note(name)
                self.gpu.cached = True
            if name == "map" and args[0] is release:
                self.gpu.note("release")
                self.gpu.cached = False
            return method(*args, **kwargs)

        return call


def shared(w, gpu):
    """These workers on one GPU, which checks every call."""
    trainers = {name: Ranks(trainer, gpu) for name, trainer in w.trainers.items()}
    w = attrs.evolve(w, rollout=Engine(w.rollout, gpu), trainers=trainers)
    return by_turns(w, list(trainers), lambda: gpu.note("settle"))


def mocks(gpu):
    trainer = Mock(4, sgd(lambda count: 0.1))
    return shared(Workers({"actor": trainer}, MockRollout(sample_table), None, None, Sampling(3)), gpu)


BATCH = aggregate(Batch.from_rows([[1, 2, 3]], {"response_mask": [[0.0, 1.0, 1.0]]}))


def a_call(w, state, name):
    actor = w.trainers["actor"]
    if name == "publish":
        w.rollout.publish(state.step, actor.weights(state.params))
    elif name in ("generate", "stream"):
        list(getattr(w.rollout, name)(REQUESTS))
    elif name == "forward":
        actor.forward(state.params, BATCH, ["logprobs"])
    elif name == "update":
        grads, _ = actor.forward_backward(state, BATCH, cross_entropy())
        return actor.apply_update(state, grads)[0]
    elif name == "read":
        assert actor.map(lambda backend, value: backend is actor.inner and len(value), actor, state.params)
        assert dict(actor.named(state.params))
    else:
        getattr(w.rollout, name.split()[0])(*([int(name[-1])] if name[-1].isdigit() else []))
    return state


CALLS = ("publish", "generate", "stream", "forward", "update", "read", "sleep 1", "sleep 2", "wake")


def any_order(names):
    """Makes these calls, of which requests may be refused for want of weights; returns the GPU's log."""
    gpu = Gpu()
    w = mocks(gpu)
    state, version = w.trainers["actor"].init(Key.from_seed(0)), None
    for name in names:
        try:
            state = a_call(w, state, name)
        except StaleWeightsError:
            assert version is None and name in ("generate", "stream"), name
        if name == "publish":
            version = state.step
        # The engine drops its weights only where somebody asked for it.
        if gpu.calls[-1] == "sleep 2":
            version = None
        assert w.rollout.version == version, name
    return gpu.calls


@given(st.lists(st.sampled_from(CALLS), max_size=12))
@examples(150)
def test_in_any_order_nobody_computes_beside_the_other(names):
    any_order(names)


class NeverSleeps(turns.Turns):
    def to_trainer(self, level=1):
        self.awake.clear()


class DropsWeights(turns.Turns):
    """Sleeps so deeply that weights are lost that may be asked for."""

    def to_trainer(self, level=1):
        super().to_trainer(2)


class WakesWeightsAlone(turns.Turns):
    def to_engine(self, parts):
        super().to_engine(["weights"])


class SleepsTwice(turns.Turns):
    def to_trainer(self, level=1):
        self._engine.sleep(level)
        self.awake.clear()


class KeepsMemory(turns.Turns):
    """Does not let torch give back what the ranks have used."""

    def to_engine(self, parts):
        trainers, self._trainers = self._trainers, ()
        super().to_engine(parts)
        self._trainers = trainers


@pytest.mark.parametrize("mutant", [NeverSleeps, DropsWeights, WakesWeightsAlone, SleepsTwice, KeepsMemory])
def test_mutants_are_caught(mutant, monkeypatch):
    orders = (["publish", "generate", "forward", "generate", "update"], ["publish", "forward", "update"])
    for order in orders:
        any_order(order)
    monkeypatch.setattr(turns, "Turns", mutant)
    with pytest.raises(AssertionError):
        for order in orders:
            any_order(order)


def test_weights_wake_before_the_cache_and_ranks_settle_before_each():
    assert any_order(["publish", "generate"]) == [
        "sleep 2", "init", "settle", "release", "wake weights", "publish 0", "settle", "release", "wake cache",
        "generate None",
    ]  # fmt: skip


def plan_of(tiny, folder, *more):
    plan = tiny_run(tiny, folder, "algorithm.name=grpo", "rollout.n=2", *more)
    return attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, name="vllm"))


def steps(plan, w, source, count, roles=frozenset()):
    """Reports of steps with an evaluation before each, and the last state."""
    algorithm = on_one_gpu(algorithm_of(plan), plan, roles, device="cpu")
    state, reports = initial_state(plan, w), []
    for _ in range(count):
        held_out = validate(state, source.held_out(8), w, plan)[0]
        state, report, _ = advance(algorithm, state, source, w, Pace.of(plan))
        reports.append({name: value for name, value in (report | held_out).items() if "time" not in name})
    return [{k: v for k, v in r.items() if not k.startswith(("timing", "perf/"))} for r in reports], state


@pytest.fixture(scope="module")
def parts(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    source = prepare(tiny_run(tiny, folder, "algorithm.name=grpo", "rollout.n=2"), lambda line: None)
    with local_workers(tiny_run(tiny, folder, "algorithm.name=grpo", "rollout.n=2")) as w:
        yield plan_of(tiny, folder), w, source


def test_a_step_has_one_publication_and_its_learning_the_gpu_for_itself(parts):
    plan, w, source = parts
    gpu = Gpu()
    reports, _ = steps(plan, shared(w, gpu), source, 2)
    update = ["forward_backward", "apply_update"] * 2
    wake = lambda part: ["settle", "release", f"wake {part}"]  # noqa: E731

    def step(version):
        # The evaluation publishes, and the step's own samples come from the same weights.
        evaluated = [*wake("weights"), f"publish {version}", *wake("cache"), f"generate {version}"]
        return [*evaluated, f"generate {version}", "sleep 2", "forward", *update]

    assert gpu.calls == ["sleep 2", "load_pretrained", *step(0), *step(1)]
    assert reports == steps(attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, free_cache_engine=False)),
                            w, source, 2)[0]  # fmt: skip


def test_states_lie_on_the_cpu_but_in_learn(parts, monkeypatch):
    plan, w, source = parts
    moves = []
    actor = w.trainers["actor"]
    place = type(actor).place

    def placed(self, state, *, params=None, optimizer=None):
        moves.append((params, optimizer, state.step))
        return place(self, state, params=params, optimizer=optimizer)

    monkeypatch.setattr(type(actor), "place", placed)
    reports, state = steps(plan, w, source, 2, roles=frozenset({"actor"}))
    # From the CPU and back to it in each step; here the CPU stands for the GPU too.
    assert moves == [("cpu", "cpu", step) for step in (0, 2, 2, 4)]
    expected, whole = steps(plan, w, source, 2)
    assert reports == expected
    assert all(torch.equal(t, whole.role("actor").params[name]) for name, t in state.role("actor").params.items())


def test_an_update_that_was_left_out_copies_nothing_back(parts):
    plan, w, _ = parts
    algorithm = algorithm_of(plan)
    same = attrs.evolve(algorithm, learn=lambda state, experience, w: (attrs.evolve(state, step=state.step + 1), {}))
    state = initial_state(plan, w)
    after, _ = on_one_gpu(same, plan, frozenset({"actor"}), device="cpu").learn(state.algorithm, None, w)
    assert after.actor is state.algorithm.actor


def test_an_engine_that_never_sleeps_leaves_the_algorithm_as_it_is(parts):
    plan, _, _ = parts
    algorithm = algorithm_of(plan)
    assert on_one_gpu(algorithm, plan, frozenset()) is not algorithm
    awake = attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, free_cache_engine=False))
    assert on_one_gpu(algorithm, awake, frozenset()) is algorithm
