"""The local driver: all parts of a run live in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from verl_fn.algorithms.workers import Workers
from verl_fn.backends.hf.tokenizer import end_tokens
from verl_fn.config.plan import Plan

from . import build, ranks


@contextlib.contextmanager
def local_workers(plan: Plan) -> Iterator[Workers]:
    """Makes the parts of a plan in this process; under torchrun, every process makes its own."""
    build.set_up_process(plan.driver, ranks.torchrun_size())
    device = ranks.device(plan.driver)
    tokenizer = build.policy_tokenizer(plan.rollout)
    with ranks.process_group(plan):
        yield Workers(
            trainers={name: build.trainer(role, plan.driver, device) for name, role in plan.roles.items()},
            rollout=build.conversing(plan.rollout, device, plan.env),
            reward=build.reward(plan.reward, plan.model, env=plan.env.name, replies=plan.trainer.dir),
            tokenizer=tokenizer,
            sampling=build.sampling(plan.rollout),
            max_prompt_length=plan.rollout.max_prompt_length,
            truncation=plan.data.truncation,
            end_tokens=end_tokens(plan.model, tokenizer),
            about=build.libraries(plan.roles.values()),
            converses=bool(plan.env.name),
            gpu_memory=ranks.gpu_memory(device),
            router_replay=plan.roles["actor"].router_replay,
            gives_likeliest=plan.roles["actor"].strategy != "megatron",
        )
