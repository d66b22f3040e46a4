"""The protocols of training backends and rollout engines; algorithms use nothing else of either."""

from verl_fn.state import Request, Sample, Sampling

from .handles import Freed, Handle, Ref, Reference, Remote, here
from .rollout import (
    Capabilities,
    PublicationFailed,
    RolloutBackend,
    StaleWeightsError,
    UnsupportedSampling,
    check_sampling,
    serves,
)
from .train import HoldsBuffers, TrainBackend, whole_leaves
from .weights import BUCKET_BYTES, Chunk, TensorSpec, WeightSource

__all__ = [
    "BUCKET_BYTES", "Capabilities", "Chunk", "Freed", "Handle", "HoldsBuffers", "PublicationFailed", "Ref",
    "Reference", "Remote", "Request", "RolloutBackend", "Sample", "Sampling", "StaleWeightsError", "TensorSpec",
    "TrainBackend", "UnsupportedSampling", "WeightSource", "check_sampling", "here", "serves", "whole_leaves",
]  # fmt: skip
