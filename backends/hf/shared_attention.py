"""Attention of ranks that share the sequence; a module of its own, as ``torch.compiler.disable`` imports much."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_fn.backends.hf.ulysses import Sequence


# Compiled code silently loses the gradient of the exchange.
@torch.compiler.disable
def shared(ranks: Sequence, attend: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """Computes the attention of ranks that share the sequence, each for a part of the heads."""
    *others, sinks = options
    if sinks is not None:
        sinks = sinks.unflatten(0, (ranks.size, -1))[ranks.rank]
    return ranks.to_tokens(attend(*(ranks.to_heads(x) for x in (q, k, v)), *others, sinks))
