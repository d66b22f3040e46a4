"""Notes about settings that are valid but probably a mistake: keys without effect, and models that never learn."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .algorithms import (
    BUILT_IN,
    CLIPPED,
    DAPO,
    DPO,
    GRPO,
    OF_LOSS_TYPE,
    PPO,
    RLOO,
    SCALED_BY_STD,
    TOKEN_BASELINES,
    PolicyOptimization,
    Rejection,
    ReMax,
    uses_critic,
)
from .fields import ConfigError
from .lag import corrected
from .loading import elsewhere, load, raw_table, to_table
from .plan import outline, role_names
from .schema import AlgorithmTable, Config
from .tables import flat
from .tasks import reasoning_names, verifiers_name, with_own_env, with_own_scorer

Rule = tuple[str, bool, str]


def notes(path: str | Path | None, overrides: Sequence[str]) -> list[str]:
    """Returns a sentence for each key that is set but has no effect, and for settings that are hardly meant.

    A key at its default is not reported as without effect, nor is a key of the file that loses its effect only by an
    override.

    Example:
        >>> notes(None, ["algorithm.name=sft", "algorithm.lam=0.9"])
        ['algorithm.lam has no effect with algorithm.name = "sft"']
    """
    cfg = load(path, overrides)
    sentences = without_effect(cfg, flat(raw_table(None, overrides)))
    if path is not None:
        with contextlib.suppress(ConfigError):
            file_alone = load(path)
            table = flat(raw_table(path, ()))
            ignored_in_file = without_effect(file_alone, table)
            sentences = without_effect(cfg, {key: table[key] for key in ignored_in_file}) | sentences
    return [*sentences.values(), *_hardly_meant(cfg)]


def _hardly_meant(cfg: Config) -> Iterator[str]:
    """Yields sentences about values that are allowed but leave a model or a file as it is."""
    options, steps = cfg.algorithm.options, cfg.trainer.total_training_steps
    if isinstance(options, PPO) and options.critic_warmup >= steps:
        yield (
            f"algorithm.critic_warmup = {options.critic_warmup} leaves no step to the actor: "
            f"trainer.total_training_steps is {steps}"
        )
    if isinstance(options, Rejection) and (lag := cfg.driver.max_lag):
        yield (
            f"driver.max_lag = {lag} lets rejection learn from answers that weights up to {lag} steps older have "
            "drawn, and nothing corrects for it"
        )
    for name, role in outline(cfg).roles.items():
        table, settings = ("critic", cfg.critic) if uses_critic(name, role) else ("actor", cfg.actor)
        if role.trained and settings.optim.lr == 0:
            yield f"{table}.optim.lr is 0: the weights of the {name} stay as they are"
    ranks, engines = cfg.ray.ranks, cfg.rollout.engines
    colocated = cfg.driver.kind == "ray" and cfg.rollout.name == "vllm" and cfg.rollout.placement == "colocated"
    if colocated and engines < ranks and outline(cfg).learns_from == "samples" and cfg.driver.device != "cpu":
        yield f"rollout.engines = {engines} leaves {ranks - engines} of the GPUs of {ranks} ranks without an engine"
    if outline(cfg).learns_from != "samples" and cfg.trainer.journal == "samples":
        with_name = f'with algorithm.name = "{cfg.algorithm.name}"'
        yield f'trainer.journal = "samples" keeps digests alone {with_name}, which samples nothing'


def without_effect(cfg: Config, settings: dict[str, Any]) -> dict[str, str]:
    """Returns a sentence for each of these settings that ``cfg`` ignores, by key."""
    chosen: type = type(cfg.algorithm.options)
    values, defaults = flat(to_table(cfg)), _defaults(chosen)
    rules = [(pattern, reason) for pattern, used, reason in _rules(cfg) if not used]
    sentences: dict[str, str] = {}
    for key, value in settings.items():
        if values.get(key, value) != defaults.get(key):
            for pattern, reason in rules:
                if fnmatch.fnmatchcase(key, pattern):
                    sentences.setdefault(key, f"{key} has no effect {reason}")
    return sentences


@functools.lru_cache(maxsize=16)
def _defaults(chosen: type) -> Mapping[str, Any]:
    """Returns the default of every key, including keys of algorithms other than the one with the chosen options."""
    defaults = flat(to_table(Config()))
    for options in (*BUILT_IN.values(), chosen):
        table = flat(to_table(Config(algorithm=AlgorithmTable("ppo", options()))))
        defaults |= {key: value for key, value in table.items() if key.startswith("algorithm.")}
    return defaults


def _rules(cfg: Config) -> Iterator[Rule]:
    """Yields patterns of keys, whether this config uses these keys, and the reason if it does not."""
    algorithm, options = cfg.algorithm.name, cfg.algorithm.options
    roles = outline(cfg).roles
    with_name = f'with algorithm.name = "{algorithm}"'
    chosen: type = type(options)
    for key in elsewhere(chosen):
        yield key, False, with_name
    yield "critic.*", any(uses_critic(name, role) for name, role in roles.items()), with_name
    for pattern in ("rollout.n", "rollout.temperature", "rollout.top_*"):
        yield pattern, outline(cfg).learns_from == "samples", with_name
    yield from _option_rules(corrected(cfg), cfg.data.train_batch_size)
    yield from _table_rules(cfg)
    absent = [role for role in cfg.ray.separate if role not in role_names(cfg)]
    present = ", ".join(role_names(cfg))
    yield "ray.separate", not absent, f"for {' and '.join(absent)}: this run trains with {present}"


def _option_rules(options: Any, batch_size: int) -> Iterator[Rule]:
    """Yields the rules of the built-in algorithms' options."""
    norm = "seq-mean-token-sum-norm"
    used = getattr(options, "loss_agg_mode", norm) == norm
    yield "algorithm.loss_scale_factor", used, f'without algorithm.loss_agg_mode = "{norm}"'
    if isinstance(options, DPO):
        for loss_type, keys in OF_LOSS_TYPE.items():
            for key in keys:
                kind = options.loss_type
                yield f"algorithm.{key}", kind == loss_type, f'with algorithm.loss_type = "{kind}"'
    if not isinstance(options, PolicyOptimization):
        return
    if isinstance(options, PPO | GRPO):
        estimator = options.adv_estimator
        by_user = ":" in estimator
        yield "algorithm.norm_adv_by_std_in_grpo", estimator in SCALED_BY_STD, f"with {estimator}"
        yield "algorithm.gdpo_reward_*", estimator == "gdpo", f"with {estimator}"
        yield "algorithm.handle_zero_tail", estimator in TOKEN_BASELINES, f"with {estimator}"
        yield "algorithm.lam", estimator == "gae", f"with {estimator}"
        yield "algorithm.gamma", not by_user and estimator in ("gae", "reinforce_plus_plus"), f"with {estimator}"
    if isinstance(options, DAPO):
        for name in ("metric", "max_num_gen_batches"):
            used = options.filter_groups.enable
            yield f"algorithm.filter_groups.{name}", used, "without algorithm.filter_groups.enable"
        key = "algorithm.overlong_buffer"
        yield f"{key}.penalty_factor", options.overlong_buffer.len > 0, f"with {key}.len = 0"
    if isinstance(options, RLOO | ReMax):
        yield "algorithm.gamma", False, f"with {type(options).__name__.lower()}"
    yield from _loss_rules(options)
    for name in ("threshold", "threshold_lower", "outside"):
        yield f"algorithm.rollout_is_{name}", options.rollout_is not in (None, "off"), "without algorithm.rollout_is"
    yield "algorithm.kl_loss_*", options.use_kl_loss, "without algorithm.use_kl_loss"
    for pattern in ("algorithm.kl_penalty", "algorithm.kl_ctrl.*"):
        yield pattern, options.use_kl_in_reward, "without algorithm.use_kl_in_reward"
    for name in ("target_kl", "horizon"):
        adaptive = options.kl_ctrl.type == "adaptive"
        yield f"algorithm.kl_ctrl.{name}", adaptive, 'with algorithm.kl_ctrl.type = "fixed"'
    whole = f"above data.train_batch_size = {batch_size}: every update takes the whole batch"
    yield "algorithm.ppo_mini_batch_size", options.ppo_mini_batch_size <= batch_size, whole


