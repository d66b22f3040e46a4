"""One of two ranks dies, fails or hangs while the other waits for it: told at once, and by the right name."""

import os
import signal
import time
import traceback

import pytest
import ray
import remote_mutants
import torch
import torch.distributed as dist
from ray_ranks import start_ranks

from verl_fn.driver import cluster
from verl_fn.driver.cluster import Watch, ask
from verl_fn.driver.group import Member, Placement
from verl_fn.driver.host import Heartbeat, Host
from verl_fn.driver.processes import runs
from verl_fn.driver.ranks import ActorDied, ActorHangs
from verl_fn.state import Key
from verl_fn.steps import cross_entropy, loss
from verl_fn.testing import tiny_batch


def on_rank_1(act):
    """A loss at which the second rank does something else."""

    def fn(outputs, batch):
        if dist.get_rank() == 1:
            act()
        return cross_entropy()(outputs, batch)

    return loss(cross_entropy().needs)(fn)


def say():
    print("the last words", flush=True)


def fail():
    raise KeyError("only here")


def sleep():
    time.sleep(600)


DEVICES = ["cpu", "cuda"] if torch.cuda.device_count() > 1 else ["cpu"]


@pytest.fixture(
    params=[(kind, device) for device in DEVICES for kind in ("raise", "kill", "sleep", "stop")], ids="-".join
)
def case(request, ray_cluster, model):
    """What is done to a rank, and a group for it; afterwards nothing of the group is left."""
    kind, device = request.param
    before = rooms()
    ranks = start_ranks(2, device=device)
    members = ranks.group.members
    yield kind, ranks
    ranks.cluster.stop()
    assert not [member.pid for member in members if runs(member.pid)]
    assert rooms() == before


def rooms():
    """The placement groups that are not given back."""
    return {name for name, one in ray.util.placement_group_table().items() if one["state"] != "REMOVED"}


def test_the_guilty_rank_is_told(case, model, monkeypatch):
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
        ray.get(second.host.run.options(num_returns=2).remote("map", say, None))
        os.kill(second.pid, signal.SIGSTOP)
    if kind == "stop":
        os.kill(second.pid, signal.SIGSTOP)
        monkeypatch.setattr(cluster, "ANSWER_SECONDS", 4.0)
    _, found = backend.forward_backward(state, tiny_batch(), loss)
    if kind == "kill":
        time.sleep(0.5)
        os.kill(second.pid, signal.SIGKILL)
    expected = {"raise": KeyError, "kill": ActorDied}.get(kind, ActorHangs)
    with pytest.raises(expected) as caught:
        ranks.get(found)
    told = str(caught.value)
    if kind == "raise":
        assert "only here" in told and caught.value.__notes__[-1] == "raised in trainer rank 1"
    else:
        verb = "died" if kind == "kill" else "hangs"
        assert told.startswith(f"trainer rank 1 (pid {second.pid}) {verb}")
    if kind == "kill":
        assert "the last words" in told
    if kind == "sleep":
        waiting, here = told.split("trainer rank 1 is here:")
        assert "trainer rank 0 waits in a collective:\n  File" in waiting and "time.sleep(600)" in here
    if kind == "stop":
        assert "trainer rank 1 does not answer" in told


def test_ranks_hang_only_in_a_call():
    """The driver may take long between two calls."""
    watch, members = Watch(5.0), ("rank 0", "rank 1")
    for busy in (False, True):
        watch._heartbeats = dict.fromkeys(members, Heartbeat(busy, 3, 3, traceback.StackSummary()))
        still = [watch._stands_still(members, now, engine=False) for now in (0.0, 4.0, 6.0)]
        assert still == [False, False, busy]


def at(filename, collectives):
    """A rank in a call of the driver that has started so many collectives and is in a line of a file."""
    stack = traceback.StackSummary.from_list([(filename, 7, "fn", "line")])
    return Heartbeat(True, 3, collectives, stack)


WAITING = f"{cluster.TORCH}/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("progress", "suspect"),
    [
        # All wait: one of them has not come to the collective that the others are in.
        ([at(WAITING, 3), at(WAITING, 5), at(WAITING, 4)], 0),
        ([at(WAITING, 5), at(WAITING, 3), at(WAITING, 4)], 1),
        # Others wait for a rank that is in none, even if it has come further.
        ([at(WAITING, 3), at(WAITING, 3), at("loss.py", 4)], 2),
        ([at(WAITING, 1), at("loss.py", 4), at("loss.py", 3)], 2),
        ([at(WAITING, 1), None, at("loss.py", 2)], 1),
    ],
)
def test_the_rank_that_others_wait_for_is_suspected(progress, suspect, monkeypatch):
    members = [Member(f"rank {i}", None, None, 10 + i, "", (), Placement(i)) for i in range(3)]
    monkeypatch.setattr(cluster, "progress_of", lambda asked: dict(zip(asked, progress, strict=True)))
    error = Watch(5.0)._hanging("trainer", tuple(members))
    assert error.member is members[suspect] and str(error).startswith(f"rank {suspect} (pid {10 + suspect}) hangs")


class NoRoute(Host):
    def join(self, place, rank, size, timeout, device):
        if rank == 1:
            raise OSError("no route to rank 0")
        super().join(place, rank, size, timeout, device)


def test_a_rank_that_cannot_join_is_told_at_once(ray_cluster, monkeypatch):
    monkeypatch.setattr(cluster, "Host", NoRoute)
    start = time.monotonic()
    with pytest.raises(OSError, match="no route to rank 0") as caught:
        start_ranks(2, timeout=300.0)
    assert caught.value.__notes__ == ["raised in trainer rank 1"]
    assert time.monotonic() - start < 150


def reset_or_work():
    dist.barrier()
    if dist.get_rank() == 0:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection reset by peer")
    time.sleep(600)


def test_a_collective_that_failed_is_no_hang(ray_cluster, monkeypatch):
    """Told with its error, and with where the rank is that was not in it; and a dead member's answer is no error."""
    monkeypatch.setattr(cluster, "GRACE_SECONDS", 1)
    ranks = start_ranks(2)
    backend = ranks.backend("mock", remote_mutants.mock)
    first, second = ranks.group.members
    try:
        with pytest.raises(
            ActorHangs, match=rf"^trainer rank 0 \(pid {first.pid}\) failed in a collective: "
        ) as caught:
            ranks.get(backend.map(reset_or_work))
        told = str(caught.value)
        assert "Connection reset by peer" in told and "Connection reset" in str(caught.value.__cause__)
        assert f"rank 1 (pid {second.pid}) was not in it" in told and "time.sleep(600)" in told
        assert "hangs" not in told and "ray.timeout" not in told
        os.kill(second.pid, signal.SIGKILL)
        ray.wait([second.sentinel], timeout=30)
        watch = ranks.cluster._watch = Watch(600.0)
        watch._asked[second] = (ref := ask(second), time.monotonic())
        ray.wait([ref], timeout=30)
        watch.look([ranks.group])
        assert second not in watch._heartbeats and watch._hanging("trainer", ranks.group.members) is None
        with pytest.raises(ActorDied, match="trainer rank 1"):
            ranks.cluster.finish(ranks.group)
    finally:
        ranks.cluster.stop()
