"""What an error of an actor means: whose error it is, its own class, and the end of the actor's log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_fn.errors import UserError

from . import ray_private
from .errors import ActorDied
from .group import Member

LOG_TAIL_LINES = 20
NODE_SECONDS = 20


def death_of(member: Member) -> ActorDied:
    """Returns an error about a member that has ended, with the end of its log."""
    try:
        ray.get(member.sentinel)
        reason = "it returned"
    except ray.exceptions.ActorUnavailableError:
        reason = "its process ended"
    except ray.exceptions.RayError as error:
        reason = str(error)
    tail = on_node(member.node, tails_of, member.logs) or ["(its log cannot be read)"]
    end = "\n  ".join(tail)
    return ActorDied(
        f"{member.name} (pid {member.pid}) died: {reason}\nits log ends:\n  {end}\n"
        "The same command continues from the last checkpoint"
    )


def not_started(name: str, seconds: float) -> ActorDied:
    """Returns an error about an actor that has not started, with what Ray's processes on this machine wrote last."""
    end = "\n  ".join(ray_private.last_messages(LOG_TAIL_LINES)) or "(none)"
    return ActorDied(
        f"{name} did not start in {seconds:g} s. If ray.runtime_env sets py_executable, try whether it runs "
        f"`-c 'import ray'`. The last messages of Ray are:\n  {end}"
    )


def of_others(error: Exception) -> bool:
    """Returns whether an error only means that another rank failed."""
    import torch.distributed as dist

    if isinstance(error, ray.exceptions.RayActorError):
        return True
    cause = cause_of(error)
    message = str(cause).lower()
    return isinstance(cause, dist.DistError) or "gloo" in message or "nccl" in message


def cause_of(error: Exception) -> Exception:
    """Returns what a worker raised, without Ray's traceback around it."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error


def unwrapped_error(error: Exception, name: str = "") -> Exception:
    """Returns a worker's error with its own class."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return ActorDied(f"{name}: {error}")
    unwrapped = error.cause if isinstance(error.cause, UserError) else error.as_instanceof_cause()
    if name:
        unwrapped.add_note(f"raised in {name}")
    return unwrapped


def on_node(node: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Returns ``fn(*args)``, applied on a node of the cluster; None where that node does not answer."""
    if node == ray.get_runtime_context().get_node_id():
        return fn(*args)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    with contextlib.suppress(ray.exceptions.RayError):
        task = ray.remote(num_cpus=0, max_retries=0)(fn).options(scheduling_strategy=there)
        return ray.get(task.remote(*args), timeout=NODE_SECONDS)
    return None


def tails_of(logs: Sequence[str]) -> list[str]:
    """Returns the last lines of log files, without Ray's own marks."""
    tails = []
    for log in logs:
        with contextlib.suppress(OSError):
            lines = Path(log).read_text(errors="replace").splitlines()
            tails += [line for line in lines if not line.startswith(":")][-LOG_TAIL_LINES:]
    return tails or ["(empty)"]
