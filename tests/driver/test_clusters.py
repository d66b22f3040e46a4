"""Other people's clusters and torchrun: what is refused, what code workers run, and the same numbers everywhere."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch.distributed as dist

from verl_fn import build
from verl_fn.backends import agreement
from verl_fn.backends.hf.new_model import new_model
from verl_fn.config import ConfigError, load, make_plan
from verl_fn.config.plan import check_address, check_room
from verl_fn.driver import ranks
from verl_fn.driver.host import Host
from verl_fn.driver.ranks import process_group, torchrun_rank, torchrun_size, training_ranks
from verl_fn.driver.ray import placements, runtime_env
from verl_fn.runs.checks import check_ranks
from verl_fn.runs.logs import read_metrics

ROOT = Path(__file__).parents[2]
SFT = [
    str(ROOT / "recipes/sft_reverse.toml"), "data.train_batch_size=8", "data.val_size=16",
    "trainer.total_training_steps=3",
    "trainer.test_freq=2", "trainer.save_freq=2", "driver.device=cpu",
]  # fmt: skip


def ray_plan(*overrides):
    return make_plan(load(overrides=["driver.kind=ray", "model.path=m", *overrides]))


def command(*args, program=(sys.executable,), folder=ROOT, **env):
    line = [*program, "-m", "verl_fn.cli", "train", *SFT, *args]
    return subprocess.run(line, capture_output=True, text=True, cwd=folder, env=os.environ | env, timeout=300)


@pytest.mark.parametrize(
    ("more", "ranks", "message"),
    [
        ([], 2, "actor.strategy is local, which is one process, but ray.ranks is 2; set actor.strategy=fsdp"),
        (["actor.strategy=fsdp", "critic.strategy=local"], 2, "critic.strategy is local"),
        (["actor.strategy=fsdp", "actor.fsdp_config.replicate=3"], 4, "replicate = 3 does not divide the 4"),
        (["actor.strategy=fsdp", "actor.fsdp_config.ulysses_sequence_parallel_size=2"], 3, "does not divide the 3"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_are_refused_before_anything_starts(model, more, ranks, message):
    plan = make_plan(load(overrides=["driver.kind=ray", f"ray.ranks={ranks}", f"model.path={model}", *more]))
    with pytest.raises(ConfigError, match=message):
        check_ranks(plan)


def test_sequence_parallelism_wants_heads_to_share(tmp_path):
    three = new_model(tmp_path, chars="abcd", hidden_size=24, num_attention_heads=6, num_key_value_heads=3)
    sp = "actor.fsdp_config.ulysses_sequence_parallel_size"
    with pytest.raises(ConfigError, match=rf"{sp}: .*6 attention heads"):
        over = ["driver.kind=ray", "ray.ranks=4", "actor.strategy=fsdp"]
        check_ranks(make_plan(load(overrides=[*over, f"{sp}=4", f"model.path={three}"])))


def test_more_than_the_cluster_has_is_refused():
    one = [{"CPU": 2.0}]
    cuda = ray_plan("driver.device=cuda", "ray.ranks=64", "ray.separate=critic")
    with pytest.raises(ConfigError, match=r"ask for 128 GPUs, and the cluster has 0; lower ray.ranks"):
        check_room(cuda, placements(cuda, "cuda")[1], one)
    apart = ray_plan("driver.device=cuda", "rollout.engines=3", "rollout.placement=apart")
    with pytest.raises(ConfigError, match=r"engines = 3 apart ask for 4 GPUs.*lower ray.ranks or rollout.engines"):
        check_room(apart, placements(apart, "cuda")[1], one)
    spread = ray_plan("ray.ranks=2", "ray.placement=STRICT_SPREAD")
    with pytest.raises(ConfigError, match="the cluster has 1; take SPREAD"):
        check_room(spread, placements(spread, "cpu")[1], one)
    packed = ray_plan("driver.device=cuda", "ray.ranks=2", "ray.placement=STRICT_PACK")
    with pytest.raises(ConfigError, match="2 GPUs on one node, and the largest has 1; take PACK"):
        check_room(packed, placements(packed, "cuda")[1], [{"GPU": 1.0}] * 2)
    # What is just enough is enough.
    check_room(packed, placements(packed, "cuda")[1], [{"GPU": 2.0}, {"GPU": 1.0}])
    check_room(spread, placements(spread, "cpu")[1], one * 2)


@pytest.mark.parametrize(("engines", "rollout"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 0])])
def test_where_everything_sits(engines, rollout):
    """Engines share the GPUs of the trainer's ranks; roles apart have ranks of their own."""
    plan = ray_plan("ray.ranks=2", "ray.separate=critic", f"rollout.engines={engines}")
    places, bundles = placements(plan, "cuda")
    assert [bundle["GPU"] for bundle in bundles] == [1] * 4
    assert {name: [one.bundle for one in placed] for name, placed in places.items()} == {
        "trainer": [0, 1], "critic": [2, 3], "rollout": rollout,
    }  # fmt: skip
    shares = {
        bundle: sum(s.gpus for placed in places.values() for s in placed if s.bundle == bundle) for bundle in range(4)
    }
    assert all(0 < share <= 1 for share in shares.values())


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0.0), ("cuda", 1.0)])
def test_engines_apart_have_places_of_their_own(device, gpus):
    """Beside those of all ranks; what sat with the ranks stays there."""
    plan = ray_plan("ray.ranks=2", "ray.separate=critic", "rollout.engines=2", "rollout.placement=apart")
    places, bundles = placements(plan, device)
    assert [bundle.get("GPU", 0.0) for bundle in bundles] == [gpus] * 6
    assert {name: [(one.bundle, one.gpus) for one in placed] for name, placed in places.items()} == {
        "trainer": [(0, gpus), (1, gpus)], "critic": [(2, gpus), (3, gpus)], "rollout": [(4, gpus), (5, gpus)],
    }  # fmt: skip


