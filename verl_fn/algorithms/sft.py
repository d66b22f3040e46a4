"""Supervised fine-tuning on a task's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_fn.algorithms.experience import loss_scale, timing_report, update, update_report
from verl_fn.algorithms.workers import Clock, Workers
from verl_fn.config.schema import Config
from verl_fn.data.tasks import Problem
from verl_fn.rewards.reward import pack_examples
from verl_fn.state import Key, Node, node
from verl_fn.steps import aggregate, cross_entropy


@node
class SFTState(Node):
    """All that a fine-tuning run is."""

    actor: Any
    key: Key
    step: int
    cursor: int


def new(cfg: Config, key: Key) -> SFTState:
    """The state before the first step, its model still to be loaded."""
    return SFTState(actor=None, key=key, step=0, cursor=0)


def step(state: SFTState, problems: Sequence[Problem], w: Workers, cfg: Config) -> tuple[SFTState, dict[str, float]]:
    """One update on the answers to ``problems``. ``state`` is spent: its actor is donated."""
    clock = Clock(w.wait)
    batch = aggregate(
        pack_examples(problems, w.tokenizer), cfg.algorithm.loss_agg_mode, loss_scale_factor=loss_scale(cfg)
    )
    actor, updates = clock.run("update_actor", update, w.actor, state.actor, [batch], cross_entropy())
    report = update_report("train", w.get(updates))
    tokens = float(batch.num_tokens)
    report |= {"train/global_tokens": tokens} | timing_report(clock, tokens)
    return SFTState(actor, state.key, state.step + 1, state.cursor + len(problems)), report
