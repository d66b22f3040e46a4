"""What a step reports, in verl's metric names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_fn.state import Batch, Max, Metrics, Min, Moments, Weighted

from .contract import Report
from .workers import Clock


def update_report(role: str, updates: Sequence[tuple[Metrics, Metrics]]) -> Report:
    """The mean over updates of every metric; those without a family get ``role``'s, such as ``actor/grad_norm``."""
    found: dict[str, list[float]] = {}
    for pair in updates:
        for metrics in pair:
            for name, metric in metrics.items():
                if name.startswith("perf/"):
                    name = f"{name}/{role}"
                found.setdefault(name if "/" in name else f"{role}/{name}", []).append(metric.value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def batch_report(batch: Batch) -> Report:
    """What a batch of experience says, in verl's metric names."""
    mask = batch["response_mask"]
    rows = torch.ones(len(batch))
    lengths = batch.sum_rows(mask)
    found: Metrics = {
        "actor/entropy": Weighted.of(batch["entropys"], mask),
        "response_length/clip_ratio": Weighted.of(batch["finished"] == 0, rows),
    }
    for family, values, weights in (
        ("critic/score", batch["score"], rows),
        ("critic/rewards", batch.sum_rows(batch["token_level_rewards"] * mask), rows),
        ("critic/advantages", batch["advantages"], mask),
        ("critic/returns", batch["returns"], mask),
        ("response_length", lengths, rows),
        ("prompt_length", batch["prompt_length"], rows),
    ):
        found |= _spread_of(family, values, weights)
    if "values" in batch:
        found |= _spread_of("critic/values", batch["values"], mask)
        found["critic/vf_explained_var"] = Weighted(explained_variance(batch["values"], batch["returns"], mask), 1.0)
    # Where top-k or top-p cut, the trainer's counterpart is the engine's full distribution.
    full = "rollout_full_log_probs" if "rollout_full_log_probs" in batch else "rollout_log_probs"
    ours, theirs = batch["old_log_probs"].exp(), batch[full].exp()
    gap = (ours - theirs).abs()
    found |= {
        "training/rollout_probs_diff_mean": Weighted.of(gap, mask),
        "training/rollout_probs_diff_max": Max.of(gap, mask),
        "training/rollout_probs_diff_std": Moments.of(gap, mask, stat="std"),
        "training/rollout_actor_probs_pearson_corr": Moments.of(ours, mask, theirs, stat="correlation"),
        "training/rollout_near_ties": Weighted.of(batch["near_ties"], rows),
    }
    for name, values in batch.per_row.items():
        if name.startswith("reward/"):
            found[f"{name}/mean"] = Weighted.of(values, rows)
    report = {name: metric.value for name, metric in found.items()}
    return report | {"training/acc": float(batch["acc"].mean()), "perf/total_num_tokens": float(batch.num_tokens)}


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - Var[returns - values] / Var[returns] over masked tokens; 0 where returns do not vary.

    >>> explained_variance(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0]), torch.ones(2))
    1.0
    """
    chosen = mask.bool()
    left, whole = (returns - values)[chosen].var(correction=0), returns[chosen].var(correction=0)
    return float(1.0 - left / whole) if whole > 0 else 0.0


def _spread_of(family: str, values: torch.Tensor, weights: torch.Tensor) -> Metrics:
    return {
        f"{family}/mean": Weighted.of(values, weights),
        f"{family}/max": Max.of(values, weights),
        f"{family}/min": Min.of(values, weights),
    }


def timing_report(clock: Clock, tokens: float) -> Report:
    """``timing_s/*``, the whole step and its throughput."""
    step = clock.total()
    report = {f"timing_s/{phase}": seconds for phase, seconds in clock.seconds.items()}
    return report | {"timing_s/step": step, "perf/time_per_step": step, "perf/throughput": tokens / max(step, 1e-9)}
