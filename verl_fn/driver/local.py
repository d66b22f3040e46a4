"""Runs in this process, which under torchrun makes the calls of the others too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from verl_fn import build
from verl_fn.algorithms.workers import Processes, Workers
from verl_fn.config.plan import Plan

from .ranks import gpu_memory
from .torchrun import process_group


@contextlib.contextmanager
def local_workers(plan: Plan) -> Iterator[Workers]:
    """Makes the parts of a plan in this process; under torchrun, every process makes backends of its own."""
    with process_group(plan) as ranks:
        where = build.device(plan.driver)
        if ranks is None:
            build.set_up_process(plan.driver, 1)
            trainers = {name: build.trainer(role, plan.driver, where) for name, role in plan.roles.items()}
            rollout = build.conversing(plan.rollout, where, plan.env)
        else:
            trainers, rollout = ranks.parts(plan, where)
        processes = Processes(", ".join(build.libraries(plan.roles.values())), gpu_memory(where))
        yield Workers(trainers, rollout, **build.at_driver(plan), processes=processes)
