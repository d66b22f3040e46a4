"""The local driver: all parts of a run live in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verl_fn.algorithms.workers import Workers
from verl_fn.backends.hf.tokenizer import end_tokens
from verl_fn.config.plan import Plan

from . import build, ranks, torchrun


@contextlib.contextmanager
def local_workers(plan: Plan) -> Iterator[Workers]:
    """Makes the parts of a plan in this process; under torchrun, every process makes its own backends."""
    with torchrun.process_group(plan) as leader:
        backends = _backends(plan) if leader is None else leader.make(_backends, plan)
        rollout, device = backends.pop(torchrun.ENGINE), ranks.device(plan.driver)
        tokenizer = build.policy_tokenizer(plan.rollout)
        yield Workers(
            trainers=backends,
            rollout=rollout,
            reward=build.reward(plan.reward, plan.model, env=plan.env.name, replies=plan.trainer.dir),
            tokenizer=tokenizer,
            sampling=build.sampling(plan.rollout),
            max_prompt_length=plan.data.max_prompt_length,
            truncation=plan.data.truncation,
            end_tokens=end_tokens(plan.model, tokenizer),
            about=build.libraries(plan.roles.values()),
            converses=bool(plan.env.name),
            gpu_memory=ranks.gpu_memory(device),
            router_replay=plan.roles["actor"].router_replay,
            gives_likeliest=plan.roles["actor"].strategy != "megatron",
        )


def _backends(plan: Plan) -> dict[str, Any]:
    """Returns the training backend of each role by its name, and the engine.

    Under torchrun only the first process samples, so the engines of the others have no environments.
    """
    build.set_up_process(plan.driver, ranks.torchrun_size())
    device = ranks.device(plan.driver)
    trainers = {name: build.trainer(role, plan.driver, device) for name, role in plan.roles.items()}
    if ranks.torchrun_rank() == 0:
        return {**trainers, torchrun.ENGINE: build.conversing(plan.rollout, device, plan.env)}
    return {**trainers, torchrun.ENGINE: build.rollout(plan.rollout, device)}
