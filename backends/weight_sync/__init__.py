"""Sends weights from a training backend to a rollout engine: sources, checks and channels."""

from .apart import Apart, apart_of
from .cut import Cut
from .intake import IncompleteWeights, arriving, check_specs, checksum, receive
from .source import Weights, apart, specs_of

__all__ = [
    "Apart", "Cut", "IncompleteWeights", "Weights", "apart", "apart_of", "arriving", "check_specs", "checksum",
    "receive", "specs_of",
]  # fmt: skip
