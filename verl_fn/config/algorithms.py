"""The options of the built-in algorithms: each class is the ``[algorithm]`` table under its ``name``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import ge, gt, le

from .aggregation import Aggregation
from .catalogue import GROUP_ESTIMATORS, POLICY_LOSSES
from .fields import MOST, ConfigError, free, one_of, opt, paths, sub
from .learners import Distill, Rejection
from .names import one_of_or_own
from .preferences import DPO, RewardModel
from .roles import LearnsFrom, Role, one_a_step

KL_TYPES = tuple(kind + plus for plus in ("", "+") for kind in ("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"))


def has_its_options(instance: Any, attribute: Any, value: str) -> None:
    """Validates a policy loss: ``dro`` has no default for the weight of its penalty."""
    if value == "dro" and instance.dro_beta is None:
        raise ValueError("dro needs algorithm.dro_beta, the weight of its penalty, such as 0.1")


@attrs.frozen(kw_only=True)
class KLCtrl:
    """Options of the controller that sets the coefficient of the KL penalty in the reward."""

    type: str = opt("fixed", "fixed or adaptive", one_of("fixed", "adaptive"))
    kl_coef: float = opt(0.001, "coefficient of the KL penalty; the initial one if adaptive", ge(0), le(MOST))
    target_kl: float = opt(0.1, "KL that the adaptive controller aims at, in nats", gt(0), le(MOST))
    horizon: int = opt(10000, "rows over which the adaptive controller reacts", ge(1))


@attrs.frozen(kw_only=True)
class SFT(Aggregation):
    """Options of supervised fine-tuning."""

    @property
    def roles(self) -> Mapping[str, Role]:
        """Returns the actor alone."""
        return {"actor": Role()}

    @property
    def min_n(self) -> int:
        """Returns 1: nothing is sampled."""
        return 1

    @property
    def learns_from(self) -> LearnsFrom:
        """Returns ``answers``: those of the data."""
        return "answers"

    @property
    def needs_reward(self) -> bool:
        """Returns False: nothing is sampled."""
        return False

    updates = staticmethod(one_a_step)


@attrs.frozen(kw_only=True)
class PolicyOptimization(Aggregation):
    """Options that PPO and GRPO share."""

    gamma: float = opt(1.0, "discount of later rewards", ge(0), le(1))
    policy_loss: str = opt(
        "ppo_clip",
        f"the policy's loss: {', '.join(POLICY_LOSSES)}, or a Loss of yours as FILE.py:NAME",
        one_of_or_own(*POLICY_LOSSES),
        has_its_options,
    )
    policy_loss_kwargs: Mapping[str, Any] = free(
        "a table of keyword arguments; policy_loss then names a function of yours that returns a Loss"
    )
    clip_ratio: float = opt(0.2, "clip range of the ratio; for dppo_*, of the divergence", gt(0), le(MOST))
    clip_ratio_low: float | None = opt(None, "lower clip range, by default clip_ratio", gt(0), le(MOST))
    clip_ratio_high: float | None = opt(None, "upper clip range, by default clip_ratio", gt(0), le(MOST))
    clip_ratio_c: float | None = opt(
        None,
        "largest ratio where the advantage is negative (dual clip), by default 3; for dppo_*, largest weight, by "
        "default 20",
        gt(1), le(MOST),
    )  # fmt: skip
    tau_pos: float = opt(1.0, "sapo: how fast the gradient fades where the advantage is positive", gt(0), le(MOST))
    tau_neg: float = opt(1.05, "sapo: how fast the gradient fades elsewhere", gt(0), le(MOST))
    dro_beta: float | None = opt(None, "dro: weight of the quadratic penalty, which dro needs", gt(0), le(MOST))
    clip_cov_ratio: float = opt(0.0002, "clip_cov: share of the tokens that are left out", gt(0), le(1))
    clip_cov_lb: float = opt(1.0, "clip_cov: these tokens have a larger covariance", ge(-MOST), le(MOST))
    clip_cov_ub: float = opt(5.0, "clip_cov: these tokens have a smaller covariance", ge(-MOST), le(MOST))
    kl_cov_ratio: float = opt(0.0002, "kl_cov: share of the tokens that get the penalty", gt(0), le(1))
    ppo_kl_coef: float = opt(0.1, "kl_cov: weight of the penalty", ge(0), le(MOST))
    top_entropy_quantile: float = opt(
        1.0, "learn from this share of the tokens alone, those of the highest entropy", gt(0), le(1)
    )
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus", ge(-MOST), le(MOST))
    use_kl_loss: bool = opt(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: float = opt(0.001, "weight of the KL in the loss", ge(0), le(MOST))
    kl_loss_type: str = opt(
        "low_var_kl",
        "estimator of the KL in the loss: k1, k2, k3 (low_var_kl), abs, or one with +",
        one_of(*KL_TYPES),
    )
    use_kl_in_reward: bool = opt(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = opt("kl", "estimator of the KL in the reward", one_of(*KL_TYPES))
    kl_ctrl: KLCtrl = sub(KLCtrl)
    rollout_is: str | None = opt(
        None,
        "importance weights of the advantages for samples that the rollout engine drew with other probabilities: "
        "token, sequence, geometric or off; by default token with driver.max_lag, otherwise off",
        one_of("token", "sequence", "geometric", "off"),
    )
    rollout_is_threshold: float = opt(2.0, "the largest importance weight", ge(1), le(MOST))
    rollout_is_threshold_lower: float = opt(0.0, "the smallest importance weight", ge(0), le(1))
    rollout_is_outside: str = opt(
        "truncate",
        "what becomes of weights outside the thresholds: truncate moves them to the threshold, mask makes them 0",
        one_of("truncate", "mask"),
    )
    reward_model: str = paths(
        "", "model folder of a reward model, whose score is then the only reward of training responses"
    )
    ppo_mini_batch_size: int = opt(256, "prompts per update", ge(1))
    ppo_epochs: int = opt(1, "passes over a batch", ge(1))
    shuffle: bool = opt(False, "draw a new order of rows in every pass")

    @property
    def roles(self) -> Mapping[str, Role]:
        """Returns the actor, the reference policy if a KL term needs it, and the reward model if there is one."""
        roles = {"actor": Role()}
        if self.use_kl_loss or self.use_kl_in_reward:
            roles["reference"] = Role(trained=False, copy_of="actor")
        if self.reward_model:
            roles["reward_model"] = Role(head="value", trained=False, path=self.reward_model)
        return roles

    @property
    def min_n(self) -> int:
        """Returns 1: responses are not compared within a group."""
        return 1

    @property
    def learns_from(self) -> LearnsFrom:
        """Returns ``samples``."""
        return "samples"

    @property
    def needs_reward(self) -> bool:
        """Returns whether the workers' reward scores training responses: where no reward model does."""
        return not self.reward_model

    def minibatches(self, prompts: int) -> int:
        """Counts the minibatches of one pass over ``prompts`` prompts.

        Example:
            >>> PPO(ppo_mini_batch_size=4).minibatches(10)
            3
        """
        return -(-prompts // min(self.ppo_mini_batch_size, prompts))

    def updates(self, role: str, prompts: int, steps: int) -> int:
        """Counts the updates of a role in ``steps`` steps."""
        return steps * self.ppo_epochs * self.minibatches(prompts)


@attrs.frozen(kw_only=True)
class PPO(PolicyOptimization):
    """Options of PPO with a critic."""

    adv_estimator: str = opt("gae", "gae, or an estimator of yours as FILE.py:NAME", one_of_or_own("gae"))
    adv_estimator_kwargs: Mapping[str, Any] = free("a table of keyword arguments of an estimator of yours")
    lam: float = opt(1.0, "GAE's lambda", ge(0), le(1))
    cliprange_value: float = opt(0.5, "clip range of the value loss", gt(0), le(MOST))
    critic_warmup: int = opt(0, "steps in which only the critic learns", ge(0))

    @property
    def roles(self) -> Mapping[str, Role]:
        """Returns the actor, the critic, the reference policy if a KL term needs it, and a reward model."""
        return {"actor": Role(), "critic": Role(head="value")} | dict(super().roles)

    def updates(self, role: str, prompts: int, steps: int) -> int:
        """Counts the updates of a role; the actor has none while the critic warms up."""
        active = max(0, steps - self.critic_warmup) if role == "actor" else steps
        return active * self.ppo_epochs * self.minibatches(prompts)


@attrs.frozen(kw_only=True)
class GRPO(PolicyOptimization):
    """Options of GRPO and related algorithms without a critic."""

    adv_estimator: str = opt(
        "grpo",
        f"{', '.join(GROUP_ESTIMATORS)}, reinforce_plus_plus, or an estimator of yours as FILE.py:NAME",
        one_of_or_own(*GROUP_ESTIMATORS, "reinforce_plus_plus"),
    )
    adv_estimator_kwargs: Mapping[str, Any] = free("a table of keyword arguments of an estimator of yours")
    norm_adv_by_std_in_grpo: bool = opt(True, "grpo, grpo_passk, gdpo: divide by the group's standard deviation")
    gdpo_reward_keys: tuple[str, ...] = opt((), "gdpo: names of the rewards, by default all there are")
    gdpo_reward_weights: tuple[float, ...] = opt((), "gdpo: one weight for each reward, by default 1")
    handle_zero_tail: bool = opt(
        True, "optimal token baselines: no baseline where only the longest response of a group goes on"
    )

    @property
    def min_n(self) -> int:
        """Returns 2 for estimators that compare within a group."""
        return 2 if self.adv_estimator in GROUP_ESTIMATORS else 1


@attrs.frozen(kw_only=True)
class RLOO(PolicyOptimization):
    """Options of RLOO: those of GRPO without a choice of the estimator."""

    @property
    def min_n(self) -> int:
        """Returns 2: the baseline of a response is the mean of the others."""
        return 2


@attrs.frozen(kw_only=True)
class ReMax(PolicyOptimization):
    """Options of ReMax."""

    def __attrs_post_init__(self) -> None:
        if self.reward_model:
            raise ConfigError(
                "algorithm.reward_model: remax needs the score of the greedy response while it samples, and a reward "
                "model scores later; leave it empty and use reward.functions"
            )


@attrs.frozen(kw_only=True)
class FilterGroups:
    """Options of dynamic sampling."""

    enable: bool = opt(
        True, "leave out groups whose responses all have the same metric, and sample new prompts in their place"
    )
    metric: str = opt("score", "what the responses of a group must differ in: score or acc", one_of("score", "acc"))
    max_num_gen_batches: int = opt(
        10,
        "most calls for samples in a step, the first included; it then goes on with the groups that there are",
        ge(1),
    )


@attrs.frozen(kw_only=True)
class OverlongBuffer:
    """Options of the penalty on responses that come near the length limit."""

    len: int = opt(
        0, "the penalty rises over the last so many tokens of data.max_response_length; 0: no penalty", ge(0)
    )
    penalty_factor: float = opt(1.0, "the penalty of a response that is as long as allowed", ge(0), le(MOST))


@attrs.frozen(kw_only=True)
class DAPO(GRPO):
    """Options of DAPO: those of GRPO with other defaults, dynamic sampling, and the penalty on overlong responses."""

    clip_ratio_low: float | None = opt(0.2, "lower clip range", gt(0), le(MOST))
    clip_ratio_high: float | None = opt(0.28, "upper clip range", gt(0), le(MOST))
    filter_groups: FilterGroups = sub(FilterGroups)
    overlong_buffer: OverlongBuffer = sub(OverlongBuffer)

    def __attrs_post_init__(self) -> None:
        if self.reward_model and self.filter_groups.enable:
            raise ConfigError(
                "algorithm.reward_model: dynamic sampling needs scores while it samples, and a reward model scores "
                "later; set algorithm.filter_groups.enable=false, or use reward.functions"
            )

    @property
    def min_n(self) -> int:
        """Returns 2: responses are compared within a group."""
        return 2


BUILT_IN: Mapping[str, type[Any]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "remax": ReMax,
    "sft": SFT,
    "dpo": DPO,
    "reward_model": RewardModel,
    "distill": Distill,
    "rejection": Rejection,
}
