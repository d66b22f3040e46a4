"""Runs in this process, and training under torchrun, whose first process runs the command and calls the others.

Each of torchrun's processes has its own shards of every state, and the first process has handles to them, as it has
over Ray. Batches and losses travel whole.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from verl_fn.algorithms.workers import Processes, Workers
from verl_fn.backends.protocol import RolloutBackend, Through, TrainBackend
from verl_fn.config import ConfigError
from verl_fn.config.plan import Plan
from verl_fn.state import Batch

from . import build
from .ranks import ActorDied, ActorHangs, backends, device, gpu_memory, torchrun_rank, torchrun_size

if TYPE_CHECKING:
    from .host import Host

# The first process may read data or wait for a download for hours before it makes a call.
_PATIENCE = timedelta(days=30)
ENGINE = "rollout"  # the name of the engine among the components of each process
_AT_ONCE = signal.default_int_handler
_ranks: Torchrun | None = None


@contextlib.contextmanager
def local_workers(plan: Plan) -> Iterator[Workers]:
    """Makes the parts of a plan in this process; under torchrun, every process makes backends of its own."""
    with process_group(plan) as ranks:
        where = device(plan.driver)
        if ranks is None:
            build.set_up_process(plan.driver, 1)
            trainers = {name: build.trainer(role, plan.driver, where) for name, role in plan.roles.items()}
            rollout = engine(plan, where)
        else:
            trainers, rollout = ranks.parts(plan, where)
        processes = Processes(", ".join(build.libraries(plan.roles.values())), gpu_memory(where))
        yield Workers(trainers, rollout, **build.at_driver(plan), processes=processes)


@contextlib.contextmanager
def process_group(plan: Plan) -> Iterator[Torchrun | None]:
    """Opens the process group that training in this process needs, and closes it at the end.

    Under torchrun all its processes form the group, and only the first one enters the body; the others follow it and
    exit. Otherwise ``fsdp`` and ``megatron`` need a group with this process only, and ``local`` needs none.

    Yields:
        What makes calls on all of torchrun's processes; None without torchrun.

    Raises:
        ConfigError: torchrun started several processes for a plan that cannot use them.
        SystemExit: on all of torchrun's processes but the first, when the first one has left the body.
    """
    global _ranks
    size = torchrun_size()
    if size > 1:
        _check_plan(plan, size)
    if _ranks is not None or (
        size == 1 and (plan.driver.kind == "ray" or all(role.strategy == "local" for role in plan.roles.values()))
    ):
        yield _ranks
        return
    with _initialized(plan, size):
        if size == 1:
            yield None
            return
        import torch.distributed as dist

        calls = dist.new_group(backend="gloo", timeout=_PATIENCE)
        if torchrun_rank() > 0:
            raise SystemExit(_follow(calls))
        _ranks = Torchrun(calls)
        try:
            yield _ranks
        finally:
            _ranks.end()
            _ranks = None


@contextlib.contextmanager
def _initialized(plan: Plan, size: int) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    from verl_fn.backends.agreement import use_loopback

    if dist.is_initialized():
        yield
        return
    kind = device(plan.driver)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=plan.ray.timeout)
    if size == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        use_loopback("127.0.0.1")
    if size > 1:
        dist.init_process_group(backends(kind), timeout=timeout)
    else:
        dist.init_process_group(backends(kind), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_plan(plan: Plan, size: int) -> None:
    if plan.driver.kind == "ray":
        raise ConfigError(
            "driver.kind=ray starts its training processes itself: run it without torchrun and set ray.ranks, or set "
            "driver.kind=local for an algorithm that samples nothing, such as sft, under torchrun"
        )
    if plan.learns_from == "samples":
        raise ConfigError(
            f"torchrun trains algorithms that sample nothing, such as sft; for {plan.algorithm} set driver.kind=ray "
            f"and ray.ranks={size}, and run it without torchrun"
        )


class Torchrun:
    """Torchrun's processes as a group of ranks: each has a ``Host``, and makes the calls of the first process.

    ``RemoteTrain`` calls it as it calls a ``Cluster`` and a ``Group`` of Ray actors; a call that returns has ended.

    Args:
        calls: the process group through which calls are sent.
    """

    name = "torchrun"
    before_update = ()

    def __init__(self, calls: Any) -> None:
        from .host import Host

        self._calls, self._host = calls, Host()
        self.dropped: list[int] = []
        self._in_step = True  # whether the others wait for the next call

    def parts(self, plan: Plan, where: str) -> tuple[dict[str, TrainBackend], RolloutBackend]:
        """Makes the backends of a plan in every process; returns the training backends by role, and the engine."""
        from .remote import RemoteTrain

        self.run("map", build.set_up_process, None, plan.driver, torchrun_size())
        for role in plan.roles.values():
            self.run("build", role.name, build.trainer, role, plan.driver, where)
        self.run("build", ENGINE, engine, plan, where)
        ranks: Any = self
        trainers: Any = {name: RemoteTrain(ranks, ranks, name) for name in plan.roles}
        return trainers, _Engine(self, self._host.components[ENGINE])

    def run(self, method: str, *args: Any) -> Any:
        """Calls a method of ``Host`` in every process, and returns the result of the first.

        Raises:
            Exception: the error of this process, or else the error of the first one that failed.
            ActorHangs: a process did not answer within ``ray.timeout``.
            ActorDied: a process has ended.
        """
        from ray import cloudpickle

        drops = self.dropped[:]
        message = cloudpickle.dumps((drops, method, args))
        del self.dropped[: len(drops)]
        self._in_step = False
        try:
            _broadcast(message, self._calls)
        except RuntimeError as error:
            raise _ended(error) from error
        try:
            with _together():
                self._host.drop(drops)
                result = getattr(self._host, method)(*args)
        except (ActorDied, ActorHangs):
            raise
        except Exception:
            self._in_step = True
            raise
        self._in_step = True
        return result

    def finish(self, group: Torchrun) -> None:
        """Returns at once, since every call has ended."""

    def stored(self, batch: Batch) -> Batch:
        """Returns the batch; it travels with each call."""
        return batch

    def end(self) -> None:
        """Lets the other processes end."""
        if self._in_step:
            with contextlib.suppress(RuntimeError):  # they have ended
                _broadcast(None, self._calls)


class _Engine(Through):
    """The engine of the first process; to publish, all ranks read weights together, and each has an engine."""

    def __init__(self, ranks: Torchrun, inner: RolloutBackend) -> None:
        super().__init__(inner)
        self._ranks = ranks

    def publish(self, version: int, weights: Any) -> Any:
        from .host import Component

        trainer, params = Component(weights.backend.component), weights.params.open()
        return self._ranks.run("map", _publish, None, Component(ENGINE), trainer, params, version)


def _publish(engine: Any, trainer: Any, params: Any, version: int) -> None:
    engine.publish(version, trainer.weights(params))


def engine(plan: Plan, where: str) -> RolloutBackend:
    """Makes the engine of this process; only torchrun's first process samples, so others have no environments."""
    return build.rollout(plan.rollout, where) if torchrun_rank() else build.conversing(plan.rollout, where, plan.env)


