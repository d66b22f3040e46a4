"""Rollout, reward and training as Ray actors; the driver holds handles, and batches travel as references."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import ray
from torch.utils import _pytree as pytree

from verl_fn.errors import USER_ERRORS
from verl_fn.schema import Config
from verl_fn.workers import ActorDied, Workers

from . import build
from .host import Host
from .remote import Remote, RemoteField, RemoteRollout, RemoteTrain

LOG_TAIL_LINES = 20
START_SECONDS = 300


@attrs.frozen(eq=False)
class Member:
    """One actor of the run: its handle, a reference that ends when it does, and its process."""

    name: str
    host: Any
    sentinel: Any
    pid: int
    logs: tuple[str, ...]


class Cluster:
    """The actors of one run. ``get`` and ``wait`` fail as soon as any of them has died."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self.members: dict[str, Member] = {}

    def start(self, names: tuple[str, ...], gpus: dict[str, float]) -> None:
        """Start one actor a name, together."""
        actor = ray.remote(num_cpus=0, concurrency_groups={"watch": 1})(Host)
        hosts = {name: actor.options(num_gpus=gpus.get(name, 0)).remote(self._cfg) for name in names}
        about = {name: host.about.remote() for name, host in hosts.items()}
        for name, host in hosts.items():
            try:
                told = ray.get(about[name], timeout=START_SECONDS)
            except ray.exceptions.GetTimeoutError:
                asked = f"{gpus[name]} of a GPU" if name in gpus else "no GPU"
                raise ActorDied(f"the {name} actor did not start in {START_SECONDS} s; it asks for {asked}") from None
            except ray.exceptions.RayActorError as error:
                raise ActorDied(f"the {name} actor did not start: {error}") from None
            sentinel = host.watch.options(concurrency_group="watch").remote()
            self.members[name] = Member(name, host, sentinel, told["pid"], tuple(told["logs"]))

    def build(self, member: str, component: str, factory: Callable[..., Any], *args: Any) -> None:
        """Make a component inside an actor."""
        self.get(self.members[member].host.build.remote(component, factory, *args))

    def call(self, fn: Callable[..., Any] | str, *args: Any, returns: int | None = None, **kwargs: Any) -> Any:
        """Apply a function where the states lie that it is given, else where the rewards are computed."""
        held = [arg for arg in args if isinstance(arg, (Remote, RemoteField))]
        method = (held[0].host if held else self.members["reward"].host).call
        args = tuple(arg.open() if isinstance(arg, (Remote, RemoteField)) else arg for arg in args)
        if returns is not None and returns > 1:
            method = method.options(num_returns=returns)
        found = method.remote(fn, kwargs, returns is not None, *args)
        return [found] if returns == 1 else found

    def wait(self, value: Any) -> Any:
        """Block until everything that ``value`` refers to is there, and return ``value``.

        Raises:
            ActorDied: an actor ended meanwhile, whichever it was.
        """
        pending = list({leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, ray.ObjectRef)})
        watched = {member.sentinel: member for member in self.members.values()}
        while pending:
            ready, _ = ray.wait([*pending, *watched], num_returns=1, fetch_local=False)
            if ready[0] in watched:
                raise self._died(watched[ready[0]])
            pending.remove(ready[0])
        return value

    def get(self, value: Any) -> Any:
        """``value`` with every reference replaced by what it refers to. A worker's error is raised as its own."""
        self.wait(value)
        return pytree.tree_map(lambda leaf: self._fetch(leaf) if isinstance(leaf, ray.ObjectRef) else leaf, value)

    def stop(self) -> None:
        """End the actors."""
        for member in self.members.values():
            ray.kill(member.host)
        self.members.clear()

    def _fetch(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, USER_ERRORS):
                raise error.cause from None
            raise error.as_instanceof_cause() from None
        except ray.exceptions.RayActorError as error:
            for member in self.members.values():
                if ray.wait([member.sentinel], timeout=1.0)[0]:
                    raise self._died(member) from None
            raise ActorDied(str(error)) from None

    def _died(self, member: Member) -> ActorDied:
        try:
            ray.get(member.sentinel)
            reason = "it returned"
        except ray.exceptions.RayError as error:
            reason = str(error)
        tail = []
        for log in member.logs:
            with contextlib.suppress(OSError):
                lines = Path(log).read_text(errors="replace").splitlines()
                tail += [line for line in lines if not line.startswith(":")][-LOG_TAIL_LINES:]
        end = "\n  ".join(tail) or "(empty)"
        return ActorDied(f"the {member.name} actor (pid {member.pid}) died: {reason}\nits log ends:\n  {end}")


@contextlib.contextmanager
def ray_workers(cfg: Config) -> Iterator[Workers]:
    """The parts that ``cfg`` asks for, as actors of a cluster that is started unless one is connected."""
    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", num_cpus=os.cpu_count())
    cluster = Cluster(cfg)
    try:
        # A share each, so that training and rollout sit on one GPU.
        share = {"trainer": 0.5, "rollout": 0.4} if build.device(cfg) == "cuda" else {}
        cluster.start(("trainer", "rollout", "reward"), share)
        training = {}
        for role in build.roles(cfg):
            cluster.build("trainer", role, build.trainer, role)
            training[role] = RemoteTrain(cluster.members["trainer"].host, role, cluster.get)
        cluster.build("rollout", "rollout", build.rollout)
        # An actor may run in another folder than the driver, where a user's reward functions lie.
        cluster.build("reward", "reward", build.reward, os.getcwd())
        yield Workers(
            rollout=RemoteRollout(cluster.members["rollout"].host, "rollout"),
            reward=lambda batch, problems: cluster.call("reward", batch, problems),
            tokenizer=build.tokenizer(cfg),
            call=cluster.call,
            get=cluster.get,
            wait=cluster.wait,
            **training,
        )
    finally:
        cluster.stop()
        if started:
            ray.shutdown()
