"""Common losses: PPO's clipped surrogate and its critic, the plain policy gradient, entropy, KL, cross-entropy."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs
from verl_fn.steps.kl import kl_penalty

from .contract import Loss, loss, token_mean, weighted_sum

# exp of a larger log-ratio would overflow when it is multiplied, and its gradient carries no information.
LARGEST = 20.0


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
        return per_token, {
            "actor/pg_loss": weighted_sum(batch, per_token),
            "actor/pg_clipfrac": token_mean(batch, clipped > unclipped),
            "actor/pg_clipfrac_lower": token_mean(batch, (upper > cap) & (advantages < 0)),
            "actor/ppo_kl": token_mean(batch, -gap),
        }

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
        return per_token, {
            "actor/pg_loss": weighted_sum(batch, per_token),
            "actor/ppo_kl": token_mean(batch, -log_ratio(outputs, batch)),
        }

    return reinforce


def entropy() -> Loss:
    """Returns the policy's entropy in nats as a loss. Subtract it for a bonus: ``ppo_clip() - 0.01 * entropy()``."""

    @loss(needs=["entropy"])
    def entropy(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        return outputs.entropy, {"actor/entropy_loss": weighted_sum(batch, outputs.entropy)}

    return entropy


def kl_to_reference(kind: str = "low_var_kl") -> Loss:
    """Returns the KL to the reference policy as a loss. It reads ``ref_log_prob``.

    Args:
        kind: the estimator, as for ``kl_penalty``.
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


def bounds(both: float, low: float | None, high: float | None) -> tuple[float, float]:
    """Returns the distances to the lower and the upper bound; None stands for the common one.

    Example:
        >>> bounds(0.2, None, 0.28)
        (0.2, 0.28)
    """
    return both if low is None else low, both if high is None else high
