"""One Ray cluster for all tests of this folder, and two ranks on it that many of them share."""

import importlib

import pytest

pytest.importorskip("ray")

import attrs
import ray

from verl_fn.config import load
from verl_fn.driver.cluster import Cluster, Seat
from verl_fn.driver.ray import ROOM
from verl_fn.driver.remote import RemoteTrain
from verl_fn.models import new_model
from verl_fn.tasks import TASKS


@pytest.fixture(scope="session")
def ray_cluster():
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=2**28
    )
    # Workers do not see this folder.
    for name in ("remote_mutants", "test_failures"):
        ray.cloudpickle.register_pickle_by_value(importlib.import_module(name))
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars=TASKS["reverse"].alphabet, hidden_size=32)


@attrs.frozen
class Ranks:
    """A group of ranks and nothing else: no rollout, no reward."""

    cluster: Cluster
    get: object

    @property
    def group(self):
        return self.cluster.groups["trainer"]

    def backend(self, name, factory, *args, cls=RemoteTrain):
        """A component on every rank, made by ``factory(cfg, *args)``."""
        self.cluster.build("trainer", name, factory, *args)
        return cls(self.cluster, self.group, name)


def start_ranks(size, timeout=120.0, device="cpu"):
    cfg = load(overrides=["driver.num_threads=1", f"driver.device={device}"])
    gpus = float(device == "cuda")
    cluster = Cluster(timeout)
    try:
        cluster.reserve([{"CPU": ROOM, "GPU": gpus}] * size, "PACK")
        cluster.start({"trainer": [Seat(i, gpus) for i in range(size)]}, cfg)
        cluster.join(cluster.groups["trainer"])
    except BaseException:
        cluster.stop()
        raise
    return Ranks(cluster, cluster.get)


@pytest.fixture(scope="session")
def two(ray_cluster):
    ranks = start_ranks(2)
    yield ranks
    ranks.cluster.stop()
