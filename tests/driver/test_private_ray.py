"""A Ray of a run alone: nobody else reaches its ports or reads its files, and it ends as a whole."""

import ipaddress
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray
import remote_mutants
from ray._raylet import AuthenticationMode, get_authentication_mode

from verl_fn.driver import processes, ray_private
from verl_fn.driver.processes import runs, users_of
from verl_fn.driver.ranks import ActorDied
from verl_fn.state import Key

ROOT = Path(__file__).parents[2]


def test_it_is_written_for_this_version():
    assert ray.__version__.startswith(f"{ray_private.RAY}."), "read verl_fn/driver/ray_private.py anew"


def reachable(actors):
    """The sockets of this process, of Ray's and of actors that another machine, or another address, can reach."""
    sockets = []
    # Other tests keep processes of their own. Those of Ray write their logs to its folder.
    started = list(users_of(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent))
    assert {"gcs_server", "raylet"} <= {psutil.Process(pid).name() for pid in started}
    # A warm Python has forked the actors, and so they do not descend from Ray's processes.
    below = [child.pid for pid in started for child in psutil.Process(pid).children(recursive=True)]
    for pid in {os.getpid(), *started, *below, *(actor.pid for actor in actors)}:
        process = psutil.Process(pid)
        sockets += [
            (process.name(), connection.laddr)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN or not connection.raddr
        ]
    assert len(sockets) > 8, sockets
    addresses = [(name, ipaddress.ip_address(address.ip.removeprefix("::ffff:"))) for name, address in sockets]
    return [(name, str(address)) for name, address in addresses if not address.is_loopback]


def test_nothing_of_it_is_reachable_from_another_address(two, model):
    """Ray's own processes, actors, the ranks' store and gloo, and the engines that wait for weights."""
    fsdp = two.backend("listening", remote_mutants.fsdp, model)
    engines = two.engines("listening", remote_mutants.table_engine, False)
    two.get(engines.publish(1, fsdp.weights(fsdp.init(Key.from_seed(0)).params)))
    assert reachable(members(two)) == []


def test_its_files_and_its_token_are_this_users(two):
    assert get_authentication_mode() == AuthenticationMode.TOKEN
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    environments = ray.get(
        [member.host.map.remote(os.getenv, None, "RAY_AUTH_TOKEN_PATH") for member in members(two)]
    )
    assert environments == [str(token)] * len(environments)
    sockets = ray.get([member.host.map.remote(os.getenv, None, "VLLM_RPC_BASE_PATH") for member in members(two)])
    assert sockets == [str(token.parent)] * len(sockets), "vLLM's, which outlive engines that are killed"
    for member in members(two):
        logs = [Path(log) for log in member.logs]
        assert [log.suffix for log in logs] == [".out", ".err"] and all(token.parent in log.parents for log in logs)
    assert token.parent.stat().st_mode & 0o777 == 0o700


HOLDS = """
import os, sys, time
held = [os.open(sys.argv[1], int(flags)) for flags in sys.argv[2:]]
print("ready", flush=True)
time.sleep(600)
"""


def test_whoever_only_reads_its_files_survives(tmp_path):
    """Such as a process that follows a log, or that removes a folder around."""
    file = tmp_path / "log"
    file.touch()
    opened = {
        "writes": (file, os.O_WRONLY | os.O_APPEND),
        "updates": (file, os.O_RDWR),
        "reads": (file, os.O_RDONLY),
        "lists": (tmp_path, os.O_RDONLY | os.O_DIRECTORY),
    }
    held = {
        name: subprocess.Popen([sys.executable, "-c", HOLDS, *map(str, args)], stdout=subprocess.PIPE)
        for name, args in opened.items()
    }
    try:
        assert all(process.stdout.readline() for process in held.values())
        assert set(users_of(tmp_path)) == {held["writes"].pid, held["updates"].pid}
        # The end of stdin says that the driver has died.
        subprocess.run([sys.executable, processes.__file__, tmp_path], stdin=subprocess.DEVNULL, check=True)
        assert [held[name].wait() for name in ("writes", "updates")] == [-signal.SIGKILL] * 2
        assert not tmp_path.exists()
        assert [held[name].poll() for name in ("reads", "lists")] == [None, None]
    finally:
        for process in held.values():
            process.kill()
            process.communicate()


def members(two):
    return list(two.cluster.members.values())


def test_a_process_of_ray_that_ends_is_reported(two, monkeypatch):
    monkeypatch.setattr(ray_private, "ended", lambda: ["gcs_server (pid 1)"])
    with pytest.raises(ActorDied, match=r"^Ray itself has died: gcs_server \(pid 1\)"):
        two.get(two.group.run("map", remote_mutants.nap, None))


DYING = """
import os, signal, sys
import psutil, ray
from verl_fn.driver import ray_private
from verl_fn.driver.ranks import ActorDied

class Actor:
    def nothing(self):
        pass

before = dict(os.environ)
with ray_private.private_ray(num_cpus=1, log_to_driver=False, logging_level="critical"):
    actor = ray.remote(num_cpus=0)(Actor).remote()
    ray.get(actor.nothing.remote())
    family = [process.pid for process in psutil.Process().children(recursive=True)]
    # A signal to the group of this process, as of `timeout`, leaves them alone.
    assert os.getpgrp() not in map(os.getpgid, family)
    print(os.environ["RAY_AUTH_TOKEN_PATH"], *family, flush=True)
    ray_private.require_alive()
    if sys.argv[1] == "driver":
        os.kill(os.getpid(), signal.SIGKILL)
    names = {pid: open(f"/proc/{pid}/comm").read().strip() for pid in family}
    os.kill(next(pid for pid, name in names.items() if name == "gcs_server"), signal.SIGKILL)
    while not ray_private.ended():
        pass
    try:
        ray_private.require_alive()
    except ActorDied as error:
        print(error, flush=True)
after = dict(os.environ)
assert all(before.get(name) == after.get(name) for name in after if name.startswith("RAY_AUTH")), after
raise SystemExit(7)
"""


def test_without_its_control_process_it_ends_as_a_whole(warm):
    """Of a Ray of its own, since the tests' would go with it: at once, with no process and no file left."""
    ended = subprocess.run([warm, "-c", DYING, "gcs"], capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert ended.returncode == 7, ended.stderr
    processes, message = ended.stdout.split("\n", 1)
    token, *pids = processes.split()
    assert message.startswith("Ray itself has died: gcs_server")
    assert len(pids) > 4 and not [pid for pid in pids if runs(int(pid))]
    assert not Path(token).parent.exists()


def test_it_ends_with_a_driver_that_is_killed(warm):
    """Its agents would look for its control process for a minute."""
    command = [warm, "-c", DYING, "driver"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    token, *pids = ended.stdout.split()
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if runs(int(pid))] or Path(token).parent.exists():
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert len(pids) > 4 and not left
