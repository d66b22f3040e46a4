"""Losses: pure functions of outputs and batch."""

from .policy import (
    Loss,
    cross_entropy,
    entropy,
    kl_to_reference,
    loss,
    ppo_clip,
    token_mean,
    total_loss,
    value_clip,
    weighted_sum,
)

__all__ = [
    "Loss", "cross_entropy", "entropy", "kl_to_reference", "loss", "ppo_clip", "token_mean", "total_loss",
    "value_clip", "weighted_sum",
]  # fmt: skip
