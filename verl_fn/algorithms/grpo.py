"""Group-relative policy optimization (Shao et al. 2024, arXiv 2402.03300), and its relatives without a critic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_fn import steps
from verl_fn.config.algorithms import GRPO, RLOO, PolicyOptimization
from verl_fn.data.tasks import Problem
from verl_fn.state import Batch, Key, Node, node
from verl_fn.steps import AdaptiveKL, FixedKL

from .algorithm import Algorithm
from .by_conversation import by_conversation
from .contract import Experience, Report
from .experience import annotate, draw, kl_controller, kl_in_reward, selecting, update, update_batches
from .model_reward import score_by_model
from .policy import actor_outputs, corrected, estimator, policy_loss, selection
from .reports import batch_report, timing_report, update_report
from .workers import Clock, Workers


@node
class GRPOState(Node):
    """The state of a GRPO run; it has the fields of ``PPOState`` except the critic."""

    actor: Any
    reference: Any
    kl: FixedKL | AdaptiveKL
    key: Key
    step: int
    reward_model: Any = None


def grpo(options: GRPO) -> Algorithm[GRPOState]:
    """Makes GRPO: a step samples groups of responses, compares rewards within each group, and updates the actor.

    Example:
        >>> grpo(GRPO(adv_estimator="rloo")).outline.min_n
        2

    Source:
        Shao et al. 2024, arXiv 2402.03300.
    """
    return without_critic(options, estimator(options), outputs=actor_outputs(options))


def rloo(options: RLOO) -> Algorithm[GRPOState]:
    """Makes RLOO: GRPO in which the baseline of a response is the mean reward of the others in its group.

    Example:
        >>> rloo(RLOO()).outline.min_n
        2

    Source:
        Ahmadian et al. 2024, arXiv 2402.14740.
    """
    return without_critic(options, corrected(functools.partial(by_conversation, estimate=steps.rloo), options))


def without_critic(
    options: PolicyOptimization,
    advantages: Callable[[Batch], Batch],
    sample: Callable[[GRPOState, Sequence[Problem], Workers], Experience] | None = None,
    *,
    outputs: tuple[str, ...] = ("logprobs", "entropy"),
    shape: Callable[[Batch, int], Batch] | None = None,
) -> Algorithm[GRPOState]:
    """Makes an algorithm that updates the actor alone.

    Args:
        options: its options.
        advantages: the estimator.
        sample: draws the experience of a step; by default ``draw``.
        outputs: the actor's outputs that the step reads; see ``annotate``.
        shape: changes the rewards of a scored batch, given the longest response allowed; by default they stay.
    """
    loss, outline, chosen = policy_loss(options), options.outline, selection(options)

    def init(states: Mapping[str, Any], key: Key) -> GRPOState:
        reference = states.get("reference")
        kl, judge = kl_controller(options), states.get("reward_model")
        return GRPOState(states["actor"], reference, kl, key, step=0, reward_model=judge)

    def learn(state: GRPOState, experience: Experience, w: Workers) -> tuple[GRPOState, Report]:
        clock, key = Clock(w.get, experience.seconds), state.key.fold_in(state.step)
        batch = experience.batch
        if state.reward_model is not None:
            batch = score_by_model(batch, state.reward_model, w, clock)
        if shape is not None:
            batch = shape(batch, w.sampling.max_tokens)
        batch = annotate(batch, state, w, clock, reference="reference" in outline.roles, outputs=outputs)
        batch, kl, report = kl_in_reward(batch, state.kl, options)
        batch = clock.run("adv", advantages, batch)
        batches = update_batches(w, batch, experience.problems, options, key.fold_in("minibatches"), loss)
        select = selecting(w.trainers["actor"], chosen, w, key.fold_in("selection"))
        actor, metrics = clock.run("update_actor", update, w.trainers["actor"], state.actor, batches, loss, select)

        of_batch = batch_report(batch, compares=outline.min_n > 1)
        report |= update_report("actor", metrics) | experience.report | of_batch
        report |= timing_report(clock, report["perf/total_num_tokens"])
        return GRPOState(actor, state.reference, kl, state.key, state.step + 1, state.reward_model), report

    sample = sample or functools.partial(draw, score=outline.needs_reward)
    return Algorithm(init=init, sample=sample, learn=learn, outline=outline)
