"""Policy losses that bound the probability ratio in other ways than PPO's clip."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs

from .contract import Loss, loss, token_mean, weighted_sum
from .policy import bounds, log_ratio


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
        return per_token, {
            "actor/pg_loss": weighted_sum(batch, per_token),
            "actor/ppo_kl": token_mean(batch, -gap),
        }

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
        return per_token, {
            "actor/pg_loss": weighted_sum(batch, per_token),
            "actor/pg_clipfrac": token_mean(batch, ratio != weight),
            "actor/ppo_kl": token_mean(batch, -gap),
        }

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
        return per_token, {
            "actor/pg_loss": weighted_sum(batch, per_token),
            "actor/ppo_kl": token_mean(batch, -gap),
        }

    return dro
