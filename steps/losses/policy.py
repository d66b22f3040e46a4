"""Policy losses that bound the probability ratio of tokens or responses, and the losses that go with them.

Some of them learn from selected tokens only. What a token is compared with must not depend on micro-batches or ranks.
So the outputs of the whole update batch are computed first, a function ``select_*`` writes its choice into the batch,
as a step between two calls of a backend, and the loss reads it from there:

    outputs = backend.forward(state.params, batch, ["logprobs"])
    batch = select_kl_cov(batch, outputs.logprobs)
    grads, metrics = backend.forward_backward(state, batch, kl_cov())
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch, Key, Metrics, TokenOutputs
from verl_fn.steps.kl import kl_penalty

from .contract import Loss, loss, token_mean, weighted_sum

# exp of a larger log-ratio would overflow when it is multiplied, and its gradient carries no information.
LARGEST = 20.0

# The largest mean log-ratio of a row, as in verl.
MOST = 10.0
# Tokens whose log-probability and advantage vary together make the policy's entropy collapse. The whole update batch
# decides which they are, so a function ``select_*`` writes this field before the batch is split.
SELECTED = "cov_selected"


def ppo_clip(
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> Loss:
    """Returns the clipped surrogate loss with dual clip. It reads ``old_log_probs`` and ``advantages``.

    Args:
        clip_ratio: how far the probability ratio may move from 1 in either direction.
        clip_ratio_low: replaces ``clip_ratio`` for ratios below 1.
        clip_ratio_high: replaces ``clip_ratio`` for ratios above 1.
        clip_ratio_c: if the advantage is negative, the loss is at most ``-clip_ratio_c * advantage``.

    Raises:
        ValueError: ``clip_ratio_c`` is not above 1.

    Example:
        >>> batch = Batch.from_rows([[1]], {"old_log_probs": [[0.0]], "advantages": [[1.0]],
        ...                                 "response_mask": [[1.0]], "loss_weight": [[1.0]]})
        >>> per_token, metrics = ppo_clip()(TokenOutputs({"logprobs": torch.tensor([1.0])}), batch)
        >>> round(per_token.item(), 4), metrics["actor/pg_clipfrac"].value
        (-1.2, 1.0)

    Source: Schulman et al. 2017 (arXiv 1707.06347); dual clip, Ye et al. 2020 (arXiv 1912.09729);
    separate bounds, Yu et al. 2025 (DAPO, arXiv 2503.14476).
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    if clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c is {clip_ratio_c}; the dual clip needs a value above 1")

    @loss(needs=["logprobs"])
    def ppo_clip(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        advantages = batch["advantages"]
        gap = log_ratio(outputs, batch)
        ratio = gap.exp()
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
        upper = torch.maximum(unclipped, clipped)
        cap = -advantages * clip_ratio_c
        per_token = torch.where(advantages < 0, torch.minimum(upper, cap), upper)
        lower = {"actor/pg_clipfrac_lower": token_mean(batch, (upper > cap) & (advantages < 0))}
        return per_token, policy_metrics(batch, per_token, gap, clipped > unclipped) | lower

    return ppo_clip


def reinforce() -> Loss:
    """Returns the policy gradient itself as a loss: ``-advantage * log-probability``. It reads ``advantages``.

    GPG's loss is the same; its advantages (``steps.gpg``) differ. Only the metric ``actor/ppo_kl`` reads
    ``old_log_probs``.

    Example:
        >>> batch = Batch.from_rows([[1]], {"old_log_probs": [[-2.0]], "advantages": [[3.0]],
        ...                                 "response_mask": [[1.0]], "loss_weight": [[1.0]]})
        >>> reinforce()(TokenOutputs({"logprobs": torch.tensor([-2.0])}), batch)[0].tolist()
        [6.0]

    Source: Williams 1992; GPG, Chu et al. 2025 (arXiv 2504.02546).
    """

    @loss(needs=["logprobs"])
    def reinforce(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        per_token = -batch["advantages"] * outputs.logprobs
        return per_token, policy_metrics(batch, per_token, log_ratio(outputs, batch))

    return reinforce


def entropy(cap: float | None = None) -> Loss:
    """Returns the policy's entropy in nats as a loss. Subtract it for a bonus: ``ppo_clip() - 0.01 * entropy()``.

    Args:
        cap: a token whose entropy is at least this has no gradient. A bonus without a cap can outgrow advantages that
            shrink, and the entropy then grows without end.

    Example:
        >>> batch = Batch.from_rows([[1, 1]], {"response_mask": [[1.0, 1.0]], "loss_weight": [[0.5, 0.5]]})
        >>> entropy(cap=0.5)(TokenOutputs({"entropy": torch.tensor([0.2, 3.0])}), batch)[0].tolist()
        [0.20000000298023224, 0.5]
    """

    @loss(needs=["entropy"])
    def entropy(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        per_token = outputs.entropy if cap is None else outputs.entropy.clamp(max=cap)
        return per_token, {"actor/entropy_loss": weighted_sum(batch, per_token)}

    return entropy


def kl_to_reference(kind: str = "low_var_kl") -> Loss:
    """Returns the KL to the reference policy as a loss. It reads ``ref_log_prob``.

    Args:
        kind: the estimator, as for ``kl_penalty``.

    Example:
        >>> batch = Batch.from_rows([[1]], {"ref_log_prob": [[-2.0]], "response_mask": [[1.0]],
        ...                                "loss_weight": [[1.0]]})
        >>> kl_to_reference("kl")(TokenOutputs({"logprobs": torch.tensor([-0.5])}), batch)[0].tolist()
        [1.5]
    """

    @loss(needs=["logprobs"])
    def kl_to_reference(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        per_token = kl_penalty(outputs.logprobs, batch["ref_log_prob"], kind)
        return per_token, {"actor/kl_loss": weighted_sum(batch, per_token)}

    return kl_to_reference


def value_clip(cliprange_value: float = 0.5) -> Loss:
    """Returns half the squared error of the value, the larger one of the clipped and the unclipped value.

    It reads ``returns`` and the critic's ``values`` of before the update.

    Args:
        cliprange_value: how far the clipped value may move from ``values``. A value that has not moved has the full
            gradient of its error for every range, 0 included; verl's two ``min`` and ``max`` halve it at such ties.

    Example:
        >>> batch = Batch.from_rows([[1]], {"values": [[0.0]], "returns": [[2.0]],
        ...                                 "response_mask": [[1.0]], "loss_weight": [[1.0]]})
        >>> value_clip(0.5)(TokenOutputs({"values": torch.tensor([1.0])}), batch)[0].tolist()
        [1.125]

    Source: Schulman et al. 2016 (arXiv 1506.02438).
    """

    if not cliprange_value >= 0:
        raise ValueError(f"cliprange_value must be >= 0, and it is {cliprange_value}")

    @loss(needs=["values"])
    def value_clip(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        old, returns = batch["values"], batch["returns"]
        near = outputs.values.clamp(old - cliprange_value, old + cliprange_value)
        unclipped, clipped = (outputs.values - returns).square(), (near - returns).square()
        per_token = 0.5 * torch.maximum(unclipped, clipped)
        return per_token, {
            "critic/vf_loss": weighted_sum(batch, per_token),
            "critic/vf_clipfrac": token_mean(batch, clipped > unclipped),
            "critic/vpred_mean": token_mean(batch, outputs.values),
        }

    return value_clip


def cross_entropy() -> Loss:
    """Returns the loss of supervised fine-tuning: minus the log-probability of each target token.

    Example:
        >>> import torch
        >>> batch = Batch.from_rows([[1]], {"response_mask": [[1.0]], "loss_weight": [[1.0]]})
        >>> cross_entropy()(TokenOutputs({"logprobs": torch.tensor([-2.0])}), batch)[0].tolist()
        [2.0]
    """

    @loss(needs=["logprobs"])
    def cross_entropy(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        return -outputs.logprobs, {"train/nll": token_mean(batch, -outputs.logprobs)}

    return cross_entropy


def log_ratio(outputs: TokenOutputs, batch: Batch) -> Float[Tensor, " T"]:
    """Returns the policy's log-probability of each token minus ``old_log_probs``, in nats, clamped to [-20, 20].

    If it is clamped, its gradient is 0.
    """
    return (outputs.logprobs - batch["old_log_probs"]).clamp(-LARGEST, LARGEST)


def policy_metrics(batch: Batch, per_token: Tensor, gap: Tensor, clipped: Tensor | None = None) -> Metrics:
    """Returns the metrics of a policy loss: the loss, minus the mean log-ratio, and the share of clipped tokens."""
    share = {} if clipped is None else {"actor/pg_clipfrac": token_mean(batch, clipped)}
    return {"actor/pg_loss": weighted_sum(batch, per_token), **share, "actor/ppo_kl": token_mean(batch, -gap)}


def bounds(both: float, low: float | None, high: float | None) -> tuple[float, float]:
    """Returns the distances to the lower and the upper bound; None stands for the common one.

    Example:
        >>> bounds(0.2, None, 0.28)
        (0.2, 0.28)
    """
    low, high = both if low is None else low, both if high is None else high
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip ratios must be >= 0, and the lower one is {low} and the upper one {high}")
    return low, high


def gspo(clip_ratio: float = 0.2, clip_ratio_low: float | None = None, clip_ratio_high: float | None = None) -> Loss:
    """Returns the clipped surrogate with the ratio of the whole response (GSPO). It reads ``old_log_probs``.

    s is the geometric mean of the probability ratios of a row's response tokens, and the loss of each of them is
    ``max(-A s, -A clip(s, 1 - low, 1 + high))``. The gradient reaches a token through its own log-probability, so
    that every token can have an advantage of its own; with one advantage per row it is the gradient of s.

    The paper averages over the tokens of a row and then over rows: use the weights of ``seq-mean-token-mean``. Its
    bounds are about 3e-4, since s stays near 1.

    Args:
        clip_ratio: how far s may move from 1 in either direction.
        clip_ratio_low: replaces ``clip_ratio`` for s below 1.
        clip_ratio_high: replaces ``clip_ratio`` for s above 1.

    Example:
        >>> fields = {"old_log_probs": [[-1.0, -1.0]], "advantages": [[1.0, 1.0]], "response_mask": [[1.0, 1.0]],
        ...           "loss_weight": [[0.5, 0.5]]}
        >>> outputs = TokenOutputs({"logprobs": torch.tensor([-0.9, -1.1])})
        >>> gspo()(outputs, Batch.from_rows([[1, 2]], fields))[0].tolist()
        [-1.0, -1.0]

    Source: Zheng et al. 2025 (arXiv 2507.18071); the form per token is GSPO-token.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)

    @loss(needs=["logprobs"])
    def gspo(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        mask, advantages, logprobs = batch["response_mask"].bool(), batch["advantages"], outputs.logprobs
        gap = torch.where(mask, logprobs.detach() - batch["old_log_probs"], 0.0)
        mean = batch.sum_rows(gap) / batch.sum_rows(mask.to(gap.dtype)).clamp(min=1.0)
        ratio = (logprobs - logprobs.detach() + batch.spread(mean)).clamp(max=MOST).exp()
        unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
        per_token = torch.maximum(unclipped, clipped)
        return per_token, policy_metrics(batch, per_token, gap, clipped > unclipped)

    return gspo


def geo_mean(
    clip_ratio: float = 0.2, clip_ratio_low: float | None = None, clip_ratio_high: float | None = None
) -> Loss:
    """Returns the geometric-mean policy loss (GMPO), one value per row. It reads ``old_log_probs``.

    The log-ratio of each token is clipped to ``[-low, high]`` on the side that its advantage moves it to. The loss of
    a row is minus its mean advantage times the exponential of the mean of these log-ratios.

    It is a row loss, so it needs ``row_weight`` (``aggregate_rows``).

    Args:
        clip_ratio: how far a log-ratio may be from 0 in either direction, in nats.
        clip_ratio_low: replaces ``clip_ratio`` for log-ratios below 0.
        clip_ratio_high: replaces ``clip_ratio`` for log-ratios above 0.

    Example:
        >>> fields = {"old_log_probs": [[-1.0, -1.0]], "advantages": [[2.0, 2.0]], "response_mask": [[1.0, 1.0]]}
        >>> batch = Batch.from_rows([[1, 2]], fields, {"row_weight": [1.0]})
        >>> geo_mean()(TokenOutputs({"logprobs": torch.tensor([-0.2, -1.2])}), batch)[0].tolist()
        [-2.0]

    Source: Zhao et al. 2025 (arXiv 2507.20673).
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)

    @loss(needs=["logprobs"], level="row")
    def geo_mean(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        mask = batch["response_mask"].bool()
        advantages = torch.where(mask, batch["advantages"], 0.0)
        gap = torch.where(mask, log_ratio(outputs, batch), 0.0)
        near, sign = gap.clamp(-low, high), advantages.sign()
        pessimistic = sign * torch.minimum(sign * gap, sign * near)
        lengths = batch.sum_rows(mask.to(gap.dtype)).clamp(min=1.0)
        ratio = (batch.sum_rows(pessimistic) / lengths).exp()
        values = -batch.sum_rows(advantages) / lengths * ratio
        clipped = gap != near
        return values, {
            "actor/pg_loss": weighted_sum(batch, values, "row"),
            "actor/pg_clipfrac": token_mean(batch, clipped & (advantages > 0)),
            "actor/pg_clipfrac_lower": token_mean(batch, clipped & (advantages < 0)),
            "actor/ppo_kl": token_mean(batch, -gap),
        }

    return geo_mean


def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """Returns the soft adaptive policy loss (SAPO), with a gate in place of a clip. It reads ``old_log_probs``.

    With the probability ratio r and the advantage A, the loss is ``-A (4 / tau) sigmoid(tau (r - 1))``. Its gradient
    is largest on policy, where it is the policy gradient, and fades as r moves away from 1.

    The paper averages over the tokens of a row and then over rows: use the weights of ``seq-mean-token-mean``.

    Args:
        tau_pos: how fast the gradient fades if the advantage is positive.
        tau_neg: the same for all other tokens.

    Raises:
        ValueError: one of them is not positive.

    Example:
        >>> batch = Batch.from_rows([[1]], {"old_log_probs": [[-1.0]], "advantages": [[1.0]],
        ...                                 "response_mask": [[1.0]], "loss_weight": [[1.0]]})
        >>> sapo()(TokenOutputs({"logprobs": torch.tensor([-1.0])}), batch)[0].tolist()
        [-2.0]

    Source: Gao et al. 2025 (arXiv 2511.20347).
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos is {tau_pos} and tau_neg {tau_neg}; both must be positive")

    @loss(needs=["logprobs"])
    def sapo(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        advantages, gap = batch["advantages"], log_ratio(outputs, batch)
        tau = torch.where(advantages > 0, tau_pos, tau_neg).to(gap.dtype)
        gate = torch.sigmoid(tau * (gap.exp() - 1.0)) * (4.0 / tau)
        per_token = -advantages * gate
        return per_token, policy_metrics(batch, per_token, gap)

    return sapo


def cispo(clip_ratio: float = 0.2, clip_ratio_low: float | None = None, clip_ratio_high: float | None = None) -> Loss:
    """Returns the policy gradient with clipped importance weights (CISPO). It reads ``old_log_probs``.

    The loss is ``-clip(r, 1 - low, 1 + high) * A * log-probability``; the gradient does not pass through the
    ratio r. So a token whose ratio is clipped still has a gradient.

    Args:
        clip_ratio: how far the weight may be from 1 in either direction.
        clip_ratio_low: replaces ``clip_ratio`` for weights below 1.
        clip_ratio_high: replaces ``clip_ratio`` for weights above 1.

    Example:
        >>> batch = Batch.from_rows([[1]], {"old_log_probs": [[-2.0]], "advantages": [[1.0]],
        ...                                 "response_mask": [[1.0]], "loss_weight": [[1.0]]})
        >>> x = torch.tensor([-1.0], requires_grad=True)
        >>> cispo()(TokenOutputs({"logprobs": x}), batch)[0].sum().backward()
        >>> round(x.grad.item(), 4)
        -1.2

    Source: MiniMax 2025 (arXiv 2506.13585).
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)

    @loss(needs=["logprobs"])
    def cispo(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        gap = log_ratio(outputs, batch)
        ratio = gap.exp().detach()
        weight = ratio.clamp(1.0 - low, 1.0 + high)
        per_token = -weight * batch["advantages"] * outputs.logprobs
        return per_token, policy_metrics(batch, per_token, gap, ratio != weight)

    return cispo


def dro(dro_beta: float) -> Loss:
    """Returns the direct reward optimization loss (DRO). It reads ``old_log_probs``.

    The loss is ``-(A * log-probability - dro_beta / 2 * d^2)``, where d is the log-ratio to ``old_log_probs``. The
    penalty takes the place of a clip, so zero advantages do not give a zero gradient away from the old policy.

    Args:
        dro_beta: the weight of the penalty.

    Raises:
        ValueError: ``dro_beta`` is not positive.

    Example:
        >>> batch = Batch.from_rows([[1]], {"old_log_probs": [[-2.0]], "advantages": [[1.0]],
        ...                                 "response_mask": [[1.0]], "loss_weight": [[1.0]]})
        >>> dro(0.5)(TokenOutputs({"logprobs": torch.tensor([-1.0])}), batch)[0].tolist()
        [1.25]

    Source: Richemond et al. 2024 (arXiv 2405.19107), equation 8 for given values.
    """
    if dro_beta <= 0:
        raise ValueError(f"dro_beta is {dro_beta}; it must be positive")

    @loss(needs=["logprobs"])
    def dro(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        gap = outputs.logprobs - batch["old_log_probs"]
        per_token = 0.5 * dro_beta * gap.square() - batch["advantages"] * outputs.logprobs
        return per_token, policy_metrics(batch, per_token, gap)

    return dro


def clip_cov(
    clip_ratio: float = 0.2, clip_ratio_low: float | None = None, clip_ratio_high: float | None = None
) -> Loss:
    """Returns the clipped surrogate without the selected tokens (Clip-Cov).

    It reads ``old_log_probs``, ``advantages``, and ``cov_selected`` from ``select_clip_cov``. Selected tokens have
    no gradient and still count in the weights.

    Args:
        clip_ratio: how far the probability ratio may move from 1 in either direction.
        clip_ratio_low: replaces ``clip_ratio`` for ratios below 1.
        clip_ratio_high: replaces ``clip_ratio`` for ratios above 1.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"old_log_probs": [[-1.0, -1.0]], "advantages": [[1.0, 1.0]],
        ...     "response_mask": [[1.0, 1.0]], "loss_weight": [[0.5, 0.5]], "cov_selected": [[0.0, 1.0]]})
        >>> clip_cov()(TokenOutputs({"logprobs": torch.tensor([-1.0, -1.0])}), batch)[0].tolist()
        [-1.0, 0.0]

    Source: Cui et al. 2025 (arXiv 2505.22617).
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)

    @loss(needs=["logprobs"])
    def clip_cov(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        advantages, selected = batch["advantages"], _selected(batch, "select_clip_cov")
        gap = log_ratio(outputs, batch)
        ratio = gap.exp()
        surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high))
        per_token = torch.where(selected, 0.0, surrogate)
        return per_token, policy_metrics(batch, per_token, gap, selected)

    return clip_cov


def kl_cov(ppo_kl_coef: float = 0.1) -> Loss:
    """Returns the unclipped surrogate with a penalty for the selected tokens (KL-Cov).

    With the log-ratio d, the loss is ``-A exp(d)``, plus ``ppo_kl_coef * |d|`` for selected tokens. It reads
    ``old_log_probs``, ``advantages``, and ``cov_selected`` from ``select_kl_cov``.

    Args:
        ppo_kl_coef: the weight of the penalty.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"old_log_probs": [[-1.0, -1.0]], "advantages": [[0.0, 0.0]],
        ...     "response_mask": [[1.0, 1.0]], "loss_weight": [[0.5, 0.5]], "cov_selected": [[0.0, 1.0]]})
        >>> kl_cov(0.5)(TokenOutputs({"logprobs": torch.tensor([-3.0, -3.0])}), batch)[0].tolist()
        [0.0, 1.0]

    Source: Cui et al. 2025 (arXiv 2505.22617).
    """

    @loss(needs=["logprobs"])
    def kl_cov(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        selected = _selected(batch, "select_kl_cov")
        gap = log_ratio(outputs, batch)
        per_token = torch.where(selected, ppo_kl_coef * gap.abs(), 0.0) - batch["advantages"] * gap.exp()
        return per_token, {
            "actor/pg_loss": weighted_sum(batch, per_token),
            "actor/kl_cov_frac": token_mean(batch, selected),
            "actor/ppo_kl": token_mean(batch, gap.abs()),
        }

    return kl_cov


def _selected(batch: Batch, writer: str) -> Tensor:
    if SELECTED not in batch:
        raise KeyError(f"the batch has no field {SELECTED!r}; call steps.{writer} on the whole update batch first")
    return batch[SELECTED] != 0


def select_clip_cov(
    batch: Batch,
    logprobs: Float[Tensor, " T"],
    key: Key,
    *,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> Batch:
    """Draws tokens of high covariance for ``clip_cov``: ``cov_selected`` is 1 for them and 0 elsewhere.

    The covariance of a token is (A - mean of A) (log-probability - its mean), with means over the response tokens of
    the batch. Candidates have one between the bounds and are not clipped already; of these, ``clip_cov_ratio`` times
    the number of response tokens are drawn, at least one. The draw does not depend on the order of the rows.

    Args:
        batch: the whole update batch, with ``response_mask``, ``old_log_probs`` and ``advantages``.
        logprobs: the policy's log-probabilities.
        key: what the draw depends on.
        clip_cov_ratio: the share of the response tokens to draw.
        clip_cov_lb: candidates have a larger covariance, in nats times the unit of the advantages.
        clip_cov_ub: candidates have a smaller covariance.
        clip_ratio: the bounds of the ratio, as for ``clip_cov``, like the following.
        clip_ratio_low: replaces ``clip_ratio`` for ratios below 1.
        clip_ratio_high: replaces ``clip_ratio`` for ratios above 1.

    Example:
        >>> batch = Batch.from_rows([[1, 2, 3]], {"response_mask": [[1.0] * 3], "advantages": [[3.0, 0.0, 0.0]],
        ...                                       "old_log_probs": [[-0.5, -2.0, -2.0]]})
        >>> select_clip_cov(batch, batch["old_log_probs"], Key.from_seed(0))["cov_selected"].tolist()
        [1.0, 0.0, 0.0]

    Source: Cui et al. 2025 (arXiv 2505.22617).
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    mask, advantages = batch["response_mask"].bool(), batch["advantages"]
    ratio = (logprobs - batch["old_log_probs"]).clamp(-LARGEST, LARGEST).exp()
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high) > -advantages * ratio
    covariance = _covariance(batch, logprobs)
    (candidates,) = torch.where(mask & ~clipped & (covariance > clip_cov_lb) & (covariance < clip_cov_ub))
    count = max(1, int(clip_cov_ratio * int(mask.sum())))
    # In the order of their covariance, the draw is the same for every order of the rows.
    candidates = candidates[covariance[candidates].argsort(stable=True)]
    drawn = torch.randperm(len(candidates), generator=key.generator())[:count]
    selected = torch.zeros_like(advantages)
    selected[candidates[drawn.to(candidates.device)]] = 1.0
    return batch.with_tokens(**{SELECTED: selected})


def select_kl_cov(batch: Batch, logprobs: Float[Tensor, " T"], *, kl_cov_ratio: float = 0.0002) -> Batch:
    """Selects the tokens of highest covariance for ``kl_cov``: ``cov_selected`` is 1 for them and 0 elsewhere.

    Args:
        batch: the whole update batch, with ``response_mask`` and ``advantages``.
        logprobs: the policy's log-probabilities; ``select_clip_cov`` has the formula of the covariance.
        kl_cov_ratio: the share of the response tokens to select; at least one is, and more if values are equal.

    Example:
        >>> batch = Batch.from_rows([[1, 2, 3]], {"response_mask": [[1.0] * 3], "advantages": [[3.0, 0.0, 0.0]]})
        >>> select_kl_cov(batch, torch.tensor([-0.5, -2.0, -2.0]))["cov_selected"].tolist()
        [1.0, 0.0, 0.0]

    Source: Cui et al. 2025 (arXiv 2505.22617).
    """
    selected = _largest(batch, _covariance(batch, logprobs), kl_cov_ratio)
    return batch.with_tokens(**{SELECTED: selected.to(batch["advantages"].dtype)})


def select_high_entropy(batch: Batch, entropy: Float[Tensor, " T"], *, top_entropy_quantile: float = 0.2) -> Batch:
    """Keeps the advantages of the response tokens with the highest entropy, and sets all others to 0.

    Every loss that is proportional to the advantage then learns only from these tokens. The others still count in
    the weights, and KL terms still reach them. Also writes ``high_entropy``, 1 for the tokens that are kept.

    Args:
        batch: the whole update batch, with ``response_mask`` and ``advantages``.
        entropy: the policy's entropy where each token was drawn, in nats.
        top_entropy_quantile: the share of the response tokens to keep; at least one is, and more where values are
            equal.

    Raises:
        ValueError: ``top_entropy_quantile`` is not in (0, 1].

    Example:
        >>> batch = Batch.from_rows([[1, 2, 3]], {"response_mask": [[1.0] * 3], "advantages": [[3.0, 3.0, 3.0]]})
        >>> select_high_entropy(batch, torch.tensor([0.1, 1.2, 0.4]), top_entropy_quantile=0.4)["advantages"].tolist()
        [0.0, 3.0, 0.0]

    Source: Wang et al. 2025 (arXiv 2506.01939); the name of the option is TRL's.
    """
    if not 0.0 < top_entropy_quantile <= 1.0:
        raise ValueError(f"top_entropy_quantile is {top_entropy_quantile}; it must be above 0 and at most 1")
    kept = _largest(batch, entropy.double(), top_entropy_quantile)
    advantages = torch.where(kept, batch["advantages"], 0.0)
    return batch.with_tokens(advantages=advantages, high_entropy=kept.to(advantages.dtype))


def _covariance(batch: Batch, logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Returns the product of each response token's centred advantage and centred log-probability, and 0 elsewhere."""
    mask = batch["response_mask"].bool()

    def centred(values: Tensor) -> Tensor:
        values = torch.where(mask, values.double(), 0.0)
        return torch.where(mask, values - values.sum() / mask.sum(), 0.0)

    return centred(batch["advantages"]) * centred(logprobs)


def _largest(batch: Batch, values: Float[Tensor, " T"], share: float) -> Tensor:
    """Returns a mask of the response tokens with the largest values.

    All tokens with the value of the last one chosen are in it, so the order of rows makes no difference.
    """
    mask = batch["response_mask"].bool()
    chosen = values[mask]
    if not len(chosen):
        return mask
    count = max(1, int(share * len(chosen)))
    return mask & (values >= chosen.topk(count).values[-1])
