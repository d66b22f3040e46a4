"""The reward of levels that only need one: a rule that responses of any model satisfy more or less."""

from typing import Any


def even_share(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Returns the share of a response's characters whose code points are even.

    Random models get rewards around a half, all different, so advantages and gradients are not zero; and a policy
    learns it within a few steps.

    Example:
        >>> even_share("count", "ab", "aaa")
        0.5
    """
    return sum(ord(char) % 2 == 0 for char in solution_str) / max(1, len(solution_str))
