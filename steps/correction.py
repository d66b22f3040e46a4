"""Corrects for samples that other probabilities than the trainer's have drawn: importance weights, as data.

A rollout engine computes with other kernels than the trainer, and in asynchronous training with older weights. So it
draws tokens with probabilities that differ from the trainer's ``old_log_probs``. The ratio of the two, bounded, times
the advantages makes the policy gradient less biased.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch, Max, Metrics, Moments, Sum, TokenOutputs, Weighted

from .losses.contract import Loss, loss

LEVELS = ("token", "sequence", "geometric")
OUTSIDE = ("truncate", "mask")
# exp of a larger log-ratio carries no more information, and would overflow for long rows.
_LARGEST = 20.0


def rollout_log_ratio(batch: Batch) -> Float[Tensor, " T"]:
    """Returns the trainer's log-probability of each sampled token minus the rollout engine's, and 0 elsewhere.

    If top-k or top-p cut the engine's distribution, its log-probabilities before the cut are used. After the cut they
    are larger by the mass that was cut, although the two models need not differ.

    Args:
        batch: needs ``response_mask``, ``old_log_probs``, and ``rollout_full_log_probs`` or ``rollout_log_probs``.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"response_mask": [[0.0, 1.0]], "old_log_probs": [[9.0, -1.0]],
        ...     "rollout_log_probs": [[0.0, -1.5]]})
        >>> rollout_log_ratio(batch).tolist()
        [0.0, 0.5]
    """
    return torch.where(batch["response_mask"].bool(), batch["old_log_probs"] - engine_log_probs(batch), 0.0)


def engine_log_probs(batch: Batch) -> Float[Tensor, " T"]:
    """Returns the engine's log-probabilities before top-k and top-p, since the trainer does not know these cuts."""
    return batch["rollout_full_log_probs" if "rollout_full_log_probs" in batch else "rollout_log_probs"]


def importance_weights(
    batch: Batch, level: str = "token", *, low: float = 0.0, high: float = 2.0, outside: str = "truncate"
) -> Float[Tensor, " T"]:
    """Returns the importance weight of each sampled token, and 0 elsewhere.

    In the table, r is the ratio of a token's probabilities, the trainer's over the engine's, and the product and the
    geometric mean are over the sampled tokens of its row.

    =============  ==================
    level          weight
    =============  ==================
    ``token``      r
    ``sequence``   the product of r
    ``geometric``  the geometric mean of r
    =============  ==================

    Args:
        batch: as for ``rollout_log_ratio``.
        level: a level of the table.
        low: the smallest weight.
        high: the largest weight.
        outside: what becomes of weights outside these bounds: ``truncate`` moves them to the bound, ``mask`` makes
            them 0.

    Raises:
        ValueError: the level or ``outside`` is unknown, or the bounds are not 0 <= low <= high.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"response_mask": [[1.0, 1.0]], "old_log_probs": [[-1.0, -1.0]],
        ...     "rollout_log_probs": [[-2.0, -1.5]]})
        >>> [round(w, 2) for w in importance_weights(batch, "token").tolist()]
        [2.0, 1.65]
        >>> [round(w, 2) for w in importance_weights(batch, "token", outside="mask").tolist()]
        [0.0, 1.65]

    Source:
        Ionides 2008 (truncated importance sampling); Ling Team 2025, arXiv 2510.18855 (masked, "IcePop"); Zheng et
        al. 2025, arXiv 2507.18071 (geometric mean). Names as in verl's ``rollout_is``.
    """
    if level not in LEVELS or outside not in OUTSIDE:
        raise ValueError(
            f"level is {level!r} and outside {outside!r}; level is one of {', '.join(LEVELS)}, outside one of "
            f"{', '.join(OUTSIDE)}"
        )
    if not 0.0 <= low <= high:
        raise ValueError(f"low is {low:g} and high {high:g}; they must be 0 <= low <= high")
    mask = batch["response_mask"].bool()
    log_ratio = rollout_log_ratio(batch).double()
    if level != "token":
        by_row = batch.sum_rows(log_ratio)
        if level == "geometric":
            by_row = by_row / batch.sum_rows(mask.double()).clamp(min=1.0)
        log_ratio = batch.spread(by_row)
    ratio = log_ratio.clamp(-_LARGEST, _LARGEST).exp()
    if outside == "truncate":
        weights = ratio.clamp(low, high)
    else:
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return torch.where(mask, weights, 0.0).to(batch["old_log_probs"].dtype)


def correct_advantages(
    batch: Batch, level: str = "token", *, low: float = 0.0, high: float = 2.0, outside: str = "truncate"
) -> Batch:
    """Multiplies the advantages by the importance weights, and writes these as ``rollout_is_weights``.

    A weight is not negative, so a policy loss that is proportional to the size of the advantage, as ``ppo_clip`` is,
    is multiplied by it; KL and entropy terms are not. A token of weight 0 still counts in the loss's denominator.

    Args:
        batch: needs ``advantages`` and what ``rollout_log_ratio`` needs.
        level: as for ``importance_weights``, like the following.
        low: the smallest weight.
        high: the largest weight.
        outside: what becomes of weights outside these bounds.

    Raises:
        ValueError: as ``importance_weights``.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"response_mask": [[0.0, 1.0]], "old_log_probs": [[0.0, -1.0]],
        ...     "rollout_log_probs": [[0.0, -5.0]], "advantages": [[0.0, 3.0]]})
        >>> correct_advantages(batch, high=2.0)["advantages"].tolist()
        [0.0, 6.0]
    """
    weights = importance_weights(batch, level, low=low, high=high, outside=outside)
    return batch.with_tokens(advantages=batch["advantages"] * weights, rollout_is_weights=weights)


