"""Sends weights from a training backend to a rollout engine: sources, checks and channels."""

from .cut import Cut
from .intake import IncompleteWeights, arriving, check_specs, checksum, receive
from .source import Weights, specs_of

__all__ = ["Cut", "IncompleteWeights", "Weights", "arriving", "check_specs", "checksum", "receive", "specs_of"]
