"""Losses for preferences between two rows, relative to a reference policy or by a reward model's scores."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import softplus

from verl_fn.state import Batch, Metrics, TokenOutputs

from .contract import Loss, loss, row_mean, weighted_sum
from .pairs import Pairs, row_log_probs

OfMargin = Callable[[Tensor], Tensor]


def bradley_terry(pair: str = "pair", chosen: str = "chosen", *, center_rewards_coefficient: float = 0.0) -> Loss:
    """Returns the loss of a reward model: minus the log-likelihood that the preferred row of each pair wins.

    For scores r of the preferred row w and the other row l it is -log sigmoid(r_w - r_l). Preferences say nothing of
    the mean of both scores, as it may differ by prompt; center_rewards_coefficient * (r_w + r_l)^2 keeps
    it near 0, so that scores of different prompts compare. It is a row loss and reads ``row_values``. Both rows of a
    pair get the loss of the pair, so with the weights of ``aggregate_rows(batch, "group-mean", group="pair")`` the
    total is the mean over pairs.

    Args:
        pair: the per-row field of integers that is the same for the two rows of a pair.
        chosen: the per-row field that is 1 for the preferred row and 0 for the other.
        center_rewards_coefficient: the weight of the second term, under TRL's name; such as 0.01.

    Raises:
        ValueError: when it is computed, if a pair does not have exactly one preferred row and one other row.

    Example:
        >>> import torch
        >>> fields = {"pair": [7, 7], "chosen": [1.0, 0.0], "row_weight": [0.5, 0.5]}
        >>> batch = Batch.from_rows([[1], [2]], per_row=fields)
        >>> outputs = TokenOutputs({"row_values": torch.tensor([2.0, 0.0])})
        >>> [round(value, 4) for value in bradley_terry()(outputs, batch)[0].tolist()]
        [0.1269, 0.1269]

    Source: Bradley & Terry 1952; Ouyang et al. 2022 (arXiv 2203.02155), equation 1; the second term, Eisenstein et
    al. 2023 (arXiv 2312.09244), section 3.
    """

    @loss(needs=["row_values"], level="row", together=pair)
    def bradley_terry(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        pairs = Pairs.of(batch, pair, chosen, outputs.row_values.dtype)
        margin = pairs.margin(outputs.row_values)
        values = softplus(-margin)
        if center_rewards_coefficient:
            values = values + center_rewards_coefficient * pairs.total(outputs.row_values).square()
        return values, {
            "reward_model/loss": weighted_sum(batch, values, "row"),
            "reward_model/accuracy": row_mean(batch, margin > 0),
            "reward_model/margin": row_mean(batch, margin),
        }

    return bradley_terry


def dpo(beta: float = 0.1, *, pair: str = "pair", chosen: str = "chosen") -> Loss:
    """Returns the loss of direct preference optimization: ``bradley_terry`` of the policy's implicit rewards.

    The implicit reward of a response y to x is beta * log(policy(y | x) / reference(y | x)). With h the log-ratio of
    the preferred response less the other's, the loss is -log sigmoid(beta * h). It is a row loss; it reads
    ``ref_log_prob`` and, as ``bradley_terry``, gives both rows of a pair the loss of the pair.

    Args:
        beta: a smaller one lets the policy move further from the reference.
        pair: the per-row field of integers that is the same for the two rows of a pair.
        chosen: the per-row field that is 1 for the preferred row and 0 for the other.

    Raises:
        ValueError: ``beta`` is not positive; or, when it is computed, a pair does not have exactly one preferred row
            and one other row.

    Example:
        >>> import torch
        >>> batch = Batch.from_rows([[1], [2]], {"response_mask": [[1.0], [1.0]], "ref_log_prob": [[-1.0], [-1.0]]},
        ...                         {"pair": [7, 7], "chosen": [1.0, 0.0], "row_weight": [0.5, 0.5]})
        >>> values, metrics = dpo(beta=0.5)(TokenOutputs({"logprobs": torch.tensor([-1.0, -5.0])}), batch)
        >>> [round(value, 4) for value in values.tolist()], metrics["rewards/margins"].value
        ([0.1269, 0.1269], 2.0)

    Source: Rafailov et al. 2023 (arXiv 2305.18290), equation 7.
    """
    return _of_log_ratios("dpo", beta, lambda h: softplus(-beta * h), pair, chosen)


def cdpo(beta: float = 0.1, label_smoothing: float = 0.1, *, pair: str = "pair", chosen: str = "chosen") -> Loss:
    """Returns the loss of conservative DPO, for preferences of which a share is wrong.

    With h as in ``dpo`` and e the share, it is -(1 - e) log sigmoid(beta * h) - e log sigmoid(-beta * h). Its minimum
    lies where the policy prefers the chosen row with probability 1 - e, so margins stay bounded.

    Args:
        beta: as for ``dpo``.
        label_smoothing: the share of wrong preferences, from 0 (``dpo``) to below 0.5.
        pair: the per-row field of integers that is the same for the two rows of a pair.
        chosen: the per-row field that is 1 for the preferred row and 0 for the other.

    Raises:
        ValueError: as ``dpo``, or ``label_smoothing`` is out of range.

    Example:
        >>> import torch
        >>> batch = Batch.from_rows([[1], [2]], {"response_mask": [[1.0], [1.0]], "ref_log_prob": [[-1.0], [-1.0]]},
        ...                         {"pair": [7, 7], "chosen": [1.0, 0.0], "row_weight": [0.5, 0.5]})
        >>> values, _ = cdpo(0.5, 0.25)(TokenOutputs({"logprobs": torch.tensor([-1.0, -5.0])}), batch)
        >>> [round(value, 4) for value in values.tolist()]
        [0.6269, 0.6269]

    Source: Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO", equation 4.
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be at least 0 and below 0.5")

    def of_margin(h: Tensor) -> Tensor:
        return (1.0 - label_smoothing) * softplus(-beta * h) + label_smoothing * softplus(beta * h)

    return _of_log_ratios("cdpo", beta, of_margin, pair, chosen)


