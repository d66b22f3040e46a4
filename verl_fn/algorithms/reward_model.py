"""A reward model: a value head that scores whole responses, trained on pairs (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Sequence

from verl_fn.config.algorithms import RewardModel
from verl_fn.data.tasks import Problem
from verl_fn.steps import bradley_terry, total_loss

from .algorithm import ActorState, Algorithm
from .contract import Experience, Report
from .experience import update
from .judged import held_out_pairs, pair_batch, pair_report
from .reports import timing_report, update_report
from .workers import Clock, Workers


def reward_model(options: RewardModel) -> Algorithm[ActorState]:
    """Makes the training of a reward model: a step is one update on the pairs of its problems.

    Its folder serves as the reward of ``ppo`` and ``grpo`` (``algorithm.reward_model``).

    Example:
        >>> reward_model(RewardModel()).outline.roles["actor"].head
        'value'

    Source:
        Ouyang et al. 2022, arXiv 2203.02155.
    """
    loss = bradley_terry(center_rewards_coefficient=options.center_rewards_coefficient)

    def sample(state: ActorState, problems: Sequence[Problem], w: Workers) -> Experience:
        batch = pair_batch(problems, w)
        return Experience(batch, len(problems), report={"train/global_tokens": float(batch.num_tokens)})

    def learn(state: ActorState, experience: Experience, w: Workers) -> tuple[ActorState, Report]:
        clock = Clock(w.get, experience.seconds)
        batches = [experience.batch]
        actor, metrics = clock.run("update_actor", update, w.trainers["actor"], state.actor, batches, loss)
        report = update_report("train", metrics) | experience.report
        report |= timing_report(clock, report["train/global_tokens"])
        return ActorState(actor, state.key, state.step + 1), report

    def evaluate(state: ActorState, problems: Sequence[Problem], w: Workers) -> Report:
        pairs = held_out_pairs(problems)
        batch = pair_batch(pairs, w)
        outputs = w.get(w.trainers["actor"].forward(state.actor.params, batch, ("row_values",)))
        report = {"val/loss": float(total_loss(loss, outputs, batch)[0])}
        return report | pair_report(pairs, outputs.row_values, "val-core", "acc/mean@1")

    return Algorithm(sample=sample, learn=learn, outline=options.outline, evaluate=evaluate)
