"""One of two ranks dies, fails or hangs while the other waits for it: told at once, and by the right name."""

import os
import signal
import time

import pytest
import ray
import remote_mutants
from conftest import start_ranks

from verl_fn.driver.cluster import _runs
from verl_fn.driver.watch import Watch
from verl_fn.state import Key
from verl_fn.steps import Loss, cross_entropy
from verl_fn.testing import tiny_batch
from verl_fn.workers import ActorDied, ActorHangs


def on_rank_1(act):
    """A loss at which the second rank does something else."""

    def fn(outputs, batch):
        import torch.distributed as dist

        if dist.get_rank() == 1:
            act()
        return cross_entropy()(outputs, batch)

    return Loss(fn, cross_entropy().needs)


def say():
    print("the last words", flush=True)


def fail():
    raise KeyError("only here")


def sleep():
    time.sleep(600)


@pytest.fixture(params=["raise", "kill", "sleep", "stop"])
def case(request, ray_cluster, model):
    """What is done to a rank, and a group for it; afterwards nothing of the group is left."""
    ranks = start_ranks(2)
    members = ranks.group.members
    yield request.param, ranks
    ranks.cluster.stop()
    assert not [member.pid for member in members if _runs(member.pid)]
    assert {one["state"] for one in ray.util.placement_group_table().values()} == {"REMOVED"}


def test_the_guilty_rank_is_told(case, model):
    kind, ranks = case
    second = ranks.group.members[1]
    backend = ranks.backend("fsdp", remote_mutants.fsdp, model)
    state = backend.init(Key.from_seed(0))
    if kind in ("sleep", "stop"):
        # Only now: a machine with much to do may be slow to start.
        ranks.cluster._watch = Watch(4.0)
    loss = {"raise": on_rank_1(fail), "sleep": on_rank_1(sleep)}.get(kind, cross_entropy())
    if kind == "kill":
        # The first one goes into a collective, in which the second will be missing.
        ray.get(second.host.run.options(num_returns=2).remote("map", 1, say, None))
        os.kill(second.pid, signal.SIGSTOP)
    if kind == "stop":
        os.kill(second.pid, signal.SIGSTOP)
    _, found = backend.forward_backward(state, tiny_batch(), loss)
    if kind == "kill":
        time.sleep(0.5)
        os.kill(second.pid, signal.SIGKILL)
    expected = {"raise": KeyError, "kill": ActorDied}.get(kind, ActorHangs)
    with pytest.raises(expected) as caught:
        ranks.get(found)
    told = str(caught.value)
    if kind == "raise":
        assert "only here" in told and caught.value.__notes__ == ["raised in trainer rank 1"]
    else:
        verb = "died" if kind == "kill" else "hangs"
        assert told.startswith(f"trainer rank 1 (pid {second.pid}) {verb}")
    if kind == "kill":
        assert "the last words" in told
    if kind == "sleep":
        assert "trainer rank 0 waits for it" in told and "time.sleep(600)" in told
    if kind == "stop":
        assert "It does not answer" in told
