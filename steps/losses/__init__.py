"""Losses: pure functions of outputs and batch."""

from .contract import (
    Level,
    Loss,
    Term,
    check_weights,
    loss,
    row_mean,
    token_mean,
    total_loss,
    weighted_sum,
)
from .policy import entropy, kl_to_reference, ppo_clip
from .preference import bradley_terry
from .supervised import cross_entropy
from .value import value_clip

__all__ = [
    "Level",
    "Loss",
    "Term",
    "bradley_terry",
    "check_weights",
    "cross_entropy",
    "entropy",
    "kl_to_reference",
    "loss",
    "ppo_clip",
    "row_mean",
    "token_mean",
    "total_loss",
    "value_clip",
    "weighted_sum",
]
