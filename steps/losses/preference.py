"""Losses of preferences: of a reward model, relative to a reference policy, without one, and KTO.

Losses of pairs read two per-row fields: ``pair``, an integer that is the same for the two rows of a pair, and
``chosen``, 1 for the preferred row and 0 for the other.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from verl_fn.state import Batch, Metrics, TokenOutputs, Weighted

from .contract import Loss, loss, row_mean, weighted_sum

OfMargin = Callable[[Tensor], Tensor]


def bradley_terry(*, center_rewards_coefficient: float = 0.0) -> Loss:
    """Returns the loss of a reward model: minus the log-likelihood that the preferred row of each pair wins.

    For scores r of the preferred row w and the other row l it is -log sigmoid(r_w - r_l). Preferences say nothing of
    the mean of both scores, as it may differ by prompt; center_rewards_coefficient * (r_w + r_l)^2 keeps
    it near 0, so that scores of different prompts compare. It is a row loss and reads ``row_values``. Both rows of a
    pair get the loss of the pair, so with the weights of ``aggregate_rows(batch, "group-mean", group="pair")`` the
    total is the mean over pairs.

    Args:
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

    @loss(needs=["row_values"], level="row", together="pair")
    def bradley_terry(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        pairs = Pairs.of(batch, outputs.row_values.dtype)
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


def dpo(beta: float = 0.1) -> Loss:
    """Returns the loss of direct preference optimization: ``bradley_terry`` of the policy's implicit rewards.

    The implicit reward of a response y to x is beta * log(policy(y | x) / reference(y | x)). With h the log-ratio of
    the preferred response less the other's, the loss is -log sigmoid(beta * h). It is a row loss; it reads
    ``ref_log_prob`` and, as ``bradley_terry``, gives both rows of a pair the loss of the pair.

    Args:
        beta: a smaller one lets the policy move further from the reference.

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
    return _of_log_ratios("dpo", beta, lambda h: softplus(-beta * h))


def cdpo(beta: float = 0.1, label_smoothing: float = 0.1) -> Loss:
    """Returns the loss of conservative DPO, for preferences of which a share is wrong.

    With h as in ``dpo`` and e the share, it is -(1 - e) log sigmoid(beta * h) - e log sigmoid(-beta * h). Its minimum
    lies where the policy prefers the chosen row with probability 1 - e, so margins stay bounded.

    Args:
        beta: as for ``dpo``.
        label_smoothing: the share of wrong preferences, from 0 (``dpo``) to below 0.5.

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

    return _of_log_ratios("cdpo", beta, of_margin)


def ipo(beta: float = 0.1) -> Loss:
    """Returns the loss of identity preference optimization: it aims at a given margin, not at the largest one.

    With h as in ``dpo`` it is (h - 1 / (2 * beta))^2. Log-ratios are sums over tokens, as in the paper; TRL takes
    means over tokens: another loss.

    Args:
        beta: the paper's tau; log-ratios aim at a difference of 1 / (2 * beta) nats.

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
    return _of_log_ratios("ipo", beta, lambda h: (h - 0.5 / beta).square())


def _of_log_ratios(name: str, beta: float, of_margin: OfMargin) -> Loss:
    """Returns the loss that is a function of the difference of the log-ratios of a pair."""
    check_beta(beta)

    @loss(needs=["logprobs"], level="row", together="pair")
    def preference(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        pairs = Pairs.of(batch, outputs.logprobs.dtype)
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
    """Raises ValueError unless the scale of implicit rewards is positive."""
    if not beta > 0.0:
        raise ValueError(f"beta is {beta}; it must be positive")


@attrs.frozen(eq=False)
class Pairs:
    """The pairs of a batch, with the rows of a pair in any order.

    Attributes:
        sign: 1 for the preferred row of a pair, -1 for the other.
        index: the place of each row's pair among the pairs.
        count: the number of pairs.
    """

    sign: Float[Tensor, " B"]
    index: Int[Tensor, " B"]
    count: int

    @classmethod
    def of(cls, batch: Batch, dtype: torch.dtype) -> Pairs:
        """Finds the pairs of a batch.

        Args:
            batch: has both fields.
            dtype: of ``sign``.

        Raises:
            ValueError: a pair does not have exactly one preferred row and one other row.

        Example:
            >>> batch = Batch.from_rows([[1], [2]], per_row={"pair": [7, 7], "chosen": [0.0, 1.0]})
            >>> pairs = Pairs.of(batch, torch.float32)
            >>> pairs.margin(torch.tensor([1.0, 3.0])).tolist()
            [2.0, 2.0]
        """
        ids, index, counts = batch["pair"].unique(return_inverse=True, return_counts=True)
        sign = 2.0 * batch["chosen"].to(dtype) - 1.0
        balance = sign.new_zeros(len(ids)).index_add(0, index, sign)
        wrong = (counts != 2) | (balance != 0)
        if bool(wrong.any()):
            raise ValueError(
                f"pair {ids[wrong][:5].tolist()} of this batch do not have two rows, one with chosen 1 and one "
                "with 0; group rows by pair before the batch is made"
            )
        return cls(sign, index, len(ids))

    def margin(self, values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns, for both rows of a pair, the value of the preferred row less the value of the other."""
        return self.total(self.sign * values)

    def total(self, values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns, for both rows of a pair, the sum of their values."""
        return values.new_zeros(self.count).index_add(0, self.index, values)[self.index]

    def preferred(self, values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns, for both rows of a pair, the value of the preferred row."""
        return self.total(torch.where(self.sign > 0, values, 0.0))

    def mean(self, batch: Batch, values: Float[Tensor, " B"], sign: float) -> Weighted:
        """Makes the metric for the mean over the preferred rows (``sign`` 1) or over the others (-1)."""
        return Weighted.of(values, (batch["row_weight"] != 0) & (self.sign == sign))


def row_log_probs(batch: Batch, log_probs: Float[Tensor, " T"]) -> Float[Tensor, " B"]:
    """Returns the log-probability of each row's response, in nats: the sum over tokens with ``response_mask``.

    Example:
        >>> batch = Batch.from_rows([[1, 2, 3]], {"response_mask": [[0.0, 1.0, 1.0]]})
        >>> row_log_probs(batch, torch.tensor([9.0, -1.0, -0.5])).tolist()
        [-1.5]
    """
    return batch.sum_rows(torch.where(batch["response_mask"] != 0, log_probs, 0.0))


def row_mean_log_probs(batch: Batch, log_probs: Float[Tensor, " T"]) -> Float[Tensor, " B"]:
    """Returns the mean log-probability of the tokens of each row's response, in nats; 0 for a row without one."""
    lengths = batch.sum_rows((batch["response_mask"] != 0).to(log_probs.dtype))
    return row_log_probs(batch, log_probs) / lengths.clamp(min=1.0)


def simpo(beta: float = 2.0, gamma: float = 1.0) -> Loss:
    """Returns the loss of simple preference optimization.

    The reward of a response is beta times its mean log-probability per token, m, and the preferred one must win by a
    margin: the loss is -log sigmoid(beta * (m_w - m_l) - gamma). It is a row loss, and both rows of a pair get the
    loss of the pair.

    Args:
        beta: the scale of rewards.
        gamma: the margin. TRL's ``simpo_gamma`` and the paper's gamma are the same.

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

    @loss(needs=["logprobs"], level="row", together="pair")
    def simpo(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        pairs = Pairs.of(batch, outputs.logprobs.dtype)
        rewards = beta * row_mean_log_probs(batch, outputs.logprobs)
        values = softplus(gamma - pairs.margin(rewards))
        return values, reward_metrics("simpo", batch, pairs, values, rewards)

    return simpo


def orpo(beta: float = 0.1) -> Loss:
    """Returns the loss of odds ratio preference optimization: fine-tuning on the preferred response, and a penalty.

    With m the mean log-probability per token of a response and odds = exp(m) / (1 - exp(m)), it is
    -m_w - beta * log sigmoid(log odds_w - log odds_l). It is a row loss, and both rows of a pair get the loss of the
    pair.

    Args:
        beta: the weight of the penalty, the paper's lambda.

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

    @loss(needs=["logprobs"], level="row", together="pair")
    def orpo(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        pairs = Pairs.of(batch, outputs.logprobs.dtype)
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
    live = mismatched.sum_rows((mismatched["response_mask"] != 0).float()) > 0
    if not bool(live.any()):
        raise ValueError("no mismatched row has a response, so there is no reference point")
    log_ratio = row_log_probs(mismatched, mismatched["old_log_probs"] - mismatched["ref_log_prob"])
    point = log_ratio[live].double().mean().clamp(min=0.0).to(log_ratio.dtype)
    return batch.with_rows(reference_point=point.expand(len(batch)).clone())
