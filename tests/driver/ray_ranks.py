"""A group of ranks on the tests' Ray cluster."""

import attrs

from verl_fn.config.schema import DriverConfig
from verl_fn.driver.cluster import Cluster, Seat
from verl_fn.driver.ray import ROOM
from verl_fn.driver.remote import RemoteTrain


@attrs.frozen
class Ranks:
    """A group of ranks and nothing else: no rollout, no reward."""

    cluster: Cluster
    get: object
    device: str = "cpu"

    @property
    def group(self):
        return self.cluster.groups["trainer"]

    def backend(self, name, factory, *args, cls=RemoteTrain):
        """A component on every rank, made by ``factory(device, *args)``."""
        self.cluster.build("trainer", name, factory, self.device, *args)
        return cls(self.cluster, self.group, name)


def start_ranks(size, timeout=120.0, device="cpu"):
    driver = DriverConfig(num_threads=1, device=device)
    gpus = float(device == "cuda")
    cluster = Cluster(timeout)
    try:
        cluster.reserve([{"CPU": ROOM, "GPU": gpus}] * size, "PACK")
        cluster.start({"trainer": [Seat(i, gpus) for i in range(size)]}, driver, size)
        cluster.join(cluster.groups["trainer"], device)
    except BaseException:
        cluster.stop()
        raise
    return Ranks(cluster, cluster.get, device)
