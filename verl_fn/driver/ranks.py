"""The process group of training ranks: in Ray actors, under torchrun, or in a single process."""

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

# The driver reports a hang after ray.timeout. Collectives must time out later than that, or the ranks that wait would
# fail first and be reported in place of the one that hangs.
PATIENCE = 2.0


def join(place: tuple[str, int], rank: int, size: int, timeout: float, device: str, store: Any = None) -> None:
    """Makes this process a rank of the default process group.

    Args:
        place: host and port of the store.
        rank: the number of this process.
        size: the number of all ranks.
        timeout: ``ray.timeout``, in seconds.
        device: ``cpu`` or ``cuda``.
        store: the store, on the rank that opened it; others connect to it.
    """
    import torch.distributed as dist

    from verl_fn.backends.rendezvous import use_loopback

    use_loopback(place[0])
    if store is None:
        store = dist.TCPStore(*place, size, is_master=False, timeout=timedelta(seconds=timeout))
    dist.init_process_group(
        backends(device), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE * timeout + 60)
    )


def backends(device: str) -> str:
    """Returns the backends of the process group: NCCL for tensors on GPUs, gloo for tensors on the CPU."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def collectives() -> int:
    """Returns how many collectives this process has begun; a rank that others wait for has begun fewer."""
    import sys

    # A process that has not imported torch.distributed has begun none, and importing it here would take long.
    dist = sys.modules.get("torch.distributed.distributed_c10d")
    groups = () if dist is None else tuple(dist._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def torchrun_size() -> int:
    """Returns how many processes torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def torchrun_rank() -> int:
    """Returns the rank of this process under torchrun; 0 without torchrun."""
    return int(os.environ.get("RANK", "0")) if "WORLD_SIZE" in os.environ else 0


@contextlib.contextmanager
def process_group(plan: Plan) -> Iterator[None]:
    """Opens the process group that training in this process needs, and closes it at the end.

    Under torchrun all its processes form the group. Otherwise ``fsdp`` and ``megatron`` need a group of this
    process alone, and ``local`` needs none.

    Raises:
        ConfigError: torchrun started several processes for a plan that cannot use them.
    """
    size = torchrun_size()
    if size > 1:
        _check_torchrun(plan, size)
    elif plan.driver.kind == "ray" or all(role.strategy == "local" for role in plan.roles.values()):
        yield
        return
    import torch
    import torch.distributed as dist

    from verl_fn.backends.rendezvous import use_loopback

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


def _check_torchrun(plan: Plan, size: int) -> None:
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


def of_first(value: T) -> T:
    """Returns the first rank's value on every rank; without torchrun, ``value`` itself."""
    if torchrun_size() == 1:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gathered(value: T) -> list[T]:
    """Returns the values of all processes that torchrun started, by rank.

    Raises:
        ActorHangs: a process did not join within ``ray.timeout``.
        ActorDied: a process has ended.
        SystemExit: a process has ended, on all ranks but the first; the first rank reports the error.
    """
    if torchrun_size() == 1:
        return [value]
    from verl_fn.backends import agreement
    from verl_fn.driver.errors import ActorDied, ActorHangs

    try:
        return agreement.gathered(value)
    except RuntimeError as error:
        # Gloo raises plain RuntimeErrors, so only the message shows which error it is.
        if "timed out" in str(error).lower():
            raise ActorHangs(
                f"rank {torchrun_rank()} waited for another of torchrun's processes for longer than ray.timeout; "
                "raise ray.timeout if that one was still at work, such as reading data or writing a checkpoint"
            ) from error
        if torchrun_rank() > 0:
            end_after_first(1)
        raise ActorDied(
            "another of torchrun's processes has ended; its output, or torchrun's, shows the reason"
        ) from error


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Makes all ranks leave the body together; an error on one rank ends all, and the first rank reports it."""
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
    """Lets the first rank run the body before the other ranks do, which can then read what it wrote."""
    if torchrun_rank() > 0:
        with together():
            pass
    with together():
        yield
    if torchrun_rank() == 0:
        with together():
            pass


def end_after_first(status: int) -> NoReturn:
    """Ends this process after the first rank has ended.

    When any process ends, torchrun ends the others at once, and the first rank could not print its error.
    """
    with contextlib.suppress(RuntimeError):
        of_first(None)
    # The broadcast fails when the first rank closes its connections, shortly before it prints its error.
    time.sleep(2.0)
    raise SystemExit(status)


def device(driver: DriverConfig) -> str:
    """Returns the device that ``driver.device`` asks for."""
    import torch

    if driver.device != "auto":
        return driver.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_memory(device: str) -> int | None:
    """Returns the bytes of this process's GPU; None on a CPU, and for a plan for a GPU that is not here.

    Example:
        >>> gpu_memory("cpu") is None
        True
    """
    import torch

    if device != "cuda" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def training_ranks(plan: Plan) -> int:
    """Returns how many processes train a role: Ray's, torchrun's, or this process alone."""
    return plan.ray.ranks if plan.driver.kind == "ray" else torchrun_size()
