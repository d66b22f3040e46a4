"""The algorithms: what each asks of a run, and its options: the ``[algorithm]`` table under its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import attrs
from attrs.validators import ge, gt, le, lt

from .names import is_reference, load_object, one_of_or_own
from .options import MOST, Condition, ConfigError, free, given, one_of, opt, paths, provided, sub, unless

POLICY_LOSSES = (
    "ppo_clip", "gspo", "sapo", "cispo", "gpg", "dro", "dppo_tv", "dppo_kl", "geo_mean", "clip_cov", "kl_cov",
    "reinforce",
)  # fmt: skip
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
GROUP_ESTIMATORS = (
    "grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "gdpo",
    *TOKEN_BASELINES,
)  # fmt: skip
KL_TYPES = tuple(kind + plus for plus in ("", "+") for kind in ("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"))
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
LOSS_TYPES = ("dpo", "cdpo", "ipo", "simpo", "orpo", "kto")
WITHOUT_REFERENCE = ("simpo", "orpo")


def own(key: str) -> Condition:
    """Returns the condition that another key names a function of the user."""
    return provided(
        lambda table, cfg: is_reference(getattr(table, key)), f"as algorithm.{key} is no function of yours"
    )


LearnsFrom: TypeAlias = Literal["samples", "answers", "pairs", "labels"]
"""What an algorithm learns from: responses that it samples, the answers in the data, pairs of a preferred and another
response, or responses that are each labelled good or bad."""


@attrs.frozen
class Role:
    """A model that an algorithm works with.

    Attributes:
        head: ``lm`` for a language model, ``value`` for one number per token.
        trained: whether the algorithm updates the model; a model that is not trained has no optimizer state.
        copy_of: the role whose initial weights this frozen model has, such as ``actor`` for a reference policy. With
            LoRA that role's frozen base is used, so no second model is made.
        path: the model folder. If empty, a value head takes ``critic.path`` if that is set; otherwise
            ``model.path`` is used. A role that is not trained and no copy is loaded from it as it is, with LoRA too,
            as a model of its own.

    Raises:
        ConfigError: a copy of another role is trained.

    Example:
        >>> Role(head="value").trained
        True
    """

    head: str = attrs.field(default="lm", validator=attrs.validators.in_(("lm", "value")))
    trained: bool = True
    copy_of: str | None = None
    path: str = ""

    def __attrs_post_init__(self) -> None:
        if self.copy_of is not None and self.trained:
            raise ConfigError(f'a copy of {self.copy_of} is frozen: Role(trained=False, copy_of="{self.copy_of}")')


def one_a_step(role: str, prompts: int, steps: int) -> int:
    """Counts the updates of an algorithm with one update per step.

    Example:
        >>> one_a_step("actor", prompts=8, steps=100)
        100
    """
    return steps


@attrs.frozen
class Outline:
    """What an algorithm asks of a run.

    Attributes:
        roles: the models by name. ``actor`` is the policy: it is sampled from, evaluated and exported.
        min_n: the fewest responses per prompt that the algorithm can learn from.
        learns_from: ``samples``, or what the problems hold: ``answers``, ``pairs`` or ``labels``.
        needs_reward: whether ``sample`` asks the workers' reward, so that every training problem must have one.
        updates: ``(role, prompts, steps)`` to the number of the role's updates in ``steps`` steps of ``prompts``
            prompts; learning rates decay over it.

    Raises:
        ConfigError: a role is a copy of a role that does not exist.

    Example:
        >>> Outline(min_n=2).updates("actor", 8, 100)
        100
    """

    roles: Mapping[str, Role] = attrs.field(factory=lambda: {"actor": Role()})
    min_n: int = 1
    learns_from: LearnsFrom = "samples"
    needs_reward: bool = True
    updates: Callable[[str, int, int], int] = one_a_step

    def __attrs_post_init__(self) -> None:
        for name, role in self.roles.items():
            if role.copy_of is not None and (role.copy_of not in self.roles or role.copy_of == name):
                raise ConfigError(
                    f"role {name}: copy_of is {role.copy_of!r}, which is no other role; there are "
                    f"{', '.join(self.roles)}"
                )


def uses_critic(name: str, role: Role) -> bool:
    """Returns whether a role takes its settings from the critic's table.

    Example:
        >>> uses_critic("critic", Role(head="value")), uses_critic("actor", Role(head="value"))
        (True, False)
    """
    return name != "actor" and role.head == "value"


@attrs.frozen(kw_only=True)
class Aggregation:
    """Options that all built-in algorithms share: how per-token losses are averaged."""

    loss_agg_mode: str = opt(
        "token-mean",
        f"how per-token losses are averaged: {', '.join(AGGREGATIONS)}, or a function of yours as FILE.py:NAME, from "
        "an update batch to the weight of each token",
        one_of_or_own(*AGGREGATIONS),
        when=provided(
            lambda o, cfg: getattr(o, "policy_loss", "") != "geo_mean" or o.use_kl_loss or o.entropy_coeff,
            'with algorithm.policy_loss = "geo_mean", which averages over responses',
        ),
    )
    loss_scale_factor: float | None = opt(
        None,
        "divisor of seq-mean-token-sum-norm, by default data.max_response_length",
        gt(0),
        le(1e12),
        when=given("loss_agg_mode", "seq-mean-token-sum-norm", label=""),
    )


@attrs.frozen(kw_only=True)
class SFT(Aggregation):
    """Options of supervised fine-tuning."""

    outline = Outline(learns_from="answers", needs_reward=False)


SAPO, CLIP_COV, KL_COV = (given("policy_loss", name) for name in ("sapo", "clip_cov", "kl_cov"))
CLIPPED = given("policy_loss", "ppo_clip", "gspo", "cispo", "dppo_tv", "dppo_kl", "geo_mean", "clip_cov")
CORRECTED = unless("rollout_is", None, "off")


def has_its_options(instance: Any, attribute: Any, value: str) -> None:
    """Validates a policy loss: ``dro`` has no default for the weight of its penalty."""
    if value == "dro" and instance.dro_beta is None:
        raise ValueError("dro needs algorithm.dro_beta, the weight of its penalty, such as 0.1")


@attrs.frozen(kw_only=True)
class KLCtrl:
    """Options of the controller that sets the coefficient of the KL penalty in the reward."""

    type: str = opt("fixed", "fixed or adaptive", one_of("fixed", "adaptive"))
    kl_coef: float = opt(0.001, "coefficient of the KL penalty; the initial one if adaptive", ge(0), le(MOST))
    target_kl: float = opt(
        0.1, "KL that the adaptive controller aims at, in nats", gt(0), le(MOST), when=unless("type", "fixed")
    )
    horizon: int = opt(10000, "rows over which the adaptive controller reacts", ge(1), when=unless("type", "fixed"))


@attrs.frozen(kw_only=True)
class PolicyOptimization(Aggregation):
    """Options that PPO and GRPO share."""

    gamma: float = opt(
        1.0,
        "discount of later rewards",
        ge(0),
        le(1),
        when=provided(
            lambda o, cfg: getattr(o, "adv_estimator", "") in ("gae", "reinforce_plus_plus"),
            "without algorithm.adv_estimator = gae or reinforce_plus_plus",
        ),
    )
    policy_loss: str = opt(
        "ppo_clip",
        f"the policy's loss: {', '.join(POLICY_LOSSES)}, or a Loss of yours as FILE.py:NAME",
        one_of_or_own(*POLICY_LOSSES),
        has_its_options,
    )
    policy_loss_kwargs: Mapping[str, Any] = free(
        "a table of keyword arguments; policy_loss then names a function of yours that returns a Loss",
        when=own("policy_loss"),
    )
    clip_ratio: float = opt(
        0.2,
        "clip range of the ratio; for dppo_*, of the divergence",
        gt(0),
        le(MOST),
        when=(
            CLIPPED,
            provided(
                lambda o, cfg: None in (o.clip_ratio_low, o.clip_ratio_high),
                "with algorithm.clip_ratio_low and algorithm.clip_ratio_high",
            ),
        ),
    )
    clip_ratio_low: float | None = opt(None, "lower clip range, by default clip_ratio", gt(0), le(MOST), when=CLIPPED)
    clip_ratio_high: float | None = opt(
        None, "upper clip range, by default clip_ratio", gt(0), le(MOST), when=CLIPPED
    )
    clip_ratio_c: float | None = opt(
        None,
        "largest ratio where the advantage is negative (dual clip), by default 3; for dppo_*, largest weight, by "
        "default 20",
        gt(1),
        le(MOST),
        when=given("policy_loss", "ppo_clip", "dppo_tv", "dppo_kl", label=""),
    )
    tau_pos: float = opt(
        1.0, "how fast the gradient fades where the advantage is positive", gt(0), le(MOST), when=SAPO
    )
    tau_neg: float = opt(1.05, "how fast the gradient fades elsewhere", gt(0), le(MOST), when=SAPO)
    dro_beta: float | None = opt(
        None, "weight of the quadratic penalty; dro needs it", gt(0), le(MOST), when=given("policy_loss", "dro")
    )
    clip_cov_ratio: float = opt(0.0002, "share of the tokens that are left out", gt(0), le(1), when=CLIP_COV)
    clip_cov_lb: float = opt(1.0, "these tokens have a larger covariance", ge(-MOST), le(MOST), when=CLIP_COV)
    clip_cov_ub: float = opt(5.0, "these tokens have a smaller covariance", ge(-MOST), le(MOST), when=CLIP_COV)
    kl_cov_ratio: float = opt(0.0002, "share of the tokens that get the penalty", gt(0), le(1), when=KL_COV)
    ppo_kl_coef: float = opt(0.1, "weight of the penalty", ge(0), le(MOST), when=KL_COV)
    top_entropy_quantile: float = opt(
        1.0, "learn only from this share of the tokens, the ones with the highest entropy", gt(0), le(1)
    )
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus", ge(-MOST), le(MOST))
    entropy_cap: float | None = opt(
        None,
        "tokens with this entropy in nats, or more, get no bonus, so that it does not grow without end",
        gt(0),
        le(MOST),
        when=given("entropy_coeff"),
    )
    use_kl_loss: bool = opt(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: float = opt(0.001, "weight of the KL in the loss", ge(0), le(MOST), when=given("use_kl_loss"))
    kl_loss_type: str = opt(
        "low_var_kl",
        "estimator of the KL in the loss: k1, k2, k3 (low_var_kl), abs, or one with +",
        one_of(*KL_TYPES),
        when=given("use_kl_loss"),
    )
    use_kl_in_reward: bool = opt(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = opt(
        "kl", "estimator of the KL in the reward", one_of(*KL_TYPES), when=given("use_kl_in_reward")
    )
    kl_ctrl: KLCtrl = sub(KLCtrl, when=given("use_kl_in_reward"))
    rollout_is: str | None = opt(
        None,
        "importance weights of the advantages for samples that the rollout engine drew with other probabilities: "
        "token, sequence, geometric or off; by default token with driver.max_lag, otherwise off",
        one_of("token", "sequence", "geometric", "off"),
    )
    rollout_is_threshold: float = opt(2.0, "the largest importance weight", ge(1), le(MOST), when=CORRECTED)
    rollout_is_threshold_lower: float = opt(0.0, "the smallest importance weight", ge(0), le(1), when=CORRECTED)
    rollout_is_outside: str = opt(
        "truncate",
        "what becomes of weights outside the thresholds: truncate moves them to the threshold, mask makes them 0",
        one_of("truncate", "mask"),
        when=CORRECTED,
    )
    reward_model: str = paths(
        "", "model folder of a reward model, whose score is then the only reward of training responses"
    )
    ppo_mini_batch_size: int = opt(
        256,
        "prompts per update",
        ge(1),
        when=provided(
            lambda o, cfg: o.ppo_mini_batch_size <= cfg.data.train_batch_size,
            "above data.train_batch_size = {cfg.data.train_batch_size}: every update takes the whole batch",
        ),
    )
    ppo_epochs: int = opt(1, "passes over a batch", ge(1))
    shuffle: bool = opt(False, "draw a new order of rows in every pass")

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

    @property
    def outline(self) -> Outline:
        """A KL term needs the reference policy; a reward model scores in place of the reward."""
        roles = {"actor": Role()}
        if self.use_kl_loss or self.use_kl_in_reward:
            roles["reference"] = Role(trained=False, copy_of="actor")
        if self.reward_model:
            roles["reward_model"] = Role(head="value", trained=False, path=self.reward_model)
        return Outline(roles, needs_reward=not self.reward_model, updates=self.updates)


@attrs.frozen(kw_only=True)
class PPO(PolicyOptimization):
    """Options of PPO with a critic."""

    adv_estimator: str = opt("gae", "gae, or an estimator of yours as FILE.py:NAME", one_of_or_own("gae"))
    adv_estimator_kwargs: Mapping[str, Any] = free(
        "a table of keyword arguments of an estimator of yours", when=own("adv_estimator")
    )
    lam: float = opt(1.0, "GAE's lambda", ge(0), le(1), when=given("adv_estimator", "gae", label=""))
    cliprange_value: float = opt(0.5, "clip range of the value loss", gt(0), le(MOST))
    critic_warmup: int = opt(0, "steps in which only the critic learns", ge(0))

    def updates(self, role: str, prompts: int, steps: int) -> int:
        """Counts the updates of a role; the actor has none while the critic warms up."""
        active = max(0, steps - self.critic_warmup) if role == "actor" else steps
        return active * self.ppo_epochs * self.minibatches(prompts)

    @property
    def outline(self) -> Outline:
        """The critic joins the roles."""
        shared = super().outline
        return attrs.evolve(shared, roles={"actor": Role(), "critic": Role(head="value")} | dict(shared.roles))


@attrs.frozen(kw_only=True)
class GRPO(PolicyOptimization):
    """Options of GRPO and related algorithms without a critic."""

    adv_estimator: str = opt(
        "grpo",
        f"{', '.join(GROUP_ESTIMATORS)}, reinforce_plus_plus, or an estimator of yours as FILE.py:NAME",
        one_of_or_own(*GROUP_ESTIMATORS, "reinforce_plus_plus"),
    )
    adv_estimator_kwargs: Mapping[str, Any] = free(
        "a table of keyword arguments of an estimator of yours", when=own("adv_estimator")
    )
    norm_adv_by_std_in_grpo: bool = opt(
        True, "divide by the group's standard deviation", when=given("adv_estimator", "grpo", "grpo_passk", "gdpo")
    )
    gdpo_reward_keys: tuple[str, ...] = opt(
        (), "names of the rewards, numbers that reward functions return", when=given("adv_estimator", "gdpo")
    )
    gdpo_reward_weights: tuple[float, ...] = opt(
        (), "one weight for each reward, by default 1", when=given("adv_estimator", "gdpo")
    )
    handle_zero_tail: bool = opt(
        True,
        "no baseline where only the longest response of a group goes on",
        when=given("adv_estimator", *TOKEN_BASELINES, label="optimal token baselines"),
    )

    @property
    def outline(self) -> Outline:
        """Most estimators compare responses within a group."""
        return attrs.evolve(super().outline, min_n=2 if self.adv_estimator in GROUP_ESTIMATORS else 1)


@attrs.frozen(kw_only=True)
class RLOO(PolicyOptimization):
    """Options of RLOO: GRPO's options without a choice of the estimator."""

    @property
    def outline(self) -> Outline:
        """The baseline of a response is the mean of the others."""
        return attrs.evolve(super().outline, min_n=2)


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
    metric: str = opt(
        "score",
        "what the responses of a group must differ in: score or acc",
        one_of("score", "acc"),
        when=given("enable"),
    )
    max_num_gen_batches: int = opt(
        10,
        "most calls for samples in a step, the first included; it then goes on with the groups that there are",
        ge(1),
        when=given("enable"),
    )