def rollout_gap(batch: Batch) -> Metrics:
    """Returns metrics of how far the trainer's probabilities are from the engine's.

    ==============================================  ==========================================================
    metric                                          meaning, over the sampled tokens
    ==============================================  ==========================================================
    ``training/rollout_probs_diff_{mean,max,std}``  the difference of the two probabilities
    ``training/rollout_actor_probs_pearson_corr``   their correlation
    ``rollout/log_prob_diff_mean``                  the absolute difference of the two log-probs, in nats
    ``rollout_corr/kl``, ``rollout_corr/k3_kl``     two estimates of KL(engine || trainer) per token, in nats
    ``rollout_corr/rollout_is_eff_sample_size``     the effective sample size of the unbounded token weights, as a
                                                    fraction of the number of tokens: 1 where both agree
    ==============================================  ==========================================================

    Args:
        batch: as for ``rollout_log_ratio``. The metrics of parts of a batch add up to the metrics of the batch.

    Example:
        >>> batch = Batch.from_rows([[1]], {"response_mask": [[1.0]], "old_log_probs": [[-1.0]],
        ...     "rollout_log_probs": [[-0.5]]})
        >>> {name: round(metric.value, 3) for name, metric in rollout_gap(batch).items()}["rollout_corr/kl"]
        0.5

    Source:
        Kish 1965 (effective sample size); Schulman, "Approximating KL Divergence" (2020).
    """
    mask = batch["response_mask"]
    trainer, engine = batch["old_log_probs"].exp(), engine_log_probs(batch).exp()
    difference = (trainer - engine).abs()
    log_ratio = rollout_log_ratio(batch).double().clamp(-_LARGEST, _LARGEST)
    ratio = log_ratio.exp()
    return {
        "training/rollout_probs_diff_mean": Weighted.of(difference, mask),
        "training/rollout_probs_diff_max": Max.of(difference, mask),
        "training/rollout_probs_diff_std": Moments.of(difference, mask, stat="std"),
        "training/rollout_actor_probs_pearson_corr": Moments.of(trainer, mask, engine, stat="correlation"),
        "rollout/log_prob_diff_mean": Weighted.of(log_ratio.abs(), mask),
        "rollout_corr/kl": Weighted.of(-log_ratio, mask),
        "rollout_corr/k3_kl": Weighted.of(ratio - 1.0 - log_ratio, mask),
        "rollout_corr/rollout_is_eff_sample_size": Moments.of(ratio, mask, stat="ess"),
    }


def exact_gap(batch: Batch, log_probs: Float[Tensor, " T"]) -> Metrics:
    """Returns metrics of whether log-probs of the trainer equal the engine's in every bit.

    ================================  ===================================================
    metric                            meaning, over the sampled tokens
    ================================  ===================================================
    ``rollout/tokens_differing``      how many log-probs differ from the engine's
    ``rollout/log_prob_diff_max``     the largest difference, in nats
    ================================  ===================================================

    Args:
        batch: needs ``response_mask``, and ``rollout_full_log_probs`` or ``rollout_log_probs``.
        log_probs: of the trainer, from the weights that have drawn the tokens.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"response_mask": [[1.0, 1.0]], "rollout_log_probs": [[-1.0, -2.0]]})
        >>> {name: m.value for name, m in exact_gap(batch, torch.tensor([-1.0, -2.25])).items()}
        {'rollout/tokens_differing': 1.0, 'rollout/log_prob_diff_max': 0.25}
    """
    mask, engine = batch["response_mask"], engine_log_probs(batch)
    differs = (log_probs != engine) & (mask != 0)
    # Metrics of parts of a batch add up, so the count is a sum.
    return {
        "rollout/tokens_differing": Sum(differs.sum().double()),
        "rollout/log_prob_diff_max": Max.of((log_probs - engine).abs(), mask),
    }


def exactness() -> Loss:
    """Makes a loss of value 0 with the metrics of ``exact_gap`` and ``actor/entropy``.

    Added to the loss of an update with the weights that have drawn the tokens, it compares the update's own log-probs
    with the engine's; a pass for them is saved.

    Example:
        >>> sorted(exactness().needs)
        ['entropy', 'logprobs']
    """

    @loss(needs=["logprobs", "entropy"])
    def gap(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        entropy = Weighted.of(outputs.entropy.detach(), batch["response_mask"])
        gaps = exact_gap(batch, outputs.logprobs.detach())
        return torch.zeros_like(outputs.logprobs), gaps | {"actor/entropy": entropy}

    return gap
