"""Preference losses that need no reference policy: they compare mean log-probabilities per token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from verl_fn.state import Batch, Metrics, TokenOutputs

from .contract import Loss, loss, row_mean
from .pairs import Pairs, row_mean_log_probs
from .preference import check_beta, reward_metrics


def simpo(beta: float = 2.0, gamma: float = 1.0, *, pair: str = "pair", chosen: str = "chosen") -> Loss:
    """Returns the loss of simple preference optimization.

    The reward of a response is beta times its mean log-probability per token, m, and the preferred one must win by a
    margin: the loss is -log sigmoid(beta * (m_w - m_l) - gamma). It is a row loss, and both rows of a pair get the
    loss of the pair.

    Args:
        beta: the scale of rewards.
        gamma: the margin. TRL's ``simpo_gamma`` and the paper's gamma are the same.
        pair: the per-row field of integers that is the same for the two rows of a pair.
        chosen: the per-row field that is 1 for the preferred row and 0 for the other.

    Raises:
        ValueError: ``beta`` is not positive; or, when it is computed, a pair does not have exactly one preferred row
            and one other row.

    Example:
        >>> batch = Batch.from_rows([[1, 1], [2]], {"response_mask": [[1.0, 1.0], [1.0]]},
        ...                         {"pair": [7, 7], "chosen": [1.0, 0.0], "row_weight": [0.5, 0.5]})
        >>> outputs = TokenOutputs({"logprobs": torch.tensor([-1.0, -2.0, -3.0])})
        >>> [round(value, 4) for value in simpo()(outputs, batch)[0].tolist()]
        [0.1269, 0.1269]

    Source: Meng et al. 2024 (arXiv 2405.14734), equation 6.
    """
    check_beta(beta)

    @loss(needs=["logprobs"], level="row", together=pair)
    def simpo(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        pairs = Pairs.of(batch, pair, chosen, outputs.logprobs.dtype)
        rewards = beta * row_mean_log_probs(batch, outputs.logprobs)
        values = softplus(gamma - pairs.margin(rewards))
        return values, reward_metrics("simpo", batch, pairs, values, rewards)

    return simpo


def orpo(beta: float = 0.1, *, pair: str = "pair", chosen: str = "chosen") -> Loss:
    """Returns the loss of odds ratio preference optimization: fine-tuning on the preferred response, and a penalty.

    With m the mean log-probability per token of a response and odds = exp(m) / (1 - exp(m)), it is
    -m_w - beta * log sigmoid(log odds_w - log odds_l). It is a row loss, and both rows of a pair get the loss of the
    pair.

    Args:
        beta: the weight of the penalty, the paper's lambda.
        pair: the per-row field of integers that is the same for the two rows of a pair.
        chosen: the per-row field that is 1 for the preferred row and 0 for the other.

    Raises:
        ValueError: as ``simpo``.

    Example:
        >>> batch = Batch.from_rows([[1], [2]], {"response_mask": [[1.0], [1.0]]},
        ...                         {"pair": [7, 7], "chosen": [1.0, 0.0], "row_weight": [0.5, 0.5]})
        >>> outputs = TokenOutputs({"logprobs": torch.tensor([0.5, 0.25]).log()})
        >>> [round(value, 4) for value in orpo(1.0)(outputs, batch)[0].tolist()]
        [0.9808, 0.9808]

    Source: Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7.
    """
    check_beta(beta)

    @loss(needs=["logprobs"], level="row", together=pair)
    def orpo(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        pairs = Pairs.of(batch, pair, chosen, outputs.logprobs.dtype)
        mean = row_mean_log_probs(batch, outputs.logprobs)
        # The odds of a response with probability 1 are infinite.
        mean = mean.clamp(max=-torch.finfo(mean.dtype).eps)
        margin = pairs.margin(mean - torch.log(-torch.expm1(mean)))
        nll = pairs.preferred(-mean)
        values = nll + beta * softplus(-margin)
        metrics = reward_metrics("orpo", batch, pairs, values, beta * mean)
        return values, metrics | {
            "orpo/nll": row_mean(batch, nll),
            "orpo/log_odds_ratio": row_mean(batch, margin),
        }

    return orpo
