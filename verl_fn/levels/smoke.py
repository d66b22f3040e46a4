"""Levels 0 and 3: PPO with actor, critic, reference and engine, judged by the files that the run wrote.

Level 0 trains adapters beside Megatron's DDP; level 3 trains all parameters with Megatron-FSDP. The second step
shows that the engine got the weights of the first.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from verl_fn.backends.hf.frozen_base import Reference
from verl_fn.backends.hf.lora import in_peft
from verl_fn.backends.tensor_file import TENSORS
from verl_fn.benchmarks.first_step_layout import ON_CPU
from verl_fn.config import Plan, load, make_plan
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train

from .subject import TASK, Request
from .verdict import Check, SaysNothing

# Root mean square of the difference of log-probs, in nats. In bf16 both round, each in its own way.
AGREE = 1e-4  # nats between two computations of the same log-probs in fp32
LORA, FSDP = "lora", "megatron-fsdp"
PHASES = {
    "engine": ("timing_s/gen", "timing_s/update_weights"),
    "reward": ("timing_s/reward",),
    "actor": ("timing_s/old_log_prob", "timing_s/update_actor"),
    "reference": ("timing_s/ref",),
    "critic": ("timing_s/values", "timing_s/update_critic"),
}
COMPLETED, FINITE, AGREES = "the steps were completed", "metrics are finite", "engine and trainer agree"
VERIFIED, ROLES, CRITIC = "published weights were verified", "every role ran", "the critic changed"
ADAPTERS, BASE, ALL_CHANGED = "all adapters changed", "the base is bitwise unchanged", "all parameters changed"
COMMON = (COMPLETED, FINITE, AGREES, VERIFIED, ROLES, CRITIC)
WITH_LORA, WITHOUT_LORA = (*COMMON, ADAPTERS, BASE), (*COMMON, ALL_CHANGED)
# Two updates of each role a step, so that the first matrices of adapters, behind zeros at first, get gradients too.
SETTINGS = (
    "algorithm.name=ppo", "algorithm.use_kl_loss=true", "data.train_batch_size=8", "algorithm.ppo_mini_batch_size=4",
    "trainer.save_freq=1", "trainer.max_ckpt_to_keep=999", "trainer.val_before_train=false", "data.val_size=4",
    "actor.optim.lr=1e-3", "critic.optim.lr=1e-3", "rollout.verify=always", "actor.strategy=megatron",
    # What is compared is compared in fp32, whatever the dtype of the model's folder.
    "actor.dtype=float32", "critic.dtype=float32", "rollout.dtype=float32",
    # Decay changes parameters that no gradient reaches.
    "actor.optim.weight_decay=0.0", "critic.optim.weight_decay=0.0",
    'reward.functions=["verl_fn.scores:even_share"]',
)  # fmt: skip
# The learning rate of every update is another one, whatever the number of steps.
SCHEDULE = tuple(
    f"{role}.optim.{key}" for role in ("actor", "critic")
    for key in ("lr_scheduler_type=linear", "lr_warmup_steps=2", "lr_decay_steps=20")
)  # fmt: skip


def plan_of(request: Request, folder: Path, *more: str) -> Plan:
    """Returns the plan of a run of two steps in ``folder``; later settings replace earlier ones."""
    settings = [f"model.path={request.folder}", f"trainer.dir={folder}", f"driver.device={request.device}"]
    settings += [*SETTINGS, *SCHEDULE, *data_settings(request), f"rollout.name={request.engine}"]
    settings += [f"trainer.seed={request.seed}", "trainer.total_training_steps=2"]
    if request.device == "cpu":
        settings.append("driver.num_threads=1")
    if request.reward_model:
        settings.append(f"algorithm.reward_model={request.reward_model}")
    return make_plan(load(overrides=[*settings, *ray_settings(request), *more]))


def data_settings(request: Request) -> list[str]:
    """Returns the settings of the data: the user's files, or a task of the project."""
    if not request.data:
        return [f"data.task={TASK}", "data.max_response_length=10"]
    files = (f'data.{split}_files=["{Path(request.data) / name}.parquet"]'
             for split, name in (("train", "train"), ("val", "test")))  # fmt: skip
    return [*files, "data.max_response_length=64", "data.filter_overlong_prompts=true"]


