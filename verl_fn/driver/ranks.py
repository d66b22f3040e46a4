"""Training ranks: how many there are, their devices, their process group, their errors; or one, in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from verl_fn import build
from verl_fn.algorithms.workers import Processes, Workers
from verl_fn.config.plan import Plan
from verl_fn.errors import UserError


class ActorDied(UserError, RuntimeError):
    """A worker's process ended; the message has its error and the end of its log."""


class ActorHangs(UserError, RuntimeError):
    """A worker, ``member``, makes no progress while others wait for it; the message has its stack."""

    def __init__(self, message: str, member: Any = None) -> None:
        super().__init__(message)
        self.member = member


def backends(device: str) -> str:
    """Returns the backends of the process group: NCCL for tensors on GPUs, gloo for tensors on the CPU."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def torchrun_size() -> int:
    """Returns how many processes torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def torchrun_rank() -> int:
    """Returns the rank of this process under torchrun; 0 without torchrun."""
    return int(os.environ.get("RANK", "0")) if "WORLD_SIZE" in os.environ else 0


def training_ranks(plan: Plan) -> int:
    """Returns how many processes train a role: Ray's, torchrun's, or only this process."""
    return plan.ray.ranks if plan.driver.kind == "ray" else torchrun_size()


@contextlib.contextmanager
def local_workers(plan: Plan) -> Iterator[Workers]:
    """Makes the parts of a plan in this process."""
    where = build.device(plan.driver)
    grouped = any(role.strategy != "local" for role in plan.roles.values())
    with process_group(plan, size=1) if grouped else contextlib.nullcontext():
        build.set_up_process(plan.driver, 1, by_user=True)
        trainers = {name: build.trainer(role, plan.driver, where) for name, role in plan.roles.items()}
        rollout = build.conversing(plan.rollout, where, plan.env)
        processes = Processes(", ".join(build.libraries(plan.roles.values())), build.gpu_memory(where))
        yield Workers(trainers, rollout, **build.at_driver(plan), processes=processes)


@contextlib.contextmanager
def process_group(plan: Plan, size: int) -> Iterator[None]:
    """Opens a process group of ``size`` processes that torchrun has started, or of this one, for the body."""
    import torch
    import torch.distributed as dist

    from verl_fn.backends.agreement import use_loopback

    if dist.is_initialized():
        yield
        return
    kind = build.device(plan.driver)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if size == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        use_loopback("127.0.0.1")
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
    dist.init_process_group(backends(kind), timeout=timedelta(seconds=plan.ray.timeout), **alone)
    try:
        yield
    finally:
        dist.destroy_process_group()
