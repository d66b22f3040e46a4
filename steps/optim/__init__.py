"""Optimizers, learning-rate schedules, and ``apply_update`` to apply an optimizer to a state."""

from .apply import apply_update, check_update
from .optimizers import SGD, AdamState, AdamW, SGDState, adamw, matrices, no_decay, sgd
from .schedules import Constant, Cosine, Linear, Schedule, constant, cosine, linear
from .transforms import (
    Chain,
    ClipByGlobalNorm,
    Frozen,
    GradTransform,
    Optimizer,
    Update,
    chain,
    clip_by_global_norm,
    frozen,
    stateless,
)

__all__ = [
    "SGD",
    "AdamState",
    "AdamW",
    "Chain",
    "ClipByGlobalNorm",
    "Constant",
    "Cosine",
    "Frozen",
    "GradTransform",
    "Linear",
    "Optimizer",
    "SGDState",
    "Schedule",
    "Update",
    "adamw",
    "apply_update",
    "chain",
    "check_update",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "frozen",
    "linear",
    "matrices",
    "no_decay",
    "sgd",
    "stateless",
]
