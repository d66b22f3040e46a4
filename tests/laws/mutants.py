"""Broken backends, losses, estimators and rollout engines: each check must catch every one of its kind.

Every list pairs a mutant with the law that it breaks, so that a check which fails for the wrong reason is noticed
too. ``LAYOUTS`` pairs mutants with right backends, beside which they are broken.
"""

from mock_backends import VOCAB, mock, optimizer
from mock_rollouts import rollout
from mutant_advantages import ADVANTAGES
from mutant_draws import DRAWS
from mutant_folders import FOLDERS
from mutant_gradients import GRADIENTS
from mutant_in_flight import FLIGHTS
from mutant_layouts import LAYOUTS
from mutant_losses import LOSSES
from mutant_outputs import OTHER_OUTPUTS, OUTPUTS
from mutant_purity import PURITY, StaleChecksums, StaleLocal, StaleTower
from mutant_rollouts import SAMPLES
from mutant_updates import UPDATES

ROLLOUTS = [*SAMPLES, *DRAWS, *FLIGHTS]
BACKENDS = [*PURITY, *GRADIENTS, *OUTPUTS, *UPDATES, *FOLDERS]

__all__ = [
    "ADVANTAGES",
    "BACKENDS",
    "LAYOUTS",
    "LOSSES",
    "OTHER_OUTPUTS",
    "ROLLOUTS",
    "VOCAB",
    "StaleChecksums",
    "StaleLocal",
    "StaleTower",
    "mock",
    "optimizer",
    "rollout",
]
