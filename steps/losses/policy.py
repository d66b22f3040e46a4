"""Losses: pure per-token functions ``(outputs, batch) -> (per_token [T], metrics)``, added up like numbers.

A backend computes ``(batch["loss_weight"] * per_token).sum()`` and differentiates that. A loss therefore
knows nothing of averages, micro-batches or ranks, and two losses add:

    loss = ppo_clip(clip_ratio_high=0.28) + 0.001 * kl_to_reference("low_var_kl") - 0.01 * entropy()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from verl_fn.state import Batch, Metrics, Sum, TokenOutputs, Weighted, metrics
from verl_fn.steps.kl import kl_penalty

LossFn: TypeAlias = Callable[[TokenOutputs, Batch], tuple[Float[Tensor, " T"], Metrics]]


@attrs.frozen(eq=False)
class Loss:
    """A per-token loss and the outputs that it reads.

    Attributes:
        fn: the function.
        needs: names of model outputs: ``logprobs``, ``entropy``, ``values``.
    """

    fn: LossFn
    needs: frozenset[str]

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Float[Tensor, " T"], Metrics]:
        return self.fn(outputs, batch)

    def __add__(self, other: Loss) -> Loss:
        def both(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
            mine, my_metrics = self(outputs, batch)
            theirs, their_metrics = other(outputs, batch)
            return mine + theirs, metrics.merge(my_metrics, their_metrics)

        return Loss(both, self.needs | other.needs)

    def __mul__(self, factor: float) -> Loss:
        def scaled(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
            per_token, found = self(outputs, batch)
            return factor * per_token, found

        return Loss(scaled, self.needs)

    __rmul__ = __mul__

    def __sub__(self, other: Loss) -> Loss:
        return self + -1.0 * other


def loss(needs: Iterable[str] = ("logprobs",)) -> Callable[[LossFn], Loss]:
    """Turn a function into a ``Loss``.

    >>> @loss(needs=["logprobs"])
    ... def reinforce(outputs, batch):
    ...     return -batch["advantages"] * outputs.logprobs, {}
    >>> sorted((reinforce + entropy()).needs)
    ['entropy', 'logprobs']
    """
    return lambda fn: Loss(fn, frozenset(needs))


def token_mean(batch: Batch, values: Tensor) -> Weighted:
    """The metric "mean of ``values`` over response tokens", the same for every split.

    >>> token_mean(Batch.from_rows([[1, 2]], {"response_mask": [[0.0, 1.0]]}), torch.tensor([9.0, 2.0])).value
    2.0
    """
    return Weighted.of(values, batch["response_mask"])


def weighted_sum(batch: Batch, per_token: Tensor) -> Sum:
    """The metric "this term of the loss", aggregated as the loss is."""
    return Sum(total_loss(batch, per_token.detach().double()))


def total_loss(batch: Batch, per_token: Float[Tensor, " T"]) -> Float[Tensor, ""]:
    """What a backend differentiates; tokens of weight zero don't count, even when not finite.

    Raises:
        ValueError: the loss is not one value a token.

    >>> batch = Batch.from_rows([[1, 2]], {"loss_weight": [[0.0, 0.5]]})
    >>> total_loss(batch, torch.tensor([float("nan"), 4.0])).item()
    2.0
    """
    weight = batch["loss_weight"]
    if per_token.shape != weight.shape:
        raise ValueError(
            f"the loss has the shape {tuple(per_token.shape)} where the batch has {len(weight)} tokens; a loss is one "
            f"value a token, and sums and means are made by loss_weight"
        )
    return torch.where(weight != 0, weight * per_token, 0.0).sum()


def ppo_clip(
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
) -> Loss:
    """The clipped surrogate with dual clip.

    Reads ``old_log_probs`` and ``advantages``. The log-ratio is clamped to 20. Where the advantage is
    negative the loss is capped at ``-clip_ratio_c * advantage``.

    Source: Schulman et al. 2017 (arXiv 1707.06347); dual clip Ye et al. 2020 (arXiv 1912.09729);
    separate bounds Yu et al. 2025 (DAPO, arXiv 2503.14476). ``low`` and ``high`` default to ``clip_ratio``.

    >>> batch = Batch.from_rows([[1]], {"old_log_probs": [[0.0]], "advantages": [[1.0]],
    ...                                 "response_mask": [[1.0]], "loss_weight": [[1.0]]})
    >>> per_token, found = ppo_clip()(TokenOutputs({"logprobs": torch.tensor([1.0])}), batch)
    >>> round(per_token.item(), 4), found["actor/pg_clipfrac"].value
    (-1.2, 1.0)
    """
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    if clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c is {clip_ratio_c}; the dual clip needs a value above 1")

    @loss(needs=["logprobs"])
    def ppo_clip(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        advantages = batch["advantages"]
        log_ratio = (outputs.logprobs - batch["old_log_probs"]).clamp(-20.0, 20.0)
        ratio = log_ratio.exp()
        free = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
        upper = torch.maximum(free, clipped)
        cap = -advantages * clip_ratio_c
        per_token = torch.where(advantages < 0, torch.minimum(upper, cap), upper)
        return per_token, {
            "actor/pg_loss": weighted_sum(batch, per_token),
            "actor/pg_clipfrac": token_mean(batch, clipped > free),
            "actor/pg_clipfrac_lower": token_mean(batch, (upper > cap) & (advantages < 0)),
            "actor/ppo_kl": token_mean(batch, -log_ratio),
        }

    return ppo_clip


def value_clip(cliprange_value: float = 0.5) -> Loss:
    """Half the squared error of the value, the larger of clipped and unclipped (Schulman et al. 2016).

    Reads ``values`` (those of the rollout) and ``returns``.

    >>> batch = Batch.from_rows([[1]], {"values": [[0.0]], "returns": [[2.0]],
    ...                                 "response_mask": [[1.0]], "loss_weight": [[1.0]]})
    >>> value_clip(0.5)(TokenOutputs({"values": torch.tensor([1.0])}), batch)[0].tolist()
    [1.125]
    """

    @loss(needs=["values"])
    def value_clip(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        old, returns = batch["values"], batch["returns"]
        near = outputs.values.clamp(old - cliprange_value, old + cliprange_value)
        free, clipped = (outputs.values - returns).square(), (near - returns).square()
        per_token = 0.5 * torch.maximum(free, clipped)
        return per_token, {
            "critic/vf_loss": weighted_sum(batch, per_token),
            "critic/vf_clipfrac": token_mean(batch, clipped > free),
            "critic/vpred_mean": token_mean(batch, outputs.values),
        }

    return value_clip


def entropy() -> Loss:
    """The policy's entropy in nats, to be subtracted as a bonus: ``policy - 0.01 * entropy()``."""

    @loss(needs=["entropy"])
    def entropy(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        return outputs.entropy, {"actor/entropy_loss": weighted_sum(batch, outputs.entropy)}

    return entropy


def kl_to_reference(kind: str = "low_var_kl") -> Loss:
    """KL to the reference policy, estimated as ``kl_penalty`` does. Reads ``ref_log_prob``."""

    @loss(needs=["logprobs"])
    def kl_to_reference(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        per_token = kl_penalty(outputs.logprobs, batch["ref_log_prob"], kind)
        return per_token, {"actor/kl_loss": weighted_sum(batch, per_token)}

    return kl_to_reference


def cross_entropy() -> Loss:
    """Minus the log-probability of each target token: supervised fine-tuning.

    >>> batch = Batch.from_rows([[1]], {"response_mask": [[1.0]], "loss_weight": [[1.0]]})
    >>> cross_entropy()(TokenOutputs({"logprobs": torch.tensor([-2.0])}), batch)[0].tolist()
    [2.0]
    """

    @loss(needs=["logprobs"])
    def cross_entropy(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        return -outputs.logprobs, {"train/nll": token_mean(batch, -outputs.logprobs)}

    return cross_entropy
