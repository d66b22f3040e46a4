"""Policy losses that mask tokens by the divergence of the two policies instead of clipping the ratio (DPPO).

Both have the gradient of the policy gradient with importance weights: with the probability ratio r,

    L = -A min(r, c) log-probability    where the token is valid, and 0 elsewhere,

where the gradient does not pass through min(r, c). A token is invalid if its probability has moved too far in the
direction in which its advantage pushes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs

from .contract import Loss, loss, token_mean, weighted_sum
from .policy import bounds, log_ratio

_TINY = 1e-8


def dppo_tv(
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> Loss:
    """Returns the policy loss with a bound on the total variation of each token (DPPO-Binary-TV).

    A token is valid while its probability p is at most ``high`` above the old one where its advantage is positive,
    and at most ``low`` below it elsewhere.

    Args:
        clip_ratio: how far p may move, as a difference of probabilities, in either direction.
        clip_ratio_low: replaces ``clip_ratio`` for p below the old probability.
        clip_ratio_high: replaces ``clip_ratio`` for p above it.
        clip_ratio_c: the largest importance weight.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"old_log_probs": [[-2.0, -0.2]], "advantages": [[1.0, 1.0]],
        ...                                    "response_mask": [[1.0, 1.0]], "loss_weight": [[0.5, 0.5]]})
        >>> x = torch.tensor([-0.5, -0.1], requires_grad=True)
        >>> dppo_tv()(TokenOutputs({"logprobs": x}), batch)[0].sum().backward()
        >>> [round(g, 4) + 0.0 for g in x.grad.tolist()]
        [0.0, -1.1052]

    Source: Qi et al. 2026 (arXiv 2602.04879).
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)

    @loss(needs=["logprobs"])
    def dppo_tv(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        moved = outputs.logprobs.detach().exp() - batch["old_log_probs"].exp()
        valid = torch.where(batch["advantages"] > 0, moved <= high, moved >= -low)
        return _masked(outputs, batch, valid, clip_ratio_c)

    return dppo_tv


def dppo_kl(
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> Loss:
    """Returns the policy loss with a bound on the KL divergence of each token (DPPO-Binary-KL).

    With the probabilities p now and q before, D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)). A token is valid
    while D is at most ``high``, or p at most q, where its advantage is positive; and while D is at most ``low``, or p
    at least q, elsewhere.

    Args:
        clip_ratio: the largest D, in nats, in either direction.
        clip_ratio_low: replaces ``clip_ratio`` for p below q.
        clip_ratio_high: replaces ``clip_ratio`` for p above q.
        clip_ratio_c: the largest importance weight.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"old_log_probs": [[-2.0, -0.2]], "advantages": [[1.0, 1.0]],
        ...                                    "response_mask": [[1.0, 1.0]], "loss_weight": [[0.5, 0.5]]})
        >>> x = torch.tensor([-0.5, -0.1], requires_grad=True)
        >>> dppo_kl()(TokenOutputs({"logprobs": x}), batch)[0].sum().backward()
        >>> [round(g, 4) + 0.0 for g in x.grad.tolist()]
        [0.0, -1.1052]

    Source: Qi et al. 2026 (arXiv 2602.04879).
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)

    @loss(needs=["logprobs"])
    def dppo_kl(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        new, old = outputs.logprobs.detach(), batch["old_log_probs"]
        p, q = new.exp(), old.exp()
        kl = q * (old - new) + (1.0 - q) * ((1.0 - q + _TINY) / (1.0 - p + _TINY)).log()
        valid = torch.where(batch["advantages"] > 0, (kl <= high) | (p <= q), (kl <= low) | (p >= q))
        return _masked(outputs, batch, valid, clip_ratio_c)

    return dppo_kl


def _masked(outputs: TokenOutputs, batch: Batch, valid: Tensor, clip_ratio_c: float) -> tuple[Tensor, Metrics]:
    gap = log_ratio(outputs, batch)
    ratio = gap.detach().exp()
    per_token = torch.where(valid, -batch["advantages"] * ratio.clamp(max=clip_ratio_c) * outputs.logprobs, 0.0)
    return per_token, {
        "actor/pg_loss": weighted_sum(batch, per_token),
        "actor/pg_clipfrac": token_mean(batch, ~valid),
        "actor/pg_clipfrac_lower": token_mean(batch, (ratio > clip_ratio_c) & valid),
        "actor/ppo_kl": token_mean(batch, -gap),
    }
