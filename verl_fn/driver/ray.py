"""Runs rollout and training as Ray actors; the driver has the batches, and holds handles to training states."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import attrs
import ray
import ray.runtime_env

from verl_fn import build
from verl_fn.algorithms.workers import Processes, Workers
from verl_fn.backends.protocol import TrainBackend
from verl_fn.config import ConfigError
from verl_fn.config.names import is_reference, module_of
from verl_fn.config.plan import Plan, RolePlan, check_address, check_room
from verl_fn.config.schema import RayConfig

from .cluster import Cluster
from .group import Placement, on_node
from .ray_private import private_ray
from .remote import RemoteRollout, RemoteTrain

# The CPUs that each process reserves: few, since processes share cores and many of them wait for others.
ROOM = 0.01
# The shares of a GPU that training and rollout have, so that both use the same one.
TRAINER_SHARE, ROLLOUT_SHARE = 0.5, 0.4


@contextlib.contextmanager
def ray_started(plan: Plan) -> Iterator[Future[tuple[Cluster, str]]]:
    """Starts the actors of a plan in a thread, so that they import while the caller checks the plan.

    The future raises ``ConfigError`` if the cluster cannot be reached, or has too few resources for the plan.
    """
    # An error is raised where its result is awaited; Ray would print it again when the reference is dropped.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    cluster, over = Cluster(plan.ray.timeout), threading.Event()
    started: Future[tuple[Cluster, str]] = Future()
    late: list[BaseException] = []
    python = ctypes.PyDLL(None)
    python.PyOS_getsig.restype = ctypes.c_void_p

    def live() -> None:
        try:
            handler = python.PyOS_getsig(signal.SIGTERM)
            with connected(plan.ray):
                # Ray's own prints a stack and ends the process; only the main thread may set Python's otherwise.
                python.PyOS_setsig(signal.SIGTERM, ctypes.c_void_p(handler))
                try:
                    started.set_result((cluster, _start(plan, cluster)))
                    over.wait()
                finally:
                    cluster.stop()
        except BaseException as error:
            (late.append if started.done() else started.set_exception)(error)

    # Ray's processes end with the thread that has started them, so it stays as long as they.
    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        yield started
    finally:
        over.set()
        cluster.abort()
        thread.join()
    if late:
        raise late[0]


def _start(plan: Plan, cluster: Cluster) -> str:
    """Starts the actors, and returns their device."""
    # The driver's machine may have another device than the cluster.
    auto = "cuda" if ray.cluster_resources().get("GPU", 0.0) >= 1 else "cpu"
    device = auto if plan.driver.device == "auto" else plan.driver.device
    places, bundles = placements(plan, device)
    check_room(plan, bundles, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    cluster.reserve(bundles, plan.ray.placement)
    # An actor without a GPU would take the machine for one without GPUs.
    cluster.start(places, attrs.evolve(plan.driver, device=device), plan.ray.ranks, plan.code)
    return device


@contextlib.contextmanager
def ray_workers(plan: Plan, started: Future[tuple[Cluster, str]] | None = None) -> Iterator[Workers]:
    """Makes the parts of a plan in actors: in the ones that ``ray_started`` has begun to start, or in new ones."""
    with contextlib.ExitStack() as stack:
        cluster, device = (started or stack.enter_context(ray_started(plan))).result()
        build.set_up_process(attrs.evolve(plan.driver, device=device), plan.ray.ranks)
        send_code(plan.code)
        groups = training_groups(plan)
        # An actor may run in another folder than the driver, whose folder has the user's own code.
        engine = (build.conversing, plan.rollout, device, plan.env, os.getcwd())
        components: list[tuple[Any, ...]] = [("rollout", "rollout", *engine)]
        for name, roles in groups.items():
            if any(role.strategy != "local" for role in roles):
                cluster.join(cluster.groups[name], device)
            components += [(name, role.name, build.trainer, role, plan.driver, device) for role in roles]
        # Before the components, since an error here comes sooner.
        at_driver = build.at_driver(plan)
        cluster.build(*components)
        for name, roles in groups.items():
            cluster.groups[name].run("map", build.log_libraries, None, roles)
        code = [f"{name} {one}" for name, one in cluster.code.items()] + build.libraries(plan.roles.values())
        of = {role.name: cluster.groups[name] for name, roles in groups.items() for role in roles}
        w = Workers(
            # A backend accepts values or handles, the kind that it returns; types cannot express that.
            trainers={name: cast(TrainBackend, RemoteTrain(cluster, of[name], name)) for name in plan.roles},
            rollout=RemoteRollout(cluster, cluster.groups["rollout"], "rollout", plan.rollout.max_restarts),
            **at_driver,
            get=cluster.get,
            processes=Processes(
                f"{len(cluster.members)} processes on {device} run {', '.join(code)}",
                cluster.get(cluster.groups["trainer"].run("map", build.gpu_memory, None, device)),
                cluster.submit,
                cluster.restarts,
            ),
        )
        if plan.rollout.sleeps:
            cluster.get(w.rollout.sleep(2))
        yield w


def send_code(code: Sequence[str]) -> None:
    """Makes functions of the user's own files travel as source, since actors cannot import those files by name.

    So do modules and packages beside such a file, since it may import them.
    """
    for reference in code:
        if is_reference(reference) and reference.rpartition(":")[0].endswith(".py"):
            module = module_of(reference, "algorithm")
            ray.cloudpickle.register_pickle_by_value(sys.modules[module.__name__.partition(".")[0]])
            folder = Path(str(module.__file__)).parent
            for name, one in list(sys.modules.items()):
                files = (str(folder / f"{name}.py"), str(folder / name / "__init__.py"))
                if getattr(one, "__file__", None) in files and name not in ("__main__", "verl_fn"):
                    ray.cloudpickle.register_pickle_by_value(one)


@contextlib.contextmanager
def connected(table: RayConfig) -> Iterator[None]:
    """Connects to a cluster: the one that is connected, the one at ``ray.address``, or a new one of this run alone.

    Raises:
        ConfigError: there is none at that address, or the runtime environment cannot be used.
    """
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if table.runtime_env:
        options["runtime_env"] = runtime_env(Path(table.runtime_env))
    if table.address:
        check_address(table.address)
    with contextlib.ExitStack() as stack:
        try:
            if table.address:
                stack.enter_context(ray.init(address=table.address, **options))
            else:
                os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
                stack.enter_context(private_ray(num_cpus=os.cpu_count(), **options))
        except Exception as error:
            raise ConfigError(
                f"Ray does not start with ray.address={table.address!r} and ray.runtime_env={table.runtime_env!r}: "
                f"{error} (a cluster that asks for a token wants RAY_AUTH_MODE=token in the environment, or "
                "ray.address=auto; Ray's own files go into RAY_TMPDIR, a folder with a short path to write to)"
            ) from error
        yield


def on_nodes(table: RayConfig, fn: Callable[[], Any]) -> dict[str, Any]:
    """Calls a function, whose module workers import, on every node, and returns the results by address."""
    with connected(table):
        calls = {n["NodeManagerAddress"]: on_node(n["NodeID"], fn) for n in ray.nodes() if n["Alive"]}
        return {address: ray.get(call) for address, call in calls.items()}


def runtime_env(file: Path) -> dict[str, Any]:
    """Reads Ray's runtime environment from a YAML file.

    Raises:
        ConfigError: the file cannot be read or is no mapping.
    """
    import yaml

    try:
        environment = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"ray.runtime_env: {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"ray.runtime_env: {file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(environment, dict):
        raise ConfigError(f"ray.runtime_env: {file} must be a mapping, with keys such as env_vars or py_modules")
    known = {name for name in ray.runtime_env.RuntimeEnv.known_fields if not name.startswith("_")}
    if unknown := sorted(map(str, environment.keys() - known)):
        raise ConfigError(f"ray.runtime_env: {file} has {unknown[0]!r}, but Ray knows only {sorted(known)}")
    return environment


def training_groups(plan: Plan) -> dict[str, tuple[RolePlan, ...]]:
    """Returns the groups of ranks and the roles that each trains.

    Example:
        >>> from verl_fn.config import load, make_plan
        >>> groups = training_groups(make_plan(load(overrides=["ray.separate=critic"])))
        >>> {name: [role.name for role in roles] for name, roles in groups.items()}
        {'trainer': ['actor'], 'critic': ['critic']}
    """
    together = tuple(role for role in plan.roles.values() if role.name not in plan.ray.separate)
    return {"trainer": together} | {name: (role,) for name, role in plan.roles.items() if name in plan.ray.separate}


def placements(plan: Plan, device: str) -> tuple[dict[str, list[Placement]], list[dict[str, float]]]:
    """Returns the placements of each group's actors on ``cpu`` or ``cuda``, and the resources of the run's bundles.

    There is a bundle for each rank, and one for each engine that is placed apart from them. The ranks of ``trainer``
    share theirs with colocated engines.
    """
    gpu, ranks, rollout = device == "cuda", plan.ray.ranks, plan.rollout
    places: dict[str, list[Placement]] = {}
    bundles: list[dict[str, float]] = []
    sizes = dict.fromkeys(training_groups(plan), (ranks, 1))
    if rollout.placement == "apart":
        sizes["rollout"] = rollout.engines, rollout.tensor_parallel_size
    for name, (size, gpus) in sizes.items():
        places[name] = [Placement(len(bundles) + rank, gpus * float(gpu)) for rank in range(size)]
        bundles += [{"CPU": ROOM, "GPU": gpus} if gpu else {"CPU": ROOM}] * size
    if rollout.placement == "colocated":
        on_rank = [engine % ranks for engine in range(rollout.engines)]
        shares = Counter(on_rank)
        for rank in shares if gpu else ():
            places["trainer"][rank] = Placement(rank, TRAINER_SHARE)
        places["rollout"] = [Placement(rank, gpu * ROLLOUT_SHARE / shares[rank]) for rank in on_rank]
    return places, bundles