def _loss_rules(options: PolicyOptimization) -> Iterator[Rule]:
    """Yields the rules of the policy losses' options."""
    loss, with_loss = options.policy_loss, f"with algorithm.policy_loss = {options.policy_loss!r}"
    for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        yield f"algorithm.{key}", loss in CLIPPED, with_loss
    both = options.clip_ratio_low is not None and options.clip_ratio_high is not None
    yield "algorithm.clip_ratio", not both, "with algorithm.clip_ratio_low and algorithm.clip_ratio_high"
    yield "algorithm.clip_ratio_c", loss in ("ppo_clip", "dppo_tv", "dppo_kl"), with_loss
    yield "algorithm.tau_*", loss == "sapo", with_loss
    yield "algorithm.dro_beta", loss == "dro", with_loss
    yield "algorithm.clip_cov_*", loss == "clip_cov", with_loss
    for key in ("kl_cov_ratio", "ppo_kl_coef"):
        yield f"algorithm.{key}", loss == "kl_cov", with_loss
    by_row = loss == "geo_mean" and not (options.use_kl_loss or options.entropy_coeff)
    yield "algorithm.loss_agg_mode", not by_row, f"{with_loss}, which averages over responses"


def _table_rules(cfg: Config) -> Iterator[Rule]:
    """Yields the rules of the other tables."""
    data = cfg.data
    from_files = bool(data.train_files or data.val_files)
    task = "" if from_files else data.task
    sets, env = reasoning_names(task), with_own_env(cfg.env, task)
    reward = with_own_scorer(cfg.reward, task, cfg.env)
    read = from_files or bool(verifiers_name(task))
    for role, table in (("actor", cfg.actor), ("critic", cfg.critic)):
        for name in ("lora_alpha", "target_modules"):
            yield f"{role}.{name}", table.lora_rank > 0, f"without {role}.lora_rank"
        constant = table.optim.lr_scheduler_type == "constant"
        for name in ("min_lr_ratio", "lr_decay_steps"):
            yield f"{role}.optim.{name}", not constant, f'with {role}.optim.lr_scheduler_type = "constant"'
    sharded = not {"fsdp", "megatron"}.isdisjoint((cfg.actor.strategy, cfg.critic.strategy))
    for role, table in (("actor", cfg.actor), ("critic", cfg.critic)):
        for keys, name in (("fsdp_config", "fsdp"), ("megatron", "megatron")):
            yield f"{role}.{keys}.*", table.strategy == name, f'without {role}.strategy = "{name}"'
    yield "ray.timeout", cfg.driver.kind == "ray" or sharded, 'with driver.kind = "local"'
    for name in ("ranks", "separate", "address", "runtime_env", "placement"):
        yield f"ray.{name}", cfg.driver.kind == "ray", 'with driver.kind = "local"'
    for name in ("engines", "placement"):
        yield f"rollout.{name}", cfg.driver.kind == "ray", 'with driver.kind = "local"'
    for name in ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "engine_kwargs*", "adapters"):
        yield f"rollout.{name}", cfg.rollout.name == "vllm", 'without rollout.name = "vllm"'
    yield "rollout.adapters", cfg.actor.lora_rank > 0, "without actor.lora_rank"
    shares = cfg.rollout.name == "vllm" and cfg.rollout.placement == "colocated"
    for name in ("free_cache_engine", "offload_trainer"):
        yield f"rollout.{name}", shares, 'without rollout.name = "vllm" and rollout.placement = "colocated"'
    yield "rollout.offload_trainer", cfg.rollout.free_cache_engine, "without rollout.free_cache_engine"
    yield "model.new.*", not cfg.model.path, "with model.path"
    yield "data.task", not data.train_files, "with data.train_files"
    yield "data.task_options*", bool(sets), "without data.task = reasoning_gym:SET"
    yield "data.weights", bool(sets or data.train_files), "without data.train_files or data.task = reasoning_gym:SET"
    yield "data.prompt_key", from_files, "without data.train_files"
    rendered = read or bool(sets) or bool(env.name)
    yield "data.chat_template_kwargs*", rendered, "without data.train_files or env.name"
    yield "data.convert", from_files, "without data.train_files"
    yield "data.truncation", not data.filter_overlong_prompts, "with data.filter_overlong_prompts"
    yield "data.truncation", read, "without data.train_files"
    yield "data.filter_overlong_prompts", read or bool(sets), "without data.train_files"
    yield "data.stream", bool(data.train_files), "without data.train_files"
    yield "data.shuffle", read, "without data.train_files"
    for name in ("arguments*", "python", "max_turns", "max_turn_length", "timeout", "num_workers", "variables"):
        yield f"env.{name}", bool(env.name), "without env.name"
    for name in ("weights", "arguments*", "num_workers", "env"):
        yield f"reward.{name}", bool(reward.functions), "without reward.functions"
    yield "reward.timeout", reward.by_user, "without reward.functions or reward.url"
    for name in ("api", "model", "retries", "concurrency", "api_key_env", "offline"):
        yield f"reward.{name}", bool(reward.url), "without reward.url"
    asks = bool(reward.url) and reward.api == "chat"
    for name in ("prompt", "pattern", "unreadable_score"):
        yield f"reward.{name}", asks, 'without reward.url and reward.api = "chat"'
    yield "trainer.stop_metric", cfg.trainer.stop_at is not None, "without trainer.stop_at"
    for name in ("project_name", "experiment_name"):
        yield f"trainer.{name}", "wandb" in cfg.trainer.logger, "without wandb in trainer.logger"
