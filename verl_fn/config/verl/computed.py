"""verl's keys whose values change on the way here, or that are computed from several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from verl_fn.config.catalogue import GROUP_ESTIMATORS

from .keys import ACTOR, MODEL, ROLLOUT
from .reading import Settings

Values = Mapping[str, Any]
CountRows = Callable[[Sequence[str]], int | None]

SHARED = ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor")


@attrs.frozen
class Move:
    """One key here, and the keys of verl that it comes from.

    Attributes:
        keys: verl's keys.
        ours: the key here; empty for a problem.
        value: its value.
        remark: how it differs, for the report.
        problem: why the keys cannot be followed; nothing is set then.
    """

    keys: tuple[str, ...]
    ours: str = ""
    value: Any = None
    remark: str = ""
    problem: str = ""


def algorithm(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the algorithm's name, its estimator and its loss."""
    if settings.sft:
        yield Move(("verl.trainer.sft_trainer",), "algorithm.name", "sft")
        return
    key = "algorithm.adv_estimator"
    estimator = str(values[key]).removesuffix("_vectorized")
    filtering = bool(values.get(enable := "algorithm.filter_groups.enable"))
    if estimator in (*GROUP_ESTIMATORS, "reinforce_plus_plus"):
        yield Move((key, enable) if filtering else (key,), "algorithm.name", "dapo" if filtering else "grpo")
        yield Move((key,), "algorithm.adv_estimator", estimator)
        yield from _dynamic_sampling(values) if filtering else ()
    elif filtering:
        yield Move((enable,), problem="groups are sampled again only with an estimator that compares within them")
    elif estimator in ("gae", "remax"):
        yield Move((key,), "algorithm.name", "ppo" if estimator == "gae" else "remax")
    else:
        yield Move((key,), problem=f"there is no estimator {estimator}")
    loss = values[key := ACTOR + "policy_loss.loss_mode"]
    if loss == "bypass_mode":
        yield Move((key,), problem="the ratio starts from the trainer's own log-probs")
    else:
        yield Move((key,), "algorithm.policy_loss", "ppo_clip" if loss == "vanilla" else loss)
    for side in ("low", "high"):
        if (clip := values.get(key := f"{ACTOR}clip_ratio_{side}")) is not None and (clip != 0.2 or filtering):
            yield Move((key,), f"algorithm.clip_ratio_{side}", clip)


def _dynamic_sampling(values: Values) -> Iterator[Move]:
    key = (start := "algorithm.filter_groups.") + "metric"
    if (metric := values.get(key)) not in (None, "acc", "score", "seq_reward", "seq_final_reward"):
        yield Move((key,), problem=f"groups differ in acc or score, not in {metric}")
    elif metric is not None:
        remark = "" if metric in ("acc", "score") else "the rewards of a response add up to its score"
        yield Move((key,), "algorithm.filter_groups.metric", "acc" if metric == "acc" else "score", remark)
    if (most := values.get(key := start + "max_num_gen_batches")) is not None:
        remark = "" if most > 0 else "in verl, 0 is without a limit"
        yield Move((key,), "algorithm.filter_groups.max_num_gen_batches", most if most > 0 else 10, remark)


