"""Policy losses that treat the tokens apart whose log-probability and advantage vary together.

These tokens make the policy's entropy collapse. Which they are depends on the whole update batch, so a function of
``steps.selection`` writes the field ``cov_selected`` before the batch is split, and these losses read it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs

from .contract import Loss, loss, token_mean, weighted_sum
from .policy import bounds, log_ratio

SELECTED = "cov_selected"


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
        return per_token, {
            "actor/pg_loss": weighted_sum(batch, per_token),
            "actor/pg_clipfrac": token_mean(batch, selected),
            "actor/ppo_kl": token_mean(batch, -gap),
        }

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
