"""A Ray of this run alone, and every private name of Ray that this takes; written for the version in ``RAY``.

A Ray that ``ray.init`` starts listens on the machine's address, and keeps its sockets, its logs and the workers'
environment in a folder that all users can read and that stays. Here it listens on the loopback device, asks for a
token that only this user can read, and lies in a folder that only this user can read and that is removed. A small
process does that if this one is killed, or the next run if both are.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # its types lack them

from . import processes
from .errors import ActorDied
from .processes import await_end, birth, kill, users_of, with_descendants

RAY = "2.60"
PREFIX, OWNER = "verl_fn_", "owner"
_WARNING = re.compile(r"\[\S+ \S+ [WEF] ")


@contextlib.contextmanager
def private_ray(**options: Any) -> Iterator[None]:
    """Starts a Ray on this machine for the body, and ends all of its processes afterwards.

    Args:
        options: the arguments of ``ray.init``.
    """
    # The mode of this folder is 0700; Ray opens its own folder to everybody. RAY_TMPDIR is Ray's variable.
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=os.environ.get("RAY_TMPDIR")))
    try:
        (folder / OWNER).write_text(birth(os.getpid()))
        remove_dead(folder.parent)
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        # A token in RAY_AUTH_TOKEN would come before that in the file.
        with (
            _watched(folder),
            _environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_AUTH_TOKEN=None),
        ):
            try:
                with _one_machine(), _bare_node():
                    ray.init(address="local", include_dashboard=False, _temp_dir=str(folder / "ray"), **options)
                yield
            finally:
                _end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_dead(parent: Path) -> None:
    """Removes the folders of this user's runs that were killed, and ends what is left of their Ray.

    The folder has a token.

    Args:
        parent: the folder of these folders.
    """
    own = birth(os.getpid()).split()
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            owner = (folder / OWNER).read_text().split()
            ours = folder.stat().st_uid == os.getuid() and not folder.is_symlink() and owner[:1] == own[:1]
            if ours and len(owner) == len(own) and birth(int(owner[1])).split() != owner:
                kill(users_of(folder))
                shutil.rmtree(folder, ignore_errors=True)


def alive() -> bool:
    """Returns whether all processes of the Ray that this process started are running."""
    return not _ended()


def require_alive() -> None:
    """Raises an error if a process of the Ray that this process started has ended.

    Raises:
        ActorDied: one has ended; actors would go on for a minute, and then this process would end without a message.
    """
    if ended := _ended():
        raise ActorDied(
            f"Ray itself has died: {', '.join(ended)}. The machine may have run out of memory (see `dmesg`). The "
            "same command continues from the last checkpoint"
        )


def last_messages(count: int) -> list[str]:
    """Returns the last warnings of Ray's node of this machine, and the last lines that its processes printed.

    Args:
        count: the most lines of each log.
    """
    node = ray_worker._global_node
    logs = Path(node.get_logs_dir_path()) if node is not None else Path("/nonexistent")
    warnings = [line for line in _lines(logs / "raylet.out") if _WARNING.match(line)]
    printed = [_lines(log)[-count:] for log in sorted(logs.glob("*.err"))]
    return list(dict.fromkeys(warnings[-count:] + [line for lines in printed for line in lines]))


def _lines(log: Path) -> list[str]:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip() and not line.startswith(":")]


def _ended() -> list[str]:
    node = ray_worker._global_node
    dead = [] if node is None else node.dead_processes()
    return [f"{kind} (pid {process.pid}, status {process.returncode})" for kind, process in dead]


def _end() -> None:
    """Ends Ray in this process, and all processes that it has started."""
    node = ray_worker._global_node
    own = [] if node is None else [one.process.pid for infos in node.all_processes.values() for one in infos]
    family = with_descendants(own)
    if node is not None and not alive():
        # The others would look for the missing process for a minute, and then Ray would end this process too.
        kill(family)
    ray.shutdown(wait_for_processes=True)
    await_end(family)


@contextlib.contextmanager
def _watched(folder: Path) -> Iterator[None]:
    """Ends the users of a folder and removes it if this process is killed in the body.

    Ray's agents would go on for a minute, since they look for other processes of Ray.
    """
    nothing = subprocess.DEVNULL
    # A signal to this process's group must not reach it.
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", processes.__file__, folder],
        stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        watcher.communicate(b"over")


@contextlib.contextmanager
def _one_machine() -> Iterator[None]:
    """Makes Ray listen on the loopback device, as it does on macOS, where it does not support several machines."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _bare_node() -> Iterator[None]:
    """Makes Ray start neither its dashboard, nor its autoscaler, nor what prints workers' logs: seconds for nothing.

    ``include_dashboard=False`` leaves out the dashboard's pages alone.
    """

    def none(self: Node, **options: Any) -> None:
        pass

    names = ("start_api_server", "start_monitor", "start_log_monitor")
    before = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, none)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


@contextlib.contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Sets environment variables that Ray reads, and removes those that are None, for the body."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Ray read them when it was imported. The settings come first, since Ray's threads may look for a token at once.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
