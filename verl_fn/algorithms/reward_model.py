"""A reward model: a value head that scores whole responses, trained on pairs (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_fn.config.algorithms import RewardModel
from verl_fn.data.tasks import Problem
from verl_fn.state import Key, Node, node
from verl_fn.steps import bradley_terry, total_loss

from .contract import Algorithm, Experience, Report
from .experience import update
from .judged import held_out_pairs, pair_batch, pair_report
from .reports import timing_report, update_report
from .workers import Clock, Workers


@node
class RewardModelState(Node):
    """The state of a run that trains a reward model, its actor."""

    actor: Any
    key: Key
    step: int


def reward_model(options: RewardModel) -> Algorithm[RewardModelState]:
    """Makes the training of a reward model: a step is one update on the pairs of its problems.

    Its folder serves as the reward of ``ppo`` and ``grpo`` (``algorithm.reward_model``).

    Example:
        >>> reward_model(RewardModel()).outline.roles["actor"].head
        'value'

    Source:
        Ouyang et al. 2022, arXiv 2203.02155.
    """
    loss = bradley_terry(center_rewards_coefficient=options.center_rewards_coefficient)

    def init(states: Mapping[str, Any], key: Key) -> RewardModelState:
        return RewardModelState(states["actor"], key, step=0)

    def sample(state: RewardModelState, problems: Sequence[Problem], w: Workers) -> Experience:
        batch = pair_batch(problems, w)
        return Experience(batch, len(problems), report={"train/global_tokens": float(batch.num_tokens)})

    def learn(state: RewardModelState, experience: Experience, w: Workers) -> tuple[RewardModelState, Report]:
        clock = Clock(w.get, experience.seconds)
        batches = [experience.batch]
        actor, metrics = clock.run("update_actor", update, w.trainers["actor"], state.actor, batches, loss)
        report = update_report("train", metrics) | experience.report
        report |= timing_report(clock, report["train/global_tokens"])
        return RewardModelState(actor, state.key, state.step + 1), report

    def evaluate(state: RewardModelState, problems: Sequence[Problem], w: Workers) -> Report:
        pairs = held_out_pairs(problems)
        batch = pair_batch(pairs, w)
        outputs = w.get(w.trainers["actor"].forward(state.actor.params, batch, ("row_values",)))
        report = {"val/loss": float(total_loss(loss, outputs, batch)[0])}
        return report | pair_report(pairs, outputs.row_values, "val-core", "acc/mean@1")

    return Algorithm(init=init, sample=sample, learn=learn, outline=options.outline, evaluate=evaluate)
