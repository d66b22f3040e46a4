"""Policy losses with one probability ratio for a whole response."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs

from .contract import Loss, loss, token_mean, weighted_sum
from .policy import bounds, log_ratio

# The largest mean log-ratio of a row, as in verl.
MOST = 10.0


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
        return per_token, {
            "actor/pg_loss": weighted_sum(batch, per_token),
            "actor/pg_clipfrac": token_mean(batch, clipped > unclipped),
            "actor/ppo_kl": token_mean(batch, -gap),
        }

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
