"""The parts that algorithms share: gathering experience, updating one role, and what a step reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_fn.algorithms.workers import Clock, Workers
from verl_fn.backends.protocol import Sampling, TrainBackend
from verl_fn.config.schema import Config
from verl_fn.data.files import encode_prompts
from verl_fn.data.tasks import Problem
from verl_fn.state import Batch, Key, Max, Metrics, Min, Moments, TokenOutputs, Weighted
from verl_fn.steps import Loss, aggregate, minibatches, scan


def sampling_of(cfg: Config) -> Sampling:
    """The sampling of training rollouts."""
    r = cfg.rollout
    return Sampling(cfg.data.max_response_length, r.temperature, r.top_k, r.top_p, r.n)


def publish(w: Workers, actor: Any, version: int) -> Any:
    """Give the actor's weights to the rollout engine, unless it has them."""
    if w.rollout.version != version:
        return w.rollout.publish(version, w.actor.named_tensors(actor.params))
    return None


def collect(
    actor: Any,
    reference: Any,
    problems: Sequence[Problem],
    w: Workers,
    cfg: Config,
    key: Key,
    step: int,
    clock: Clock,
) -> Any:
    """Sample, score and annotate: a batch with rewards, ``old_log_probs`` and, if asked for, ``ref_log_prob``."""
    clock.run("update_weights", publish, w, actor, step)
    ids = [problem.id for problem in problems]
    batch = clock.run(
        "gen",
        w.rollout.generate,
        encode_prompts(problems, w.tokenizer, cfg.data.max_prompt_length),
        sampling_of(cfg),
        key.fold_in("rollout"),
        ids=ids,
        version=step,
    )
    batch = clock.run("reward", w.reward, batch, problems)
    outputs = clock.run("old_log_prob", w.actor.forward, actor.params, batch, ("logprobs", "entropy"))
    batch = w.call(with_outputs, batch, outputs, logprobs="old_log_probs", entropy="entropys")
    if (policy := reference_policy(actor, reference, w, cfg)) is not None:
        backend, params = policy
        outputs = clock.run("ref", backend.forward, params, batch, ("logprobs",))
        batch = w.call(with_outputs, batch, outputs, logprobs="ref_log_prob")
    return batch


def reference_policy(actor: Any, reference: Any, w: Workers, cfg: Config) -> tuple[TrainBackend, Any] | None:
    """The reference's backend and parameters: with LoRA the actor's without adapters; None without a KL term."""
    a = cfg.algorithm
    if reference is not None:
        assert w.reference is not None
        return w.reference, reference.params
    if cfg.actor.lora_rank and (a.use_kl_loss or a.use_kl_in_reward):
        return w.actor, actor.params.base
    return None


def with_outputs(batch: Batch, outputs: TokenOutputs, **names: str) -> Batch:
    """Write outputs into a batch, each under the given name.

    >>> batch = with_outputs(Batch.from_rows([[1]]), TokenOutputs({"values": torch.zeros(1)}), values="values")
    >>> "values" in batch
    True
    """
    return batch.with_tokens(**{new: outputs.by_name[old] for old, new in names.items()})


def update(
    backend: TrainBackend, state: Any, batches: Sequence[Any], loss: Loss
) -> tuple[Any, list[tuple[Metrics, Metrics]]]:
    """One update a batch; the metrics of each as a pair, of the gradient and of the update."""

    def one(state: Any, batch: Any) -> tuple[Any, tuple[Metrics, Metrics]]:
        grads, of_gradient = backend.forward_backward(state, batch, loss)
        state, of_update = backend.apply_update(state, grads)
        return state, (of_gradient, of_update)

    return scan(one, state, batches)


def update_batches(w: Workers, batch: Any, rows: int, cfg: Config, key: Key) -> list[Any]:
    """The weighted minibatches of one batch of ``rows`` rows, over all epochs."""
    a = cfg.algorithm
    size = min(rows, a.ppo_mini_batch_size * cfg.rollout.n)
    count = a.ppo_epochs * -(-rows // size)
    return w.call(
        _weighted_minibatches, batch, size, a.ppo_epochs, key if a.shuffle else None, a.loss_agg_mode,
        loss_scale(cfg), returns=count,
    )  # fmt: skip


def loss_scale(cfg: Config) -> float:
    """The constant of ``seq-mean-token-sum-norm``: the config's, or the longest response allowed."""
    return cfg.algorithm.loss_scale_factor or float(cfg.data.max_response_length)


def _weighted_minibatches(
    batch: Batch, size: int, epochs: int, key: Key | None, mode: str, scale: float | None
) -> list[Batch]:
    parts = minibatches(batch, size, epochs=epochs, shuffle=key)
    return [aggregate(part, mode, loss_scale_factor=scale) for part in parts]


def update_report(role: str, updates: Sequence[tuple[Metrics, Metrics]]) -> dict[str, float]:
    """The mean over updates of every metric; those without a family get ``role``'s, such as ``actor/grad_norm``."""
    found: dict[str, list[float]] = {}
    for pair in updates:
        for metrics in pair:
            for name, metric in metrics.items():
                if name.startswith("perf/"):
                    name = f"{name}/{role}"
                found.setdefault(name if "/" in name else f"{role}/{name}", []).append(metric.value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def batch_report(batch: Batch, max_response_length: int) -> dict[str, float]:
    """What a batch of experience says, in verl's metric names."""
    mask = batch["response_mask"]
    rows = torch.ones(len(batch))
    lengths = batch.sum_rows(mask)
    found: Metrics = {
        "actor/entropy": Weighted.of(batch["entropys"], mask),
        "response_length/clip_ratio": Weighted.of(lengths >= max_response_length, rows),
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


def timing_report(clock: Clock, tokens: float) -> dict[str, float]:
    """``timing_s/*``, the whole step and its throughput."""
    step = clock.total()
    report = {f"timing_s/{phase}": seconds for phase, seconds in clock.seconds.items()}
    return report | {"timing_s/step": step, "perf/time_per_step": step, "perf/throughput": tokens / max(step, 1e-9)}
