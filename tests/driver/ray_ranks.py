"""A group of ranks on the tests' Ray cluster."""

import attrs

from verl_fn.config.schema import DriverConfig
from verl_fn.driver.cluster import Cluster
from verl_fn.driver.group import Group, Placement
from verl_fn.driver.ray import ROOM
from verl_fn.driver.remote import RemoteRollout, RemoteTrain


@attrs.frozen
class Ranks:
    """A group of ranks, and perhaps processes for rollout engines; no reward."""

    cluster: Cluster
    get: object
    device: str = "cpu"

    @property
    def group(self):
        return self.cluster.groups["trainer"]

    def engines(self, name, factory, *args, count=2):
        """Rollout engines in processes of their own, made by ``factory(*args)``."""
        self.cluster.build(("engines", name, factory, *args))
        members = self.cluster.groups["engines"].members[:count]
        return RemoteRollout(self.cluster, Group("engines", members), name)

    def backend(self, name, factory, *args, cls=RemoteTrain):
        """A component on every rank, made by ``factory(device, *args)``."""
        self.cluster.build(("trainer", name, factory, self.device, *args))
        return cls(self.cluster, self.group, name)


def start_ranks(size, timeout=120.0, device="cpu", engines=0):
    driver = DriverConfig(num_threads=1, device=device)
    gpus = float(device == "cuda")
    cluster = Cluster(timeout)
    try:
        cluster.reserve([{"CPU": ROOM, "GPU": gpus}] * size, "PACK")
        places = {"trainer": [Placement(i, gpus) for i in range(size)]}
        cluster.start(places | ({"engines": [Placement(0)] * engines} if engines else {}), driver, size)
        cluster.join(cluster.groups["trainer"], device)
    except BaseException:
        cluster.stop()
        raise
    return Ranks(cluster, cluster.get, device)