def ray_settings(request: Request) -> list[str]:
    """Returns the settings of a run over Ray, whose workers get the path of this process; none for this process."""
    if not request.ray:
        return []
    path = os.environ.get("PYTHONPATH", "")
    environment: dict[str, Any] = {"env_vars": {"PYTHONPATH": path}}
    if request.device == "cpu":
        environment["env_vars"] = {"PYTHONPATH": os.pathsep.join([str(ON_CPU), path]).rstrip(os.pathsep)}
        environment["worker_process_setup_hook"] = "megatron_on_cpu.install_with_backend"
    file = Path(request.out) / "ray_environment.yaml"
    file.write_text(json.dumps(environment))  # JSON is YAML
    address = [] if request.ray == "local" else [f"ray.address={request.ray}"]
    return ["driver.kind=ray", f"ray.ranks={request.gpus}", f"ray.runtime_env={file}", *address]


def kind_settings(kind: str) -> list[str]:
    """Returns the settings of level 0 or 3."""
    if kind == LORA:
        return ["actor.lora_rank=4"]
    return [
        setting
        for role in ("actor", "critic")
        for setting in (
            f"{role}.megatron.use_megatron_fsdp=true",
            f"{role}.megatron.override_transformer_config={{gradient_accumulation_fusion=false}}",
        )
    ]


def smoke(request: Request, folder: Path, kind: str, say: Callable[[str], None]) -> list[Check]:
    """Trains for two steps and returns what the files of the run say.

    Args:
        request: what is tested.
        folder: of the run.
        kind: ``LORA`` or ``FSDP``.
        say: prints a line.

    Raises:
        SaysNothing: all rewards are the same.
    """
    plan = plan_of(request, folder, *kind_settings(kind))
    train(plan, say)
    checks = checks_of(folder, plan)
    # An engine with wrong weights may repeat one token, and then its log-probs are not the trainer's.
    if all(check.held for check in checks if check.name in (COMPLETED, FINITE, AGREES)):
        require_signal(folder, request)
    return checks


def require_signal(folder: Path, request: Request) -> None:
    """Raises an error if every response of a run got the same reward, so that there is nothing to learn from.

    Raises:
        SaysNothing: it did.
    """
    rows = [row for row in read_metrics(folder) if row["step"] > 0]
    scores = {row[f"critic/score/{end}"] for row in rows for end in ("min", "max")}
    if len(scores) == 1:
        whose = f"the reward model {request.reward_model}" if request.reward_model else "the rule of the data"
        raise SaysNothing(
            f"{whose} gave every response the reward {scores.pop():g}, so there was nothing to learn from: name "
            "another --reward-model, or leave --data out"
        )


def checks_of(folder: Path, plan: Plan) -> list[Check]:
    """Returns the checks of a finished run, by its metrics and checkpoints."""
    rows, actor = read_metrics(folder), plan.roles["actor"]
    last = plan.trainer.total_training_steps
    before, after = (parameters(folder / f"checkpoints/step_{step}/actor") for step in (0, last))
    critics = (parameters(folder / f"checkpoints/step_{step}/critic") for step in (0, last))
    moved = changed(before, after)
    checks = [
        _completed(rows, last),
        finite(rows),
        agreement(rows),
        _verified(rows, plan.rollout.verify),
        _ran(rows),
        all_changed(CRITIC, changed(*critics)),
    ]
    if not actor.lora:
        return [*checks, all_changed(ALL_CHANGED, moved)]
    adapters = {name: other for name, other in moved.items() if ".lora_" in name}
    return [
        *checks,
        all_changed(ADAPTERS, adapters),
        _untouched(folder / f"checkpoints/step_{last}/actor", plan, moved),
    ]


def _untouched(last: Path, plan: Plan, moved: Mapping[str, bool]) -> Check:
    """Checks that adapters' training has not changed what is frozen, which the last checkpoint refers to or holds."""
    if Reference.read(last) is not None:
        return Check(BASE, True, f"every bit is that of {plan.model}")
    given = changed(parameters(Path(plan.model)), parameters(last))
    base = {name: other or moved.get(name, False) for name, other in given.items() if ".lora_" not in name}
    touched = sorted(name for name, other in base.items() if other)
    held = f"{len(base)} parameters" if not touched else f"{len(touched)} changed, such as {touched[0]}"
    return Check(BASE, not touched and bool(base), held)


