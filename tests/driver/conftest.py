"""One Ray cluster for all tests of this folder, and two ranks on it that many of them share."""

import importlib

import pytest

pytest.importorskip("ray")

import ray
from ray_ranks import start_ranks

from verl_fn.backends.hf.new_model import new_model
from verl_fn.data.tasks import TASKS
from verl_fn.driver.ray_private import private_ray


@pytest.fixture(scope="session")
def ray_cluster(warm):
    # Workers do not see this folder.
    for name in ("remote_mutants", "test_failures", "test_overlap", "test_turns", "test_updates_in_flight"):
        ray.cloudpickle.register_pickle_by_value(importlib.import_module(name))
    options = {"log_to_driver": False, "logging_level": "error", "object_store_memory": 2**28}
    with private_ray(num_cpus=2, runtime_env={"py_executable": warm}, **options):
        yield


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


@pytest.fixture(scope="session")
def two(ray_cluster):
    """Two ranks, and beside them two processes for rollout engines."""
    ranks = start_ranks(2, engines=2)
    yield ranks
    ranks.cluster.stop()
