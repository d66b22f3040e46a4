"""Optimizers, schedules, and the one rule for applying an update."""

from .apply import (
    AdamState,
    GradTransform,
    Optimizer,
    Update,
    adamw,
    apply_update,
    chain,
    check_update,
    clip_by_global_norm,
    frozen,
    sgd,
)
from .schedules import constant, cosine, linear

__all__ = [
    "AdamState", "GradTransform", "Optimizer", "Update", "adamw", "apply_update", "chain", "check_update",
    "clip_by_global_norm", "constant", "cosine", "frozen", "linear", "sgd",
]  # fmt: skip
