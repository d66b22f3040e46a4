"""One of two ranks dies, fails or hangs while the other waits for it: told at once, and by the right name."""

import os
import signal
import time
import traceback
from types import SimpleNamespace

import pytest
import ray
import remote_mutants
import torch
import torch.distributed as dist
from ray_ranks import start_ranks

from verl_fn.driver import cluster, processes
from verl_fn.driver.cluster import Watch, absent, ask, described, waits
from verl_fn.driver.group import Member, Placement, of_others, tails_of, unwrapped_error
from verl_fn.driver.host import Heartbeat, Host
from verl_fn.driver.processes import runs
from verl_fn.driver.ranks import ActorDied, ActorHangs
from verl_fn.errors import UserError, in_one_line
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


def beat(line="a", *, busy=True, calls=3, collectives=3, steps=None):
    stack = traceback.StackSummary.from_list([("loss.py", 7, line, line)])
    return Heartbeat(busy, calls, collectives, stack, steps)


@pytest.mark.parametrize(
    ("first", "second", "hangs"),
    [
        ({}, {}, True),
        ({}, {"line": "b"}, False),
        ({}, {"collectives": 4}, False),
        ({}, {"calls": 4}, False),
        ({"steps": 1}, {"steps": 1}, True),
    ],
)
@pytest.mark.parametrize("moving", [0, 1])
def test_ranks_hang_together_if_none_of_them_comes_further(first, second, hangs, moving):
    """The time counts from the last progress of any rank; a rank that is idle waits for nobody."""
    watch, members = Watch(5.0), ("rank 0", "rank 1")

    def seen(now, **one):
        watch._heartbeats = {member: beat() for member in members} | {members[moving]: beat(**one)}
        watch._heartbeats[members[1 - moving]] = beat(busy=False)
        return watch._stands_still(members, now, engine=False)

    assert not seen(0.0, **first) and not seen(4.0, **second)
    assert [seen(now, **second) for now in (5.0, 5.5, 9.5)] == [False, hangs, True]


def test_a_rank_without_others_and_an_engine_without_requests_do_not_hang():
    watch = Watch(5.0)
    watch._heartbeats = {"rank 0": beat(steps=3)}
    assert not any(watch._stands_still(("rank 0",), now, engine=False) for now in (0.0, 9.0, 99.0))
    for steps, hangs in ((None, False), (3, True)):
        # The line of an engine says nothing about its steps, and idle threads of it are busy.
        for now, line in ((100.0, "a"), (106.0, "b")):
            watch._heartbeats["rank 0"] = beat(line, steps=steps)
            still = watch._stands_still(("rank 0",), now, engine=True)
        assert still is hangs
        watch._since.clear()


def test_progress_is_asked_for_a_few_times_in_the_time_limit(monkeypatch):
    """By each engine for itself, and by ranks together; who does not answer in time hangs."""
    assert [Watch(timeout).interval for timeout in (8.0, 40.0, 600.0)] == [2.0, 10.0, 10.0]
    clock, looked, asked, silent = [100.0], [], [], {"engine 1"}
    monkeypatch.setattr(cluster.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(cluster, "ask", lambda member: asked.append(member) or member)
    monkeypatch.setattr(cluster.ray, "wait", lambda refs, timeout: ([ref for ref in refs if ref not in silent], []))
    monkeypatch.setattr(cluster.ray, "get", lambda ref: beat(busy=False))
    ranks = SimpleNamespace(name="trainer", members=("rank 0", "rank 1"), restart=None)
    engines = SimpleNamespace(name="rollout", members=("engine 0", "engine 1"), restart=print)
    watch = Watch(8.0)
    monkeypatch.setattr(watch, "_hanging", lambda name, members: looked.append((name, members)))
    for seconds in (0.0, 1.0, 2.0, 4.0, 8.0, 8.5):
        clock[0] = 100.0 + seconds
        watch.look([ranks, engines])
    assert {name: asked.count(name) for name in asked} == {"rank 0": 4, "rank 1": 4, "engine 0": 4, "engine 1": 1}
    assert looked == []
    clock[0] = 110.0
    watch.look([ranks, engines])
    assert looked == [("rollout", ("engine 1",))]
    silent.add("rank 1")
    for clock[0] in (112.0, 121.0):
        watch.look([ranks, engines])
    assert looked[1:] == [("rollout", ("engine 1",)), ("trainer", ranks.members), ("rollout", ("engine 1",))]


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
        ([at("loss.py", 1), None, None], 1),
    ],
)
def test_the_rank_that_others_wait_for_is_suspected(progress, suspect, monkeypatch):
    members = [Member(f"rank {i}", None, None, 10 + i, "", (), Placement(i)) for i in range(3)]
    monkeypatch.setattr(cluster, "progress_of", lambda asked: dict(zip(asked, progress, strict=True)))
    error = Watch(5.0)._hanging("trainer", tuple(members))
    assert error.member is members[suspect] and str(error).startswith(f"rank {suspect} (pid {10 + suspect}) hangs")


