"""Engine and ranks that share a GPU: who has it when, in the steps of a run."""

import attrs
import pytest
import torch
from run_configs import tiny_run

from verl_fn.algorithms import Clock
from verl_fn.backends.protocol import Through
from verl_fn.driver.ranks import local_workers
from verl_fn.runs.evaluate import validate
from verl_fn.runs.prepare import prepare
from verl_fn.runs.state import algorithm_of, give_to_engine, initial_state, on_one_gpu, release
from verl_fn.runs.steps import advance

COMPUTE = ("init", "load_pretrained", "restore", "place", "forward", "forward_backward", "apply_update")


class Gpu:
    """Who uses the GPU. It refuses what a real one could not hold: the ranks' work beside an engine that is awake."""

    def __init__(self):
        self.calls, self.awake, self.cached = [], set(), False

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

    def sleep(self, level=2):
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
                assert args[1] is self, "another backend gives back its buffers"
                self.gpu.note("release")
                self.gpu.cached = False
                return None
            return method(*args, **kwargs)

        return call


def shared(w, gpu):
    """These workers on one GPU, which checks every call; the engine sleeps."""
    w.rollout.sleep(2)
    trainers = {name: Ranks(trainer, gpu) for name, trainer in w.trainers.items()}
    return attrs.evolve(w, rollout=Engine(w.rollout, gpu), trainers=trainers)


def plan_of(tiny, folder, *more):
    plan = tiny_run(tiny, folder, "algorithm.name=grpo", "rollout.n=2", *more)
    return attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, name="vllm"))


def steps(plan, w, source, count, roles=frozenset()):
    """Reports of steps with an evaluation before each, and the last state."""
    algorithm = on_one_gpu(algorithm_of(plan), plan, roles, device="cpu")
    state, reports = initial_state(plan, w), []
    for _ in range(count):
        held_out = validate(state, source.held_out(8), w, plan)[0]
        state, report, _ = advance(algorithm, state, source, w, plan)
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
    wake = lambda part: ["release", f"wake {part}"]  # noqa: E731

    def step(version):
        # The evaluation publishes, and the step's own samples come from the same weights.
        evaluated = [*wake("weights"), f"publish {version}", *wake("cache"), f"generate {version}"]
        return [*evaluated, f"generate {version}", "sleep 2", "forward", *update]

    assert gpu.calls == ["load_pretrained", *step(0), *step(1)]
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


def test_a_loaded_state_rests_on_the_cpu_if_the_engine_has_the_gpu(parts, monkeypatch):
    plan, w, _ = parts
    moves = []
    monkeypatch.setattr(type(w.trainers["actor"]), "place", lambda self, state, **to: moves.append(to) or state)
    monkeypatch.setattr("verl_fn.runs.state.offloads", lambda plan, gpu_memory: True)
    initial_state(plan, w)
    assert not moves
    initial_state(plan, attrs.evolve(w, processes=attrs.evolve(w.processes, gpu_memory=1)))
    assert moves == [{"params": "cpu", "optimizer": "cpu"}]


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


def test_weights_wake_before_the_cache_and_ranks_give_memory_back_before_each(parts):
    """Once for a version."""
    plan, w, _ = parts
    gpu, state = Gpu(), initial_state(plan, w)
    one = shared(w, gpu)
    for _ in range(2):
        clock = Clock(w.get)
        give_to_engine(plan, one, state.role("actor"), 7, clock)
    assert gpu.calls == ["release", "wake weights", "publish 7", "release", "wake cache"]
    assert clock.seconds == {}


def test_ranks_on_gpus_of_their_own_keep_their_memory(parts):
    class Apart(Gpu):
        cached = property(lambda self: False, lambda self, value: None)

    plan, w, _ = parts
    ray, driver = attrs.evolve(plan.ray, separate=("critic",)), attrs.evolve(plan.driver, kind="ray")
    gpu, clock, actor = Apart(), Clock(w.get), initial_state(plan, w).role("actor")
    apart = attrs.evolve(plan, driver=driver, ray=ray, roles={"critic": plan.roles["actor"]})
    give_to_engine(apart, shared(w, gpu), actor, 8, clock)
    assert gpu.calls == ["wake weights", "publish 8", "wake cache"]
    assert list(clock.seconds) == ["update_weights", "gen"]


def test_what_a_phase_took_adds_up(parts):
    plan, w, source = parts
    w.rollout.sleep(2)
    state = initial_state(plan, w).algorithm
    algorithm = algorithm_of(plan)

    def sample(*args):
        drawn = algorithm.sample(*args)
        return attrs.evolve(drawn, seconds=drawn.seconds | {"gen": 1000.0})

    slow = on_one_gpu(attrs.evolve(algorithm, sample=sample), plan, frozenset())
    drawn = slow.sample(state, source.held_out(8), w)
    assert set(drawn.seconds) == {"update_weights", "gen", "reward"} and min(drawn.seconds.values()) > 0
    # The cache wakes for it, too.
    assert drawn.seconds["gen"] > 1000.0
