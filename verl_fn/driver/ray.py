"""Rollout, reward and training as Ray actors; the driver holds handles, and batches travel as references."""

from __future__ import annotations

import contextlib
import difflib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import ray
import ray.runtime_env

from verl_fn.algorithms.workers import ActorDied, Workers
from verl_fn.config import Config, ConfigError, plan

from . import build
from .cluster import Cluster, Seat
from .remote import RemoteRollout, RemoteTrain

__all__ = ["ActorDied", "connected", "ray_workers"]

# A process without a GPU still needs a place; cores are shared, as many processes wait for others.
ROOM = 0.01
# A share each, so that training and rollout sit on one GPU.
TRAINER_SHARE, ROLLOUT_SHARE = 0.5, 0.4


@contextlib.contextmanager
def ray_workers(cfg: Config) -> Iterator[Workers]:
    """The parts that ``cfg`` asks for, as actors of a cluster: the one that is connected, or ``ray.address``, or a new one.

    Raises:
        ConfigError: the cluster cannot be reached, or has not what the config asks for.
    """
    # An error is raised once, where it is waited for; Ray would print it again when its reference goes.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    with connected(cfg):
        cfg = on_cluster(cfg)
        cluster = Cluster(cfg.ray.timeout)
        try:
            seats, bundles = seating(cfg)
            check_room(bundles, cfg)
            cluster.reserve(bundles, cfg.ray.placement)
            cluster.start(seats, cfg)
            training = {}
            for name, roles in training_groups(cfg).items():
                group = cluster.groups[name]
                if any(plan.settings(cfg, role).strategy == "fsdp" for role in roles):
                    cluster.join(group)
                for role in roles:
                    cluster.build(name, role, build.trainer, role)
                    training[role] = RemoteTrain(cluster, group, role)
            cluster.build("rollout", "rollout", build.rollout)
            # An actor may run in another folder than the driver, where a user's reward functions lie.
            cluster.build("reward", "reward", build.reward, os.getcwd())
            yield Workers(
                rollout=RemoteRollout(cluster.groups["rollout"], "rollout"),
                reward=lambda batch, problems: cluster.call("reward", batch, problems),
                tokenizer=build.tokenizer(cfg),
                call=cluster.call,
                get=cluster.get,
                wait=cluster.wait,
                about=f"{len(cluster.members)} processes on {cfg.driver.device} run {cluster.code}",
                **training,
            )
        finally:
            cluster.stop()


@contextlib.contextmanager
def connected(cfg: Config) -> Iterator[None]:
    """A cluster: the one that is connected already, or that of ``ray.address``, or one of this machine alone.

    Raises:
        ConfigError: there is none at that address, or the runtime environment cannot be used.
    """
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if cfg.ray.runtime_env:
        options["runtime_env"] = runtime_env(Path(cfg.ray.runtime_env))
    if cfg.ray.address:
        check_address(cfg.ray.address)
        options["address"] = cfg.ray.address
    else:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Said by name, or Ray would look for a cluster that runs or ran here.
        options |= {"address": "local", "include_dashboard": False, "num_cpus": os.cpu_count()}
    try:
        ray.init(**options)
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise ConfigError(f"ray.runtime_env: {cfg.ray.runtime_env} cannot be set up: {error}") from error
    except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
        keys = [f"{key} = {value!r}" for key, value in attrs.asdict(cfg.ray).items() if key in options and value]
        token = " (a cluster that asks for a token wants RAY_AUTH_MODE=token in the environment, or ray.address=auto)"
        hint = token if cfg.ray.address not in ("", "auto") else ""
        raise ConfigError(f"Ray does not start with {', '.join(keys) or 'its defaults'}: {error}{hint}") from error
    try:
        yield
    finally:
        ray.shutdown()


def runtime_env(file: Path) -> dict[str, Any]:
    """Ray's runtime environment from a YAML file.

    Raises:
        ConfigError: it cannot be read or is no mapping.
    """
    import yaml

    try:
        found = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"ray.runtime_env: {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"ray.runtime_env: {file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"ray.runtime_env: {file} must be a mapping, with keys such as env_vars or py_modules")
    known = {name for name in ray.runtime_env.RuntimeEnv.known_fields if not name.startswith("_")}
    if odd := sorted(map(str, found.keys() - known)):
        near = difflib.get_close_matches(odd[0], known, 1)
        raise ConfigError(
            f"ray.runtime_env: {file} has {odd[0]!r}, which Ray does not know; "
            f"{f'did you mean {near[0]!r}?' if near else f'it knows {sorted(known)}'}"
        )
    return found


