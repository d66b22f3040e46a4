"""Runs in this process only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from verl_fn import build
from verl_fn.algorithms.workers import Processes, Workers
from verl_fn.config.plan import Plan

from .ranks import process_group


@contextlib.contextmanager
def local_workers(plan: Plan) -> Iterator[Workers]:
    """Makes the parts of a plan in this process."""
    where = build.device(plan.driver)
    with contextlib.ExitStack() as stack:
        if any(role.strategy != "local" for role in plan.roles.values()):
            stack.enter_context(process_group(plan, size=1))
        build.set_up_process(plan.driver, 1)
        trainers = {name: build.trainer(role, plan.driver, where) for name, role in plan.roles.items()}
        rollout = build.conversing(plan.rollout, where, plan.env)
        processes = Processes(", ".join(build.libraries(plan.roles.values())), build.gpu_memory(where))
        yield Workers(trainers, rollout, **build.at_driver(plan), processes=processes)
