"""KL estimators per token, and the controllers of the KL coefficient."""

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch, Metrics, Node, Weighted, node

ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
ESTIMATORS = ("k1", "k2", "k3", "abs")


def kl_penalty(
    logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"], kind: str = "k1"
) -> Float[Tensor, " T"]:
    """An estimate of KL(policy || reference) at each sampled token, in nats.

    With d = logprobs - ref_logprobs: ``k1`` (alias ``kl``) d; ``k2`` (``mse``) d^2 / 2; ``k3``
    (``low_var_kl``) exp(-d) - 1 + d, with d clamped to 20 and the result to 10; ``abs`` |d|. A trailing
    ``+`` keeps the value and takes the gradient of k2, which is the unbiased one.

    Example:
        >>> import torch
        >>> kl_penalty(torch.tensor([0.0]), torch.tensor([-1.0]), "k2").tolist()
        [0.5]

    Source: Schulman, "Approximating KL Divergence" (2020); clamps and names as in verl.
    """
    base = kind.removesuffix("+")
    base = ALIASES.get(base, base)
    diff = logprobs - ref_logprobs
    if base == "k1":
        value = diff
    elif base == "k2":
        value = 0.5 * diff.square()
    elif base == "k3":
        log_ratio = (-diff).clamp(-20.0, 20.0)
        value = (log_ratio.exp() - log_ratio - 1.0).clamp(-10.0, 10.0)
    elif base == "abs":
        value = diff.abs()
    else:
        raise ValueError(
            f"unknown KL estimator {kind!r}; it is one of {', '.join((*ESTIMATORS, *ALIASES))}, or one with a +"
        )
    if not kind.endswith("+"):
        return value
    carrier = 0.5 * diff.square()
    return value.detach() + (carrier - carrier.detach())


@node
class FixedKL(Node):
    """A constant KL coefficient.

    Example:
        >>> FixedKL(0.001).update(current_kl=5.0, n_steps=8).value
        0.001
    """

    value: float = 0.001

    def update(self, current_kl: float, n_steps: int) -> FixedKL:
        return self


@node
class AdaptiveKL(Node):
    """A coefficient that steers the KL towards ``target`` (Ziegler et al. 2019, arXiv 1909.08593).

    Example:
        >>> AdaptiveKL(0.1, target=1.0, horizon=100).update(current_kl=9.0, n_steps=10).value
        0.10200000000000001
    """

    value: float = 0.001
    target: float = 0.1
    horizon: int = 10000

    def update(self, current_kl: float, n_steps: int) -> AdaptiveKL:
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        return AdaptiveKL(self.value * (1.0 + error * n_steps / self.horizon), self.target, self.horizon)


KLController: TypeAlias = "FixedKL | AdaptiveKL"


def apply_kl_in_reward(
    batch: Batch, controller: KLController, kind: str = "k1"
) -> tuple[Batch, KLController, Metrics]:
    """Subtract the KL penalty from the token rewards and move the controller on.

    Needs ``token_level_scores``, ``old_log_probs``, ``ref_log_prob`` and ``response_mask``; writes
    ``token_level_rewards``. The KL that the controller sees is the mean over rows of their token means.

    Example:
        >>> rows = {name: [[x]] for name, x in {"token_level_scores": 1.0, "old_log_probs": 0.0,
        ...         "ref_log_prob": -2.0, "response_mask": 1.0}.items()}
        >>> batch, _, metrics = apply_kl_in_reward(Batch.from_rows([[7]], rows), FixedKL(0.5))
        >>> batch["token_level_rewards"].tolist(), metrics["actor/reward_kl_penalty"].value
        ([0.0], 2.0)
    """
    mask = batch["response_mask"].float()
    kl = kl_penalty(batch["old_log_probs"], batch["ref_log_prob"], kind) * mask
    lengths = batch.sum_rows(mask)
    rows = lengths > 0
    row_means = batch.sum_rows(kl)[rows] / lengths[rows]
    current = float(row_means.mean()) if len(row_means) else 0.0
    metrics: Metrics = {
        "actor/reward_kl_penalty": Weighted(current, 1.0),
        "actor/reward_kl_penalty_coeff": Weighted(controller.value, 1.0),
    }
    rewards = batch["token_level_scores"] - controller.value * kl
    return batch.with_tokens(token_level_rewards=rewards), controller.update(current, len(batch)), metrics
