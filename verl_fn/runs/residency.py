"""Who has the GPU that engine and training ranks share: one at a time, in the phases of a step.

To draw, ranks give back memory that holds no values, the engine wakes and gets weights. To learn, the engine sleeps,
and training states that rest on the CPU come to the GPU and go back. An engine that shares no GPU never sleeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from verl_fn.algorithms import Algorithm, Clock, Experience, Report, Workers
from verl_fn.algorithms.experience import publish
from verl_fn.backends.protocol import HoldsBuffers
from verl_fn.config import Plan
from verl_fn.data.tasks import Problem
from verl_fn.driver import ranks

from .memory import offloads


def offloaded_roles(plan: Plan, gpu_memory: int | None) -> frozenset[str]:
    """Returns the roles whose training states lie on the CPU between steps, and on the GPU in ``learn``.

    Args:
        plan: the plan.
        gpu_memory: bytes of the GPU of a training rank; None where ranks compute on the CPU.
    """
    if gpu_memory is None or not offloads(plan, ranks.training_ranks(plan), gpu_memory):
        return frozenset()
    return frozenset(name for name in _sharing(plan) if not plan.roles[name].offload)


def _sharing(plan: Plan) -> list[str]:
    """Returns the roles whose ranks share the engine's GPUs."""
    apart = plan.ray.separate if plan.driver.kind == "ray" else ()
    return [name for name in plan.roles if name not in apart]


def give_to_engine(plan: Plan, w: Workers, actor: Any, version: int, clock: Clock) -> None:
    """Gives the engine the actor's weights, unless it has them; an engine that sleeps is awake afterwards.

    It wakes in stages, so that the memory of its cache is free while weights arrive.

    Args:
        plan: says whether the engine sleeps.
        w: the workers.
        actor: the actor's training state.
        version: the step of the weights.
        clock: measures the time of ``update_weights`` and ``gen``.
    """
    if w.rollout.version == version:
        return
    if plan.rollout.sleeps:
        clock.run("update_weights", _wake, plan, w, "weights")
    clock.run("update_weights", publish, w, actor, version)
    if plan.rollout.sleeps:
        clock.run("gen", _wake, plan, w, "cache")


def _wake(plan: Plan, w: Workers, part: str) -> None:
    """Wakes a part of the engine, after the ranks have ended their calls and have given memory back."""
    trainers = [w.trainers[name] for name in _sharing(plan)]
    w.get([trainer.map(release, trainer) for trainer in trainers])
    w.get(w.rollout.wake([part]))


def release(backend: object) -> None:
    """Gives memory that holds no values back to the GPU: a backend's buffers, and what torch keeps for later."""
    if isinstance(backend, HoldsBuffers):
        backend.free_buffers()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def on_one_gpu(algorithm: Algorithm[Any], plan: Plan, roles: frozenset[str], device: str = "cuda") -> Algorithm[Any]:
    """Returns the algorithm with a ``sample`` that has the engine awake, and a ``learn`` that has the GPU for itself.

    In ``learn`` the engine has dropped its weights (level 2), since the next step publishes new ones. States lie on
    the CPU before and after ``learn``; a state on the CPU is never changed, so roles that are not trained are not
    copied back.

    Args:
        algorithm: the algorithm.
        plan: says whether the engine sleeps.
        roles: the roles whose states lie on the CPU; see ``offloaded_roles``.
        device: where they learn.
    """
    if not plan.rollout.sleeps and not roles:
        return algorithm

    def sample(state: Any, problems: Sequence[Problem], w: Workers) -> Experience:
        clock = Clock(w.get)
        if algorithm.outline.learns_from == "samples":
            give_to_engine(plan, w, state.actor, state.step, clock)
        experience = algorithm.sample(state, problems, w)
        seconds = Counter(clock.seconds)
        seconds.update(experience.seconds)
        return attrs.evolve(experience, seconds=dict(seconds))

    def learn(state: Any, experience: Experience, w: Workers) -> tuple[Any, Report]:
        if plan.rollout.sleeps:
            w.get(w.rollout.sleep(2))
        clock = Clock(w.get)
        near = {name: clock.run("offload", _placed, w, name, getattr(state, name), device) for name in roles}
        after, report = algorithm.learn(attrs.evolve(state, **near), experience, w)
        trained = [name for name in roles if getattr(after, name) is not near[name]]
        back = {name: clock.run("offload", _placed, w, name, getattr(after, name), "cpu") for name in trained}
        same = {name: getattr(state, name) for name in roles if name not in trained}
        after = attrs.evolve(after, **back, **same)
        return after, report | {f"timing_s/{phase}": seconds for phase, seconds in clock.seconds.items()}

    return attrs.evolve(algorithm, sample=sample, learn=learn)


def _placed(w: Workers, role: str, state: Any, device: str) -> Any:
    return w.trainers[role].place(state, params=device, optimizer=device)