def ipo(beta: float = 0.1, *, pair: str = "pair", chosen: str = "chosen") -> Loss:
    """Returns the loss of identity preference optimization: it aims at a given margin, not at the largest one.

    With h as in ``dpo`` it is (h - 1 / (2 * beta))^2. Log-ratios are sums over tokens, as in the paper; TRL takes
    means over tokens: another loss.

    Args:
        beta: the paper's tau; log-ratios aim at a difference of 1 / (2 * beta) nats.
        pair: the per-row field of integers that is the same for the two rows of a pair.
        chosen: the per-row field that is 1 for the preferred row and 0 for the other.

    Raises:
        ValueError: as ``dpo``.

    Example:
        >>> import torch
        >>> batch = Batch.from_rows([[1], [2]], {"response_mask": [[1.0], [1.0]], "ref_log_prob": [[-1.0], [-1.0]]},
        ...                         {"pair": [7, 7], "chosen": [1.0, 0.0], "row_weight": [0.5, 0.5]})
        >>> ipo(beta=0.1)(TokenOutputs({"logprobs": torch.tensor([-1.0, -5.0])}), batch)[0].tolist()
        [1.0, 1.0]

    Source: Azar et al. 2023 (arXiv 2310.12036), equation 17.
    """
    return _of_log_ratios("ipo", beta, lambda h: (h - 0.5 / beta).square(), pair, chosen)


def _of_log_ratios(name: str, beta: float, of_margin: OfMargin, pair: str, chosen: str) -> Loss:
    """Returns the loss that is a function of the difference of the log-ratios of a pair."""
    check_beta(beta)

    @loss(needs=["logprobs"], level="row", together=pair)
    def preference(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        pairs = Pairs.of(batch, pair, chosen, outputs.logprobs.dtype)
        log_ratio = row_log_probs(batch, outputs.logprobs - batch["ref_log_prob"])
        margin = pairs.margin(log_ratio)
        values = of_margin(margin)
        return values, reward_metrics(name, batch, pairs, values, beta * log_ratio)

    return preference


def reward_metrics(name: str, batch: Batch, pairs: Pairs, values: Tensor, rewards: Tensor) -> Metrics:
    """Makes the metrics of a preference loss, with TRL's names for its implicit rewards.

    As in TRL, ``rewards/accuracies`` counts pairs whose preferred row has the higher reward. A tie does not count; so
    it is 0 while the policy equals the reference.

    Args:
        name: the loss's name.
        batch: the batch.
        pairs: its pairs.
        values: the loss of each row.
        rewards: the implicit reward of each row.
    """
    rewards = rewards.detach()
    margin = pairs.margin(rewards)
    return {
        f"{name}/loss": weighted_sum(batch, values, "row"),
        "rewards/chosen": pairs.mean(batch, rewards, 1.0),
        "rewards/rejected": pairs.mean(batch, rewards, -1.0),
        "rewards/margins": row_mean(batch, margin),
        "rewards/accuracies": row_mean(batch, margin > 0),
    }


def check_beta(beta: float) -> None:
    """Checks the scale of implicit rewards.

    Raises:
        ValueError: it is not positive.
    """
    if not beta > 0.0:
        raise ValueError(f"beta is {beta}; it must be positive")
