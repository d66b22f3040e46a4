"""KL estimators per token, and the controllers of the KL coefficient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch, Metrics, Node, Weighted, node

ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _k3(diff: Tensor) -> Tensor:
    log_ratio = (-diff).clamp(-20.0, 20.0)
    return (log_ratio.exp() - log_ratio - 1.0).clamp(-10.0, 10.0)


def _k2(diff: Tensor) -> Tensor:
    return 0.5 * diff.square()


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda diff: diff, "k2": _k2, "k3": _k3, "abs": Tensor.abs}


def kl_penalty(
    logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"], kind: str = "k1"
) -> Float[Tensor, " T"]:
    """Estimates KL(policy || reference) at each sampled token, in nats.

    In the table, d is ``logprobs - ref_logprobs``.

    ==================  ==================================================================
    kind                estimate
    ==================  ==================================================================
    ``k1``, ``kl``      d
    ``k2``, ``mse``     d^2 / 2
    ``k3``,             exp(-d) - 1 + d, with d clamped to [-20, 20] and the result to
    ``low_var_kl``      [-10, 10]
    ``abs``             absolute value of d
    ==================  ==================================================================

    With a trailing ``+``, as in ``k3+``, the value is the same but the gradient is the unbiased one of ``k2``.

    Args:
        ref_logprobs: the reference's log-probabilities of the same tokens.
        kind: an estimator of the table.

    Raises:
        ValueError: the kind is unknown.

    Example:
        >>> kl_penalty(torch.tensor([0.0]), torch.tensor([-1.0]), "k2").tolist()
        [0.5]

    Source: Schulman, "Approximating KL Divergence" (2020); clamps and names as in verl.
    """
    base = kind.removesuffix("+")
    base = ALIASES.get(base, base)
    if base not in ESTIMATORS:
        raise ValueError(
            f"unknown KL estimator {kind!r}; it is one of {', '.join((*ESTIMATORS, *ALIASES))}, "
            "or one of these followed by +"
        )
    diff = logprobs - ref_logprobs
    value = ESTIMATORS[base](diff)
    if not kind.endswith("+"):
        return value
    carrier = _k2(diff)
    return value.detach() + (carrier - carrier.detach())


@node
class FixedKL(Node):
    """A constant KL coefficient.

    Attributes:
        value: the coefficient.

    Example:
        >>> FixedKL(0.001).update(current_kl=5.0, n_steps=8).value
        0.001
    """

    value: float = 0.001

    def update(self, current_kl: float, n_steps: int) -> FixedKL:
        """Returns this controller."""
        return self


def _positive(controller: Node, field: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise ValueError(f"{field.name} of an adaptive KL coefficient is {value}; it must be above 0")


@node
class AdaptiveKL(Node):
    """A KL coefficient that grows while the KL is above a target and shrinks while it is below.

    Attributes:
        value: the coefficient.
        target: the KL to reach.
        horizon: the number of samples over which the coefficient adapts; a larger one adapts it more slowly.

    Raises:
        ValueError: ``target`` or ``horizon`` is not above 0.

    Example:
        >>> AdaptiveKL(0.1, target=1.0, horizon=100).update(current_kl=9.0, n_steps=10).value
        0.10200000000000001

    Source: Ziegler et al. 2019 (arXiv 1909.08593).
    """

    value: float = 0.001
    target: float = attrs.field(default=0.1, validator=_positive)
    horizon: int = attrs.field(default=10000, validator=_positive)

    def update(self, current_kl: float, n_steps: int) -> AdaptiveKL:
        """Returns the controller after ``n_steps`` samples whose mean KL was ``current_kl``.

        A KL that is nan changes nothing, as a gradient that is not finite changes no parameters.
        """
        if math.isnan(current_kl):
            return self
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        return AdaptiveKL(self.value * (1.0 + error * n_steps / self.horizon), self.target, self.horizon)


KLController: TypeAlias = "FixedKL | AdaptiveKL"


def apply_kl_in_reward(
    batch: Batch, controller: KLController, kind: str = "k1"
) -> tuple[Batch, KLController, Metrics]:
    """Subtracts the KL penalty from the token rewards and updates the controller.

    Args:
        batch: needs ``token_level_scores``, ``old_log_probs``, ``ref_log_prob`` and ``response_mask``.
        controller: gives the coefficient.
        kind: the estimator, as for ``kl_penalty``.

    Returns:
        The batch with ``token_level_rewards``, the updated controller, and metrics. The controller is updated with
        the mean over rows of the mean KL of their response tokens. Rows without a response token count neither in
        this mean nor as samples; verl counts them with a KL of 0.

    Example:
        >>> rows = {name: [[x]] for name, x in {"token_level_scores": 1.0, "old_log_probs": 0.0,
        ...         "ref_log_prob": -2.0, "response_mask": 1.0}.items()}
        >>> batch, _, metrics = apply_kl_in_reward(Batch.from_rows([[7]], rows), FixedKL(0.5))
        >>> batch["token_level_rewards"].tolist(), metrics["actor/reward_kl_penalty"].value
        ([0.0], 2.0)
    """
    mask = batch["response_mask"].float()
    # A product with the mask would keep values that are not finite outside of responses.
    kl = torch.where(mask != 0, kl_penalty(batch["old_log_probs"], batch["ref_log_prob"], kind), 0.0)
    lengths = batch.sum_rows(mask)
    rows = lengths > 0
    row_means = batch.sum_rows(kl.double())[rows] / lengths[rows]
    current = float(row_means.mean()) if len(row_means) else 0.0
    metrics: Metrics = {
        "actor/reward_kl_penalty": Weighted(current, 1.0),
        "actor/reward_kl_penalty_coeff": Weighted(controller.value, 1.0),
    }
    rewards = batch["token_level_scores"] - controller.value * kl
    return batch.with_tokens(token_level_rewards=rewards), controller.update(current, len(row_means)), metrics
