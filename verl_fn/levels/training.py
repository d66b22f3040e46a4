"""The levels that train: PPO's smoke runs (0 and 3), a run stopped and continued (1), and a run that learns (5).

Level 0 trains adapters beside Megatron's DDP; level 3 trains all parameters with Megatron-FSDP. Both are PPO with
actor, critic, reference and engine, judged by the files that the run wrote. The second step shows that the engine got
the weights of the first. Level 1 compares a run that was stopped and continued with one that was not, and loads its
exports with other libraries. Level 5 stands beside ``local`` or ``fsdp`` on the same data, seed and settings. It is a
short run and shows a learning signal. It does not show that training converges.
"""

from __future__ import annotations

import filecmp
import gc
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open
from torch import Tensor

from verl_fn import build
from verl_fn.backends.checkpoint import SCALARS, export_adapter, export_model
from verl_fn.backends.hf.config import LOCAL, quiet, read_config
from verl_fn.backends.hf.lora import Reference, in_peft
from verl_fn.backends.tensor_file import TENSORS
from verl_fn.benchmarks.families import batch_of, log_probs_of
from verl_fn.benchmarks.first_step_layout import ON_CPU
from verl_fn.config import Plan, load, make_plan
from verl_fn.driver.ranks import process_group
from verl_fn.runs import RunError
from verl_fn.runs.evaluate import held_out_value
from verl_fn.runs.logs import TIMED, read_metrics
from verl_fn.runs.loop import train
from verl_fn.state import Batch

from .parity import rows_for
from .subject import TASK, Request
from .verdict import Check, SaysNothing

# Root mean square of the difference of log-probs, in nats. In bf16 both round, each in its own way.
AGREE = 1e-4  # nats between two computations of the same log-probs in fp32
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
    "trainer.save_freq=2", "trainer.max_ckpt_to_keep=999", "trainer.val_before_train=false", "data.val_size=4",
    "actor.optim.lr=1e-3", "critic.optim.lr=1e-3", "rollout.verify=always", "actor.strategy=megatron",
    # What is compared is compared in fp32, whatever the dtype of the model's folder.
    "actor.dtype=float32", "critic.dtype=float32", "rollout.dtype=float32",
    # Decay changes parameters that no gradient reaches.
    "actor.optim.weight_decay=0.0", "critic.optim.weight_decay=0.0",
    'reward.functions=["verl_fn.scores:even_share"]',
)  # fmt: skip
# Further ones of level 0, and of level 3.
LORA = ("actor.lora_rank=4",)
FSDP = tuple(
    f"{role}.megatron.{key}" for role in ("actor", "critic")
    for key in ("use_megatron_fsdp=true", "override_transformer_config={gradient_accumulation_fusion=false}")
)  # fmt: skip
# Few steps do not repay the compilation of vLLM's layers; its cache is small, since other runs may use the GPU.
BRIEF = ("rollout.enforce_eager=true", f"rollout.engine_kwargs.kv_cache_memory_bytes={4 * 2**30}")
# The learning rate of every update is another one, whatever the number of steps.
SCHEDULE = tuple(
    f"{role}.optim.{key}" for role in ("actor", "critic")
    for key in ("lr_scheduler_type=linear", "lr_warmup_steps=2", "lr_decay_steps=20")
)  # fmt: skip
GRADIENTS, ENTROPY = "gradients are neither zero nor constant", "entropy is in range and moves"
KL, TRAINED = "the policy stays near the one that sampled", "what is trained changed"
SIGNAL, BASELINE = "the held-out score gains the margin", "the gain is at least half of the baseline's"
LEARNING = (FINITE, GRADIENTS, ENTROPY, KL, TRAINED, SIGNAL, BASELINE)
MOST_KL = 0.5  # nats a token between the policy that sampled and the one that learned
# Pretrained weights learn as in recipes/grpo_smollm2.toml, at once at its full rate.
PRETRAINED = (
    "algorithm.name=grpo", "rollout.n=16", "data.train_batch_size=64", "algorithm.ppo_mini_batch_size=32",
    "data.max_prompt_length=512", "actor.optim.weight_decay=0.0", "algorithm.clip_ratio_high=0.28",
    "actor.optim.lr=2e-5", "rollout.slots=1024",
)  # fmt: skip
# The likeliest tokens say little of a small model in a short run: they may change in all answers at once.
RANDOM = (
    "algorithm.name=grpo", "rollout.n=8", "data.train_batch_size=16", "algorithm.ppo_mini_batch_size=8",
    "actor.optim.weight_decay=0.0", "rollout.val_kwargs.temperature=1.0", "rollout.val_kwargs.n=4",
    # At a constant rate all answers to a question become the same, and a single update then changes all of them.
    "actor.optim.lr_scheduler_type=linear",
)  # fmt: skip
# A policy of random weights draws from its whole vocabulary, and rewards for so few draws teach it nothing within a
# level's steps: it learns from answers first, until some of its own are right.
WARM_UP = (
    "algorithm.name=sft", "trainer.total_training_steps=200", "trainer.stop_at=0.3", "trainer.test_freq=2",
    "trainer.val_before_train=false", "trainer.save_freq=-1", "trainer.max_ckpt_to_keep=1",
    "data.train_batch_size=32", "data.val_size=64", "actor.optim.weight_decay=0.0",
)  # fmt: skip
# The rate of the warm-up moves a logit as far in an update in wide models as in narrow ones. Rewards take a fifth.
RATE, WIDTH, OF_REWARDS = 3e-3, 64, 0.2
STATE = "the resumed run equals the uninterrupted one in every bit"
METRICS = "so do the metrics of its last step"
MERGED, ADAPTER = "transformers loads the merged model", "PEFT loads the adapter"
RESUMING = (STATE, METRICS, MERGED, ADAPTER)


