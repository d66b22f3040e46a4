"""Supervised fine-tuning on the problems' own answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_fn.config.algorithms import SFT
from verl_fn.data.examples import pack_examples
from verl_fn.data.tasks import Problem
from verl_fn.state import Key, Node, node
from verl_fn.steps import aggregate, cross_entropy

from .contract import Algorithm, Experience, Report
from .experience import loss_scale, update
from .policy import aggregation
from .reports import timing_report, update_report
from .workers import Clock, Workers


@node
class SFTState(Node):
    """The state of a fine-tuning run."""

    actor: Any
    key: Key
    step: int


def sft(options: SFT) -> Algorithm[SFTState]:
    """Makes supervised fine-tuning: a step is one update on the answers to its problems.

    Example:
        >>> list(sft(SFT()).roles)
        ['actor']
    """

    def init(states: Mapping[str, Any], key: Key) -> SFTState:
        return SFTState(states["actor"], key, step=0)

    def sample(state: SFTState, problems: Sequence[Problem], w: Workers) -> Experience:
        batch = pack_examples(problems, w.tokenizer, w.end_tokens)
        batch = aggregate(batch, aggregation(options), loss_scale_factor=loss_scale(options, w))
        return Experience(batch, len(problems), report={"train/global_tokens": float(batch.num_tokens)})

    def learn(state: SFTState, experience: Experience, w: Workers) -> tuple[SFTState, Report]:
        clock = Clock(w.wait, experience.seconds)
        batches = [experience.batch]
        actor, metrics = clock.run("update_actor", update, w.trainers["actor"], state.actor, batches, cross_entropy())
        report = update_report("train", w.get(metrics)) | experience.report
        report |= timing_report(clock, report["train/global_tokens"])
        return SFTState(actor, state.key, state.step + 1), report

    return Algorithm(options.roles, init, sample, learn, options.updates, options.min_n, "answers", False)
