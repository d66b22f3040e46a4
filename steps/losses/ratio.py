"""Probability ratios and their bounds, for all policy losses."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch, TokenOutputs

# exp of a larger log-ratio would overflow when it is multiplied, and its gradient carries no information.
LARGEST = 20.0


def log_ratio(outputs: TokenOutputs, batch: Batch) -> Float[Tensor, " T"]:
    """Returns the policy's log-probability of each token minus ``old_log_probs``, in nats, clamped to [-20, 20].

    Where it is clamped, its gradient is 0.
    """
    return (outputs.logprobs - batch["old_log_probs"]).clamp(-LARGEST, LARGEST)


def bounds(both: float, low: float | None, high: float | None) -> tuple[float, float]:
    """Returns the distances to the lower and the upper bound, where None stands for the common one.

    Example:
        >>> bounds(0.2, None, 0.28)
        (0.2, 0.28)
    """
    return both if low is None else low, both if high is None else high
