"""The metrics of a step, under verl's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_fn.state import Batch, Max, Metrics, Min, Weighted
from verl_fn.steps import rollout_gap

from .contract import Report
from .workers import Clock


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


def batch_report(batch: Batch) -> Report:
    """Returns the metrics of a batch of experience."""
    mask = batch["response_mask"]
    rows = torch.ones(len(batch))
    lengths = batch.sum_rows(mask)
    metrics: Metrics = {
        "actor/entropy": Weighted.of(batch["entropys"], mask),
        "response_length/clip_ratio": Weighted.of(batch["finished"] == 0, rows),
        "training/rollout_near_ties": Weighted.of(batch["near_ties"], rows),
    }
    for family, values, weights in (
        ("critic/score", batch["score"], rows),
        ("critic/rewards", batch.sum_rows(batch["token_level_rewards"] * mask), rows),
        ("critic/advantages", batch["advantages"], mask),
        ("critic/returns", batch["returns"], mask),
        ("response_length", lengths, rows),
        ("prompt_length", batch["prompt_length"], rows),
    ):
        metrics |= _spread_of(family, values, weights)
    if "values" in batch:
        metrics |= _spread_of("critic/values", batch["values"], mask)
        metrics["critic/vf_explained_var"] = Weighted(
            explained_variance(batch["values"], batch["returns"], mask), 1.0
        )
    if "reward_baselines" in batch:
        metrics |= _spread_of("critic/baselines", batch["reward_baselines"], rows)
    metrics |= rollout_gap(batch)
    for name, values in batch.per_row.items():
        if name.startswith("reward/"):
            metrics[f"{name}/mean"] = Weighted.of(values, rows)
    report = {name: metric.value for name, metric in metrics.items()}
    if "acc" in batch:
        report["training/acc"] = float(batch["acc"].mean())
    return report | {"perf/total_num_tokens": float(batch.num_tokens)}


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Returns 1 - Var[returns - values] / Var[returns] over the masked tokens, or 0 if the returns do not vary.

    Example:
        >>> explained_variance(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0]), torch.ones(2))
        1.0
    """
    chosen = mask.bool()
    residual, total = (returns - values)[chosen].var(correction=0), returns[chosen].var(correction=0)
    return float(1.0 - residual / total) if total > 0 else 0.0


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