IDLE = Heartbeat(False, 4, 3, traceback.StackSummary())


@pytest.mark.parametrize(
    ("progress", "missing"),
    [
        ({1: at("loss.py", 3), 2: at(WAITING, 3)}, 1),
        ({1: at(WAITING, 3), 2: at("loss.py", 3)}, 2),
        ({1: at(WAITING, 3), 2: None}, 2),
        ({1: at("loss.py", 3), 2: None}, 1),
        ({1: at(WAITING, 3), 2: at(WAITING, 3)}, None),
        # It has ended the call meanwhile.
        ({1: IDLE, 2: at(WAITING, 3)}, None),
        (None, None),
    ],
)
def test_the_rank_that_was_missing_in_a_collective_is_the_first_that_is_in_none(progress, missing, monkeypatch):
    """Only ranks are asked that still run a call; the first and the last of five have failed or ended it."""
    members = tuple(Member(f"rank {i}", None, None, 10 + i, "", (), Placement(i)) for i in range(5))
    group = SimpleNamespace(
        members=members, calls=[SimpleNamespace(open={0: None, 1: None}), SimpleNamespace(open={2: 0})]
    )

    def told(asked):
        assert list(asked) == [members[1], members[2]]
        return progress and {members[i]: heartbeat for i, heartbeat in progress.items()}

    monkeypatch.setattr(cluster, "progress_of", told)
    error = absent(group, {members[0]: ValueError("reset"), members[4]: ValueError("closed")})
    assert (error is None) == (missing is None)
    if error is not None:
        first, second = str(error).splitlines()[:2]
        assert first == "rank 0 (pid 10) failed in a collective: reset"
        assert second == f"rank {missing} (pid {10 + missing}) was not in it"


def test_ranks_with_the_same_stack_share_a_paragraph():
    members = [Member(f"rank {i}", None, None, 10 + i, "", (), Placement(i)) for i in range(5)]
    beats = [at(WAITING, 3), at("loss.py", 3), at(WAITING, 5), None, IDLE]
    told = described(dict(zip(members, beats, strict=True)))
    assert [line for line in told.splitlines() if line.startswith("rank")] == [
        "rank 0, rank 2 waits in a collective:", "rank 1 is here:", "rank 3 does not answer", "rank 4 runs no call",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "inside"),
    [
        ([], False),
        ([WAITING], True),
        (["loss.py", WAITING, f"{cluster.TORCH}/autograd/graph.py"], True),
        ([WAITING, "loss.py"], False),
        ([WAITING, "loss.py", f"{cluster.TORCH}/nn/module.py"], False),
        (["loss.py", f"{cluster.TORCH}/nn/module.py"], False),
        ([f"{cluster.TORCH}/nn/module.py"], False),
    ],
)
def test_a_thread_waits_in_the_collective_that_it_called_last(files, inside):
    assert waits(traceback.StackSummary.from_list([(file, 1, "fn", "") for file in files])) is inside


def test_progress_is_that_of_each_rank_that_answers(monkeypatch):
    members = [Member(f"rank {i}", None, None, i, "", (), Placement(i)) for i in range(3)]
    monkeypatch.setattr(cluster, "ask", lambda member: member.pid)
    monkeypatch.setattr(cluster.ray, "wait", lambda refs, num_returns, timeout: (refs[:num_returns][:2], refs[2:]))
    monkeypatch.setattr(cluster.ray, "get", lambda ref: f"beat {ref}")
    assert list(cluster.progress_of(members).items()) == list(zip(members, ["beat 0", "beat 1", None], strict=True))
    assert cluster.progress_of([]) == {}

    def dead(ref):
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(cluster.ray, "get", dead)
    assert cluster.progress_of(members) is None


@pytest.mark.parametrize(
    ("status", "alive"),
    [
        ("7 (python) S 1 7", True),
        ("7 (python) R 1 7", True),
        # Killed, and its parent has not looked yet.
        ("7 (python) Z 1 7", False),
        ("7 (python) X 1 7", False),
        # A process chooses its name.
        ("7 (a) Z 1 7) S 1 7", True),
        ("7 (a) S 1 7) Z 1 7", False),
    ],
)
def test_a_process_runs_until_it_has_ended(status, alive, monkeypatch):
    def file(name):
        assert name == "/proc/7/stat"
        return SimpleNamespace(read_text=lambda: status)

    monkeypatch.setattr(processes, "Path", file)
    assert runs(7) == alive


def test_processes_that_stay_are_killed_after_their_time(monkeypatch):
    """Also ones that others have started meanwhile; one that cannot be killed is left."""
    clock, killed, asked = [50.0], [], []

    def pids():
        asked.append(clock[0])
        return [1, 2, 3] if len(asked) == 1 else [1, 2, 3, 4]

    def kill(pid, number):
        killed.append((clock[0] - 50.0, pid))
        if pid == 3:
            raise ProcessLookupError

    monkeypatch.setattr(
        processes, "runs", lambda pid: pid == 4 or (pid != 2 and pid not in {one for _, one in killed})
    )
    monkeypatch.setattr(processes.os, "kill", kill)
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 1.0))
    processes.end(pids, patience=3.0)
    assert killed[:3] == [(3.0, 1), (3.0, 3), (3.0, 4)] and {one for _, one in killed[3:]} == {4}
    assert asked[-1] - 50.0 == 3.0 + processes.END_SECONDS + 1.0


