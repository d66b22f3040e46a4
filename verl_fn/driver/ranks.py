"""The process group of training ranks: inside Ray actors, under torchrun, or of one process alone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from verl_fn.config import ConfigError
from verl_fn.config.plan import Plan
from verl_fn.config.schema import DriverConfig

T = TypeVar("T")

# The driver tells a hang after ray.timeout. Waiting ranks must not give up before, or they would be blamed.
PATIENCE = 2.0


def open_store(address: str, size: int, timeout: float) -> Any:
    """A store on a free port, where ``size`` ranks find each other."""
    import torch.distributed as dist

    return dist.TCPStore(address, 0, size, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def join(place: tuple[str, int], rank: int, size: int, timeout: float, device: str, store: Any = None) -> None:
    """Make this process a rank of the default process group. The first rank gives the store that it opened."""
    import torch.distributed as dist

    if place[0] == "127.0.0.1":
        # The host's name need not resolve where all ranks are on one machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if store is None:
        store = dist.TCPStore(*place, size, is_master=False, timeout=timedelta(seconds=timeout))
    dist.init_process_group(
        backends(device), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE * timeout + 60)
    )


def backends(device: str) -> str:
    """The process group's backends: what lies on the CPU travels over gloo also where there are GPUs."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def collectives() -> int:
    """How many collectives this process has begun; ranks that wait for another are ahead of it."""
    import sys

    # Not imported for the sake of counting: a process that has none never did.
    dist = sys.modules.get("torch.distributed.distributed_c10d")
    groups = () if dist is None else tuple(dist._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def torchrun_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def torchrun_rank() -> int:
    """This process's rank under torchrun; 0 without it."""
    return int(os.environ.get("RANK", "0")) if "WORLD_SIZE" in os.environ else 0


@contextlib.contextmanager
def process_group(plan: Plan) -> Iterator[None]:
    """Opens the process group that training in this process needs: torchrun's, one of this process alone, or none.

    Raises:
        ConfigError: torchrun started several processes for what only one process can do.
    """
    size = torchrun_size()
    if size > 1:
        _check_torchrun(plan, size)
    elif plan.driver.kind == "ray" or all(role.strategy == "local" for role in plan.roles.values()):
        yield
        return
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    on = device(plan.driver)
    if on == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=plan.ray.timeout)
    if size > 1:
        dist.init_process_group(backends(on), timeout=timeout)
    else:
        dist.init_process_group(backends(on), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_torchrun(plan: Plan, size: int) -> None:
    if plan.driver.kind == "ray":
        raise ConfigError(
            "driver.kind=ray starts its training processes itself: run it without torchrun and set ray.ranks, or set "
            "driver.kind=local to fine-tune (algorithm.name=sft) under torchrun"
        )
    if plan.algorithm != "sft":
        raise ConfigError(
            f"torchrun trains algorithm.name=sft only; for {plan.algorithm} set driver.kind=ray and ray.ranks={size}, "
            "and run it without torchrun"
        )


def of_first(value: T) -> T:
    """The value of the first rank, on every rank; ``value`` itself where there is one process."""
    if torchrun_size() == 1:
        return value
    import torch.distributed as dist

    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def gathered(value: T) -> list[T]:
    """The values of all processes that torchrun started, by rank.

    Raises:
        ActorHangs: one of them did not come within ``ray.timeout``.
        ActorDied: one of them has ended.
        SystemExit: the same, on all ranks but the first, which tells.
    """
    if torchrun_size() == 1:
        return [value]
    from verl_fn.backends import agreement
    from verl_fn.driver.errors import ActorDied, ActorHangs

    try:
        return agreement.gathered(value)
    except RuntimeError as error:
        # Gloo has no types of its own for these.
        if "timed out" in str(error).lower():
            raise ActorHangs(
                f"rank {torchrun_rank()} waited for another of torchrun's processes for longer than ray.timeout; "
                "raise ray.timeout if that one was still at work, such as reading data or writing a checkpoint"
            ) from error
        if torchrun_rank() > 0:
            end_after_first(1)
        raise ActorDied(
            "another of torchrun's processes has ended; what it said, or torchrun of it, tells why"
        ) from error


@contextlib.contextmanager
def together() -> Iterator[None]:
    """All ranks leave the body together. What goes wrong in it on one ends all of them, and the first one tells."""
    from verl_fn.backends.agreement import agreed

    try:
        with agreed(gathered):
            yield
    except (OSError, ValueError):
        if torchrun_rank() > 0:
            end_after_first(1)
        raise


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """The first rank goes through the body before all others do, which find what it wrote; all leave it together."""
    if torchrun_rank() > 0:
        with together():
            pass
    with together():
        yield
    if torchrun_rank() == 0:
        with together():
            pass


def end_after_first(status: int) -> NoReturn:
    """End this process after the first one: torchrun ends all others when one has ended, whatever they still do."""
    with contextlib.suppress(RuntimeError):
        of_first(None)
    # It has closed its connections, and says why right after that.
    time.sleep(2.0)
    raise SystemExit(status)


def device(driver: DriverConfig) -> str:
    """Returns the device that ``driver.device`` asks for."""
    import torch

    if driver.device != "auto":
        return driver.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def training_ranks(plan: Plan) -> int:
    """Returns how many processes train a role: Ray's, torchrun's, or this one."""
    return plan.ray.ranks if plan.driver.kind == "ray" else torchrun_size()
