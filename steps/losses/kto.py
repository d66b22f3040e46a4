"""Kahneman-Tversky optimization: learning from responses that are each good or bad, without pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_fn.state import Batch, Metrics, TokenOutputs, Weighted

from .contract import Loss, loss, weighted_sum
from .pairs import row_log_probs
from .preference import check_beta


def kto(beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> Loss:
    """Returns the loss of Kahneman-Tversky optimization.

    With r = log(policy(y | x) / reference(y | x)) and the reference point z, the loss of a desirable row is
    desirable_weight * (1 - sigmoid(beta * (r - z))), and the loss of another row is
    undesirable_weight * (1 - sigmoid(beta * (z - r))). It is a row loss. It reads ``ref_log_prob`` and two per-row
    fields: ``label``, 1 for a desirable row and 0 for another, and ``reference_point``, a column that
    ``kto_reference_point`` writes over the whole update batch. No gradient flows through the reference point.

    Args:
        beta: a larger one makes gains and losses saturate earlier.
        desirable_weight: the paper's lambda_D. Choose both weights such that the weight times the number of rows is
            about equal for both kinds.
        undesirable_weight: the paper's lambda_U.

    Raises:
        ValueError: ``beta`` is not positive.

    Example:
        >>> batch = Batch.from_rows([[1], [2]], {"response_mask": [[1.0], [1.0]], "ref_log_prob": [[-2.0], [-2.0]]},
        ...                         {"label": [1.0, 0.0], "reference_point": [0.5, 0.5], "row_weight": [0.5, 0.5]})
        >>> outputs = TokenOutputs({"logprobs": torch.tensor([-0.5, -0.5])})
        >>> [round(value, 4) for value in kto(beta=1.0)(outputs, batch)[0].tolist()]
        [0.2689, 0.7311]

    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), equation 8.
    """
    check_beta(beta)

    @loss(needs=["logprobs"], level="row")
    def kto(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        log_ratio = row_log_probs(batch, outputs.logprobs - batch["ref_log_prob"])
        desirable = batch["label"] > 0.5
        gain = beta * (log_ratio - batch["reference_point"])
        # 1 - sigmoid(x) is sigmoid(-x), without cancellation for large x.
        values = torch.where(
            desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain)
        )
        live, rewards = batch["row_weight"] != 0, beta * log_ratio.detach()
        return values, {
            "kto/loss": weighted_sum(batch, values, "row"),
            "rewards/chosen": Weighted.of(rewards, live & desirable),
            "rewards/rejected": Weighted.of(rewards, live & ~desirable),
            "kto/reference_point": Weighted.of(batch["reference_point"], live),
        }

    return kto


def kto_reference_point(batch: Batch, mismatched: Batch) -> Batch:
    """Writes ``reference_point``, an estimate of KL(policy ‖ reference), into every row of an update batch.

    It is the mean of log(policy(y' | x) / reference(y' | x)) over prompts x with responses y' to other prompts, and
    at least 0. It is a statistic of the whole update batch, so call it before the batch is split.

    Args:
        batch: the update batch.
        mismatched: rows of prompts with responses to other prompts, with ``old_log_probs`` and ``ref_log_prob``.

    Raises:
        ValueError: no mismatched row has a response.

    Example:
        >>> fields = {"old_log_probs": [[-1.0], [-1.0]], "ref_log_prob": [[-2.0], [-1.5]]}
        >>> mismatched = Batch.from_rows([[1], [2]], fields | {"response_mask": [[1.0], [1.0]]})
        >>> kto_reference_point(Batch.from_rows([[5]]), mismatched)["reference_point"].tolist()
        [0.75]

    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), section 4.1.
    """
    live = batch_rows_with_response(mismatched)
    if not bool(live.any()):
        raise ValueError("no mismatched row has a response, so there is no reference point")
    log_ratio = row_log_probs(mismatched, mismatched["old_log_probs"] - mismatched["ref_log_prob"])
    point = log_ratio[live].double().mean().clamp(min=0.0).to(log_ratio.dtype)
    return batch.with_rows(reference_point=point.expand(len(batch)).clone())


def batch_rows_with_response(batch: Batch) -> Tensor:
    """Returns a mask of the rows that have a token with ``response_mask``.

    Example:
        >>> batch_rows_with_response(Batch.from_rows([[1], [2]], {"response_mask": [[0.0], [1.0]]})).tolist()
        [False, True]
    """
    return batch.sum_rows((batch["response_mask"] != 0).float()) > 0