def test_an_engine_of_several_gpus_has_them_in_one_bundle():
    settings = ["driver.kind=ray", "rollout.name=vllm", "rollout.tensor_parallel_size=2", "rollout.engines=2"]
    plan = ray_plan(*settings, "ray.ranks=3", "rollout.placement=apart")
    places, bundles = placements(plan, "cuda")
    assert [bundle["GPU"] for bundle in bundles] == [1, 1, 1, 2, 2]
    assert [(one.bundle, one.gpus) for one in places["rollout"]] == [(3, 2.0), (4, 2.0)]
    places, bundles = placements(plan, "cpu")
    assert not any("GPU" in bundle for bundle in bundles) and {one.gpus for one in places["rollout"]} == {0.0}


def test_engines_of_a_rank_divide_its_share():
    """A rank without an engine has a GPU of its own."""
    places, _ = placements(ray_plan("ray.ranks=3", "rollout.engines=2"), "cuda")
    assert [one.gpus for one in places["trainer"]] == [0.5, 0.5, 1.0]
    assert [(one.bundle, one.gpus) for one in places["rollout"]] == [(0, 0.4), (1, 0.4)]
    places, _ = placements(ray_plan("ray.ranks=2", "rollout.engines=3"), "cuda")
    assert [(one.bundle, one.gpus) for one in places["rollout"]] == [(0, 0.2), (1, 0.4), (0, 0.2)]
    assert {one.gpus for each in placements(ray_plan("ray.ranks=2"), "cpu")[0].values() for one in each} == {0.0}


def test_the_critic_follows_the_actor_unless_it_has_its_own_strategy():
    options = ["algorithm.use_kl_loss=true", "actor.strategy=fsdp", "actor.fsdp_config.replicate=2"]
    roles = make_plan(load(overrides=options)).roles
    assert [role.fsdp_config.replicate for role in roles.values()] == [2, 2, 2]
    own = make_plan(load(overrides=[*options, "critic.strategy=fsdp"])).roles
    assert own["critic"].fsdp_config.replicate == 1