def plan_of(request: Request, folder: Path, *more: str) -> Plan:
    """Returns the plan of a run of two steps in ``folder``; later settings replace earlier ones."""
    return _plan(request, folder, *SETTINGS, *SCHEDULE, "trainer.total_training_steps=2", *more)


def _plan(request: Request, folder: Path, *settings: str) -> Plan:
    """Returns the plan of a run with these settings after the ones that the request decides."""
    given = [f"model.path={request.folder}", f"trainer.dir={folder}", f"driver.device={request.device}"]
    given += [f"trainer.seed={request.seed}", f"rollout.name={request.engine}", *data_settings(request)]
    if request.device == "cpu":
        given.append("driver.num_threads=1")
    elif request.engine == "vllm":
        given += BRIEF
    if request.reward_model:
        given.append(f"algorithm.reward_model={request.reward_model}")
    return make_plan(load(overrides=[*given, *ray_settings(request), *settings]))


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


def smoke(request: Request, folder: Path, settings: Sequence[str], say: Callable[[str], None]) -> list[Check]:
    """Trains for two steps and returns what the files of the run say.

    Args:
        settings: ``LORA`` or ``FSDP``.

    Raises:
        SaysNothing: all rewards are the same.
    """
    plan = plan_of(request, folder, *settings)
    train(plan, say)
    checks = checks_of(folder, plan)
    # An engine with wrong weights may repeat one token, and then its log-probs are not the trainer's.
    if all(check.held for check in checks if check.name in (COMPLETED, FINITE, AGREES)):
        require_signal(folder, request)
    return checks


def require_signal(folder: Path, request: Request) -> None:
    """Raises an error if every response of a run got the same reward, so that there is nothing to learn from."""
    rows = [row for row in read_metrics(folder) if row["step"] > 0]
    scores = {row[f"critic/score/{end}"] for row in rows for end in ("min", "max")}
    if len(scores) == 1:
        whose = f"the reward model {request.reward_model}" if request.reward_model else "the rule of the data"
        without = ", or leave --data out" if request.data else ""
        raise SaysNothing(
            f"{whose} gave every response the reward {scores.pop():g}, so there was nothing to learn from: name "
            f"another --reward-model{without}"
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
        return Check(name, False, ", such as ".join([f"{len(still)} of {len(moved)} did not", *still[:1]]))
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
        # A phase that takes no time at all ran, too.
        if any(first.get(phase) is None for phase in phases)
    ]
    return Check(ROLES, not missing, f"{', '.join(missing)} did not" if missing else ", ".join(PHASES))


