"""Distillation on policy: the student learns a teacher's probabilities of the tokens that it draws itself."""

from __future__ import annotations

from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs
from verl_fn.steps.kl import kl_penalty

from .contract import Loss, loss, token_mean, weighted_sum

# The estimators whose gradients are, on average over the student's own tokens, those of the two divergences.
ESTIMATORS = {"reverse": "k2", "forward": "k3"}


def distill(kl: str = "reverse") -> Loss:
    """Returns the loss of distillation on tokens that the student sampled. It reads ``teacher_log_probs``.

    With d = log student(y) - log teacher(y) it is d^2 / 2 for ``reverse``. Its gradient, d * grad log student(y), is
    on average over y from the student that of KL(student ‖ teacher). For ``forward`` it is exp(-d) - 1 + d, with the
    gradient (1 - teacher(y) / student(y)) * grad log student(y), on average that of KL(teacher ‖ student); d is
    clamped as in ``kl_penalty``. Both need tokens from the current student: one update per batch.

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
