"""One Ray cluster for all tests of this folder, and two ranks on it that many of them share."""

import contextlib
import importlib
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from ray_ranks import start_ranks

from verl_fn.backends.hf.new_model import new_model
from verl_fn.data.tasks import TASKS
from verl_fn.driver.ray_private import private_ray

STARTED, ENDS = {}, contextlib.ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Ends the cluster when tests of another folder follow: its processes compute also when nothing is asked."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        STARTED.clear()
        ENDS.close()


@pytest.fixture(scope="module")
def ray_cluster(warm_raylet):
    if "cluster" in STARTED:
        return
    # Workers do not see this folder.
    for name in ("remote_mutants", "test_failures", "test_overlap", "test_turns", "test_updates_in_flight"):
        ray.cloudpickle.register_pickle_by_value(importlib.import_module(name))
    options = {"log_to_driver": False, "logging_level": "error", "object_store_memory": 2**28}
    options["runtime_env"] = {"py_executable": warm_raylet}
    STARTED["cluster"] = ENDS.enter_context(private_ray(num_cpus=2, **options))


@pytest.fixture
def vllm_actors(ray_cluster, vllm_python, monkeypatch):
    """Actors that are started now have imported vLLM, and so have the cores of their engines."""
    remote = ray.remote

    def imported(*args, **options):
        more = {"runtime_env": {"py_executable": vllm_python}} if "concurrency_groups" in options else {}
        return remote(*args, **options, **more)

    monkeypatch.setattr(ray, "remote", imported)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars=TASKS["reverse"].alphabet, hidden_size=32, head_dim=32)


@pytest.fixture(scope="module")
def two(ray_cluster):
    """Two ranks, and beside them two processes for rollout engines."""
    if "two" not in STARTED:
        STARTED["two"] = start_ranks(2, engines=2)
        ENDS.callback(STARTED["two"].cluster.stop)
    return STARTED["two"]