def unequal(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields problems of a critic whose updates differ from the actor's."""
    if settings.sft or values["algorithm.adv_estimator"] != "gae":
        return
    for name in SHARED:
        key, actors = f"critic.{name}", values.get(ACTOR + name, False if name == "shuffle" else None)
        if values.get(key) not in (None, actors):
            yield Move((key,), problem=f"actor and critic share algorithm.{name}")


def correction(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the thresholds of importance weights; two of them, as ``0.5_5.0``, mask what lies outside."""
    key = "algorithm.rollout_correction.rollout_is_threshold"
    if (threshold := values.get(key)) is None:
        return
    lower, _, upper = str(threshold).rpartition("_")
    yield Move((key,), "algorithm.rollout_is_threshold", float(upper))
    if lower:
        yield Move((key,), "algorithm.rollout_is_threshold_lower", float(lower))
        yield Move((key,), "algorithm.rollout_is_outside", "mask")


def length(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the number of steps, and warm-ups in updates."""
    batch, epochs_key, steps_key = (
        values["data.train_batch_size"],
        "trainer.total_epochs",
        "trainer.total_training_steps",
    )
    steps, keys, remark = values.get(steps_key), (steps_key,), ""
    if steps is None:
        files = values["data.train_files"]
        rows = count_rows(files if isinstance(files, list) else [files])
        keys, remark = (epochs_key,), f"{rows} rows, of which verl drops the last incomplete batch of an epoch"
        steps = rows // batch * values[epochs_key] if rows is not None else None
    if not steps:
        yield Move(
            (epochs_key,),
            problem=f"{values[epochs_key]} epochs are rows // {batch} * {values[epochs_key]} steps, and "
            "data.train_files cannot be counted here; set trainer.total_training_steps",
        )
    else:
        yield Move(
            (*keys, *(() if keys == (epochs_key,) else (epochs_key,))), "trainer.total_training_steps", steps, remark
        )
    updates = 1
    if not settings.sft:
        updates = values[ACTOR + "ppo_epochs"] * -(-batch // min(batch, values[ACTOR + "ppo_mini_batch_size"]))
    for verl, ours in ((ACTOR, "actor"), ("critic.", "critic")):
        yield from _schedule(values, verl + "optim.", ours + ".optim.", steps or 0, updates)


def _schedule(values: Values, verl: str, ours: str, steps: int, updates: int) -> Iterator[Move]:
    warmup, ratio = values.get(verl + "lr_warmup_steps") or -1, values.get(verl + "lr_warmup_steps_ratio") or 0.0
    keys = (verl + "lr_warmup_steps", verl + "lr_warmup_steps_ratio")
    count = warmup if warmup > 0 else int(ratio * steps)
    if ratio and warmup <= 0 and not steps:
        yield Move(keys[1:], problem="the number of steps is not known; set trainer.total_training_steps")
    else:
        remark = f"{count} steps with {updates} updates each; verl counts steps" if count and updates > 1 else ""
        yield Move(keys, ours + "lr_warmup_steps", count * updates, remark)
    lr, lowest = values.get(verl + "lr"), values.get(verl + "min_lr")
    key = verl + ("min_lr_ratio" if lowest is None else "min_lr")
    share = values.get(key) if lowest is None else lowest / lr if lr else 0.0
    if share is not None:
        yield Move((key,), ours + "min_lr_ratio", share)
    old = verl.removesuffix("optim.") + "grad_clip"
    if old in values:
        # Versions before the model engine clipped at grad_clip.
        clip = values[old] if values.get(verl + "clip_grad", 1.0) == 1.0 else values[verl + "clip_grad"]
        yield Move((old, verl + "clip_grad"), ours + "clip_grad", clip)


def layouts(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields backends, ranks and the layouts of models."""
    ranks = values["trainer.nnodes"] * values["trainer.n_gpus_per_node"]
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node")
    yield Move(keys, "driver.kind", "ray")
    yield Move(keys, "ray.ranks", ranks)
    device = values.get("trainer.device", "cuda")
    yield (
        Move(("trainer.device",), "driver.device", {"cuda": "auto"}.get(device, device))
        if device in ("cuda", "cpu")
        else Move(("trainer.device",), problem=f"there is no device {device}")
    )
    for role, verl, fsdp in (("actor", ACTOR, ACTOR + "fsdp_config."), ("critic", "critic.", "critic.fsdp.")):
        strategy = values.get(verl + "strategy", "megatron" if settings.megatron else "fsdp")
        if strategy not in ("fsdp", "fsdp2", "megatron"):
            yield Move((verl + "strategy",), problem=f"there is no strategy {strategy}; there are fsdp and megatron")
            continue
        strategy = "megatron" if strategy == "megatron" else "fsdp"
        yield Move((verl + "strategy",), f"{role}.strategy", strategy)
        size = values.get(key := fsdp + "fsdp_size", -1)
        if size is not None and 0 < size < ranks:
            yield Move((key,), f"{role}.fsdp_config.replicate", ranks // size, f"{ranks} ranks in shards of {size}")
        elif key in values:
            yield Move((key,), f"{role}.fsdp_config.replicate", 1)
        dtype_keys = (fsdp + "dtype", f"{verl}megatron.dtype")
        dtype = next((values[key] for key in dtype_keys if values.get(key)), "bfloat16")
        yield Move(dtype_keys, f"{role}.dtype", {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype))
        if strategy == "megatron":
            yield from _megatron(values, role, verl + "megatron.")
        if role == "actor" and (mode := values.get(key := verl + "router_replay.mode")) is not None:
            yield _replay(key, mode, strategy)


def _replay(key: str, mode: str, strategy: str) -> Move:
    if mode not in ("disabled", "R2", "R3"):
        return Move((key,), problem=f"there is no mode {mode}; there are R2 and R3")
    if mode != "disabled" and strategy != "megatron":
        return Move((key,), problem=f"{strategy} cannot replay expert routing; megatron can")
    return Move((key,), "actor.router_replay.mode", mode)


def _megatron(values: Values, role: str, verl: str) -> Iterator[Move]:
    shared = (values.get(verl + "tensor_model_parallel_size") or 1) > 1
    wanted = values.get(key := verl + "sequence_parallel", True)
    yield Move((key,), f"{role}.megatron.sequence_parallel", bool(wanted and shared))
    overrides = verl + "override_transformer_config."
    fields = {k: v for k, v in values.items() if k.startswith(overrides) and v is not None}
    for key, value in fields.items():
        name = key.removeprefix(overrides)
        yield Move((key,), f"{role}.megatron.override_transformer_config.{name}", value)


def budgets(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the budgets of micro-batches in tokens, of lengths and of adapters' layers."""
    if settings.sft:
        longest = values["data.max_length"]
        for name in ("max_prompt_length", "max_response_length"):
            yield Move(("data.max_length",), f"data.{name}", longest)
    else:
        longest = values["data.max_prompt_length"] + values["data.max_response_length"]
    for role, verl in (("actor", ACTOR), ("critic", "critic.")):
        tokens = values.get(tokens_key := verl + "ppo_max_token_len_per_gpu")
        rows = values.get(rows_key := verl + "ppo_micro_batch_size_per_gpu")
        dynamic = values.get(verl + "use_dynamic_bsz", values.get(ACTOR + "use_dynamic_bsz"))
        if tokens is None:
            continue
        budget, remark = tokens, ""
        keys: tuple[str, ...] = (tokens_key,)
        if not dynamic and rows:
            budget, remark, keys = rows * longest, f"{rows} rows of {longest} tokens", (rows_key, tokens_key)
        if budget < longest:
            budget, remark = longest, f"raised to the longest row, of {longest} tokens"
        yield Move(keys, f"{role}.ppo_max_token_len_per_gpu", budget, remark)
    for role, verl in (("actor", MODEL), ("critic", "critic.model.")):
        key = f"{verl}lora.target_modules"
        if values.get(key) and values.get(verl + "lora_rank"):
            yield Move((key,), f"{role}.target_modules", "all-linear", "Megatron's names of linear layers")


def rollout(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the rollout engines."""
    if settings.sft:
        return
    name = values[key := ROLLOUT + "name"]
    yield Move((key,), "rollout.name", "vllm", "" if name == "vllm" else f"in place of {name}")
    split = values.get(ROLLOUT + "tensor_model_parallel_size") or 1
    nodes, key = values[ROLLOUT + "nnodes"] or 0, ROLLOUT + "tensor_model_parallel_size"
    if nodes:
        gpus = nodes * (values.get(ROLLOUT + "n_gpus_per_node") or values["trainer.n_gpus_per_node"])
        keys = (ROLLOUT + "nnodes", ROLLOUT + "n_gpus_per_node")
        yield Move(keys, "rollout.placement", "apart")
        yield Move(keys, "rollout.engines", max(1, gpus // split))
        yield Move((key,), "rollout.tensor_parallel_size", split)
    else:
        ranks = values["trainer.nnodes"] * values["trainer.n_gpus_per_node"]
        remark = "each has a GPU of its own: only engines placed apart may have several" if split > 1 else ""
        yield Move((key, ROLLOUT + "nnodes", ROLLOUT + "n_gpus_per_node"), "rollout.engines", ranks, remark)
    for key, value in values.items():
        if key.startswith(ROLLOUT + "engine_kwargs.vllm."):
            yield Move((key,), f"rollout.engine_kwargs.{key.removeprefix(ROLLOUT + 'engine_kwargs.vllm.')}", value)
    if (tokens := values.get(key := ROLLOUT + "max_num_batched_tokens")) is not None:
        yield Move((key,), "rollout.engine_kwargs.max_num_batched_tokens", tokens)
    offloads = [
        f"{ACTOR}{table}.{what}_offload" for table in ("fsdp_config", "megatron") for what in ("param", "optimizer")
    ]
    if (asked := tuple(key for key in offloads if values.get(key))) and values.get(
        ROLLOUT + "free_cache_engine", True
    ):
        yield Move(asked, "rollout.offload_trainer", True)
    most, key = values.get("data.val_max_samples", -1), "data.val_max_samples"
    if most != -1 and most is not None:
        yield Move((key,), "data.val_size", most)
    n, temperature = (values.get(f"{ROLLOUT}val_kwargs.{name}") for name in ("n", "temperature"))
    if (n or 1) > 1 and not temperature:
        yield Move(
            (ROLLOUT + "val_kwargs.n",), "rollout.val_kwargs.n", 1, "at temperature 0 all answers are the same"
        )


def rewards(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the reward functions and the reward model."""
    start = "reward.custom_reward_function."
    if path := values.get(start + "path"):
        name = values.get(start + "name") or "compute_score"
        yield Move((start + "path", start + "name"), "reward.functions", [f"{path}:{name}"])
    start = "reward.reward_model."
    if values.get(start + "enable"):
        if path := values.get(start + "model_path"):
            remark = "a model folder with a value head"
            yield Move((start + "enable", start + "model_path"), "algorithm.reward_model", path, remark)
        else:
            yield Move((start + "enable",), problem="the reward model has no path")


def run(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the run's folder, its checkpoints and its loggers."""
    project, experiment = values["trainer.project_name"], values["trainer.experiment_name"]
    folder = values.get(key := "trainer.default_local_dir") or f"checkpoints/{project}/{experiment}"
    yield Move((key,), "trainer.dir", folder)
    loggers = values[key := "trainer.logger"]
    loggers = loggers if isinstance(loggers, list) else [loggers]
    known = [name for name in loggers if name in ("tensorboard", "wandb")]
    others = ", ".join(name for name in loggers if name not in (*known, "console", "file"))
    yield Move((key,), "trainer.logger", known, f"{others} left out" if others else "")
    keep = values.get(key := "trainer.max_actor_ckpt_to_keep")
    if keep:
        yield Move((key,), "trainer.max_ckpt_to_keep", keep)
    elif values["trainer.save_freq"] > 0:
        yield Move((key,), "trainer.max_ckpt_to_keep", 1_000_000, "verl keeps all by default")
    mode = values.get(key := "trainer.resume_mode")
    if mode is not None:
        yield Move((key,), "trainer.resume_mode", {"resume_path": "auto"}.get(mode, mode))


COMPUTED = (algorithm, unequal, correction, length, layouts, budgets, rollout, rewards, run)
