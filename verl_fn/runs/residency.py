"""Where engine and training states lie in a step on one GPU: an algorithm whose learning has the GPU for itself."""

from __future__ import annotations

import time
from typing import Any

import attrs

from verl_fn.algorithms import Algorithm, Experience, Report, Workers
from verl_fn.config import Plan
from verl_fn.driver import ranks

from .memory import offloads


def resting(plan: Plan, w: Workers) -> frozenset[str]:
    """Returns the roles whose training states lie on the CPU between steps, and on the GPU in ``learn``."""
    if w.gpu_memory is None or not offloads(plan, ranks.training_ranks(plan), w.gpu_memory):
        return frozenset()
    apart = plan.ray.separate if plan.driver.kind == "ray" else ()
    return frozenset(name for name, role in plan.roles.items() if name not in apart and not role.offload)


def on_one_gpu(algorithm: Algorithm[Any], plan: Plan, roles: frozenset[str], device: str = "cuda") -> Algorithm[Any]:
    """Returns the algorithm with a ``learn`` that puts the engine to sleep and moves states to the GPU and back.

    The engine drops its weights (level 2), since the next step publishes new ones. States lie on the CPU before and
    after ``learn``; a state on the CPU is never changed, so roles that are not trained are not copied back.

    Args:
        algorithm: the algorithm.
        plan: says whether the engine sleeps.
        roles: those whose states lie on the CPU; see ``resting``.
        device: where they learn.
    """
    if not plan.rollout.sleeps and not roles:
        return algorithm

    def learn(state: Any, experience: Experience, w: Workers) -> tuple[Any, Report]:
        if plan.rollout.sleeps:
            # Earlier calls of the engine end before it sleeps.
            w.get(w.rollout.sleep(2))
        start = time.perf_counter()
        near = {name: _placed(w, name, getattr(state, name), device) for name in roles}
        moved = time.perf_counter() - start
        after, report = algorithm.learn(attrs.evolve(state, **near), experience, w)
        start = time.perf_counter()
        trained = [name for name in roles if getattr(after, name) is not near[name]]
        back = {name: _placed(w, name, getattr(after, name), "cpu") for name in trained}
        moved += time.perf_counter() - start
        same = {name: getattr(state, name) for name in roles if name not in trained}
        after = attrs.evolve(after, **back, **same)
        return after, report | ({"timing_s/offload": moved} if roles else {})

    return attrs.evolve(algorithm, learn=learn)


def _placed(w: Workers, role: str, state: Any, device: str) -> Any:
    return w.trainers[role].place(state, params=device, optimizer=device)
