"""Losses of value models."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs

from .contract import Loss, loss, token_mean, weighted_sum


def value_clip(cliprange_value: float = 0.5) -> Loss:
    """Half the squared error of the value, the larger of clipped and unclipped (Schulman et al. 2016).

    Reads ``values`` (those of the rollout) and ``returns``.

    Example:
        >>> batch = Batch.from_rows([[1]], {"values": [[0.0]], "returns": [[2.0]],
        ...                                 "response_mask": [[1.0]], "loss_weight": [[1.0]]})
        >>> value_clip(0.5)(TokenOutputs({"values": torch.tensor([1.0])}), batch)[0].tolist()
        [1.125]
    """

    @loss(needs=["values"])
    def value_clip(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        old, returns = batch["values"], batch["returns"]
        near = outputs.values.clamp(old - cliprange_value, old + cliprange_value)
        free, clipped = (outputs.values - returns).square(), (near - returns).square()
        per_token = 0.5 * torch.maximum(free, clipped)
        return per_token, {
            "critic/vf_loss": weighted_sum(batch, per_token),
            "critic/vf_clipfrac": token_mean(batch, clipped > free),
            "critic/vpred_mean": token_mean(batch, outputs.values),
        }

    return value_clip
