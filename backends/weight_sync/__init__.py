"""Sends weights from a training backend to a rollout engine: sources, checks and channels."""

from .intake import Cut, IncompleteWeights, arriving, check_specs, checksum, receive
from .source import Apart, Weights, apart, apart_of, specs_of

__all__ = [
    "Apart", "Cut", "IncompleteWeights", "Weights", "apart", "apart_of", "arriving", "check_specs", "checksum",
    "receive", "specs_of",
]  # fmt: skip
