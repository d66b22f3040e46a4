"""Sends weights from a training backend to a rollout engine: sources, checks and channels."""

from .publication import (
    Apart,
    Cut,
    IncompleteWeights,
    Weights,
    apart,
    arriving,
    check_specs,
    form_of,
    identity_of,
    in_parts,
    keeping,
    receive,
    specs_of,
    whole_of_parts,
)

__all__ = [
    "Apart", "Cut", "IncompleteWeights", "Weights", "apart", "arriving", "check_specs",
    "form_of", "identity_of", "in_parts", "keeping", "receive", "specs_of", "whole_of_parts",
]  # fmt: skip
