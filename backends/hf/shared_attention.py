"""Attention of ranks that share the sequence; a module of its own, as ``torch.compiler.disable`` imports much."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_fn.backends.hf.attention import Packing


# Compiled code silently loses the gradient of the exchange.
@torch.compiler.disable
def shared(attend: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, *options: Any) -> Tensor:
    """Computes the attention of ranks that share the sequence, each for a part of the heads."""
    ranks = packing.sequence
    return ranks.to_tokens(attend(*(ranks.to_heads(x) for x in (q, k, v)), packing, *options))