@attrs.frozen(kw_only=True)
class OverlongBuffer:
    """Options of the penalty on responses that come near the length limit."""

    len: int = opt(
        0, "the penalty rises over the last so many tokens of data.max_response_length; 0: no penalty", ge(0)
    )
    penalty_factor: float = opt(
        1.0, "the penalty of a response that is as long as allowed", ge(0), le(MOST), when=unless("len", 0)
    )


@attrs.frozen(kw_only=True)
class DAPO(GRPO):
    """Options of DAPO: GRPO's with other defaults, dynamic sampling, and the penalty on overlong responses."""

    clip_ratio_low: float | None = opt(0.2, "lower clip range", gt(0), le(MOST), when=CLIPPED)
    clip_ratio_high: float | None = opt(0.28, "upper clip range", gt(0), le(MOST), when=CLIPPED)
    filter_groups: FilterGroups = sub(FilterGroups)
    overlong_buffer: OverlongBuffer = sub(OverlongBuffer)

    def __attrs_post_init__(self) -> None:
        if self.reward_model and self.filter_groups.enable:
            raise ConfigError(
                "algorithm.reward_model: dynamic sampling needs scores while it samples, and a reward model scores "
                "later; set algorithm.filter_groups.enable=false, or use reward.functions"
            )

    @property
    def outline(self) -> Outline:
        """Dynamic sampling compares responses within a group."""
        return attrs.evolve(super().outline, min_n=2)