def test_logs_end_with_their_last_lines(tmp_path):
    """Of both streams, without Ray's marks; a file that is gone has none."""
    (tmp_path / "out").write_text("".join(f"out {i}\n" for i in range(25)) + ":actor_name:Host\n")
    (tmp_path / "err").write_bytes(b":job_id:01\nerr 0\n\xffend")
    files = [str(tmp_path / name) for name in ("out", "none", "err")]
    assert tails_of(files) == [*(f"out {i}" for i in range(5, 25)), "err 0", "\ufffdend"]
    (tmp_path / "err").write_text(":job_id:01\n")
    assert tails_of(files[1:]) == tails_of([]) == ["(empty)"]


def test_errors_of_workers_keep_their_class_and_name_the_rank():
    def of(cause):
        return ray.exceptions.RayTaskError("run", "the traceback", cause)

    for cause in (UserError("no such file"), OSError(28, "No space left on device"), KeyError("only here")):
        error = unwrapped_error(of(cause), "trainer rank 1")
        assert isinstance(error, type(cause)) and error.__notes__ == ["raised in trainer rank 1"]
        # Whoever reads of a mistake in code wants to see where.
        assert ("the traceback" in str(error)) is isinstance(cause, KeyError)
    assert unwrapped_error(of(OSError(28, "No space"))).errno == 28
    assert not hasattr(unwrapped_error(of(UserError("no name"))), "__notes__")
    assert in_one_line(unwrapped_error(of(KeyError("only here")), "rank 1")) == "KeyError: 'only here'"
    died = unwrapped_error(ray.exceptions.RayActorError(), "trainer rank 1")
    assert isinstance(died, ActorDied) and str(died).startswith("trainer rank 1: ")


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (ray.exceptions.RayActorError(), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("[Gloo/transport] Connection closed"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("shapes differ"), False),
        (KeyError("only here"), False),
    ],
)
def test_an_error_of_a_collective_is_that_of_another_rank(error, others):
    assert of_others(error) is others
    if not isinstance(error, ray.exceptions.RayError):
        assert of_others(ray.exceptions.RayTaskError("run", "", error)) is others


@pytest.mark.parametrize("late", [False, True])
def test_of_several_failed_ranks_the_one_with_an_error_of_its_own_is_blamed(late, monkeypatch):
    """Also if its error arrives after the others, and also if it is not the last."""
    members = [Member(f"trainer rank {i}", None, i, 10 + i, "", (), Placement(i)) for i in range(3)]
    broken = [RuntimeError("[Gloo/transport] Connection closed"), KeyError("only here"), RuntimeError("NCCL error")]
    errors = [ray.exceptions.RayTaskError("run", str(cause), cause) for cause in broken]
    coming = [[0, 2], [1]] if late else [[0, 1, 2]]
    call = SimpleNamespace(quiet=False)
    group = SimpleNamespace(members=members, restart=None, calls=[call], errors={})
    group.settle = lambda: group.errors.update({members[i]: errors[i] for i in (coming.pop(0) if coming else ())})
    monkeypatch.setattr(cluster.ray, "wait", lambda refs, timeout: ([], refs))
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: None)
    actors = cluster.Cluster(600.0)
    actors.groups["trainer"] = group
    with pytest.raises(KeyError, match="only here") as caught:
        actors._deal_with_errors()
    assert caught.value.__notes__ == ["raised in trainer rank 1"] and call.quiet
    # Without an error of its own, the first rank is named as soon as the others have had their time.
    monkeypatch.setattr(cluster, "GRACE_SECONDS", -1)
    monkeypatch.setattr(cluster, "absent", lambda group, failed: None)
    coming.append([2, 0])
    with pytest.raises(RuntimeError, match="Connection closed") as caught:
        actors._deal_with_errors()
    assert caught.value.__notes__ == ["raised in trainer rank 0"]


@pytest.mark.parametrize("timeout", [1.0, 600.0])
def test_collectives_time_out_after_the_driver_has_looked_for_hangs(timeout, monkeypatch):
    """The rank that hangs is told, and not the ones that wait for it."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    asked = {}
    monkeypatch.setattr(dist, "TCPStore", lambda *place, is_master, timeout: place)
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **options: asked.update(options))
    Host().join(("127.0.0.1", 7), 1, 2, timeout, "cpu")
    assert (asked["store"], asked["rank"], asked["world_size"]) == (("127.0.0.1", 7, 2), 1, 2)
    # The driver counts from an answer on, asks again after an interval, and waits for a rank that does not answer.
    latest = timeout + 2 * Watch(timeout).interval + cluster.ANSWER_SECONDS
    assert asked["timeout"].total_seconds() > latest


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
