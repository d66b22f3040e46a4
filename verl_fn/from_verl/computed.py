"""verl's keys whose values change on the way here, or that are computed from several."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.config.algorithms import GROUP_ESTIMATORS
from verl_fn.config.options import home

from .keys import (
    ACTOR,
    ENGINE_ARGUMENTS,
    MEGATRON_CHOICES,
    MODEL,
    PROCESSOR_CACHE,
    PROVIDER_FIELDS,
    ROLES,
    ROLLOUT,
    SHARED,
    TABLES,
    TEXT,
)
from .reading import Settings

Values = Mapping[str, Any]
CountRows = Callable[[Sequence[str]], int | None]

# Layers as Megatron names them, and as models here do.
LAYERS: Mapping[str, Sequence[str]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


@attrs.frozen
class Move:
    """One key here, and the keys of verl that it comes from.

    Attributes:
        keys: verl's keys.
        ours: the key here; of a problem, the key that the user has to set, if there is one.
        value: its value.
        remark: how it differs, for the report.
        problem: why the keys cannot be followed; nothing is set then.
        differs: whether verl's default means something else though ``value`` is the default here.
    """

    keys: tuple[str, ...]
    ours: str = ""
    value: Any = None
    remark: str = ""
    problem: str = ""
    differs: bool = False


def algorithm(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the algorithm's name, its estimator and its loss."""
    if settings.sft:
        yield Move(("verl.trainer.sft_trainer",), "algorithm.name", "sft")
        return
    key = "algorithm.adv_estimator"
    estimator = str(values[key]).removesuffix("_vectorized")
    filtering = bool(values.get(enable := "algorithm.filter_groups.enable"))
    penalty = overlong(values)
    if estimator in (*GROUP_ESTIMATORS, "reinforce_plus_plus"):
        named = "dapo" if filtering or penalty else "grpo"
        yield Move((key, enable) if filtering else (key,), "algorithm.name", named)
        yield Move((key,), "algorithm.adv_estimator", estimator)
        if named == "dapo":
            yield Move((enable,), "algorithm.filter_groups.enable", filtering)
        yield from _dynamic_sampling(values) if filtering else ()
        yield from penalty
    elif penalty:
        yield Move(penalty[0].keys, problem=f"the penalty on long responses goes with groups, not with {estimator}")
    elif filtering:
        yield Move((enable,), problem="groups are sampled again only with an estimator that compares within them")
    elif estimator in ("gae", "remax"):
        yield Move((key,), "algorithm.name", "ppo" if estimator == "gae" else "remax")
    else:
        yield Move((key,), problem=f"there is no estimator {estimator}")
    if (enabled := values.get(enable := "critic.enable")) is not None and enabled != (estimator == "gae"):
        yield Move((enable,), problem=f"a critic learns with the estimator gae, and not with {estimator}; remove it")
    yield from _loss(values)


def _loss(values: Values) -> Iterator[Move]:
    """Yields the policy loss and its clip ranges; verl's defaults set them for every loss."""
    loss = values[key := ACTOR + "policy_loss.loss_mode"]
    if loss == "bypass_mode":
        yield Move((key,), problem="set algorithm.rollout_correction.bypass_mode to choose it")
    else:
        yield Move((key,), "algorithm.policy_loss", "ppo_clip" if loss == "vanilla" else loss)
    yield Move((ACTOR + "clip_ratio_c",), "algorithm.clip_ratio_c", values.get(ACTOR + "clip_ratio_c") or 3.0)
    both = ACTOR + "clip_ratio"
    for side in ("low", "high"):
        clip = values.get(key := f"{ACTOR}clip_ratio_{side}")
        keys = (key,) if clip is not None else (key, both)
        yield Move(keys, f"algorithm.clip_ratio_{side}", values[both] if clip is None else clip)


