"""Training under torchrun: its first process runs the command, and the others repeat the calls of its backends.

Each process has its own shards of every state, and the first one has handles to them, as it has over Ray. Batches and
losses travel whole.
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
from typing import Any

from verl_fn import build
from verl_fn.algorithms.workers import Processes, Workers
from verl_fn.backends.protocol import RolloutBackend, Through, TrainBackend
from verl_fn.config import ConfigError
from verl_fn.config.plan import Plan
from verl_fn.driver.ranks import ActorDied, ActorHangs, process_group, torchrun_rank, torchrun_size
from verl_fn.state import Batch

# The first process may read data or wait for a download for hours before it makes a call.
_PATIENCE = timedelta(days=30)
ENGINE = "rollout"  # the name of the engine among the components of each process
_AT_ONCE = signal.default_int_handler
_ranks: Torchrun | None = None


@contextlib.contextmanager
def torchrun_workers(plan: Plan) -> Iterator[Workers]:
    """Makes the parts of a plan in each of torchrun's processes, for the first one to use."""
    with leading(plan) as led:
        assert led is not None, "there is only one process"
        where = build.device(plan.driver)
        trainers, rollout = led.parts(plan, where)
        processes = Processes(", ".join(build.libraries(plan.roles.values())), build.gpu_memory(where))
        yield Workers(trainers, rollout, **build.at_driver(plan), processes=processes)


@contextlib.contextmanager
def leading(plan: Plan) -> Iterator[Torchrun | None]:
    """Lets torchrun's first process lead the others: only it enters the body, and they follow its calls and exit.

    Yields:
        What makes calls in all of torchrun's processes; None without torchrun.

    Raises:
        ConfigError: torchrun started several processes for a plan that cannot use them.
        SystemExit: in all of torchrun's processes but the first, when the first one has left the body.
    """
    global _ranks
    if torchrun_size() == 1 or _ranks is not None:
        yield _ranks
        return
    _check_plan(plan, torchrun_size())
    with process_group(plan, torchrun_size()):
        import torch.distributed as dist

        led = Torchrun(dist.new_group(backend="gloo", timeout=_PATIENCE))
        if torchrun_rank() > 0:
            raise SystemExit(led.follow())
        _ranks = led
        try:
            yield led
        finally:
            led.end()
            _ranks = None


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
        from verl_fn.driver.host import Host

        self.host, self._calls = Host(), calls
        self.dropped: list[int] = []
        self._others_wait = True  # for the next call
        self._stops: list[int] = []

    def parts(self, plan: Plan, where: str) -> tuple[dict[str, TrainBackend], RolloutBackend]:
        """Makes the backends of a plan in every process; returns the training backends by role, and the engine."""
        from verl_fn.driver.remote import RemoteTrain

        self.run("map", build.set_up_process, None, plan.driver, torchrun_size())
        for role in plan.roles.values():
            self.run("build", role.name, build.trainer, role, plan.driver, where)
        self.run("build", ENGINE, _engine, plan, where)
        ranks: Any = self
        trainers: Any = {name: RemoteTrain(ranks, ranks, name) for name in plan.roles}
        return trainers, _Engine(self)

    def run(self, method: str, *args: Any) -> Any:
        """Calls a method of ``Host`` in every process, and returns the result of the first.

        Raises:
            Exception: the error of this process, or else the error of the first one that failed.
            ActorHangs: a process did not answer within ``ray.timeout``.
            ActorDied: a process has ended.
        """
        from ray import cloudpickle

        drops = self.dropped[:]
        del self.dropped[: len(drops)]
        message = cloudpickle.dumps((drops, method, args))
        self._others_wait = False
        self._broadcast(message)
        return self._make(message)

    def _make(self, message: bytes) -> Any:
        """Makes a call in this process; an error of any process is raised in all of them."""
        from verl_fn.backends.agreement import agreed

        with agreed(self._gather):
            drops, method, args = pickle.loads(message)
            self.host.drop(drops)
            return getattr(self.host, method)(*args)

    def _gather(self, error: Exception | None) -> list[Exception | None]:
        """Returns the error of each process; the first one also learns of requests to stop that others got."""
        from verl_fn.backends.agreement import gathered

        try:
            both = gathered((error, bool(self._stops)))
        except RuntimeError as failure:
            raise _ended(failure, error) from failure
        self._others_wait = True
        # A second signal would stop the run at once.
        first = torchrun_rank() == 0 and signal.getsignal(signal.SIGTERM) != _AT_ONCE
        if first and any(stop for _, stop in both):
            os.kill(os.getpid(), signal.SIGTERM)
        return [error for error, _ in both]

    def _broadcast(self, message: bytes | None) -> bytes | None:
        """Returns the first process's message in every process."""
        import torch.distributed as dist

        messages = [message]
        try:
            dist.broadcast_object_list(messages, src=0, group=self._calls)
        except RuntimeError as error:
            raise _ended(error) from error
        return messages[0]

    def follow(self) -> int:
        """Makes the calls of the first process until it ends, and returns the exit status of this one."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # The first process decides when to stop, and saves first.
            signal.signal(number, lambda number, frame: self._stops.append(number))
        try:
            while (message := self._broadcast(None)) is not None:
                try:
                    self._make(message)
                except (ActorDied, ActorHangs):
                    raise
                except Exception:
                    continue  # the first process has the error too, and ends the run
        except (ActorDied, ActorHangs) as error:
            # If this process ended now, torchrun would end the first one before that has told why.
            time.sleep(2.0)
            if isinstance(error, ActorHangs):
                raise
            return 1
        return 0

    def finish(self, group: Torchrun) -> None:
        """Returns at once, since every call has ended."""

    def stored(self, batch: Batch) -> Batch:
        """Returns the batch; it travels with each call."""
        return batch

    def end(self) -> None:
        """Lets the other processes end."""
        if self._others_wait:
            with contextlib.suppress(ActorDied, ActorHangs):
                self._broadcast(None)


class _Engine(Through):
    """The engine of the first process; to publish, all ranks read weights together, and each has an engine."""

    def __init__(self, ranks: Torchrun) -> None:
        super().__init__(ranks.host.components[ENGINE])
        self._ranks = ranks

    def publish(self, version: int, weights: Any) -> Any:
        from verl_fn.driver.host import Component

        trainer, params = Component(weights.backend.component), weights.params.open()
        return self._ranks.run("map", _publish, None, Component(ENGINE), trainer, params, version)


def _engine(plan: Plan, where: str) -> RolloutBackend:
    """Makes the engine of this process; only torchrun's first process samples, so others have no environments."""
    return build.rollout(plan.rollout, where) if torchrun_rank() else build.conversing(plan.rollout, where, plan.env)


def _publish(engine: Any, trainer: Any, params: Any, version: int) -> None:
    engine.publish(version, trainer.weights(params))


def _ended(*errors: Exception | None) -> Exception:
    """Returns what errors of gloo mean, for this process to end with it.

    The type of these errors is the same for each cause, so only the messages tell.
    """
    if threading.current_thread() is threading.main_thread():
        # torchrun ends all processes when one has ended; this one must not end before it has said why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if any("timed out" in str(error).lower() for error in errors):
        return ActorHangs(
            f"rank {torchrun_rank()} waited for another of torchrun's processes for longer than ray.timeout; raise "
            "ray.timeout if that one was still at work, such as reading a model or writing a checkpoint"
        )
    return ActorDied("another of torchrun's processes has ended; its output, or torchrun's, shows the reason")