def plan_of_learning(request: Request, folder: Path, strategy: str) -> Plan:
    """Returns the plan of a run of level 5.

    Args:
        strategy: ``megatron``, or the baseline's.
    """
    settings = [
        f"trainer.total_training_steps={request.steps}", f"trainer.test_freq={max(1, request.steps // 4)}",
        "trainer.save_freq=-1", "trainer.max_ckpt_to_keep=9", "data.val_size=200", f"actor.strategy={strategy}",
        *(RANDOM if request.dummy else PRETRAINED),
    ]  # fmt: skip
    if request.dummy:
        settings.append(f"actor.optim.lr={(1.0 if request.data else OF_REWARDS) * _rate(request):g}")
    if not request.data:
        settings.append("data.val_size=64")
        if not request.dummy:
            # Pretrained weights do not know the project's task, and write characters from the start.
            settings.append('reward.functions=["verl_fn.scores:even_share"]')
    return _plan(request, folder, *settings)


def _rate(request: Request) -> float:
    return RATE * min(1.0, WIDTH / read_config(request.folder).get_text_config().hidden_size)


def warm_up(request: Request, baseline: Path, say: Callable[[str], None]) -> None:
    """Trains random weights on the answers of the project's task, with ``local``, below the baseline's folder."""
    if after_warm_up(request, baseline) is not request:
        train(_plan(request.alone(), baseline / "warm_up", *WARM_UP, f"actor.optim.lr={_rate(request):g}"), say)
        if request.device == "cuda":
            # The baseline's engine and ranks need the memory.
            gc.collect()
            torch.cuda.empty_cache()


def after_warm_up(request: Request, baseline: Path) -> Request:
    """Returns the request with the model that ``warm_up`` leaves; with its own model if that one learns at once."""
    if not request.dummy or request.data:
        return request
    return attrs.evolve(request, folder=str(baseline / "warm_up/model"))


def compare(request: Request, folder: Path, baseline: Path, say: Callable[[str], None]) -> list[Check]:
    """Trains with Megatron, and compares the run with its start and with the baseline's.

    Raises:
        SaysNothing: both runs gain less than the margin, and nothing else is wrong.
    """
    say(f"the margin was set beforehand: {request.margin}")
    train(plan_of_learning(request, folder, "megatron"), say)
    rows, others = read_metrics(folder), read_metrics(baseline)
    kept = sorted((folder / "checkpoints").glob("step_*"), key=lambda one: int(one.name.removeprefix("step_")))
    moved = changed(parameters(Path(request.folder)), parameters(kept[-1] / "actor"))
    vocabulary = read_config(request.folder).get_text_config().vocab_size
    checks = [*trends(rows, vocabulary), all_changed(TRAINED, moved), *gains(rows, others, request.margin)]
    if [check.name for check in checks if not check.held] == [SIGNAL] and _gain(held_out(others)) < request.margin:
        raise SaysNothing(
            f"neither Megatron's run nor the baseline's gained {request.margin} of the held-out score in "
            f"{request.steps} steps ({_shown(held_out(rows))}; the baseline: {_shown(held_out(others))}): give more "
            "--steps, or another --reward-model or --data"
        )
    return checks


def trends(rows: Sequence[Mapping[str, Any]], vocabulary: int) -> list[Check]:
    """Returns the checks of the metrics of all steps."""
    steps = [row for row in rows if row["step"] > 0]
    # If all answers to each question got one reward, the gradient is zero, whatever the provider computes.
    asked = [row for row in steps if any(row.get(f"critic/advantages/{most}") != 0 for most in ("max", "min"))]
    norms = {name: [row[name] for row in asked] for name in asked[0] if name.endswith("/grad_norm")} if asked else {}
    still = [name for name, values in norms.items() if None in values or not all(values) or len(set(values)) == 1]
    entropies = [row.get("actor/entropy") or 0.0 for row in steps]
    most = math.log(vocabulary) * (1 + 1e-6)
    in_range = bool(steps) and all(0 < one <= most for one in entropies) and len(set(entropies)) > 1
    kls = [abs(row.get("actor/ppo_kl") or 0.0) for row in steps]
    spread = f"{min(entropies, default=0):.3f} to {max(entropies, default=0):.3f} nats, at most {most:.2f}"
    shown = ", ".join(f"{name} {min(v):.2g} to {max(v):.2g}" for name, v in norms.items() if None not in v)
    without = "no metric grad_norm" if asked else "all advantages are 0" if steps else "no step"
    return [
        finite(steps),
        Check(GRADIENTS, bool(norms) and not still, ", ".join(still) or shown or without),
        Check(ENTROPY, in_range, spread),
        Check(KL, bool(steps) and max(kls) <= MOST_KL, f"at most {max(kls, default=0):.1e} nats, bar {MOST_KL}"),
    ]


