"""Parts of the driver without a cluster: what an actor makes of a call, what it is sent, and where it is started."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from verl_fn.backends.protocol import Freed
from verl_fn.config import load, make_plan
from verl_fn.driver import group as groups
from verl_fn.driver import host as hosts
from verl_fn.driver import ray as driver
from verl_fn.driver.cluster import Cluster
from verl_fn.driver.group import Call, Group, Member
from verl_fn.driver.host import Component, Host, Stored
from verl_fn.driver.remote import RemoteRollout, RemoteTrain
from verl_fn.state import Key, Sampling, requests_for


def test_an_engine_streams_the_version_that_was_asked_for():
    host, asked = Host(), []
    host.components["rollout"] = SimpleNamespace(
        stream=lambda requests, version: iter([asked.append((requests, version)), "sample"])
    )
    assert list(host.stream("rollout", 5, ["request"])) == [None, "sample"] and asked == [(["request"], 5)]


def test_values_stay_under_their_numbers_until_they_are_dropped():
    host = Host()
    host.components["actor"] = SimpleNamespace(both=lambda one, two: (one + two, one * two), one=lambda one: one)
    assert host.map(lambda: 3, 7) is None and host.map(lambda value: value + 1, None, Stored(7)) == 4
    # Of the two results the one with a number stays, and the other one is returned.
    assert host.invoke("actor", "both", (8, None), {}, Stored(7), 2) == 6 and host.values[8] == 5
    assert host.invoke("actor", "one", (9,), {}, Stored(8)) is None and host.values[9] == 5
    assert host.invoke("actor", "one", (), {}, Component("actor")) is host.components["actor"]
    host.drop([7, 8, 100])
    assert list(host.values) == [9]
    with pytest.raises(Freed, match="value 8 is not here"):
        host.map(abs, None, Stored(8))


@pytest.mark.parametrize(
    ("call", "shared"),
    [
        (("invoke", "actor", "forward", (), {}), True),
        (("invoke", "actor", "forward_backward", (), {}), True),
        (("invoke", "actor", "apply_update", (), {}), False),
        (("invoke", "rollout", "publish", (), {}), False),
        (("map", len, None, "ab"), False),
    ],
)
def test_only_passes_read_tensors_in_shared_memory(call, shared, monkeypatch):
    """They do not write to their batch; a function of the user's may."""
    host, opened = Host(), []
    method = SimpleNamespace(**dict.fromkeys(("forward", "forward_backward", "apply_update", "publish"), lambda: 1))
    host.components |= {"actor": method, "rollout": method}
    monkeypatch.setattr(hosts, "opened", lambda value, *, shared: opened.append(shared) or value)
    result, _ = host.run(*call)
    assert set(opened) == {shared} and result in (1, 2)
    host._first = False
    assert host.run(*call) == (None, None), "the result of the first rank is that of the call"


def test_weights_are_sent_by_the_ranks_that_hold_rows_or_by_the_first(monkeypatch):
    sent, made = [], []
    monkeypatch.setattr(hosts, "send", lambda outlets, version, source: sent.append((outlets, version, source)))
    monkeypatch.setattr(hosts, "Outlet", lambda address, secret, device: made.append(address) or f"to {address}")
    for first, held, to in ((True, None, 2), (False, None, 0), (False, "rows", 2)):
        host, source = Host(), SimpleNamespace() if held is None else SimpleNamespace(held=held)
        host.components["actor"] = SimpleNamespace(weights=lambda params, source=source: source)
        host._first, host.values[3] = first, "params"
        for version in (4, 5):
            host.send("actor", Stored(3), version, ["a", "b"], b"")
        assert sent == [(["to a", "to b"][:to], version, held or source) for version in (4, 5)]
        assert made == ["a", "b"][:to], "a connection is kept"
        sent.clear()
        made.clear()


def test_why_engines_were_restarted_is_told_once():
    cluster = Cluster(1.0)
    cluster.reasons.append("it died")
    assert (cluster.restarts(), cluster.restarts()) == (["it died"], [])


