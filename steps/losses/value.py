"""Losses for value models."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs

from .contract import Loss, loss, token_mean, weighted_sum


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