@attrs.frozen(kw_only=True)
class Distill(Aggregation):
    """Options of distillation on policy."""

    teacher: str = paths("", "model folder of the teacher; its tokenizer must be the student's")
    kl: str = opt(
        "reverse", "reverse: KL(student || teacher); forward: KL(teacher || student)", one_of("reverse", "forward")
    )
    top_k: int = opt(
        0,
        "compare the probabilities of the teacher's K likeliest tokens and of the rest; 0: of the drawn token alone",
        ge(0),
        le(1024),
    )

    @property
    def outline(self) -> Outline:
        """The student is the actor."""
        return Outline({"actor": Role(), "teacher": Role(trained=False, path=self.teacher)}, needs_reward=False)


@attrs.frozen(kw_only=True)
class Rejection(Aggregation):
    """Options of rejection sampling: best of n, then fine-tuning on it."""

    min_score: float | None = opt(
        None, "learn from the best response to a prompt only if it scores at least this", ge(-MOST), le(MOST)
    )

    outline = Outline(min_n=2)


@attrs.frozen(kw_only=True)
class DPO:
    """Options of direct preference optimization and its family."""

    loss_type: str = opt("dpo", "dpo, cdpo, ipo, simpo, orpo, or kto (kto needs no pairs)", one_of(*LOSS_TYPES))
    beta: float | None = opt(
        None,
        "scale of implicit rewards; orpo's weight of the odds ratio; by default 0.1, for simpo 2",
        gt(0),
        le(MOST),
    )
    label_smoothing: float = opt(
        0.1, "share of the preferences that are wrong", ge(0), lt(0.5), when=given("loss_type", "cdpo")
    )
    simpo_gamma: float = opt(
        1.0, "margin by which the preferred response must win", ge(0), le(MOST), when=given("loss_type", "simpo")
    )
    desirable_weight: float = opt(
        1.0, "weight of desirable responses", ge(0), le(MOST), when=given("loss_type", "kto")
    )
    undesirable_weight: float = opt(
        1.0, "weight of undesirable responses", ge(0), le(MOST), when=given("loss_type", "kto")
    )

    @property
    def outline(self) -> Outline:
        """Losses without a reference policy have the actor only; ``kto`` needs no pairs."""
        roles = {"actor": Role()}
        if self.loss_type not in WITHOUT_REFERENCE:
            roles["reference"] = Role(trained=False, copy_of="actor")
        kind: LearnsFrom = "labels" if self.loss_type == "kto" else "pairs"
        return Outline(roles, learns_from=kind, needs_reward=False)


