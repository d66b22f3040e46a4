"""The metrics of a step, under verl's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_fn.state import Batch, Max, Metrics, Min, Weighted
from verl_fn.steps import exact_gap, rollout_gap
from verl_fn.steps.advantages.columns import groups_of

from .policy import whole_conversations
from .workers import Clock, Report


def update_report(role: str, updates: Sequence[tuple[Metrics, Metrics]]) -> Report:
    """Returns the mean of every metric over a role's updates.

    Args:
        role: the family of metrics without a family of their own, as in ``actor/grad_norm``.
        updates: the metrics of ``forward_backward`` and of ``apply_update`` for each update.
    """
    values_by_name: dict[str, list[float]] = {}
    for pair in updates:
        for metrics in pair:
            for name, metric in metrics.items():
                if name.startswith("perf/"):
                    name = f"{name}/{role}"
                values_by_name.setdefault(name if "/" in name else f"{role}/{name}", []).append(metric.value)
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


def batch_report(batch: Batch, *, compares: bool = False, exact: bool = False) -> Report:
    """Returns the metrics of a batch of experience with outputs and advantages; it has ``sample_report``'s too.

    Args:
        batch: the rows.
        compares: whether the advantages compare the rows of a group, so that a row by itself gets none.
        exact: whether to count the log-probs that differ from the engine's.
    """
    whole = whole_conversations(batch)
    mask = batch["response_mask"]
    answered = (whole.sum_rows(mask) > 0).float()
    metrics: Metrics = {}
    if "entropys" in batch:
        metrics["actor/entropy"] = Weighted.of(batch["entropys"], mask)
    metrics |= _spread_of("critic/advantages", batch["advantages"], mask)
    if "returns" in batch:
        metrics |= _spread_of("critic/returns", batch["returns"], mask)
    if "values" in batch:
        metrics |= _spread_of("critic/values", batch["values"], mask)
        metrics["critic/vf_explained_var"] = Weighted(
            explained_variance(batch["values"], batch["returns"], mask), 1.0
        )
    if "reward_baselines" in batch:
        metrics |= _spread_of("critic/baselines", whole["reward_baselines"], answered)
    metrics |= rollout_gap(batch)
    if exact:
        metrics |= exact_gap(batch, batch["old_log_probs"])
    report = sample_report(batch) | {name: metric.value for name, metric in metrics.items()}
    if compares:
        groups = groups_of(whole)
        report["rollout/rows_compared_with_none"] = float((groups.counts & ~groups.compared).sum())
    return report


def sample_report(batch: Batch) -> Report:
    """Returns the metrics of sampled rows: scores, rewards and lengths. A conversation of several rows counts once.

    Fields that the batch lacks have no metrics.
    """
    whole = whole_conversations(batch)
    metrics: Metrics = {}
    every = torch.ones(len(whole))
    answered = every
    if "response_mask" in batch:
        lengths = whole.sum_rows(batch["response_mask"])
        answered = (lengths > 0).float()
        metrics["response/aborted_ratio"] = Weighted.of(lengths == 0, every)
        metrics |= _spread_of("response_length", lengths, every)
        if "token_level_rewards" in batch:
            rewards = torch.where(whole["response_mask"] != 0, whole["token_level_rewards"], 0.0)
            metrics |= _spread_of("critic/rewards", whole.sum_rows(rewards), answered)
    if "finished" in batch:
        metrics["response_length/clip_ratio"] = Weighted.of(whole["finished"] == 0, every)
    if "near_ties" in batch:
        metrics["training/rollout_near_ties"] = Weighted.of(whole["near_ties"], every)
    for family, field, weights in (("critic/score", "score", answered), ("prompt_length", "prompt_length", every)):
        if field in batch:
            metrics |= _spread_of(family, whole[field], weights)
    report = {name: metric.value for name, metric in metrics.items()} | _judged_report(whole, answered)
    return report | {"perf/total_num_tokens": float(batch.num_tokens)}


def _judged_report(whole: Batch, answered: torch.Tensor) -> Report:
    """Returns the means of what rewards have returned beside the score, over the rows that have it.

    If some rows lack a number, it comes with the count of rows that have it.
    """
    report: Report = {}
    names = {name: f"{name}/mean" for name in whole.per_row if name.startswith("reward/")} | {"acc": "training/acc"}
    for name, metric in names.items():
        if name in whole:
            weights = answered * ~whole[name].isnan()
            if count := float(weights.sum()):
                report[metric] = Weighted.of(whole[name], weights).value
            if count < float(answered.sum()):
                report[f"{metric.removesuffix('/mean')}/count"] = count
    return report


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Returns 1 - Var[returns - values] / Var[returns] over the masked tokens, or 0 if the returns do not vary.

    Example:
        >>> explained_variance(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0]), torch.ones(2))
        1.0
    """
    chosen = mask.bool()
    returns, values = returns[chosen].double(), values[chosen].double()
    # The variance of equal returns is rounding and says nothing of the values.
    if not len(returns) or bool((returns == returns[0]).all()):
        return 0.0
    return float(1.0 - (returns - values).var(correction=0) / returns.var(correction=0))


def _spread_of(family: str, values: torch.Tensor, weights: torch.Tensor) -> Metrics:
    return {
        f"{family}/mean": Weighted.of(values, weights),
        f"{family}/max": Max.of(values, weights),
        f"{family}/min": Min.of(values, weights),
    }


def timing_report(clock: Clock, tokens: float) -> Report:
    """Returns the seconds of each phase and of the whole step, and the step's throughput in tokens per second."""
    step = clock.total()
    report = {f"timing_s/{phase}": seconds for phase, seconds in clock.seconds.items()}
    return report | {"timing_s/step": step, "perf/time_per_step": step, "perf/throughput": tokens / max(step, 1e-9)}