def check_address(address: str) -> None:
    """Refuse an address where nothing answers, at which Ray would try for long.

    Raises:
        ConfigError: nothing does.

    >>> check_address("nowhere")
    Traceback (most recent call last):
    verl_fn.config.schema.ConfigError: ray.address is 'nowhere'; it must be auto, or host:port as 10.0.0.1:6379
    """
    if address == "auto" or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"ray.address is {address!r}; it must be auto, or host:port as 10.0.0.1:6379")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray.address: no Ray cluster answers at {address} ({error}); start one with `ray start --head`, or leave "
            "the key empty to use this machine alone"
        ) from error


def on_cluster(cfg: Config) -> Config:
    """The config with the device that the cluster has, since the driver's machine may have another."""
    if cfg.driver.device != "auto":
        return cfg
    device = "cuda" if _total("GPU") >= 1 else "cpu"
    return attrs.evolve(cfg, driver=attrs.evolve(cfg.driver, device=device))


def training_groups(cfg: Config) -> dict[str, tuple[str, ...]]:
    """The groups of ranks and the roles that each trains.

    >>> from verl_fn.config import load
    >>> training_groups(load(overrides=["ray.separate=critic"]))
    {'trainer': ('actor',), 'critic': ('critic',)}
    """
    roles = plan.roles(cfg)
    apart = [role for role in roles if role in cfg.ray.separate]
    return {"trainer": tuple(r for r in roles if r not in apart)} | {role: (role,) for role in apart}


def seating(cfg: Config) -> tuple[dict[str, list[Seat]], list[dict[str, float]]]:
    """Where each group's actors go, and the room that the run asks the cluster for, a bundle for each rank."""
    gpu = cfg.driver.device == "cuda"
    seats: dict[str, list[Seat]] = {}
    bundles: list[dict[str, float]] = []
    for name in training_groups(cfg):
        seats[name] = [Seat(len(bundles) + rank, float(gpu)) for rank in range(cfg.ray.ranks)]
        bundles += [{"CPU": ROOM, "GPU": 1} if gpu else {"CPU": ROOM}] * cfg.ray.ranks
    seats["trainer"][0] = Seat(0, TRAINER_SHARE if gpu else 0.0)
    seats["rollout"], seats["reward"] = [Seat(0, ROLLOUT_SHARE if gpu else 0.0)], [Seat(0)]
    return seats, bundles


def check_room(bundles: Sequence[Mapping[str, float]], cfg: Config) -> None:
    """Refuse what this cluster can never give.

    Raises:
        ConfigError: it has too few GPUs, or too few nodes for the placement.
    """
    gpus, asked = _total("GPU"), sum(bundle.get("GPU", 0) for bundle in bundles)
    if asked > gpus:
        apart = f" and ray.separate = {list(cfg.ray.separate)}" if cfg.ray.separate else ""
        raise ConfigError(
            f"ray.ranks = {cfg.ray.ranks}{apart} ask for {asked:g} GPUs, and the cluster has {gpus:g}; lower ray.ranks, "
            "or set driver.device=cpu"
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if cfg.ray.placement == "STRICT_SPREAD" and len(nodes) < len(bundles):
        raise ConfigError(
            f"ray.placement = STRICT_SPREAD wants a node for each of {len(bundles)} training processes, and the cluster "
            f"has {len(nodes)}; take SPREAD, or lower ray.ranks"
        )
    largest = max(node.get("GPU", 0) for node in nodes)
    if cfg.ray.placement == "STRICT_PACK" and asked > largest:
        raise ConfigError(
            f"ray.placement = STRICT_PACK wants {asked:g} GPUs on one node, and the largest has {largest:g}; take PACK, "
            "or lower ray.ranks"
        )


def _total(resource: str) -> float:
    return ray.cluster_resources().get(resource, 0.0)