def _follow(calls: Any) -> int:
    """Makes the calls of the first process until it ends, and returns the exit status of this one."""
    from .host import Host

    host, stops = Host(), list[int]()
    if threading.current_thread() is threading.main_thread():
        # The first process decides when to stop, and saves first.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stops.append(number))
    try:
        while (message := _broadcast(None, calls)) is not None:
            try:
                with _together(stops):
                    _repeat(message, host)
            except (ActorDied, ActorHangs):
                raise
            except Exception:
                continue  # the first process has the error too, and ends the run
    except RuntimeError as error:
        # Another process has ended. If this one ended now, torchrun would end the first before that has told why.
        time.sleep(2.0)
        if isinstance(error, ActorHangs):
            raise
        return 1
    return 0


def _repeat(message: bytes, host: Host) -> None:
    """Makes a call of the first process in this one."""
    drops, method, args = pickle.loads(message)
    host.drop(drops)
    getattr(host, method)(*args)


@contextlib.contextmanager
def _together(stops: list[int] | None = None) -> Iterator[None]:
    """Raises an error of any process in all of them, and passes a request to stop on to the first process.

    Args:
        stops: the signals that this process got; None in the first process: it handles its own.
    """
    from verl_fn.backends import agreement

    def gather(error: Exception | None) -> list[Exception | None]:
        try:
            both = agreement.gathered((error, bool(stops)))
        except RuntimeError as failure:
            raise _ended(failure, error) from failure
        # A second signal would stop the run at once.
        if stops is None and any(stop for _, stop in both) and signal.getsignal(signal.SIGTERM) != _AT_ONCE:
            os.kill(os.getpid(), signal.SIGTERM)
        return [error for error, _ in both]

    with agreement.agreed(gather):
        yield


def _ended(*errors: Exception | None) -> Exception:
    """Returns what errors of gloo mean; their type is the same for each, so only the messages tell."""
    if any("timed out" in str(error).lower() for error in errors):
        return ActorHangs(
            f"rank {torchrun_rank()} waited for another of torchrun's processes for longer than ray.timeout; raise "
            "ray.timeout if that one was still at work, such as reading a model or writing a checkpoint"
        )
    return ActorDied("another of torchrun's processes has ended; its output, or torchrun's, shows the reason")


def _broadcast(message: bytes | None, calls: Any) -> bytes | None:
    """Returns the first process's message in every process."""
    import torch.distributed as dist

    messages = [message]
    dist.broadcast_object_list(messages, src=0, group=calls)
    return messages[0]
