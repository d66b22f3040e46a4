"""A Ray that only this run uses.

A Ray that ``ray.init`` starts listens on the machine's address, and keeps its sockets, its logs and the workers'
environment in a folder that all users can read and that stays. Here it listens on the loopback device, asks for a
token that only this user can read, and lies in a folder that only this user can read and that is removed. A small
process does that if this one is killed, or the next run if both are.

Ray reads the environment variables for this when it is imported, and a program may have imported it before. So
``_settings`` has the three private names of Ray that this package uses; it is written for the version in ``RAY``.
"""

from __future__ import annotations

import contextlib
import os
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
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # its types lack them

from . import processes
from .processes import await_end, birth, kill, runs, users_of, with_descendants
from .ranks import ActorDied

RAY = "2.60"
PREFIX, OWNER = "verl_fn_", "owner"
# The processes that Ray cannot do without, by id.
_core: dict[int, str] = {}


@contextlib.contextmanager
def private_ray(**options: Any) -> Iterator[None]:
    """Starts a Ray on this machine for the body, and ends all of its processes afterwards.

    Args:
        options: the arguments of ``ray.init``.
    """
    global _core
    # The mode of this folder is 0700; Ray opens its own folder to everybody. RAY_TMPDIR is Ray's variable.
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=os.environ.get("RAY_TMPDIR")))
    try:
        (folder / OWNER).write_text(birth(os.getpid()))
        remove_dead(folder.parent)
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        with _watched(folder), _settings(token):
            try:
                ray.init(address="local", include_dashboard=False, _temp_dir=str(folder / "ray"), **options)
                names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in users_of(folder)}
                _core = {pid: name for pid, name in names.items() if name in ("gcs_server", "raylet")}
                yield
            finally:
                _end(folder)
                _core = {}
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


def _ended() -> list[str]:
    return [f"{name} (pid {pid})" for pid, name in _core.items() if not runs(pid)]


def _end(folder: Path) -> None:
    """Ends Ray in this process, and all processes that it has started."""
    family = with_descendants(users_of(folder))
    if not alive():
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
def _settings(token: Path) -> Iterator[None]:
    """Makes Ray listen on the loopback device and ask for the token in a file, for the body."""
    # Ray would read a token in RAY_AUTH_TOKEN first.
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_TOKEN": None}
    before = {name: os.environ.get(name) for name in variables}
    several = ray_constants.ENABLE_RAY_CLUSTER
    # As on macOS, where Ray does not support several machines. Its variable is RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER.
    ray_constants.ENABLE_RAY_CLUSTER = False
    _set(variables)
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    """Sets environment variables, removes the ones that are None, and makes Ray read them again."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # The settings come first, since Ray's threads may look for a token at once.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
