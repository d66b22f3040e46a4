"""Algorithms: ``new(cfg, key) -> state`` and ``step(state, problems, workers, cfg) -> (state, report)``."""

from __future__ import annotations

import importlib
from types import ModuleType


def by_name(name: str) -> ModuleType:
    """The module of an algorithm.

    >>> by_name("ppo").__name__
    'verl_fn.algorithms.ppo'
    """
    return importlib.import_module(f"verl_fn.algorithms.{name}")
