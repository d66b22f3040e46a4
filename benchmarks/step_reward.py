"""The reward of the benchmark ``step``: cheap, and different from response to response."""

from __future__ import annotations

from typing import Any


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **more: Any) -> float:
    """Returns the share of characters with an even code point.

    Example:
        >>> score("step", "ab", "")
        0.5
    """
    return sum(ord(character) % 2 == 0 for character in solution_str) / max(len(solution_str), 1)
