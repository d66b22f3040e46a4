"""A Ray that only this run uses.

A Ray that ``ray.init`` starts listens on the machine's address, and keeps its sockets, its logs and the workers'
environment in a folder that all users can read and that stays. Here it listens on the loopback device, asks for a
token that only this user can read, and lies in a folder that only this user can read and that is removed. A small
process does that if this one is killed.

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
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # its types lack them

from . import processes
from .ranks import ActorDied

RAY = "2.60"
# The processes that Ray cannot do without, by id.
_core: dict[int, str] = {}
# The thread that starts Ray's own processes now.
_starting = 0


def _leave_group() -> None:
    """Takes a process of Ray out of the group of this one.

    A signal to the group, as of ``timeout`` or a batch system, would end Ray, and the run could not save.
    """
    if _starting == threading.get_ident():
        os.setpgid(0, 0)


# Ray gives its processes no options, but a function to call in them, and then such hooks run too.
os.register_at_fork(after_in_child=_leave_group)


@contextlib.contextmanager
def private_ray(**options: Any) -> Iterator[None]:
    """Starts a Ray for the body by ``ray.init(**options)``, and ends all of its processes afterwards."""
    global _starting
    # The mode of this folder is 0700; Ray opens its own folder to everybody. RAY_TMPDIR is Ray's variable.
    folder = Path(tempfile.mkdtemp(prefix="verl_fn_", dir=os.environ.get("RAY_TMPDIR")))
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    with _removed(folder), _settings(token):
        try:
            _starting = threading.get_ident()
            ray.init(address="local", include_dashboard=False, _temp_dir=str(folder / "ray"), **options)
            _starting = 0
            names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes.users_of(folder)}
            _core.update({pid: name for pid, name in names.items() if name in ("gcs_server", "raylet")})
            yield
        finally:
            _starting = 0
            if ended():
                # The others would look for the missing process for a minute, and then Ray would end this process.
                processes.end(lambda: processes.users_of(folder), patience=0.0)
            ray.shutdown(wait_for_processes=True)
            processes.end(lambda: processes.users_of(folder))
            _core.clear()


@contextlib.contextmanager
def _removed(folder: Path) -> Iterator[None]:
    """Removes a folder after the body. If this process is killed, another one does, and ends the folder's users."""
    nothing = subprocess.DEVNULL
    # A signal to this process's group must not reach it.
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", processes.__file__, folder],
        stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        watcher.communicate(b"over")


def ended() -> list[str]:
    """Returns the processes that have ended of the Ray that this process started."""
    return [f"{name} (pid {pid})" for pid, name in _core.items() if not processes.runs(pid)]


def require_alive() -> None:
    """Raises an error if a process of the Ray that this process started has ended.

    Actors would go on for a minute, and then this process would end without a message.
    """
    if dead := ended():
        raise ActorDied(
            f"Ray itself has died: {', '.join(dead)}. The machine may have run out of memory (see `dmesg`). The "
            "same command continues from the last checkpoint"
        )


@contextlib.contextmanager
def _settings(token: Path) -> Iterator[None]:
    """Makes Ray listen on the loopback device and ask for the token in a file, for the body."""
    # Ray would read a token in RAY_AUTH_TOKEN first, and start an idle worker for each core.
    fixed = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": None, "RAY_prestart_worker_first_driver": "0"}
    # vLLM's sockets outlive engines that are killed, and so end with the folder.
    variables = {**fixed, "RAY_AUTH_TOKEN_PATH": str(token), "VLLM_RPC_BASE_PATH": str(token.parent)}
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
