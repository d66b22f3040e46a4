"""What training backends and rollout engines promise; the algorithms know nothing else of either."""

from .rollout import RolloutBackend, Sampling, StaleWeightsError
from .train import TrainBackend

__all__ = ["RolloutBackend", "Sampling", "StaleWeightsError", "TrainBackend"]
