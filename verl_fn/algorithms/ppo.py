"""Proximal policy optimization with a critic (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_fn.config.algorithms import PPO
from verl_fn.state import Key, Node, node
from verl_fn.steps import AdaptiveKL, FixedKL, value_clip

from .algorithm import Algorithm
from .exact import check_of_updates
from .experience import annotate, kl_controller, kl_in_reward, score_by_model, selecting, update, update_batches
from .policy import estimator, policy_loss, selection
from .reports import batch_report, timing_report, update_report
from .workers import Clock, Experience, Report, Workers


@node
class PPOState(Node):
    """The state of a PPO run; saving it saves everything that a resumed run needs.

    Attributes:
        actor, critic, reference: training states, or handles to them. ``reference`` is None without a KL term, and
            with LoRA, where the actor's frozen base is the reference.
        kl: the controller of the KL penalty in the reward.
        key: the run's key; each step derives a key of its own from it and ``step``.
        step: the number of steps done.
        reward_model: the training state of a reward model, or a handle to it; None where others give the reward.
    """

    actor: Any
    critic: Any
    reference: Any
    kl: FixedKL | AdaptiveKL
    key: Key
    step: int
    reward_model: Any = None


def ppo(options: PPO) -> Algorithm[PPOState]:
    """Makes PPO: a step samples, estimates advantages, and updates critic and actor.

    Example:
        >>> ppo(PPO(lam=0.95, critic_warmup=20)).outline.updates("actor", 256, 100)
        80

    Source:
        Schulman et al. 2017, arXiv 1707.06347.
    """
    advantages, actor_loss = estimator(options), policy_loss(options)
    critic_loss = value_clip(options.cliprange_value)
    outline, chosen = options.outline, selection(options)

    def init(states: Mapping[str, Any], key: Key) -> PPOState:
        return PPOState(
            actor=states["actor"],
            critic=states["critic"],
            reference=states.get("reference"),
            kl=kl_controller(options),
            key=key,
            step=0,
            reward_model=states.get("reward_model"),
        )

    def learn(state: PPOState, experience: Experience, w: Workers) -> tuple[PPOState, Report]:
        clock, key = Clock(w.get, experience.seconds), state.key.fold_in(state.step)
        batch = experience.batch
        if state.reward_model is not None:
            batch = score_by_model(batch, state.reward_model, w, clock)
        warm = state.step >= options.critic_warmup
        batch = annotate(batch, state, w, clock, reference="reference" in outline.roles, critic=True, updated=warm)
        batch, kl, report = kl_in_reward(batch, state.kl, options)
        batch = clock.run("adv", advantages, batch)
        batches = list(update_batches(w, batch, experience.problems, options, key.fold_in("minibatches"), actor_loss))

        updates = {"critic": lambda: update(w.trainers["critic"], state.critic, batches, critic_loss)}
        if warm:
            select, check = selecting(w.trainers["actor"], chosen, w, key.fold_in("selection")), check_of_updates(w)
            updates["actor"] = lambda: update(w.trainers["actor"], state.actor, batches, actor_loss, select, check)
        results = clock.run_all({f"update_{role}": run for role, run in updates.items()})
        updated = {role: results[f"update_{role}"] for role in updates}
        for role, (_, metrics) in updated.items():
            report |= update_report(role, metrics)

        report |= experience.report | batch_report(batch, exact=w.exact != "off")
        report |= timing_report(clock, report["perf/total_num_tokens"])
        critic = updated["critic"][0]
        actor = updated["actor"][0] if "actor" in updated else state.actor
        return PPOState(actor, critic, state.reference, kl, state.key, state.step + 1, state.reward_model), report

    return Algorithm(init=init, learn=learn, outline=outline)
