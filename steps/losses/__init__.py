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
from .distillation import distill
from .kto import kto, kto_reference_point
from .policy import entropy, kl_to_reference, ppo_clip
from .preference import bradley_terry, cdpo, dpo, ipo
from .reference_free import orpo, simpo
from .supervised import cross_entropy
from .value import value_clip

__all__ = [
    "Level",
    "Loss",
    "Term",
    "bradley_terry",
    "cdpo",
    "check_weights",
    "cross_entropy",
    "distill",
    "dpo",
    "entropy",
    "ipo",
    "kl_to_reference",
    "kto",
    "kto_reference_point",
    "loss",
    "orpo",
    "ppo_clip",
    "row_mean",
    "simpo",
    "token_mean",
    "total_loss",
    "value_clip",
    "weighted_sum",
]
