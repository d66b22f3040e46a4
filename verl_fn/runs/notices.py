"""A sentence about rewards that are allowed, but teach nothing."""

from __future__ import annotations

from verl_fn.algorithms import Report


def without_signal(step: int, report: Report) -> str:
    """Returns a sentence about a step whose rewards are all equal, or whose advantages are all 0; or nothing.

    Example:
        >>> names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
        >>> without_signal(3, dict.fromkeys(names, 0.0))
        'all rewards of step 3 are 0, and all advantages are 0: the policy learns nothing from it'
        >>> without_signal(3, dict(zip(names, (0.0, 1.0, -1.0, 1.0))))
        ''
    """
    names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
    if any(name not in report for name in names):
        return ""
    lowest, highest, *advantages = (report[name] for name in names)
    idle = advantages == [0.0, 0.0]
    if lowest == highest:
        also = ", and all advantages are 0: the policy learns nothing from it" if idle else ""
        return f"all rewards of step {step} are {lowest:g}{also}"
    if idle:
        return (
            f"all advantages of step {step} are 0, although rewards go from {lowest:g} to {highest:g}: they differ "
            "between prompts alone, or are so large that their differences are rounded away"
        )
    return ""
