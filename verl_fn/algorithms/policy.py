"""The policy's loss and the advantage estimator, as an algorithm's options name them, over whole conversations."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn import steps
from verl_fn.config import ConfigError
from verl_fn.config.algorithms import GROUP_ESTIMATORS, GRPO, PPO, TOKEN_BASELINES, PolicyOptimization
from verl_fn.config.names import is_reference, load_object
from verl_fn.errors import signature_of, takes, unknown_parameter
from verl_fn.state import Batch, Key, Metrics, TokenOutputs, conversations, read_only
from verl_fn.steps import Loss
from verl_fn.steps.aggregate import last_of_rows
from verl_fn.steps.losses.policy import log_ratio

RETURNS = "an estimator returns batch.with_tokens(advantages=...), with a critic also returns=..."


class EstimatorError(ConfigError):
    """An estimator of the user returned something that is wrong whatever the rewards are, or wrote in place."""


def policy_loss(options: PolicyOptimization) -> Loss:
    """Makes the policy's loss, with the KL and entropy terms that the options ask for.

    Raises:
        ConfigError: ``policy_loss`` refers to an object that is not a ``Loss``.
    """
    loss = _measured(own_loss(options)) if is_reference(options.policy_loss) else _built_in_loss(options)
    if options.use_kl_loss:
        loss = loss + options.kl_loss_coef * steps.kl_to_reference(options.kl_loss_type)
    if options.entropy_coeff:
        loss = loss - options.entropy_coeff * steps.entropy(options.entropy_cap)
    return loss


def own_loss(options: PolicyOptimization) -> Loss:
    """Returns the loss of the user that ``policy_loss`` refers to, as it is.

    Raises:
        ConfigError: it refers to an object that is not a ``Loss``, or one that minibatches do not suit.
    """
    options_are = "set algorithm.policy_loss_kwargs to the options of a function that makes a loss"
    loss = loss_from(options.policy_loss, options.policy_loss_kwargs, "algorithm.policy_loss", options_are)
    if loss.together is not None:
        raise ConfigError(
            f"algorithm.policy_loss: {options.policy_loss} keeps rows together by {loss.together!r}, but the "
            "minibatches of this algorithm do not; write an algorithm around it (algorithm.name)"
        )
    return loss


def loss_from(name: str, arguments: Mapping[str, Any], key: str, options_are: str) -> Loss:
    """Returns the loss that a reference names, or that the function that it names makes of keyword arguments.

    Args:
        key: what has the reference, for errors.
        options_are: how to give the function its arguments there.

    Raises:
        ConfigError: there is no such object, it takes other arguments, or it is no loss and makes none.
    """
    loss = load_object(name, key)
    if isinstance(loss, Loss) and arguments:
        raise ConfigError(f"{key}: {name} is a loss and takes no options, but {', '.join(arguments)} are given")
    if not isinstance(loss, Loss) and callable(loss) and (arguments or takes(loss, (), {})):
        if not takes(loss, (), arguments):
            raise ConfigError(
                f"{key}: {name} takes {signature_of(loss)}, and is called with ({', '.join(arguments)})"
                f"{unknown_parameter(loss, arguments)}"
            )
        loss = loss(**arguments)
    if not isinstance(loss, Loss):
        raise ConfigError(
            f"{key}: {name} is a {type(loss).__name__}, where a Loss is expected; decorate a function of outputs and "
            f"batch with @verl_fn.steps.loss(needs=[...]), or {options_are}"
        )
    return loss


def averages_rows(options: Any) -> bool:
    """Returns whether the loss is one of the user that has no values of tokens, so that none are averaged."""
    own = isinstance(options, PolicyOptimization) and is_reference(options.policy_loss)
    return own and policy_loss(options).levels == {"row"}


def _measured(loss: Loss) -> Loss:
    """Returns a loss that also reports ``actor/ppo_kl``, as built-in losses do, if it reads log-probs."""
    terms = list(loss.terms)
    reads = (i for i, term in enumerate(terms) if "logprobs" in term.needs)
    if (first := next(reads, None)) is None:
        return loss
    fn = terms[first].fn

    @functools.wraps(fn)
    def measured(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        returned = fn(outputs, batch)
        match returned:
            case values, Mapping() as metrics:
                return values, {"actor/ppo_kl": steps.token_mean(batch, -log_ratio(outputs, batch)), **metrics}
        return returned

    terms[first] = attrs.evolve(terms[first], fn=measured)
    return Loss(tuple(terms))


def aggregation(options: Any) -> str | Callable[[Batch], Tensor]:
    """Returns the mode of ``steps.aggregate`` that ``loss_agg_mode`` names, or the user's own function.

    Raises:
        ConfigError: it refers to an object that is not a function of a batch.
    """
    name: str = options.loss_agg_mode
    if not is_reference(name):
        return name
    function: Callable[[Batch], Tensor] = load_object(name, "algorithm.loss_agg_mode")
    if not callable(function) or not takes(function, ["batch"]):
        raise ConfigError(
            f"algorithm.loss_agg_mode: {name} must be a function from an update batch to the weight of each token"
        )
    return function


def _clip_range(options: PolicyOptimization) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")}


def _built_in_loss(options: PolicyOptimization) -> Loss:
    clip, cap = _clip_range(options), options.clip_ratio_c
    makers: Mapping[str, Callable[[], Loss]] = {
        "ppo_clip": lambda: steps.ppo_clip(**clip, clip_ratio_c=cap or 3.0),
        "gspo": lambda: steps.gspo(**clip),
        "sapo": lambda: steps.sapo(options.tau_pos, options.tau_neg),
        "cispo": lambda: steps.cispo(**clip),
        "gpg": steps.reinforce,
        "dro": lambda: steps.dro(options.dro_beta or 0.0),
        "dppo_tv": lambda: steps.dppo_tv(**clip, clip_ratio_c=cap or 20.0),
        "dppo_kl": lambda: steps.dppo_kl(**clip, clip_ratio_c=cap or 20.0),
        "geo_mean": lambda: steps.geo_mean(**clip),
        "clip_cov": lambda: steps.clip_cov(**clip),
        "kl_cov": lambda: steps.kl_cov(options.ppo_kl_coef),
        "reinforce": steps.reinforce,
    }
    return makers[options.policy_loss]()


def selected_by(options: PolicyOptimization) -> tuple[str, ...]:
    """Returns the outputs of the policy by which tokens of an update batch are selected; empty if none are.

    Example:
        >>> selected_by(GRPO(policy_loss="kl_cov", top_entropy_quantile=0.2)), selected_by(GRPO())
        (('logprobs', 'entropy'), ())
    """
    by_covariance = options.policy_loss in ("clip_cov", "kl_cov")
    by_entropy = options.top_entropy_quantile < 1.0
    return ("logprobs",) * by_covariance + ("entropy",) * by_entropy


def select_tokens(batch: Batch, outputs: TokenOutputs, key: Key, options: PolicyOptimization) -> Batch:
    """Selects tokens of a whole update batch, as ``policy_loss`` and ``top_entropy_quantile`` need."""
    if options.policy_loss == "clip_cov":
        batch = steps.select_clip_cov(
            batch,
            outputs.logprobs,
            key,
            clip_cov_ratio=options.clip_cov_ratio,
            clip_cov_lb=options.clip_cov_lb,
            clip_cov_ub=options.clip_cov_ub,
            **_clip_range(options),
        )
    elif options.policy_loss == "kl_cov":
        batch = steps.select_kl_cov(batch, outputs.logprobs, kl_cov_ratio=options.kl_cov_ratio)
    if options.top_entropy_quantile < 1.0:
        batch = steps.select_high_entropy(batch, outputs.entropy, top_entropy_quantile=options.top_entropy_quantile)
    return batch


def estimator(options: PPO | GRPO) -> Callable[[Batch], Batch]:
    """Returns the advantage estimator that ``adv_estimator`` names, with its options bound, and ``corrected``.

    Raises:
        ConfigError: ``adv_estimator`` refers to an object that cannot be called.
    """
    estimate = _estimator(options)
    if options.adv_estimator in GROUP_ESTIMATORS and options.adv_estimator not in TOKEN_BASELINES:
        estimate = functools.partial(by_conversation, estimate=estimate)
    return corrected(estimate, options)


def corrected(estimate: Callable[[Batch], Batch], options: PolicyOptimization) -> Callable[[Batch], Batch]:
    """Returns an estimator whose advantages are multiplied by importance weights if ``rollout_is`` asks for them."""
    if options.rollout_is in (None, "off"):
        return estimate
    return functools.partial(_corrected, estimate=estimate, options=options)


def _corrected(batch: Batch, estimate: Callable[[Batch], Batch], options: PolicyOptimization) -> Batch:
    assert options.rollout_is is not None
    bounds: dict[str, Any] = {
        "low": options.rollout_is_threshold_lower,
        "high": options.rollout_is_threshold,
        "outside": options.rollout_is_outside,
    }
    if getattr(options, "adv_estimator", None) in TOKEN_BASELINES:
        weights = steps.importance_weights(batch, options.rollout_is, **bounds)
        batch = batch.with_tokens(rollout_is_weights=weights)
    return steps.correct_advantages(estimate(batch), options.rollout_is, **bounds)


def _checked(batch: Batch, estimate: Callable[[Batch], Any], name: str, needs: Sequence[str]) -> Batch:
    """Returns the result of an estimator of the user that must write the fields ``needs``.

    Raises:
        EstimatorError: it is no batch, lacks a field, or has other rows or another response_mask; or a value is for a
            whole row; or the estimator writes in place into the batch that it gets.
        ConfigError: a value is not finite.
    """
    with read_only(f"algorithm.adv_estimator: {name}", EstimatorError, batch):
        try:
            estimated = estimate(batch)
        except (RuntimeError, ValueError) as error:
            if {str(len(batch)), str(batch.num_tokens)} <= set(re.findall(r"\d+", str(error))):
                raise EstimatorError(
                    f"algorithm.adv_estimator: {name} fails with: {error}. The batch has {len(batch)} rows and "
                    f"{batch.num_tokens} tokens; batch.sum_rows(x) gives one value for each row, and batch.spread(x) "
                    "one for each token"
                ) from error
            error.add_note(f"raised in algorithm.adv_estimator = {name}")
            raise
    if not isinstance(estimated, Batch):
        raise EstimatorError(f"algorithm.adv_estimator: {name} returns a {type(estimated).__name__}; {RETURNS}")
    if missing := [field for field in needs if field not in estimated]:
        raise EstimatorError(f"algorithm.adv_estimator: {name} does not write {' and '.join(missing)}; {RETURNS}")
    if not torch.equal(estimated["response_mask"], batch["response_mask"]):
        what = "changes response_mask" if torch.equal(estimated.tokens, batch.tokens) else "changes the rows"
        raise EstimatorError(
            f"algorithm.adv_estimator: {name} {what}, which metrics and minibatches go by; tokens to learn nothing "
            "from get advantages of 0, and a function as algorithm.loss_agg_mode also takes them out of the "
            f"denominator; {RETURNS}"
        )
    written = [field for field in ("advantages", "returns") if field in estimated]
    if by_row := [field for field in written if field not in estimated.per_token]:
        raise EstimatorError(
            f"algorithm.adv_estimator: {name} writes {by_row[0]} for each row; batch.spread(values) makes one value "
            f"for each token of them; {RETURNS}"
        )
    for field in written:
        bad = ~estimated[field].isfinite() & (estimated["response_mask"] != 0)
        if bool(bad.any()):
            raise ConfigError(
                f"algorithm.adv_estimator: {name} writes {field} that are inf or nan, first in row "
                f"{int(estimated.row_ids[bad][0])} of {len(estimated)}; look for a division by the spread of equal "
                "rewards"
            )
    # Losses negate advantages, and marks of true and false cannot be.
    return estimated.with_tokens(
        **{field: estimated[field].float() for field in written if not estimated[field].is_floating_point()}
    )


def _estimator(options: PPO | GRPO) -> Callable[[Batch], Batch]:
    name = options.adv_estimator
    if is_reference(name):
        function = load_object(name, "algorithm.adv_estimator")
        arguments = options.adv_estimator_kwargs
        if not callable(function) or not takes(function, ["batch"], arguments):
            has = f"takes {signature_of(function)}" if callable(function) else f"is a {type(function).__name__}"
            given = ", ".join(["batch", *(f"{argument}=..." for argument in arguments)])
            meant = unknown_parameter(function, arguments) if callable(function) else ""
            raise ConfigError(
                f"algorithm.adv_estimator: {name} {has}, and is called with ({given}){meant}; the batch has "
                f"token_level_rewards, response_mask, group and more; {RETURNS}"
            )
        needs = ("advantages", "returns") if isinstance(options, PPO) else ("advantages",)
        return functools.partial(_checked, estimate=functools.partial(function, **arguments), name=name, needs=needs)
    if isinstance(options, PPO):
        return functools.partial(steps.gae, gamma=options.gamma, lam=options.lam)
    by_std: dict[str, Any] = {"norm_adv_by_std": options.norm_adv_by_std_in_grpo}
    baseline: dict[str, Any] = {
        "handle_zero_tail": options.handle_zero_tail,
        "rollout_is_weights": options.rollout_is not in (None, "off"),
    }
    settings: Mapping[str, dict[str, Any]] = {
        "grpo": by_std,
        "dr_grpo": {},
        "grpo_passk": by_std,
        "rloo": {},
        "opo": {},
        "gpg": {},
        "gdpo": {
            "reward_keys": options.gdpo_reward_keys or None,
            "reward_weights": options.gdpo_reward_weights or None,
            **by_std,
        },
        "reinforce_plus_plus": {"gamma": options.gamma},
        "reinforce_plus_plus_baseline": {},
        "optimal_token_baseline": baseline,
        "tir_optimal_token_baseline": baseline,
    }
    return functools.partial(getattr(steps, name), **settings[name])


def actor_outputs(options: PPO | GRPO) -> tuple[str, ...]:
    """Returns the outputs of the actor before the update that the step reads: of each token, in this order.

    Example:
        >>> actor_outputs(GRPO(adv_estimator="optimal_token_baseline"))
        ('logprobs', 'entropy', 'sum_pi_squared')
    """
    return ("logprobs", "entropy") + ("sum_pi_squared",) * (options.adv_estimator in TOKEN_BASELINES)


def whole_conversations(batch: Batch) -> Batch:
    """Returns a batch with one row for each conversation: its rows behind one another, in the same order of tokens.

    Fields of rows come from the conversation's last row, except for ``prompt_length``, from the first row, and the
    sum of ``near_ties``. Each of the rows has the score; it lies on the last response token;
    what was added to it, such as a KL penalty, stays on its tokens.

    Args:
        batch: has ``token_level_scores`` or ``score`` if it has ``token_level_rewards``.

    Example:
        >>> rows = {"group": [7] * 3, "conversation": [0, 0, 1], "score": [1.0, 1.0, 0.0]}
        >>> tokens = {"response_mask": [[1.0]] * 3, "token_level_scores": [[1.0], [1.0], [0.0]]}
        >>> batch = Batch.from_rows([[1]] * 3, tokens | {"token_level_rewards": [[0.9], [0.8], [0.0]]}, rows)
        >>> whole = whole_conversations(batch)
        >>> whole.lengths.tolist(), [round(r, 1) for r in whole["token_level_rewards"].tolist()]
        ([2, 1], [-0.1, 0.8, 0.0])
    """
    conversation, last = conversations(batch)
    if len(last) == len(batch):
        return batch
    begins = torch.cat([last.new_zeros(1), last[:-1] + 1])
    cu_seqlens = batch.cu_seqlens[torch.cat([begins, last[-1:] + 1])]
    per_row = {name: field[last] for name, field in batch.per_row.items()}
    if "prompt_length" in batch:
        per_row["prompt_length"] = batch["prompt_length"][begins]
    if "near_ties" in batch:
        per_row["near_ties"] = torch.zeros_like(last).index_add(0, conversation, batch["near_ties"].long())
    whole = attrs.evolve(batch, cu_seqlens=cu_seqlens, per_row=per_row, ragged={})
    whole = attrs.evolve(whole, positions=torch.arange(whole.num_tokens) - whole.spread(whole.cu_seqlens[:-1].long()))
    if "token_level_rewards" in batch:
        mask, rewards = batch["response_mask"], batch["token_level_rewards"]
        scores = batch["token_level_scores"] if "token_level_scores" in batch else batch.spread(batch["score"])
        repeated = last_of_rows(batch, mask) != last_of_rows(whole, mask)
        whole = whole.with_tokens(token_level_rewards=torch.where(repeated, rewards - scores, rewards))
    return whole


def by_conversation(batch: Batch, estimate: Callable[[Batch], Batch]) -> Batch:
    """Estimates advantages of whole conversations, and writes them to the response tokens of all their rows.

    Example:
        >>> from verl_fn.steps import dr_grpo
        >>> rows = {"group": [7] * 3, "conversation": [0, 0, 1], "score": [1.0, 1.0, 0.0]}
        >>> scores = [[1.0], [1.0], [0.0]]
        >>> tokens = {"response_mask": [[1.0]] * 3, "token_level_scores": scores, "token_level_rewards": scores}
        >>> by_conversation(Batch.from_rows([[1]] * 3, tokens, rows), dr_grpo)["advantages"].tolist()
        [0.5, 0.5, -0.5]
    """
    estimated = estimate(whole_conversations(batch))
    return batch.with_tokens(**{name: estimated[name] for name in ("advantages", "returns") if name in estimated})
