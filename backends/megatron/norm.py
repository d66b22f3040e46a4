"""RMSNorm for machines without transformer-engine, in the model's dtype and with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square normalisation in fp32, scaled in the model's dtype.

    A zero-centred weight w scales by 1 + w, in fp32.

    By the name of this class Megatron-Bridge knows that it is a norm, whose weights every rank has whole.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__()
        self.eps, self.centred = eps, bool(config.layernorm_zero_centered_gamma)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron adds up the gradients of ranks that share the tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised tensor, of the same shape and dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.centred:
            return ((1 + self.weight.float()) * normed).to(x.dtype)
        return self.weight * normed.to(x.dtype)
