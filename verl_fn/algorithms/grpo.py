"""Group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300), and its kin without a critic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from verl_fn.algorithms.experience import batch_report, collect, timing_report, update, update_batches, update_report
from verl_fn.algorithms.ppo import kl_controller, policy_loss
from verl_fn.algorithms.workers import Clock, Workers
from verl_fn.config.schema import Config
from verl_fn.data.tasks import Problem
from verl_fn.state import Batch, Key, Node, node
from verl_fn.steps import AdaptiveKL, FixedKL, apply_kl_in_reward, grpo, reinforce_plus_plus, rloo


@node
class GRPOState(Node):
    """All that a GRPO run is; the fields are those of ``PPOState`` less the critic."""

    actor: Any
    reference: Any
    kl: FixedKL | AdaptiveKL
    key: Key
    step: int
    cursor: int


def new(cfg: Config, key: Key) -> GRPOState:
    """The state before the first step, its roles still to be loaded."""
    return GRPOState(actor=None, reference=None, kl=kl_controller(cfg), key=key, step=0, cursor=0)


def step(
    state: GRPOState, problems: Sequence[Problem], w: Workers, cfg: Config
) -> tuple[GRPOState, dict[str, float]]:
    """Sample groups, compare within them, update the actor. ``state`` is spent: its actor is donated."""
    a, clock, key = cfg.algorithm, Clock(w.wait), state.key.fold_in(state.step)

    batch = collect(state.actor, state.reference, problems, w, cfg, key, state.step, clock)
    kl, report = state.kl, {}
    if a.use_kl_in_reward:
        batch, kl, found = w.call(apply_kl_in_reward, batch, kl, a.kl_penalty, returns=3)
        kl, found = w.get((kl, found))
        report |= update_report("actor", [(found, {})])
    batch = clock.run("adv", w.call, estimator(cfg), batch)
    batches = update_batches(w, batch, len(problems) * cfg.rollout.n, cfg, key.fold_in("minibatches"))

    actor, updates = clock.run("update_actor", update, w.actor, state.actor, batches, policy_loss(cfg))
    report |= update_report("actor", w.get(updates))

    report |= w.get(w.call(batch_report, batch, cfg.data.max_response_length))
    report |= timing_report(clock, report["perf/total_num_tokens"])
    new = GRPOState(actor, state.reference, kl, state.key, state.step + 1, state.cursor + len(problems))
    return new, report


def estimator(cfg: Config) -> Callable[[Batch], Batch]:
    """The advantage estimator that ``algorithm.adv_estimator`` names."""
    a = cfg.algorithm
    return {
        "grpo": functools.partial(grpo, norm_adv_by_std=a.norm_adv_by_std_in_grpo),
        "rloo": rloo,
        "reinforce_plus_plus": functools.partial(reinforce_plus_plus, gamma=a.gamma),
    }[a.adv_estimator or "grpo"]
