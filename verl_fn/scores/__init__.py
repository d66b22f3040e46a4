"""Reward functions with verl's signature, for ``reward.functions``. They import no other package."""

from .answers import brevity, exact, matches, tagged, thinks
from .mathematics import boxed, equal, verified

__all__ = ["boxed", "brevity", "equal", "exact", "matches", "tagged", "thinks", "verified"]
