"""Policy losses that mask tokens by the divergence of the two policies instead of clipping the ratio (DPPO).

Both have the gradient of the policy gradient with importance weights: with the probability ratio r,

    L = -A min(r, c) log-probability    where the token is valid, and 0 elsewhere,

where the gradient does not pass through min(r, c). A token is invalid if its probability has moved too far in the
direction in which its advantage pushes it.

Distillation on policy is here, too: the student learns a teacher's probabilities of the tokens that it draws itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs
from verl_fn.steps.kl import kl_penalty

from .contract import Loss, loss, token_mean, weighted_sum
from .policy import bounds, log_ratio, policy_metrics

_TINY = 1e-8

# On average over the student's own tokens, the gradients of these estimators equal the divergences' gradients.
ESTIMATORS = {"reverse": "k2", "forward": "k3"}
LEAST = 1e-6  # probability of the tokens beside the candidates; 1 minus a sum in fp32 is no more exact
IMPOSSIBLE = -1e4  # log-probability whose exponential is 0 and whose differences are finite


def dppo_tv(
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> Loss:
    """Returns the policy loss with a bound on the total variation of each token (DPPO-Binary-TV).

    A token is valid while its probability p is at most ``high`` above the old one where its advantage is positive,
    and at most ``low`` below it elsewhere.

    Args:
        clip_ratio: how far p may move, as a difference of probabilities, in either direction.
        clip_ratio_low: replaces ``clip_ratio`` for p below the old probability.
        clip_ratio_high: replaces ``clip_ratio`` for p above it.
        clip_ratio_c: the largest importance weight.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"old_log_probs": [[-2.0, -0.2]], "advantages": [[1.0, 1.0]],
        ...                                    "response_mask": [[1.0, 1.0]], "loss_weight": [[0.5, 0.5]]})
        >>> x = torch.tensor([-0.5, -0.1], requires_grad=True)
        >>> dppo_tv()(TokenOutputs({"logprobs": x}), batch)[0].sum().backward()
        >>> [round(g, 4) + 0.0 for g in x.grad.tolist()]
        [0.0, -1.1052]

    Source: Qi et al. 2026 (arXiv 2602.04879).
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)

    @loss(needs=["logprobs"])
    def dppo_tv(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        moved = outputs.logprobs.detach().exp() - batch["old_log_probs"].exp()
        valid = torch.where(batch["advantages"] > 0, moved <= high, moved >= -low)
        return _masked(outputs, batch, valid, clip_ratio_c)

    return dppo_tv


def dppo_kl(
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> Loss:
    """Returns the policy loss with a bound on the KL divergence of each token (DPPO-Binary-KL).

    With the probabilities p now and q before, D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)). A token is valid
    while D is at most ``high``, or p at most q, where its advantage is positive; and while D is at most ``low``, or p
    at least q, elsewhere.

    Args:
        clip_ratio: the largest D, in nats, in either direction.
        clip_ratio_low: replaces ``clip_ratio`` for p below q.
        clip_ratio_high: replaces ``clip_ratio`` for p above q.
        clip_ratio_c: the largest importance weight.

    Example:
        >>> batch = Batch.from_rows([[1, 2]], {"old_log_probs": [[-2.0, -0.2]], "advantages": [[1.0, 1.0]],
        ...                                    "response_mask": [[1.0, 1.0]], "loss_weight": [[0.5, 0.5]]})
        >>> x = torch.tensor([-0.5, -0.1], requires_grad=True)
        >>> dppo_kl()(TokenOutputs({"logprobs": x}), batch)[0].sum().backward()
        >>> [round(g, 4) + 0.0 for g in x.grad.tolist()]
        [0.0, -1.1052]

    Source: Qi et al. 2026 (arXiv 2602.04879).
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)

    @loss(needs=["logprobs"])
    def dppo_kl(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        new, old = outputs.logprobs.detach(), batch["old_log_probs"]
        p, q = new.exp(), old.exp()
        kl = q * (old - new) + (1.0 - q) * ((1.0 - q + _TINY) / (1.0 - p + _TINY)).log()
        valid = torch.where(batch["advantages"] > 0, (kl <= high) | (p <= q), (kl <= low) | (p >= q))
        return _masked(outputs, batch, valid, clip_ratio_c)

    return dppo_kl


def _masked(outputs: TokenOutputs, batch: Batch, valid: Tensor, clip_ratio_c: float) -> tuple[Tensor, Metrics]:
    gap = log_ratio(outputs, batch)
    ratio = gap.detach().exp()
    per_token = torch.where(valid, -batch["advantages"] * ratio.clamp(max=clip_ratio_c) * outputs.logprobs, 0.0)
    lower = {"actor/pg_clipfrac_lower": token_mean(batch, (ratio > clip_ratio_c) & valid)}
    return per_token, policy_metrics(batch, per_token, gap, ~valid) | lower


def distill(kl: str = "reverse") -> Loss:
    """Returns the loss of distillation on tokens that the student sampled. It reads ``teacher_log_probs``.

    With d = log student(y) - log teacher(y) it is d^2 / 2 for ``reverse``. Its gradient, d * grad log student(y), is
    on average over y from the student the gradient of KL(student ‖ teacher). For ``forward`` it is exp(-d) - 1 + d.
    The gradient, (1 - teacher(y) / student(y)) * grad log student(y), is on average the gradient of
    KL(teacher ‖ student); d is clamped as in ``kl_penalty``. Both need tokens from the current student: one update
    per batch.

    Args:
        kl: ``reverse`` or ``forward``.

    Raises:
        ValueError: ``kl`` is neither.

    Example:
        >>> import torch
        >>> batch = Batch.from_rows([[1]], {"response_mask": [[1.0]], "loss_weight": [[1.0]],
        ...                                 "teacher_log_probs": [[-3.0]]})
        >>> values, metrics = distill()(TokenOutputs({"logprobs": torch.tensor([-1.0])}), batch)
        >>> values.tolist(), metrics["distill/reverse_kl"].value
        ([2.0], 2.0)

    Source: Agarwal et al. 2023 (GKD, arXiv 2306.13649); Gu et al. 2023 (MiniLLM, arXiv 2306.08543), section 2.2;
    estimators of Schulman, "Approximating KL Divergence" (2020).
    """
    if kl not in ESTIMATORS:
        raise ValueError(f"kl is {kl!r}; it must be {' or '.join(ESTIMATORS)}")

    @loss(needs=["logprobs"])
    def distill(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        values = kl_penalty(outputs.logprobs, batch["teacher_log_probs"], ESTIMATORS[kl])
        difference = (outputs.logprobs - batch["teacher_log_probs"]).detach()
        return values, {
            "distill/loss": weighted_sum(batch, values),
            "distill/reverse_kl": token_mean(batch, difference),
        }

    return distill


def distill_top_k(kl: str = "reverse") -> Loss:
    """Returns the loss of distillation on the tokens that a teacher finds likeliest at each place.

    It reads ``teacher_candidate_log_probs``, ``[T, K]``, the teacher's log-probabilities of the field ``candidates``.
    All other tokens count as one, with the rest of the probability, so its value is the divergence between two
    distributions of K + 1 outcomes: at least 0, and at most the divergence of the whole vocabulary, with equality
    for K = V. A candidate that the student does not have, with the log-probability -inf, is one of the other tokens.
    Unlike the gradient of ``distill``, its gradient is exact at each place, and may use any tokens.

    Args:
        kl: ``reverse``, KL(student ‖ teacher), or ``forward``, KL(teacher ‖ student).

    Raises:
        ValueError: ``kl`` is neither.

    Example:
        >>> import torch
        >>> teacher, student = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
        >>> batch = Batch.from_rows([[1]], {"response_mask": [[1.0]], "loss_weight": [[1.0]]})
        >>> batch = batch.with_tokens(teacher_candidate_log_probs=teacher)
        >>> outputs = TokenOutputs({"candidate_logprobs": student})
        >>> values, metrics = distill_top_k("forward")(outputs, batch)
        >>> round(values.item(), 4), metrics["distill/teacher_mass"].value
        (0.1733, 0.75)

    Source: Agarwal et al. 2023 (GKD, arXiv 2306.13649), with the divergence on the likeliest tokens and the rest.
    """
    if kl not in ESTIMATORS:
        raise ValueError(f"kl is {kl!r}; it must be {' or '.join(ESTIMATORS)}")

    @loss(needs=["candidate_logprobs"])
    def distill_top_k(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        missing = outputs.candidate_logprobs.isneginf()
        candidates = batch["teacher_candidate_log_probs"].masked_fill(missing, IMPOSSIBLE)
        teacher = _with_rest(candidates)
        student = _with_rest(outputs.candidate_logprobs.masked_fill(missing, IMPOSSIBLE))
        first, second = (student, teacher) if kl == "reverse" else (teacher, student)
        values = (first.exp() * (first - second)).sum(-1)
        return values, {
            "distill/loss": weighted_sum(batch, values),
            f"distill/{kl}_kl": token_mean(batch, values.detach()),
            "distill/teacher_mass": token_mean(batch, candidates.exp().sum(-1)),
        }

    return distill_top_k


def _with_rest(log_probs: Tensor) -> Tensor:
    """Appends the log-probability of all other tokens; rounding could make their mass negative or 0."""
    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=LEAST)
    return torch.cat([log_probs, rest.log()], -1)
