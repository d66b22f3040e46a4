"""The policy's loss and the advantage estimator, as an algorithm's options name them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from verl_fn.config import ConfigError
from verl_fn.config.algorithms import GRPO, PPO, PolicyOptimization
from verl_fn.config.names import is_reference, load_object
from verl_fn.state import Batch
from verl_fn.steps import (
    Loss,
    correct_advantages,
    entropy,
    gae,
    grpo,
    kl_to_reference,
    ppo_clip,
    reinforce_plus_plus,
    rloo,
)


def policy_loss(options: PolicyOptimization) -> Loss:
    """Makes the policy's loss, with the KL and entropy terms that the options ask for.

    Raises:
        ConfigError: ``policy_loss`` refers to an object that is not a ``Loss``.
    """
    if is_reference(options.policy_loss):
        loss = load_object(options.policy_loss, "algorithm.policy_loss")
        if not isinstance(loss, Loss):
            raise ConfigError(
                f"algorithm.policy_loss: {options.policy_loss} is a {type(loss).__name__}, where a Loss is expected; "
                "decorate the function with @verl_fn.steps.loss(needs=[...])"
            )
        if loss.levels != {"token"} or loss.together is not None:
            raise ConfigError(
                f"algorithm.policy_loss: {options.policy_loss} has values of whole rows or keeps rows together, "
                "which the minibatches of this algorithm do not; write an algorithm around it (algorithm.name)"
            )
    else:
        low, high = options.clip_ratio_low, options.clip_ratio_high
        loss = ppo_clip(options.clip_ratio, low, high, options.clip_ratio_c)
    if options.use_kl_loss:
        loss = loss + options.kl_loss_coef * kl_to_reference(options.kl_loss_type)
    if options.entropy_coeff:
        loss = loss - options.entropy_coeff * entropy()
    return loss


def estimator(options: PPO | GRPO) -> Callable[[Batch], Batch]:
    """Returns the advantage estimator that ``adv_estimator`` names, with its options bound.

    Unless ``rollout_is`` is None or ``off``, importance weights multiply its advantages.

    Raises:
        ConfigError: ``adv_estimator`` refers to an object that cannot be called.
    """
    estimate = _estimator(options)
    if options.rollout_is in (None, "off"):
        return estimate
    return functools.partial(_corrected, estimate=estimate, options=options)


def _corrected(batch: Batch, estimate: Callable[[Batch], Batch], options: PPO | GRPO) -> Batch:
    assert options.rollout_is is not None
    return correct_advantages(
        estimate(batch),
        options.rollout_is,
        low=options.rollout_is_threshold_lower,
        high=options.rollout_is_threshold,
        outside=options.rollout_is_outside,
    )


def _estimator(options: PPO | GRPO) -> Callable[[Batch], Batch]:
    name = options.adv_estimator
    if is_reference(name):
        function = load_object(name, "algorithm.adv_estimator")
        if not callable(function):
            raise ConfigError(f"algorithm.adv_estimator: {name} is not a function from batch to batch")
        return function
    if isinstance(options, PPO):
        return functools.partial(gae, gamma=options.gamma, lam=options.lam)
    if name == "grpo":
        return functools.partial(grpo, norm_adv_by_std=options.norm_adv_by_std_in_grpo)
    if name == "rloo":
        return rloo
    return functools.partial(reinforce_plus_plus, gamma=options.gamma)
