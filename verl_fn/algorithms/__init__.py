"""Algorithms, each a value made from its own options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_fn.config.algorithms import BUILT_IN
from verl_fn.config.names import load_object

from .algorithm import ActorState, Algorithm
from .imitation import distill, rejection, sft
from .judged import dpo, reward_model
from .own import in_run
from .policy import aggregation
from .policy_optimization import dapo, grpo, ppo, remax, rloo
from .workers import AlgorithmError, AlgorithmState, Clock, Experience, Report, Workers

__all__ = [
    "ActorState",
    "Algorithm",
    "AlgorithmError",
    "AlgorithmState",
    "Clock",
    "Experience",
    "Report",
    "Workers",
    "dapo",
    "distill",
    "dpo",
    "grpo",
    "make",
    "ppo",
    "rejection",
    "remax",
    "reward_model",
    "rloo",
    "sft",
]


def make(name: str, options: Any) -> Algorithm[Any]:
    """Makes an algorithm from its name and its options.

    Args:
        name: a built-in one, such as ``ppo``, or a function of the user as ``FILE.py:NAME`` or ``MODULE:NAME``.

    Raises:
        ConfigError: the user's function cannot be imported.
        AlgorithmError: it returns no algorithm.

    Example:
        >>> from verl_fn.config import PPO
        >>> list(make("ppo", PPO()).outline.roles)
        ['actor', 'critic']
    """
    if name not in BUILT_IN:
        return in_run(load_object(name, "algorithm.name")(options), name)
    if hasattr(options, "loss_agg_mode"):
        aggregation(options)  # an object that does not exist is an error now, and not in the first step
    factory: Callable[[Any], Algorithm[Any]] = globals()[name]  # imported above under the algorithm's name
    return factory(options)