@attrs.frozen(kw_only=True)
class RewardModel:
    """Options of a reward model: a value head that scores whole responses, trained on pairs (Bradley-Terry)."""

    center_rewards_coefficient: float = opt(
        0.0,
        "weight of the squared sum of a pair's scores; it keeps scores of different prompts comparable",
        ge(0),
        le(MOST),
    )

    outline = Outline({"actor": Role(head="value")}, learns_from="pairs", needs_reward=False)


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


@attrs.frozen
class AlgorithmTable:
    """The ``[algorithm]`` table: an algorithm's name and its options.

    Attributes:
        name: a built-in one, such as ``ppo``, or a function of yours as ``FILE.py:NAME`` or ``MODULE:NAME``.
        options: an instance of the algorithm's options class; its fields are the other keys of the table.
    """

    name: str = "ppo"
    options: Any = attrs.field(factory=PPO)

    @property
    def outline(self) -> Outline:
        """Returns what the algorithm asks of a run; an algorithm of the user is made for it.

        Raises:
            ConfigError: the user's function cannot be imported, or does not return an Algorithm.
        """
        made = self.options if self.name in BUILT_IN else load_object(self.name, "algorithm.name")(self.options)
        if not isinstance(found := getattr(made, "outline", None), Outline):
            kind = type(made).__name__
            raise ConfigError(f"algorithm.name: {self.name} returned a {kind}, where an Algorithm is expected")
        return found