def gains(
    rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]], margin: float
) -> tuple[Check, Check]:
    """Returns the checks of the held-out score.

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


def straight(request: Request, folder: Path, say: Callable[[str], None]) -> None:
    """Trains for two steps without a stop, and for the first step of the run that another process continues."""
    train(plan_of(request, folder / "run", *LORA), say)
    train(plan_of(request, folder / "stopped", *LORA, "trainer.total_training_steps=1"), say)


def resumed(request: Request, folder: Path, other: Path, say: Callable[[str], None]) -> list[Check]:
    """Continues the stopped run, and compares it with the other one.

    Raises:
        RunError: there is no stopped run.
    """
    if not (other / "stopped/checkpoints/step_1").is_dir():
        raise RunError(f"{other} has no stopped run to continue")
    plan = plan_of(request, other / "stopped", *LORA)
    train(plan, say)
    whole, stopped = (other / name / "checkpoints/step_2" for name in ("run", "stopped"))
    checks = [_same_state(whole, stopped), _same_metrics(other)]
    here = plan_of(request.alone(), folder / "run", *LORA)
    with process_group(here, size=1):
        return [*checks, *exports(here, stopped / "actor", folder)]


def _same_state(whole: Path, stopped: Path) -> Check:
    """Compares two checkpoints of all roles, file by file."""
    kinds = ("*.safetensors", SCALARS)
    held = {file.relative_to(one) for one in (whole, stopped) for kind in kinds for file in one.glob(f"*/{kind}")}
    files = sorted(map(str, held))
    _, differing, absent = filecmp.cmpfiles(whole, stopped, files, shallow=False)
    if absent:
        return Check(STATE, False, f"{absent[0]} is missing")
    if differing:
        first = _first_tensor(whole / differing[0], stopped / differing[0])
        return Check(STATE, False, f"{differing[0]} differs{first}")
    saved = [json.loads((one / "checkpoint.json").read_text())["state"] for one in (whole, stopped)]
    if saved[0] != saved[1]:
        name = next(name for name in {**saved[0], **saved[1]} if saved[0].get(name) != saved[1].get(name))
        return Check(STATE, False, f"the state of the algorithm differs: {name}")
    return Check(STATE, True, f"{len(files)} files of actor and critic")


def _first_tensor(one: Path, other: Path) -> str:
    if one.suffix != ".safetensors":
        return ""
    with safe_open(one, "pt") as a, safe_open(other, "pt") as b:
        names, there = list(a.keys()), set(b.keys())
        for name in names:
            if name not in there or not torch.equal(a.get_tensor(name), b.get_tensor(name)):
                return f", first in {name}"
    return ""


def _same_metrics(folder: Path) -> Check:
    last = [read_metrics(folder / name)[-1] for name in ("run", "stopped")]
    names = [name for name in last[0] if not name.startswith(TIMED)]
    differing = [name for name in names if last[0][name] != last[1].get(name)]
    shown = ", ".join(f"{name} {last[0][name]} and {last[1].get(name)}" for name in differing[:2])
    return Check(METRICS, not differing and bool(names), shown or f"{len(names)} metrics")


def exports(plan: Plan, checkpoint: Path, folder: Path) -> list[Check]:
    """Exports a checkpoint, loads it with other libraries, and compares log-probs with Megatron's."""
    from peft import PeftModel

    batch = batch_of(rows_for(read_config(plan.model).get_text_config().vocab_size))
    role = plan.roles["actor"]
    trainer: Any = build.trainer(role, plan.driver, build.device(plan.driver))
    expected = trainer.forward(trainer.restore(checkpoint).params, batch, ("logprobs",)).logprobs
    merged, adapter = folder / "merged", folder / "adapter"
    export_model(checkpoint, merged)
    export_adapter(checkpoint, adapter)
    adapted = PeftModel.from_pretrained(_model(plan.model), str(adapter)).eval()
    return [_agrees(MERGED, _model(merged), expected, batch), _agrees(ADAPTER, adapted, expected, batch)]


def _agrees(name: str, model: Any, expected: Tensor, batch: Batch) -> Check:
    with torch.no_grad():
        gap = (log_probs_of(model, batch) - expected.cpu())[batch["response_mask"].bool()].abs()
    worst = float(gap.max())
    return Check(name, worst <= AGREE, f"log-probs differ by {worst:.1e} nats, bar {AGREE:.0e}")


def _model(folder: str | Path) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **LOCAL).eval()
