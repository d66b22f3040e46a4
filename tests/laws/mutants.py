"""Broken backends, losses, estimators and rollout engines: each check must catch every one of its kind.

Every list pairs a mutant with the law that it breaks, so that a check which fails for the wrong reason is noticed
too. ``LAYOUTS`` are broken only beside a right backend.
"""

from mutant_advantages import ADVANTAGES
from mutant_backends import BACKENDS, LAYOUTS, VOCAB, StaleLocal, mock, optimizer
from mutant_losses import LOSSES
from mutant_rollouts import ROLLOUTS, rollout

__all__ = [
    "ADVANTAGES",
    "BACKENDS",
    "LAYOUTS",
    "LOSSES",
    "ROLLOUTS",
    "VOCAB",
    "StaleLocal",
    "mock",
    "optimizer",
    "rollout",
]