def overlong(values: Values) -> list[Move]:
    """Returns the penalty on long responses of verl's reward manager ``dapo``; empty if it is off."""
    start = "reward.reward_kwargs.overlong_buffer_cfg."
    if not values.get(start + "enable"):
        return []
    keys, length = (start + "enable", start + "len"), values.get(start + "len") or 0
    allowed, limit = values["data.max_response_length"], "reward.reward_kwargs.max_resp_len"
    if (longest := values.get(limit)) not in (None, allowed):
        return [Move((limit,), problem=f"the penalty ends at data.max_response_length = {allowed}, not at {longest}")]
    manager = "reward.reward_manager.name"
    remark = "" if values[manager] == "dapo" else f"in verl it needs {manager}=dapo"
    factor = values.get(key := start + "penalty_factor")
    return [
        Move((*keys, limit, start + "log"), "algorithm.overlong_buffer.len", length, remark),
        Move((key,), "algorithm.overlong_buffer.penalty_factor", 1.0 if factor is None else factor),
    ]


def _dynamic_sampling(values: Values) -> Iterator[Move]:
    key = (start := "algorithm.filter_groups.") + "metric"
    if (metric := values.get(key) or "reward") not in ("acc", "score", "reward", "seq_reward", "seq_final_reward"):
        yield Move((key,), problem=f"groups differ in acc or score, not in {metric}")
    elif (metric[:4] == "seq_" and overlong(values)) or (
        metric == "seq_final_reward" and values.get("algorithm.use_kl_in_reward")
    ):
        yield Move((key,), problem=f"groups differ in acc or score, before penalties are taken off, not in {metric}")
    else:
        remark = "" if metric in ("acc", "score") else "the rewards of a response add up to its score"
        yield Move((key,), "algorithm.filter_groups.metric", "acc" if metric == "acc" else "score", remark)
    most = values.get(key := start + "max_num_gen_batches") or 0
    limited = most > 0
    remark = "after these calls verl ends with an error, and here a step has fewer groups"
    remark = remark if limited else f"{most} in verl, without a limit"
    keys: tuple[str, ...] = (key,)
    batch, drawn = values.get("data.train_batch_size"), values.get("data.gen_batch_size")
    # A call asks for the prompts that a batch lacks, so it takes more calls to ask for as many.
    if limited and isinstance(batch, int) and isinstance(drawn, int) and drawn > batch > 0:
        remark = f"{most} calls for {drawn} prompts; a call here asks for at most {batch}"
        keys, most = (key, "data.gen_batch_size"), -(-most * drawn // batch)
    ours, calls = "algorithm.filter_groups.max_num_gen_batches", most if limited else 10
    yield Move(keys, ours, calls, remark, differs=not limited)


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
    start = "algorithm.rollout_correction."
    if settings.sft or not values.get(start + "rollout_is"):
        return
    threshold = values[key := start + "rollout_is_threshold"]
    lower, _, upper = str(threshold).rpartition("_")
    yield Move((key,), "algorithm.rollout_is_threshold", float(upper))
    if lower:
        yield Move((key,), "algorithm.rollout_is_threshold_lower", float(lower))
        yield Move((key,), "algorithm.rollout_is_outside", "mask")


def length(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the number of steps, and warm-ups in updates."""
    batch, epochs = values["data.train_batch_size"], values[epochs_key := "trainer.total_epochs"]
    steps = values.get(steps_key := "trainer.total_training_steps")
    keys, remark, rows = (steps_key,), "", None
    if batch < 1:
        yield Move(("data.train_batch_size",), problem=f"a step has prompts, and not {batch}")
        return
    if steps is None:
        files = values["data.train_files"]
        rows = count_rows(files if isinstance(files, list) else [files])
        keys, remark = (epochs_key,), f"{rows} rows, of which verl drops the last incomplete batch of an epoch"
        steps = rows // batch * epochs if rows is not None else None
    if not steps:
        why, where = f"data.train_files has {rows} rows, less than a batch: lower data.train_batch_size", ""
        if rows is None:
            why, where = "data.train_files cannot be counted here", ", or translate where the data is"
        advice = f"append trainer.total_training_steps=N to verl's words, or set it in the config{where}"
        problem = f"the run has rows // {batch} * {epochs} steps, and {why}; {advice}"
        yield Move((epochs_key,), steps_key, problem=problem)
    else:
        yield Move(keys, steps_key, steps, remark)
    updates, late, uses_critic = 1, 0, values.get("algorithm.adv_estimator") == "gae"
    if not settings.sft:
        updates = values[ACTOR + "ppo_epochs"] * -(-batch // min(batch, values[ACTOR + "ppo_mini_batch_size"]))
        # verl counts steps from 1, and updates the actor from step critic_warmup on.
        late = max(0, (first := values["trainer.critic_warmup"]) - 1)
        remark = f"verl's actor learns from step {first} on" if first else ""
        if late and not uses_critic:
            waits = f"{remark}, and without a critic there is no such wait; set it to 0"
            yield Move(("trainer.critic_warmup",), problem=waits)
        else:
            yield Move(("trainer.critic_warmup",), "algorithm.critic_warmup", late, remark)
    for verl, ours in [*ROLES.items()][: 1 if settings.sft else 2]:
        yield from _schedule(values, verl + "optim.", ours + ".optim.", steps or 0, updates)
        after = late if verl == ACTOR and uses_critic else 0
        yield from _decay(values, verl + "optim.", ours + ".optim.", steps or 0, updates, after)


def _decay(values: Values, verl: str, ours: str, steps: int, updates: int, late: int) -> Iterator[Move]:
    """Yields over how many updates the rate falls: verl's schedule does not know that an actor starts late."""
    decay = values.get(key := verl + "lr_decay_steps")
    if values[kind := verl + "lr_scheduler_type"] == "constant":
        return
    if decay:
        yield Move((key,), ours + "lr_decay_steps", decay * updates, f"{updates} updates a step" * (updates > 1))
    elif late and steps:
        remark = f"verl's schedule falls over all {steps} steps, though the actor learns from step {late + 1} on"
        yield Move((kind, "trainer.critic_warmup"), ours + "lr_decay_steps", steps * updates, remark)


def _schedule(values: Values, verl: str, ours: str, steps: int, updates: int) -> Iterator[Move]:
    warmup, ratio = values.get(verl + "lr_warmup_steps") or -1, values.get(verl + "lr_warmup_steps_ratio") or 0.0
    keys = (verl + "lr_warmup_steps", verl + "lr_warmup_steps_ratio")
    steps = values.get(verl + "lr_decay_steps") or steps
    count = warmup if warmup > 0 else int(ratio * steps)
    if ratio and warmup <= 0 and not steps:
        yield Move(keys[1:], problem="the number of steps is not known; append trainer.total_training_steps=N")
    else:
        remark = f"{count} steps with {updates} updates each; verl counts steps" if count and updates > 1 else ""
        yield Move(keys, ours + "lr_warmup_steps", count * updates, remark)
    # Megatron's engine has min_lr, and the others a share. A key that is not 0 counts, whichever engine it is of.
    lr, keys = values[verl + "lr"], (verl + "min_lr", verl + "min_lr_ratio")
    lowest, share = (values.get(key) or 0.0 for key in keys)
    if lowest and share and not math.isclose(lowest, share * lr):
        yield Move(keys, problem="they name two lowest learning rates; leave one of them")
    else:
        yield Move(keys, ours + "min_lr_ratio", share or (lowest / lr if lr else 0.0))
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
    device = values.get(key := "trainer.device", "cuda")
    if device in ("cuda", "cpu"):
        yield Move((key,), "driver.device", "auto" if device == "cuda" else device)
    else:
        yield Move((key,), problem=f"there is no device {device}; set trainer.device=cuda")
    if settings.engine not in ("fsdp", "megatron"):
        yield Move(("model_engine",), problem=f"there is no engine {settings.engine}; take fsdp or megatron")
    for verl, role in ROLES.items():
        strategy = values.get(verl + "strategy") or settings.engine
        if strategy not in ("fsdp", "fsdp2", "megatron"):
            yield Move((verl + "strategy",), problem=f"there is no strategy {strategy}; there are fsdp and megatron")
            continue
        fsdp = ACTOR + "fsdp_config." if role == "actor" else "critic.fsdp."
        strategy = "megatron" if strategy == "megatron" else "fsdp"
        yield Move((verl + "strategy",), f"{role}.strategy", strategy)
        size = values.get(key := fsdp + "fsdp_size") or -1
        if 0 < size < ranks and ranks % size:
            yield Move((key,), problem=f"shards of {size} do not divide {ranks} ranks")
        else:
            remark = f"{ranks} ranks in shards of {size}" if 0 < size < ranks else ""
            yield Move((key,), f"{role}.fsdp_config.replicate", ranks // size if remark else 1, remark)
        key = f"{verl}megatron.dtype" if strategy == "megatron" else fsdp + "dtype"
        if (dtype := values.get(key)) is not None:
            yield Move((key,), f"{role}.dtype", {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype))
        if strategy == "megatron":
            shared = (values.get(verl + "megatron.tensor_model_parallel_size") or 1) > 1
            wanted = values.get(key := verl + "megatron.sequence_parallel", True)
            yield Move((key,), f"{role}.megatron.sequence_parallel", bool(wanted and shared))
            remark = "Megatron's optimizer leaves biases and norms out of weight decay"
            yield Move((verl + "strategy",), f"{role}.optim.decay_biases_and_norms", False, remark)
        if role == "actor":
            mode = values.get(key := f"{verl}{'megatron.' if strategy == 'megatron' else ''}router_replay.mode")
            other = values.get(verl + "router_replay.mode")
            key, mode = (verl + "router_replay.mode", other) if other not in (None, "disabled") else (key, mode)
            yield from [_replay(key, mode, strategy)] if mode is not None else []


def _replay(key: str, mode: str, strategy: str) -> Move:
    if mode not in ("disabled", "R2", "R3"):
        return Move((key,), problem=f"there is no mode {mode}; there are R2 and R3")
    if mode != "disabled" and strategy != "megatron":
        return Move((key,), problem=f"{strategy} cannot replay expert routing; megatron can")
    return Move((key,), "actor.router_replay.mode", mode)


def budgets(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the budgets of micro-batches in tokens, of lengths and of adapters' layers."""
    if settings.sft:
        longest = values["data.max_length"]
        for name in ("max_prompt_length", "max_response_length"):
            yield Move(("data.max_length",), f"data.{name}", longest)
    else:
        longest = values["data.max_prompt_length"] + values["data.max_response_length"]
    for verl, role in ROLES.items():
        tokens = values.get(tokens_key := verl + "ppo_max_token_len_per_gpu")
        rows = values.get(rows_key := verl + "ppo_micro_batch_size_per_gpu")
        dynamic = values.get(verl + "use_dynamic_bsz", values.get(ACTOR + "use_dynamic_bsz"))
        if tokens is None:
            continue
        budget, remark = tokens, ""
        keys: tuple[str, ...] = (tokens_key,)
        if not dynamic and rows:
            budget, remark, keys = rows * longest, f"{rows} rows of {longest} tokens", (rows_key, tokens_key)
        sharers = _sharers(values, settings, verl)
        if budget * sharers < longest:
            budget, remark = -(-longest // sharers), f"raised to the longest row, of {longest} tokens"
            remark += f" on {sharers} ranks" * (sharers > 1)
        yield Move(keys, f"{role}.ppo_max_token_len_per_gpu", budget, remark)
    for role, verl in (("actor", MODEL), ("critic", "critic.model.")):
        named = values.get(key := f"{verl}lora_target_modules")
        if not named or not values.get(f"{verl}lora_rank"):
            continue
        if others := [name for name in named if name not in LAYERS]:
            problem = f"there is no layer {others[0]!r}; there are {', '.join(LAYERS)}"
            yield Move((key,), problem=f"{problem}; or name a model's own layers in {verl}target_modules")
        else:
            layers = "all-linear" if set(named) == set(LAYERS) else [one for name in named for one in LAYERS[name]]
            yield Move((key,), f"{role}.target_modules", layers, "Megatron's names of linear layers")


def _sharers(values: Values, settings: Settings, verl: str) -> int:
    """Returns how many ranks share each row of a role, and so its budget."""
    if (values.get(verl + "strategy") or settings.engine) == "megatron":
        return values.get(verl + "megatron.context_parallel_size") or 1
    fsdp = ACTOR + "fsdp_config." if verl == ACTOR else "critic.fsdp."
    return values.get(fsdp + "ulysses_sequence_parallel_size") or 1


def rollout(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the rollout engines."""
    if settings.sft:
        return
    name = values[key := ROLLOUT + "name"]
    yield Move((key,), "rollout.name", "vllm", "" if name == "vllm" else f"in place of {name}")
    split = values.get(ROLLOUT + "tensor_model_parallel_size") or 1
    longest = values["data.max_prompt_length"] + values["data.max_response_length"]
    for name, data, most in (
        ("prompt_length", "data.max_prompt_length", None),
        ("response_length", "data.max_response_length", None),
        ("max_model_len", "the longest prompt and response", longest),
    ):
        length, wanted = values.get(ROLLOUT + name), most or values[data]
        if length is not None and (length < wanted or (most is None and length != wanted)):
            yield Move((ROLLOUT + name,), problem=f"{length} is not {data} = {wanted}; set them alike")
    for table, ours in ((ROLLOUT, "rollout."), (ROLLOUT + "val_kwargs.", "rollout.val_kwargs.")):
        k = values[table + "top_k"]
        yield Move((table + "top_k",), ours + "top_k", -1 if k == 0 else k, "0 keeps all" * (k == 0))
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
        yield Move((key, ROLLOUT + "nnodes"), "rollout.engines", ranks, remark)
    if (tokens := values.get(key := ROLLOUT + "max_num_batched_tokens")) is not None:
        yield Move((key,), "rollout.engine_kwargs.max_num_batched_tokens", tokens)
    states = [f"{table}.{what}_offload" for table in ("fsdp_config", "megatron") for what in ("param", "optimizer")]
    asked = tuple(key for state in states if values.get(key := ACTOR + state))
    if asked and values.get(ROLLOUT + "free_cache_engine", True):
        yield Move(asked, "rollout.offload_trainer", True)
    n, temperature = (values.get(f"{ROLLOUT}val_kwargs.{name}") for name in ("n", "temperature"))
    if (n or 1) > 1 and not temperature:
        remark = "at temperature 0 all answers are the same"
        yield Move((ROLLOUT + "val_kwargs.n",), "rollout.val_kwargs.n", 1, remark)


def rewards(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the reward functions with their arguments, and the reward model."""
    start, model = "reward.custom_reward_function.", "reward.reward_model."
    if path := values.get(start + "path"):
        name = values.get(start + "name") or "compute_score"
        place = str(path).removeprefix("pkg://").removeprefix("file://")
        yield Move((start + "path", start + "name"), "reward.functions", [f"{place}:{name}"])
        arguments = start + "reward_kwargs."
        given = {key.removeprefix(arguments): key for key in values if key.startswith(arguments)}
        for argument, key in given.items():
            yield Move((key,), f"reward.arguments.{argument}", values[key])
        if problem := _not_taken(place, name, [name.partition(".")[0] for name in given]):
            yield Move(tuple(given.values()), problem=problem)
    if values.get(model + "enable"):
        if path and values.get(start + "path"):
            problem = "the function that scores asks the reward model: serve that model, and ask it in the function"
            yield Move((model + "enable",), problem=problem)
        elif path := values.get(model + "model_path"):
            remark = "a model folder with a value head"
            yield Move((model + "enable", model + "model_path"), "algorithm.reward_model", path, remark)
        else:
            yield Move((model + "enable",), problem="the reward model has no path")


def _not_taken(file: str, function: str, arguments: Sequence[str]) -> str:
    """Returns why a function of a file cannot be given these arguments; empty if it can, or for a module."""
    if not arguments or not file.endswith(".py"):
        return ""
    try:
        tree = ast.parse(Path(home(file)).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        return f"whether {function} takes it cannot be seen: {file} cannot be read ({error}); give the file's path"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            taken = {one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            missing = [] if node.args.kwarg else [name for name in arguments if name not in taken]
            return f"{function} in {file} has no parameter {missing[0]}" if missing else ""
    return ""


def run(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the run's folder, its checkpoints and its loggers."""
    project, experiment = values["trainer.project_name"], values["trainer.experiment_name"]
    folder = values.get(key := "trainer.default_local_dir") or f"checkpoints/{project}/{experiment}"
    yield Move((key,), "trainer.dir", folder)
    loggers = values[key := "trainer.logger"]
    loggers = loggers if isinstance(loggers, list) else [loggers]
    known = [name for name in loggers if name in ("tensorboard", "wandb")]
    others = ", ".join(name for name in loggers if name not in (*known, "console", "file"))
    remarks = [f"{others} left out"] * bool(others)
    remarks += ["a run needs the package wandb; trainer.logger=[] leaves it out"] * ("wandb" in known)
    yield Move((key,), "trainer.logger", known, "; ".join(remarks))
    keep = values.get(key := "trainer.max_actor_ckpt_to_keep")
    if keep:
        yield Move((key,), "trainer.max_ckpt_to_keep", keep)
    elif values["trainer.save_freq"] > 0:
        yield Move((key,), "trainer.max_ckpt_to_keep", 1_000_000, "verl keeps all by default")
    if (most := values.get(key := "data.val_max_samples", -1)) != -1 and most is not None:
        yield Move((key,), "data.val_size", most)
    mode = values[key := "trainer.resume_mode"]
    yield Move((key,), "trainer.resume_mode", {"resume_path": "auto"}.get(mode, mode))
    if mode == "resume_path" and (start := values.get(path := "trainer.resume_from_path")):
        yield Move((key, path), "trainer.resume_from_path", start)


def tables(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields the keys of tables that are the user's, such as arguments of the chat template."""
    for key, value in values.items():
        for start, ours in TABLES.items():
            name = key.removeprefix(start)
            if not key.startswith(start) or value in ({}, None):
                continue
            if start.endswith("transformer_config."):
                yield from _provider(key, ours, name, value)
            elif ours == "rollout.engine_kwargs." and (problem := _of_engine(name, value, values)) is not None:
                yield from [Move((key,), problem=problem)] if problem else []
            else:
                yield Move((key,), ours + name, value)
    thinks = values.get(key := "data.enable_thinking_default")
    if isinstance(thinks, bool):
        yield Move((key,), "data.chat_template_kwargs.enable_thinking", thinks)


def _of_engine(name: str, value: Any, values: Values) -> str | None:
    """Returns why an argument of vLLM's cannot be set; empty if nothing changes by it, None if it can be."""
    if name == "max_model_len":
        longest = values.get("data.max_prompt_length", 0) + values.get("data.max_response_length", 0)
        return "" if value >= longest else f"the longest prompt and response have {longest} tokens; remove it"
    if name in PROCESSOR_CACHE:
        return ""
    decided = name.partition(".")[0] in ENGINE_ARGUMENTS
    return "the engine decides it, from keys of the rollout table; remove it" if decided else None


def _provider(key: str, ours: str, name: str, value: Any) -> Iterator[Move]:
    """Yields a field of Megatron's provider, as far as its backend leaves it to the user."""
    if name in PROVIDER_FIELDS:
        yield Move((key,), problem=PROVIDER_FIELDS[name])
    elif name not in MEGATRON_CHOICES or MEGATRON_CHOICES[name] not in (value, None):
        yield Move((key,), ours + name, value)


def refused(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields problems of the whole: another trainer, and data that are not read."""
    if not settings.trainer_is_known:
        problem = f"the trainer of {settings.module} is not translated; main_ppo and sft_trainer are"
        yield Move(("module",), problem=problem)
    if settings.module.endswith("fsdp_sft_trainer"):
        problem = f"{settings.module} is no longer part of verl: write the settings of verl.trainer.sft_trainer"
        yield Move(("module",), problem=problem)
    for key, value in settings.values.items():
        table = key.removeprefix("reward.").partition("_kwargs.")[0]
        if value is None and table in ("custom_reward_function.reward", "data.apply_chat_template"):
            yield Move((key,), problem="a config cannot pass null on; leave the key out, or give another value")
    for name in ("video", "audio"):
        # A whole dump of verl's has these keys with the names that its data loader looks for.
        key, standard = f"data.{name}_key", f"{name}s"
        if key in values and (key in settings.words or values[key] not in (None, standard)):
            yield Move((key,), problem=f"{TEXT}, and {name}s are not read; remove it if no row has any")


def tower(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """Yields that adapters leave out the tower of a model with images."""
    exclude = MODEL + "exclude_modules"
    if "visual" in str(values.get(exclude)):
        yield Move((exclude,), "actor.freeze_vision_tower", True, "adapters leave the tower as it is")


def downloaded(values: Values, settings: Settings, count_rows: CountRows) -> Iterator[Move]:
    """A model's name on the hub: models are folders here."""
    name = values.get(MODEL + "path")
    if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists():
        remark = (
            f"a name on the hub: verl-fn prepare hub:{name} --out FOLDER downloads it to the folder for model.path"
        )
        yield Move((MODEL + "path",), "model.path", name, remark)


COMPUTED = (
    algorithm,
    downloaded,
    unequal,
    correction,
    length,
    layouts,
    budgets,
    rollout,
    rewards,
    run,
    tables,
    tower,
    refused,
)
