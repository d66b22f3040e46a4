"""Supervised losses."""

from __future__ import annotations

from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs

from .contract import Loss, loss, token_mean


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
