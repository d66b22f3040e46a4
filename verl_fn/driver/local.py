"""All parts in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from verl_fn.algorithms.workers import Workers
from verl_fn.config import plan
from verl_fn.config.schema import Config

from . import build, ranks


@contextlib.contextmanager
def local_workers(cfg: Config) -> Iterator[Workers]:
    """The parts that ``cfg`` asks for, in this process; under torchrun, in each of its processes."""
    build.set_up_process(cfg)
    with ranks.process_group(cfg):
        training = {role: build.trainer(cfg, role) for role in plan.roles(cfg)}
        yield Workers(
            rollout=build.rollout(cfg),
            reward=build.reward(cfg),
            tokenizer=build.tokenizer(cfg),
            **training,
        )
