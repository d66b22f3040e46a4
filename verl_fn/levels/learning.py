"""Level 5: whether the model learns, beside ``local`` or ``fsdp`` on the same data, seed and settings.

It is a short run and shows a learning signal. It does not show that training converges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_fn.backends.hf.config import read_config
from verl_fn.config import Plan, load, make_plan
from verl_fn.runs.evaluate import held_out_value
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train

from . import smoke
from .subject import Request
from .verdict import Check

GRADIENTS, ENTROPY = "gradients are neither zero nor constant", "entropy is in range and moves"
KL, TRAINED = "the policy stays near the one that sampled", "what is trained changed"
SIGNAL, BASELINE = "the held-out score gains the margin", "the gain is at least half of the baseline's"
NAMES = (smoke.FINITE, GRADIENTS, ENTROPY, KL, TRAINED, SIGNAL, BASELINE)
MOST_KL = 0.5  # nats a token between the policy that sampled and the one that learned
# Pretrained weights learn with the settings of recipes/grpo_smollm2.toml, random ones at a rate for tiny models.
PRETRAINED = (
    "algorithm.name=grpo", "rollout.n=16", "data.train_batch_size=64", "algorithm.ppo_mini_batch_size=32",
    "data.max_prompt_length=512", "actor.optim.weight_decay=0.0", "algorithm.clip_ratio_high=0.28",
    "algorithm.entropy_coeff=0.005",
    "actor.optim.lr=2e-5", "rollout.slots=1024",
)  # fmt: skip
RANDOM = (
    "algorithm.name=grpo", "rollout.n=8", "data.train_batch_size=16", "algorithm.ppo_mini_batch_size=8",
    "actor.optim.lr=3e-3", "actor.optim.weight_decay=0.0",
)  # fmt: skip


def plan_of(request: Request, folder: Path, strategy: str) -> Plan:
    """Returns the plan of a run of level 5.

    Args:
        request: what is tested.
        folder: of the run.
        strategy: ``megatron``, or the baseline's.
    """
    settings = [
        f"model.path={request.folder}", f"trainer.dir={folder}", f"driver.device={request.device}",
        f"trainer.seed={request.seed}", f"trainer.total_training_steps={request.steps}", "trainer.save_freq=-1",
        f"trainer.test_freq={max(1, request.steps // 4)}", "trainer.max_ckpt_to_keep=9", "data.val_size=200",
        f"rollout.name={request.engine}", f"actor.strategy={strategy}", *smoke.data_settings(request),
        *(RANDOM if request.dummy else PRETRAINED),
    ]  # fmt: skip
    if not request.data:
        settings += ['reward.functions=["verl_fn.scores:even_share"]', "data.val_size=32"]
    if request.device == "cpu":
        settings.append("driver.num_threads=1")
    if request.reward_model:
        settings.append(f"algorithm.reward_model={request.reward_model}")
    return make_plan(load(overrides=[*settings, *smoke.ray_settings(request)]))


def learn(request: Request, folder: Path, strategy: str, say: Callable[[str], None]) -> Plan:
    """Trains with a strategy, and returns the plan of the run."""
    plan = plan_of(request, folder, strategy)
    train(plan, say)
    return plan


def compare(request: Request, folder: Path, baseline: Path, say: Callable[[str], None]) -> list[Check]:
    """Trains with Megatron, and compares the run with its start and with the baseline's.

    Args:
        request: what is tested.
        folder: of the run.
        baseline: the folder of the baseline's run.
        say: prints a line.
    """
    say(f"the margin was set beforehand: {request.margin}")
    learn(request, folder, "megatron", say)
    rows, others = read_metrics(folder), read_metrics(baseline)
    kept = sorted((folder / "checkpoints").glob("step_*"), key=lambda one: int(one.name.removeprefix("step_")))
    moved = smoke.changed(smoke.parameters(Path(request.folder)), smoke.parameters(kept[-1] / "actor"))
    vocabulary = read_config(request.folder).get_text_config().vocab_size
    return [*trends(rows, vocabulary), smoke.all_changed(TRAINED, moved), *gains(rows, others, request.margin)]


def trends(rows: Sequence[Mapping[str, Any]], vocabulary: int) -> list[Check]:
    """Returns the checks of the metrics of all steps."""
    steps = [row for row in rows if row["step"] > 0]
    norms = {name: [row[name] for row in steps] for name in steps[0] if name.endswith("/grad_norm")} if steps else {}
    still = [name for name, values in norms.items() if None in values or not all(values) or len(set(values)) == 1]
    entropies = [row.get("actor/entropy") or 0.0 for row in steps]
    most = math.log(vocabulary) * (1 + 1e-6)
    in_range = bool(steps) and all(0 < one <= most for one in entropies) and len(set(entropies)) > 1
    kls = [abs(row.get("actor/ppo_kl") or 0.0) for row in steps]
    spread = f"{min(entropies, default=0):.3f} to {max(entropies, default=0):.3f} nats, at most {most:.2f}"
    shown = ", ".join(f"{name} {min(v):.2g} to {max(v):.2g}" for name, v in norms.items() if None not in v)
    return [
        smoke.finite(steps),
        Check(GRADIENTS, bool(norms) and not still, ", ".join(still) or shown),
        Check(ENTROPY, in_range, spread),
        Check(KL, bool(steps) and max(kls) <= MOST_KL, f"at most {max(kls, default=0):.1e} nats, bar {MOST_KL}"),
    ]


def gains(
    rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]], margin: float
) -> tuple[Check, Check]:
    """Returns the checks of the held-out score.

    Args:
        rows: the metrics of the run.
        baseline: of the baseline's run.
        margin: the least gain.

    Example:
        >>> score = "val-core/count/acc/mean@1"
        >>> rows = [{"step": 0, score: 0.1}, {"step": 20, score: 0.3}]
        >>> [check.held for check in gains(rows, rows, 0.05)], [check.held for check in gains(rows, rows, 0.3)]
        ([True, True], [False, True])
    """
    curves = [held_out(one) for one in (rows, baseline)]
    (ours, shown), (theirs, of_baseline) = ((_gain(curve), _shown(curve)) for curve in curves)
    return (
        Check(SIGNAL, ours >= margin, f"{shown}, gain {ours:.3f}, margin {margin}"),
        Check(BASELINE, ours >= 0.5 * theirs, f"{ours:.3f} beside {theirs:.3f} of the baseline ({of_baseline})"),
    )


def held_out(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Returns the held-out accuracy of each evaluation, or the reward if there is no accuracy."""
    for metric in ("acc", "reward"):
        found = [(row["step"], value) for row in rows if (value := held_out_value(row, metric)) is not None]
        if found:
            return found
    return []


def _gain(curve: Sequence[tuple[int, float]]) -> float:
    return curve[-1][1] - curve[0][1] if len(curve) > 1 else math.nan


def _shown(curve: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"step {step}: {value:.3f}" for step, value in curve)
