"""Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv 1707.06347). Copy and edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_fn.algorithms.experience import (
    batch_report,
    collect,
    timing_report,
    update,
    update_batches,
    update_report,
    with_outputs,
)
from verl_fn.algorithms.workers import Clock, Workers
from verl_fn.config.schema import Config
from verl_fn.data.tasks import Problem
from verl_fn.state import Key, Node, node
from verl_fn.steps import (
    AdaptiveKL,
    FixedKL,
    Loss,
    apply_kl_in_reward,
    entropy,
    gae,
    kl_to_reference,
    ppo_clip,
    value_clip,
)


@node
class PPOState(Node):
    """All that a PPO run is; saving it saves everything.

    Attributes:
        actor, critic, reference: training states, or handles to them; reference is None without a KL term, and with
            LoRA, where the actor holds it.
        kl: the controller of the KL penalty in the reward.
        key: of the run; a step derives its own from it and ``step``.
        step: steps done.
        cursor: training problems used.
    """

    actor: Any
    critic: Any
    reference: Any
    kl: FixedKL | AdaptiveKL
    key: Key
    step: int
    cursor: int


def new(cfg: Config, key: Key) -> PPOState:
    """The state before the first step, its roles still to be loaded."""
    return PPOState(actor=None, critic=None, reference=None, kl=kl_controller(cfg), key=key, step=0, cursor=0)


def step(state: PPOState, problems: Sequence[Problem], w: Workers, cfg: Config) -> tuple[PPOState, dict[str, float]]:
    """Sample, estimate advantages, update critic and actor. ``state`` is spent: its roles are donated."""
    assert w.critic is not None
    a, clock, key = cfg.algorithm, Clock(w.wait), state.key.fold_in(state.step)

    batch = collect(state.actor, state.reference, problems, w, cfg, key, state.step, clock)
    outputs = clock.run("values", w.critic.forward, state.critic.params, batch, ("values",))
    batch = w.call(with_outputs, batch, outputs, values="values")
    kl, report = state.kl, {}
    if a.use_kl_in_reward:
        batch, kl, found = w.call(apply_kl_in_reward, batch, kl, a.kl_penalty, returns=3)
        kl, found = w.get((kl, found))
        report |= update_report("actor", [(found, {})])
    batch = clock.run("adv", w.call, gae, batch, gamma=a.gamma, lam=a.lam)
    batches = update_batches(w, batch, len(problems) * cfg.rollout.n, cfg, key.fold_in("minibatches"))

    value_loss = value_clip(a.cliprange_value)
    critic, updates = clock.run("update_critic", update, w.critic, state.critic, batches, value_loss)
    report |= update_report("critic", w.get(updates))
    actor = state.actor
    if state.step >= cfg.trainer.critic_warmup:
        actor, updates = clock.run("update_actor", update, w.actor, state.actor, batches, policy_loss(cfg))
        report |= update_report("actor", w.get(updates))

    report |= w.get(w.call(batch_report, batch, cfg.data.max_response_length))
    report |= timing_report(clock, report["perf/total_num_tokens"])
    new = PPOState(actor, critic, state.reference, kl, state.key, state.step + 1, state.cursor + len(problems))
    return new, report


def policy_loss(cfg: Config) -> Loss:
    """The clipped surrogate, with the KL and entropy terms that the config asks for."""
    a = cfg.algorithm
    loss = ppo_clip(a.clip_ratio, a.clip_ratio_low, a.clip_ratio_high, a.clip_ratio_c)
    if a.use_kl_loss:
        loss = loss + a.kl_loss_coef * kl_to_reference(a.kl_loss_type)
    if a.entropy_coeff:
        loss = loss - a.entropy_coeff * entropy()
    return loss


def kl_controller(cfg: Config) -> FixedKL | AdaptiveKL:
    """The controller that ``algorithm.kl_ctrl`` asks for."""
    k = cfg.algorithm.kl_ctrl
    return FixedKL(k.kl_coef) if k.type == "fixed" else AdaptiveKL(k.kl_coef, k.target_kl, k.horizon)
