"""Distillation on policy: the student learns a teacher's probabilities of the tokens that it draws itself."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs
from verl_fn.steps.kl import kl_penalty

from .contract import Loss, loss, token_mean, weighted_sum

# On average over the student's own tokens, the gradients of these estimators equal the divergences' gradients.
ESTIMATORS = {"reverse": "k2", "forward": "k3"}
LEAST = 1e-6  # probability of the tokens beside the candidates; 1 minus a sum in fp32 is no more exact
IMPOSSIBLE = -1e4  # log-probability whose exponential is 0 and whose differences are finite


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