@pytest.mark.parametrize(
    ("gpus", "asked", "device"),
    [(0.0, "auto", "cpu"), (1.0, "auto", "cuda"), (8.0, "auto", "cuda"), (8.0, "cpu", "cpu"), (None, "auto", "cpu")],
)
def test_actors_compute_on_the_gpus_of_the_cluster(gpus, asked, device, monkeypatch):
    """The driver's own machine may have none."""
    resources = {"CPU": 4.0} if gpus is None else {"CPU": 4.0, "GPU": gpus}
    nodes = [{"Alive": True, "Resources": resources}, {"Alive": False, "Resources": {"GPU": 64.0}}]
    monkeypatch.setattr(driver.ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(driver.ray, "nodes", lambda: nodes)
    checked, done = [], []
    monkeypatch.setattr(driver, "check_room", lambda plan, bundles, nodes: checked.append(nodes))
    cluster = SimpleNamespace(
        reserve=lambda bundles, strategy: done.append(strategy),
        start=lambda places, settings, ranks, code: done.append((settings.device, ranks, code)),
    )
    words = ["driver.kind=ray", "ray.placement=SPREAD", "ray.ranks=1", "model.path=m", f"driver.device={asked}"]
    assert driver._start(make_plan(load(overrides=words)), cluster) == device
    assert done == ["SPREAD", (device, 1, ())] and checked == [[resources]], "a node that has ended has no room"


def test_a_function_is_called_on_each_node_that_lives(monkeypatch):
    nodes = [{"NodeManagerAddress": f"10.0.0.{i}", "NodeID": str(i), "Alive": i != 1} for i in range(3)]
    monkeypatch.setattr(driver, "connected", lambda table: contextlib.nullcontext())
    monkeypatch.setattr(driver, "on_node", lambda node, fn: (node, fn()))
    monkeypatch.setattr(driver.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(driver.ray, "get", lambda call: call)
    assert driver.on_nodes(None, lambda: 7) == {"10.0.0.0": ("0", 7), "10.0.0.2": ("2", 7)}


def test_code_beside_a_users_file_travels_with_it(tmp_path, monkeypatch):
    """A module and a package that it imports, but nothing of other folders."""
    (tmp_path / "beside_mine.py").write_text("")
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine/__init__.py").write_text("")
    (tmp_path / "mine.py").write_text("import beside_mine, package_of_mine\ndef f():\n    pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    sent = []
    monkeypatch.setattr(
        driver.ray.cloudpickle, "register_pickle_by_value", lambda module: sent.append(module.__name__)
    )
    driver.send_code([f"{tmp_path}/mine.py:f", "json:dumps"])
    assert {"beside_mine", "package_of_mine"} <= set(sent) and len(sent) == 3, sent
    for name in ("beside_mine", "package_of_mine"):
        del sys.modules[name]


FAULT, FAILED, NONE = RuntimeError("out of order"), ValueError("a prompt is empty"), None


@pytest.mark.parametrize(
    ("restarts", "quiet", "error", "noted", "again", "failed"),
    [
        (False, False, FAULT, True, False, True),
        (False, True, FAULT, False, False, True),
        (True, False, FAULT, True, True, False),
        # The error asks for a restart, also if another call reported it.
        (True, True, FAULT, True, True, False),
        (True, False, FAILED, True, False, True),
        (True, True, FAILED, False, False, True),
        (True, False, NONE, False, False, False),
    ],
)
def test_a_call_that_has_failed_is_made_again_or_told(restarts, quiet, error, noted, again, failed, monkeypatch):
    def get(ref):
        if error is not None:
            raise driver.ray.exceptions.RayTaskError("run", "", error)

    monkeypatch.setattr(groups.ray, "get", get)
    member = Member("rollout", *[None] * 6)
    group = Group("rollout", (member,))
    group.restart, group.restarts[0] = (lambda member, error: None) if restarts else None, 2
    call = Call(group, "invoke", [()], list, range(1), draws=True, quiet=quiet, open={0: "end"})
    group._ended(call, 0, "end")
    assert not call.open and (call.again, call.failed) == ({0} if again else set(), {0} if failed else set())
    assert list(group.errors) == [member] * noted
    assert group.restarts[0] == (0 if error is None else 2), "an engine that answers may be restarted as often again"


def test_of_a_members_errors_the_first_is_kept(monkeypatch):
    errors = [driver.ray.exceptions.RayTaskError("run", "", ValueError(name)) for name in ("first", "second")]

    def get(ref):
        raise errors[ref]

    monkeypatch.setattr(groups.ray, "get", get)
    group = Group("trainer", (Member("trainer", *[None] * 6),))
    for number in range(2):
        group._ended(Call(group, "invoke", [()], list, range(1), open={0: number}), 0, number)
    assert list(group.errors.values()) == errors[:1]


def test_the_ranks_of_a_group_have_numbers_and_a_process_by_itself_has_none(monkeypatch):
    monkeypatch.setattr(Cluster, "_spawn", lambda self, placement: placement)
    monkeypatch.setattr(Cluster, "_member", lambda self, name, placement, actor: SimpleNamespace(name=name))
    monkeypatch.setattr(Group, "make", lambda self, *call: None)
    cluster = Cluster(1.0)
    monkeypatch.setattr(cluster, "finish", lambda *groups: None)
    cluster.start({"trainer": ["a", "b"], "rollout": ["c"]}, None, 2)
    assert list(cluster.members) == ["trainer rank 0", "trainer rank 1", "rollout"]


def test_a_backend_over_ranks_hands_on_all_of_a_call():
    calls = []
    group = SimpleNamespace(run=lambda *call: calls.append(call), dropped=[], name="trainer")
    cluster = SimpleNamespace(finish=calls.append, stored=lambda batch: "batch", before_update=[calls.append])
    backend, key = RemoteTrain(cluster, group, "actor"), Key.from_seed(0)
    state = backend.load_pretrained()
    backend.load_pretrained(Path("a"), key)
    backend.place(state, params="cpu", optimizer="cuda")
    backend.save(state, Path("b"))
    backend.save(state, Path("b"), later=True)
    backend.restore(Path("c"))
    called = [(method, kwargs, given) for _, _, method, _, kwargs, *given in (c for c in calls if c is not group)]
    assert called == [
        ("load_pretrained", {}, [None, None]),
        ("load_pretrained", {}, ["a", key]),
        ("place", {"params": "cpu", "optimizer": "cuda"}, [state.open()]),
        ("save", {}, [state.open(), "b"]),
        ("save", {"later": True}, [state.open(), "b"]),
        ("restore", {}, ["c"]),
    ]
    calls.clear()
    kept, _ = backend.apply_update(state, state, donate=False)
    assert state.fate is None and calls[0][3] == (kept.id, None) and calls[0][4] == {"donate": False}
    backend.apply_update(kept, state)
    assert calls[1] == "actor", "who needs the weights is asked before an update replaces them"
    assert "TrainState was donated" in kept.fate and "Grads was donated" in state.fate


@pytest.mark.parametrize(("engines", "shares"), [(1, [5]), (2, [1, 4]), (3, [1, 2, 2])])
def test_requests_are_shared_by_the_tokens_that_they_allow(engines, shares):
    """The first one asks for as many tokens as the four others together."""
    rollout = object.__new__(RemoteRollout)
    rollout._group = SimpleNamespace(members=range(engines))
    few, many = ([1], Sampling(8, n=1)), ([1], Sampling(8, n=4))
    requests = [
        attrs.evolve(requests_for([prompt], sampling, Key.from_seed(0))[0], id=number)
        for number, (prompt, sampling) in enumerate([many, few, few, few, few])
    ]
    parts = rollout._shares(requests)
    assert sorted(map(len, parts)) == shares and all([r.id for r in p] == sorted(r.id for r in p) for p in parts)
    assert rollout._shares([]) == [[]]