def parameters(folder: Path) -> dict[str, Tensor]:
    """Returns the parameters of a model folder or of a checkpoint, adapters and base apart, by canonical name."""
    found: dict[str, Tensor] = {}
    start, end = ".params['", "']"
    for file in sorted(folder.glob("*.safetensors"), key=lambda file: file.name == TENSORS):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                if file.name != TENSORS:
                    found[key.removeprefix(in_peft(""))] = tensors.get_tensor(key)
                elif key.startswith(start):
                    found[key.removeprefix(start).removesuffix(end)] = tensors.get_tensor(key)
    return found


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, bool]:
    """Returns for each parameter that both have whether any of its bits differ.

    Example:
        >>> changed({"a": torch.zeros(2), "b": torch.ones(1)}, {"a": torch.zeros(2), "b": torch.zeros(1)})
        {'a': False, 'b': True}
    """
    return {
        name: t.shape != after[name].shape or not torch.equal(t.float(), after[name].float())
        for name, t in before.items()
        if name in after
    }


def all_changed(name: str, moved: Mapping[str, bool]) -> Check:
    """Returns the check that every one of these parameters changed.

    Example:
        >>> all_changed("adapters", {"a": True, "b": False})
        Check(name='adapters', held=False, found='1 of 2 did not, such as b')
        >>> all_changed("adapters", {}).held
        False
    """
    still = sorted(one for one, other in moved.items() if not other)
    if still or not moved:
        return Check(
            name, False, f"{len(still)} of {len(moved)} did not" + (f", such as {still[0]}" if still else "")
        )
    return Check(name, True, f"{len(moved)} parameters")


def _completed(rows: Sequence[Mapping[str, Any]], steps: int) -> Check:
    done = [row["step"] for row in rows if row["step"] > 0]
    return Check(COMPLETED, done == list(range(1, steps + 1)), f"training/global_step:{done[-1] if done else 0}")


def finite(rows: Sequence[Mapping[str, Any]]) -> Check:
    """Returns the check that every metric of every step is a finite number, and that no update was skipped."""
    bad = [
        f"{name} of step {row['step']}"
        for row in rows
        for name, value in row.items()
        if value is None or not math.isfinite(value) or (name.endswith("/update_skipped") and value > 0)
    ]
    count = sum(len(row) for row in rows)
    return Check(FINITE, not bad and count > 0, ", ".join(bad[:3]) or f"{count} numbers")


def agreement(rows: Sequence[Mapping[str, Any]]) -> Check:
    """Returns the check that trainer and engine give the sampled tokens the same log-probs.

    Args:
        rows: the metrics of each step.

    Example:
        >>> agreement([{"step": 1, "rollout_corr/k3_kl": 5e-9}])
        Check(name='engine and trainer agree', held=True, found='1.0e-04 nats root mean square, bar 1e-04')
    """
    gaps = [row["rollout_corr/k3_kl"] for row in rows if row.get("rollout_corr/k3_kl") is not None]
    # The estimator is half the squared difference, for small ones.
    worst = math.sqrt(2 * max(0.0, max(gaps))) if gaps and all(map(math.isfinite, gaps)) else math.nan
    return Check(AGREES, worst <= AGREE * (1 + 1e-9), f"{worst:.1e} nats root mean square, bar {AGREE:.0e}")


def _verified(rows: Sequence[Mapping[str, Any]], verify: str) -> Check:
    lags = [row["training/rollout_lag/max"] for row in rows if "training/rollout_lag/max" in row]
    fresh = len(lags) > 1 and not any(lags)
    return Check(VERIFIED, fresh and verify == "always", f"checksums of {len(lags)} publications, staleness {lags}")


def _ran(rows: Sequence[Mapping[str, Any]]) -> Check:
    first = rows[0] if rows else {}
    missing = [
        role
        for role, phases in PHASES.items()
        # The score of a reward model is a part of the step like any other; a rule's may take no time at all.
        if not all((first.get(phase) or -1.0) >= 0.0 for phase in phases)
    ]
    return Check(ROLES, not missing, f"{', '.join(missing)} did not" if missing else ", ".join(PHASES))
