"""A group of ranks on the tests' Ray cluster."""

import attrs

from verl_fn.config import load
from verl_fn.driver.cluster import Cluster, Seat
from verl_fn.driver.ray import ROOM
from verl_fn.driver.remote import RemoteTrain


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