def test_addresses_and_runtime_environments_that_cannot_be_used(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
        check_address(f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=r"nowhere.yaml cannot be read: No such file"):
        runtime_env(tmp_path / "nowhere.yaml")
    for text, message in (("a: [", "is not YAML"), ("just words", "must be a mapping")):
        (tmp_path / "env.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            runtime_env(tmp_path / "env.yaml")


def test_workers_with_other_sources_are_refused(ray_cluster, warm, model, tmp_path):
    """On a cluster that runs already, whose workers find another copy of the package first."""
    # The links become folders.
    shutil.copytree(ROOT / "verl_fn", tmp_path / "other/verl_fn")
    with (tmp_path / "other/verl_fn/steps/kl.py").open("a") as file:
        file.write("# edited on this node\n")
    (tmp_path / "env.yaml").write_text(f"env_vars:\n  PYTHONPATH: {tmp_path / 'other'}\n")
    address = ray.get_runtime_context().gcs_address
    where = ["driver.kind=ray", f"ray.address={address}", f"ray.runtime_env={tmp_path / 'env.yaml'}"]
    # Elsewhere, since workers look into the driver's folder before all others.
    # Ray would replace the loopback address of the tests' cluster by the machine's without this variable.
    one_machine = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    started = {"program": [warm], "folder": tmp_path, **one_machine}
    ended = command(f"model.path={model}", f"trainer.dir={tmp_path / 'run'}", *where, **started)
    assert ended.returncode == 2, ended.stderr
    assert "does not run the driver's code" in ended.stderr and "Traceback" not in ended.stderr
    assert f"from {tmp_path / 'other/verl_fn'}" in ended.stderr, ended.stderr
    assert f"from {ROOT / 'verl_fn'}" in ended.stderr, ended.stderr
    assert "py_modules" in ended.stderr


def numbers(folder):
    timed = ("timing_s/", "perf/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_metrics(folder)]


def test_torchrun_fine_tunes_as_one_process_does(warm, model, tmp_path):
    """Two ranks, one folder, one voice; and the local driver goes on from there."""
    one_process = {"program": [warm]}
    torchrun = {
        "program": [warm, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "PYTHON_EXEC": warm,
    }
    two, one = tmp_path / "two", tmp_path / "one"
    ended = command(f"model.path={model}", f"trainer.dir={two}", "actor.strategy=fsdp", **torchrun)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done: 3 steps") == 1 and "2 processes" in ended.stdout
    assert command(f"model.path={model}", f"trainer.dir={one}", **one_process).returncode == 0
    for ours, theirs in zip(numbers(two), numbers(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    more = command(f"model.path={model}", f"trainer.dir={two}", "trainer.total_training_steps=4", **one_process)
    assert more.returncode == 0 and "continuing" in more.stdout and "after step 3" in more.stdout
    refused = command(f"model.path={model}", f"trainer.dir={two}", "algorithm.name=grpo", "rollout.n=2", **torchrun)
    assert "error: torchrun trains algorithms that sample nothing" in refused.stderr


def test_a_heartbeat_shows_where_the_oldest_running_call_is():
    """A publication that runs beside a call that draws does not hide it."""
    host, end = object.__new__(Host), threading.Event()

    def draws_for_ever():
        end.wait()

    drawing = threading.Thread(target=draws_for_ever)
    drawing.start()
    host._threads, host._calls, host._drawing = [drawing.ident, threading.get_ident()], 2, None
    try:
        heartbeat = host.heartbeat()
    finally:
        end.set()
        drawing.join()
    assert "draws_for_ever" in [frame.name for frame in heartbeat.stack]


def test_a_heartbeat_begins_where_the_users_call_does(monkeypatch):
    """And counts calls when they begin and when they end."""
    monkeypatch.setattr("faulthandler.enable", lambda: None)
    host, end, begun = Host(), threading.Event(), threading.Event()

    def works():
        begun.set()
        end.wait()

    def call():
        with host._busy():
            host.map(works, None)

    idle = host.heartbeat()
    calling = threading.Thread(target=call)
    calling.start()
    begun.wait()
    busy = host.heartbeat()
    end.set()
    calling.join()
    assert [(one.busy, one.calls, one.steps) for one in (idle, busy, host.heartbeat())] == [
        (False, 0, None), (True, 1, None), (False, 2, None),
    ]  # fmt: skip
    assert busy.stack[0].name == "works" and not idle.stack


def test_an_engine_counts_steps_only_while_it_draws(monkeypatch):
    """Also after a call that failed; an engine with steps that has no call would be taken to hang."""
    monkeypatch.setattr("faulthandler.enable", lambda: None)
    host = Host()
    host.components["engine"] = SimpleNamespace(steps=3)
    for error in (None, ValueError):
        with contextlib.suppress(ValueError), host._draws("engine"):
            assert host.heartbeat().steps == 3
            if error is not None:
                raise error
        assert host.heartbeat().steps is None


@pytest.mark.parametrize(
    ("variables", "size", "rank"),
    [
        ({}, 1, 0),
        ({"WORLD_SIZE": "4", "RANK": "2"}, 4, 2),
        # A batch system may set one of them.
        ({"WORLD_SIZE": "4"}, 1, 0),
        ({"RANK": "2"}, 1, 0),
    ],
)
def test_torchrun_is_known_by_both_of_its_variables(variables, size, rank, monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (torchrun_size(), torchrun_rank()) == (size, rank)
    assert training_ranks(ray_plan("ray.ranks=3")) == 3
    assert training_ranks(make_plan(load(overrides=["ray.ranks=3"]))) == size


@pytest.mark.parametrize(
    ("size", "here", "loopback"), [(1, None, True), (4, "4", True), (4, "2", False), (2, None, False)]
)
def test_ranks_of_one_machine_meet_where_no_other_machine_reaches_them(size, here, loopback, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    opened, said = {}, []
    monkeypatch.setattr(agreement, "use_loopback", said.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **more: opened.update(more, kind=kind))
    monkeypatch.setattr(dist, "destroy_process_group", opened.clear)
    with process_group(make_plan(load(overrides=["ray.timeout=7", "driver.device=cpu"])), size):
        assert said == ["127.0.0.1"] * loopback and opened["kind"] == "gloo"
        assert opened["timeout"].total_seconds() == 7.0
        assert {"store", "rank", "world_size"} & opened.keys() == (
            {"store", "rank", "world_size"} if size == 1 else set()
        )
    assert not opened, "the group is closed"


@pytest.mark.parametrize(
    ("actor", "critic", "grouped"), [("fsdp", "local", True), ("local", "fsdp", True), ("local", "local", False)]
)
def test_a_process_by_itself_has_a_process_group_if_any_role_is_sharded(actor, critic, grouped, monkeypatch):
    class Begun(Exception):
        pass

    @contextlib.contextmanager
    def group(plan, size):
        assert size == 1
        groups.append(True)
        yield
        groups.append(False)

    def set_up(driver, ranks, *, by_user):
        raise Begun

    groups = []
    monkeypatch.setattr(ranks, "process_group", group)
    monkeypatch.setattr(build, "set_up_process", set_up)
    words = [f"actor.strategy={actor}", f"critic.strategy={critic}", "driver.device=cpu"]
    with pytest.raises(Begun), ranks.local_workers(make_plan(load(overrides=words))):
        pass
    assert groups == [True] * grouped
