"""Selects tokens of a whole update batch, as a step between two calls of a backend.

What a token is compared with must not depend on micro-batches or ranks. So the outputs of the whole update batch are
computed first, one of these functions writes its choice into the batch, and the loss reads it from there:

    outputs = backend.forward(state.params, batch, ["logprobs"])
    batch = select_kl_cov(batch, outputs.logprobs)
    grads, metrics = backend.forward_backward(state, batch, kl_cov())
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch, Key

from .losses.policy import LARGEST, SELECTED, bounds


def select_clip_cov(
    batch: Batch,
    logprobs: Float[Tensor, " T"],
    key: Key,
    *,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> Batch:
    """Draws tokens of high covariance for ``clip_cov``: ``cov_selected`` is 1 for them and 0 elsewhere.

    The covariance of a token is (A - mean of A) (log-probability - its mean), with means over the response tokens of
    the batch. Candidates have one between the bounds and are not clipped already; of these, ``clip_cov_ratio`` times
    the number of response tokens are drawn, at least one. The draw does not depend on the order of the rows.

    Args:
        batch: the whole update batch, with ``response_mask``, ``old_log_probs`` and ``advantages``.
        logprobs: the policy's log-probabilities.
        key: what the draw depends on.
        clip_cov_ratio: the share of the response tokens to draw.
        clip_cov_lb: candidates have a larger covariance, in nats times the unit of the advantages.
        clip_cov_ub: candidates have a smaller covariance.
        clip_ratio: the bounds of the ratio, as for ``clip_cov``, like the following.
        clip_ratio_low: replaces ``clip_ratio`` for ratios below 1.
        clip_ratio_high: replaces ``clip_ratio`` for ratios above 1.

    Example:
        >>> batch = Batch.from_rows([[1, 2, 3]], {"response_mask": [[1.0] * 3], "advantages": [[3.0, 0.0, 0.0]],
        ...                                       "old_log_probs": [[-0.5, -2.0, -2.0]]})
        >>> select_clip_cov(batch, batch["old_log_probs"], Key.from_seed(0))["cov_selected"].tolist()
        [1.0, 0.0, 0.0]

    Source: Cui et al. 2025 (arXiv 2505.22617).
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    mask, advantages = batch["response_mask"].bool(), batch["advantages"]
    ratio = (logprobs - batch["old_log_probs"]).clamp(-LARGEST, LARGEST).exp()
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high) > -advantages * ratio
    covariance = _covariance(batch, logprobs)
    (candidates,) = torch.where(mask & ~clipped & (covariance > clip_cov_lb) & (covariance < clip_cov_ub))
    count = max(1, int(clip_cov_ratio * int(mask.sum())))
    # In the order of their covariance, the draw is the same for every order of the rows.
    candidates = candidates[covariance[candidates].argsort(stable=True)]
    drawn = torch.randperm(len(candidates), generator=key.generator())[:count]
    selected = torch.zeros_like(advantages)
    selected[candidates[drawn.to(candidates.device)]] = 1.0
    return batch.with_tokens(**{SELECTED: selected})


def select_kl_cov(batch: Batch, logprobs: Float[Tensor, " T"], *, kl_cov_ratio: float = 0.0002) -> Batch:
    """Selects the tokens of highest covariance for ``kl_cov``: ``cov_selected`` is 1 for them and 0 elsewhere.

    Args:
        batch: the whole update batch, with ``response_mask`` and ``advantages``.
        logprobs: the policy's log-probabilities; ``select_clip_cov`` has the formula of the covariance.
        kl_cov_ratio: the share of the response tokens to select; at least one is, and more if values are equal.

    Example:
        >>> batch = Batch.from_rows([[1, 2, 3]], {"response_mask": [[1.0] * 3], "advantages": [[3.0, 0.0, 0.0]]})
        >>> select_kl_cov(batch, torch.tensor([-0.5, -2.0, -2.0]))["cov_selected"].tolist()
        [1.0, 0.0, 0.0]

    Source: Cui et al. 2025 (arXiv 2505.22617).
    """
    selected = _largest(batch, _covariance(batch, logprobs), kl_cov_ratio)
    return batch.with_tokens(**{SELECTED: selected.to(batch["advantages"].dtype)})


def select_high_entropy(batch: Batch, entropy: Float[Tensor, " T"], *, top_entropy_quantile: float = 0.2) -> Batch:
    """Keeps the advantages of the response tokens with the highest entropy, and sets all others to 0.

    Every loss that is proportional to the advantage then learns only from these tokens. The others still count in
    the weights, and KL terms still reach them. Also writes ``high_entropy``, 1 for the tokens that are kept.

    Args:
        batch: the whole update batch, with ``response_mask`` and ``advantages``.
        entropy: the policy's entropy where each token was drawn, in nats.
        top_entropy_quantile: the share of the response tokens to keep; at least one is, and more where values are
            equal.

    Raises:
        ValueError: ``top_entropy_quantile`` is not in (0, 1].

    Example:
        >>> batch = Batch.from_rows([[1, 2, 3]], {"response_mask": [[1.0] * 3], "advantages": [[3.0, 3.0, 3.0]]})
        >>> select_high_entropy(batch, torch.tensor([0.1, 1.2, 0.4]), top_entropy_quantile=0.4)["advantages"].tolist()
        [0.0, 3.0, 0.0]

    Source: Wang et al. 2025 (arXiv 2506.01939); the name of the option is TRL's.
    """
    if not 0.0 < top_entropy_quantile <= 1.0:
        raise ValueError(f"top_entropy_quantile is {top_entropy_quantile}; it must be above 0 and at most 1")
    kept = _largest(batch, entropy.double(), top_entropy_quantile)
    advantages = torch.where(kept, batch["advantages"], 0.0)
    return batch.with_tokens(advantages=advantages, high_entropy=kept.to(advantages.dtype))


def _covariance(batch: Batch, logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Returns the product of each response token's centred advantage and centred log-probability, and 0 elsewhere."""
    mask = batch["response_mask"].bool()

    def centred(values: Tensor) -> Tensor:
        values = torch.where(mask, values.double(), 0.0)
        return torch.where(mask, values - values.sum() / mask.sum(), 0.0)

    return centred(batch["advantages"]) * centred(logprobs)


def _largest(batch: Batch, values: Float[Tensor, " T"], share: float) -> Tensor:
    """Returns a mask of the response tokens with the largest values.

    All tokens with the value of the last one chosen are in it, so the order of rows makes no difference.
    """
    mask = batch["response_mask"].bool()
    chosen = values[mask]
    if not len(chosen):
        return mask
    count = max(1, int(share * len(chosen)))
    return mask & (values >= chosen.topk(count).values[-1])
