"""Reward functions with verl's signature, for ``reward.functions``. They import no other package."""

from .answers import brevity, exact, matches, tagged, thinks
from .mathematics import boxed, equal, verified
from .reasoning import reasoning_gym

__all__ = ["boxed", "brevity", "equal", "exact", "matches", "reasoning_gym", "tagged", "thinks", "verified"]
