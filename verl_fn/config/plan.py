"""The plan of a run: its models with their layouts, its rollouts, and its tables of settings, as one value.

A plan is a pure function of the config and the current folder. Code that runs a plan takes the parts that it needs;
nothing else takes the whole config.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.errors import raised_as

from .algorithms import (
    BUILT_IN,
    DAPO,
    GRPO,
    AlgorithmTable,
    Distill,
    LearnsFrom,
    Outline,
    OverlongBuffer,
    PolicyOptimization,
    Role,
    uses_critic,
)
from .names import OWN_PARTS, SCORER, VERIFIERS, absolute, is_reference, reasoning_names, verifiers_name
from .options import ConfigError, check_path, home
from .schema import (
    Config,
    DataConfig,
    DriverConfig,
    EnvConfig,
    FsdpConfig,
    MegatronConfig,
    NewModelConfig,
    RayConfig,
    RewardConfig,
    RolloutConfig,
    Table,
    TrainedConfig,
    TrainerConfig,
    to_table,
)

Adapters = tuple[int, float, tuple[str, ...]]
"""Rank, alpha and target layers."""
# Of an engine on a CPU or on a GPU of unknown size, if the config leaves them open.
SLOTS, SHARE = 64, 0.5


@attrs.frozen(kw_only=True)
class RolePlan(TrainedConfig):
    """One model of a run: the settings of its table, with its source and what the run makes of it.

    Attributes:
        table: the table of the config that the settings come from: ``actor`` or ``critic``.
        head: ``lm`` or ``value``.
        trained: whether the model has an optimizer.
        total_updates: updates in the whole run, over which the learning rate decays.
        lora: rank, alpha and target layers of the adapters, or None.
        row_layout: ``packed``, ``padded`` or ``auto``; see ``hf.checks.fit_of``.
        router_replay: whether updates replay the experts of tokens, for ``megatron``.
        exact: whether log-probs equal the rollout engine's in every bit, for ``local`` and ``fsdp``.
        freeze_vision_tower: whether the module that sees images is not trained.
    """

    name: str
    table: str
    head: str
    folder: str
    trained: bool
    total_updates: int
    lora: Adapters | None
    row_layout: str = "auto"
    router_replay: bool = False
    exact: bool = False
    freeze_vision_tower: bool = False

    @property
    def sharers(self) -> int:
        """Returns how many ranks share the tokens of each row."""
        if self.strategy == "megatron":
            return self.megatron.context_parallel_size
        return self.fsdp_config.ulysses_sequence_parallel_size if self.strategy == "fsdp" else 1

    @property
    def max_tokens(self) -> int:
        """Returns the most tokens of a micro-batch, summed over the ranks that share its rows."""
        return self.ppo_max_token_len_per_gpu * self.sharers

    @property
    def falls(self) -> bool:
        """Returns whether the learning rate falls over ``total_updates``."""
        optim = self.optim
        return self.trained and optim.lr_scheduler_type != "constant" and not optim.lr_decay_steps

    @property
    def recomputes(self) -> bool:
        """Returns whether layers are recomputed by a backend that can keep their inputs in host memory."""
        return self.enable_gradient_checkpointing and self.strategy != "megatron"

    @property
    def offload_activations(self) -> bool:
        """Returns whether the inputs of recomputed layers are kept in host memory."""
        return self.recomputes and self.enable_activation_offload

    @property
    def offload(self) -> bool:
        """Returns whether parameters and optimizer state stay on the CPU between passes."""
        return self.strategy == "fsdp" and self.fsdp_config.offload_policy


@attrs.frozen(kw_only=True)
class RolloutPlan(RolloutConfig):
    """The rollout engine of a run: the settings of its table, with its model and its prompts.

    Attributes:
        slots: rows decoded at once, by default ``SLOTS``; a run on GPUs may choose another number.
        gpu_memory_utilization: of vLLM, by default ``SHARE``; a run may choose another one.
        lora: rank, alpha and target layers of adapters that are published without the model, or None.
        routed_experts: whether samples have the experts of their tokens.
        used: whether anything may be sampled: experience, or answers to held-out prompts.
        data: the table with the limits in tokens, the arguments of the chat template and the date.
    """

    slots: int
    gpu_memory_utilization: float
    folder: str
    lora: Adapters | None
    routed_experts: bool
    used: bool
    data: DataConfig

    @property
    def longest(self) -> int:
        """Returns the most tokens of a row: its prompt and its response."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def shares(self) -> bool:
        """Returns whether an engine in a process of its own shares a GPU with training ranks."""
        return self.name == "vllm" and self.placement == "colocated"

    @property
    def sleeps(self) -> bool:
        """Returns whether the engine sleeps while training ranks compute."""
        return self.shares and self.free_cache_engine


@attrs.frozen
class Plan:
    """The plan of a run.

    Attributes:
        learns_from: what the algorithm learns from: ``samples``, or ``answers``, ``pairs`` or ``labels`` of the data.
        needs_reward: whether the reward scores training responses.
        roles: the models by name, in the algorithm's order.
        copies: roles without a model of their own, each with the role whose frozen base is used in its place.
        model: the folder of the policy's model and its tokenizer.
        new_model: sizes of the random model to make in ``model`` first; None for an existing model.
        trainer, data, env, reward, driver, ray: the tables of the config.
        code: references to the user's own objects; workers check that they all have the same source.
        table: the config with absolute paths, as nested tables; the run's folder stores it.
    """

    algorithm: str
    options: Any
    learns_from: LearnsFrom
    needs_reward: bool
    roles: Mapping[str, RolePlan]
    copies: Mapping[str, str]
    rollout: RolloutPlan
    model: str
    new_model: NewModelConfig | None
    trainer: TrainerConfig
    data: DataConfig
    env: EnvConfig
    reward: RewardConfig
    driver: DriverConfig
    ray: RayConfig
    code: tuple[str, ...]
    table: Table

    def changed(self, table: str, **values: Any) -> Plan:
        """Returns the plan of a config with other values in one of its tables, such as ``rollout``."""
        changes = {table: attrs.evolve(getattr(self, table), **values)}
        return attrs.evolve(self, **changes, table=self.table | {table: self.table[table] | values})

    def dated(self, date: str) -> Plan:
        """Returns the plan with a day in place of ``data.date``."""
        plan = self.changed("data", date=date)
        return attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, data=plan.data))


def make_plan(cfg: Config, folder: Path | None = None) -> Plan:
    """Makes the plan of a config.

    Args:
        folder: the folder that relative paths start from, by default the current one.

    Raises:
        ConfigError: an algorithm of the user cannot be imported or made, it has no actor, it needs more responses per
            prompt than ``rollout.n``, or ``driver.max_lag`` does not go with other settings.

    Example:
        >>> from verl_fn.config import load
        >>> sorted(make_plan(load(overrides=["model.path=m", "algorithm.use_kl_loss=true"])).roles)
        ['actor', 'critic', 'reference']
    """
    cfg = with_absolute_paths(cfg, folder or Path.cwd())
    outline = cfg.algorithm.outline
    check(cfg)
    check_run(cfg, outline)
    model = cfg.model.path or str(Path(cfg.trainer.dir) / "new_model")
    names = role_names(cfg)
    used = completed(cfg)
    return Plan(
        algorithm=cfg.algorithm.name,
        options=used.algorithm.options,
        learns_from=outline.learns_from,
        needs_reward=outline.needs_reward,
        roles={name: _role_plan(cfg, outline, name, model) for name in names},
        copies={name: role.copy_of for name, role in outline.roles.items() if role.copy_of and name not in names},
        rollout=_rollout_plan(cfg, model),
        model=model,
        new_model=None if cfg.model.path else cfg.model.new,
        trainer=cfg.trainer,
        data=cfg.data,
        env=used.env,
        reward=used.reward,
        driver=cfg.driver,
        ray=cfg.ray,
        code=_code(cfg),
        table=to_table(cfg),
    )


def completed(cfg: Config) -> Config:
    """Returns the config with what its settings imply: the task's own environment and scorer, and ``rollout_is``.

    With ``driver.max_lag``, older weights draw the tokens, so ``rollout_is`` is turned on. An algorithm of the user
    decides itself how it corrects.

    Example:
        >>> from verl_fn.config import load
        >>> completed(load(overrides=["driver.max_lag=1"])).algorithm.options.rollout_is
        'token'
        >>> completed(load(overrides=["data.task=verifiers:my_env"])).env.name
        'verifiers:my_env'
    """
    task = "" if cfg.data.from_files else cfg.data.task
    env, reward, algorithm = cfg.env, cfg.reward, cfg.algorithm
    if verifiers_name(task):
        env = attrs.evolve(env, name=task)
    if reasoning_names(task) and not (reward.by_user or env.name):
        reward = attrs.evolve(reward, functions=(SCORER,))
    options = algorithm.options
    if cfg.driver.max_lag > 0 and isinstance(options, PolicyOptimization) and options.rollout_is is None:
        algorithm = attrs.evolve(algorithm, options=attrs.evolve(options, rollout_is="token"))
    return attrs.evolve(cfg, env=env, reward=reward, algorithm=algorithm)


def evaluation_plan(cfg: Config, folder: Path | None = None) -> Plan:
    """Makes the plan of an evaluation of ``model.path``: only the actor, in one process, without an optimizer.

    The weights in a model folder are merged, so the plan has no adapters. Training files need not exist.
    """
    weights = () if cfg.data.train_files else cfg.data.weights
    data, driver = attrs.evolve(cfg.data, train_files=(), weights=weights), attrs.evolve(cfg.driver, max_lag=0)
    engine = attrs.evolve(cfg.rollout, in_flight_weight_updates=False, exact="off")
    # An evaluation has no goal to stop at.
    trainer = attrs.evolve(cfg.trainer, stop_at=None)
    training = make_plan(attrs.evolve(cfg, data=data, driver=driver, rollout=engine, trainer=trainer), folder)
    # A model that is not trained lies in its dtype: the engine's, so that the engine gets the weights of the folder.
    layout: dict[str, Any] = {
        "strategy": "local", "fsdp_config": FsdpConfig(), "megatron": MegatronConfig(), "dtype": cfg.rollout.dtype,
    }  # fmt: skip
    actor = attrs.evolve(
        training.roles["actor"], trained=False, lora=None, router_replay=False, total_updates=0, **layout
    )
    rollout = attrs.evolve(training.rollout, lora=None, routed_experts=False)
    ray = attrs.evolve(cfg.ray, ranks=1)
    return attrs.evolve(training, roles={"actor": actor}, copies={}, rollout=rollout, ray=ray)


def role_names(cfg: Config) -> tuple[str, ...]:
    """Returns the roles that have workers of their own; with LoRA a frozen copy of another role has none.

    Example:
        >>> role_names(Config())
        ('actor', 'critic')
    """
    roles = cfg.algorithm.outline.roles
    return tuple(
        name for name, role in roles.items() if role.copy_of is None or not _table(cfg, roles, name)[1].lora_rank
    )


def _table(cfg: Config, roles: Mapping[str, Role], name: str) -> tuple[str, TrainedConfig]:
    """Returns the name and the settings of a role's table: the critic's for a value head, otherwise the actor's.

    A critic has the actor's layout unless ``critic.strategy`` is set. An actor has its own table whatever its head.
    """
    if not uses_critic(name, roles[name]):
        return "actor", cfg.actor
    if cfg.critic.strategy is not None:
        return "critic", cfg.critic
    actor = cfg.actor
    layout = attrs.evolve(cfg.critic, strategy=actor.strategy, fsdp_config=actor.fsdp_config, megatron=actor.megatron)
    return "critic", layout


def _role_plan(cfg: Config, outline: Outline, name: str, model: str) -> RolePlan:
    role = outline.roles[name]
    table, settings = _table(cfg, outline.roles, name)
    steps, prompts = cfg.trainer.total_training_steps, cfg.data.train_batch_size
    return RolePlan(
        **_values(settings, TrainedConfig) | {"strategy": settings.strategy or "local"},
        name=name,
        table=table,
        head=role.head,
        folder=role.path or (cfg.critic.path if table == "critic" else "") or model,
        trained=role.trained,
        total_updates=int(outline.updates(name, prompts, steps)) if role.trained else 0,
        lora=_adapters(settings) if settings.lora_rank and role.trained else None,
        row_layout=cfg.model.layout,
        router_replay=name == "actor" and cfg.actor.router_replay.mode != "disabled",
        exact=name == "actor" and cfg.rollout.exact != "off",
        freeze_vision_tower=role.trained and table == "actor" and cfg.actor.freeze_vision_tower,
    )


def _rollout_plan(cfg: Config, model: str) -> RolloutPlan:
    slots, share = cfg.rollout.slots or SLOTS, cfg.rollout.gpu_memory_utilization or SHARE
    outline, evaluates = cfg.algorithm.outline, bool(cfg.data.val_files) or not cfg.data.train_files
    return RolloutPlan(
        **_values(cfg.rollout, RolloutConfig) | {"slots": slots, "gpu_memory_utilization": share},
        folder=model,
        lora=_adapters(cfg.actor) if _publishes_adapters(cfg) else None,
        routed_experts=cfg.actor.router_replay.mode == "R3",
        used=(
            outline.learns_from == "samples"
            or (outline.roles["actor"].head == "lm" and evaluates)
            or cfg.algorithm.name not in BUILT_IN
        ),
        data=cfg.data,
    )


def _values(table: Any, cls: type) -> dict[str, Any]:
    """Returns the fields that a table has from the class ``cls``, by name."""
    return {field.name: getattr(table, field.name) for field in attrs.fields(cls)}


def _publishes_adapters(cfg: Config) -> bool:
    """Returns whether adapters are published without the model."""
    return cfg.rollout.adapters == "alone" and cfg.rollout.name != "sampler" and cfg.actor.lora_rank > 0


def _adapters(settings: TrainedConfig) -> Adapters:
    return settings.lora_rank, settings.lora_alpha, settings.target_modules


def _code(cfg: Config) -> tuple[str, ...]:
    """Returns the references to the user's objects that workers use."""
    options = cfg.algorithm.options
    values = (cfg.algorithm.name, *(getattr(options, name, None) for name in OWN_PARTS))
    return tuple(value for value in values if isinstance(value, str) and is_reference(value))


def check(cfg: Config) -> None:
    """Checks the rules between tables that need no algorithm; ``load`` and ``make_plan`` call it."""
    data, replay, name = cfg.data, cfg.actor.router_replay.mode, cfg.algorithm.name
    if (cfg.rollout.name == "vllm" or _publishes_adapters(cfg)) and cfg.driver.kind != "ray":
        raise ConfigError(
            'rollout.name = "vllm" runs in processes of its own: set driver.kind=ray, or rollout.name=sampler'
        )
    if replay != "disabled" and cfg.actor.strategy != "megatron":
        raise ConfigError(
            f'actor.router_replay.mode = "{replay}" needs actor.strategy=megatron; {cfg.actor.strategy} cannot '
            "replay expert routing"
        )
    if replay != "disabled" and name in BUILT_IN and not isinstance(cfg.algorithm.options, PolicyOptimization):
        raise ConfigError(
            f'actor.router_replay.mode = "{replay}" needs the pass for old log-probs, and {name} has no such pass; '
            "leave it disabled"
        )
    if verifiers_name(data.task) and not data.from_files and cfg.env.name not in ("", data.task):
        raise ConfigError(f"data.task = {data.task} brings its own environment; remove env.name")
    buffer = getattr(cfg.algorithm.options, "overlong_buffer", None)
    if isinstance(buffer, OverlongBuffer) and buffer.len > data.max_response_length:
        raise ConfigError(
            f"algorithm.overlong_buffer.len is {buffer.len}, more than data.max_response_length = "
            f"{data.max_response_length}, of which it is the last part"
        )


def _check_gdpo(cfg: Config, options: GRPO) -> None:
    """Checks that gdpo has what it reads, numbers of reward functions by name, and that nothing else is a reward."""
    start, names = 'algorithm.adv_estimator = "gdpo"', options.gdpo_reward_keys
    if not names:
        raise ConfigError(
            f"{start} compares numbers that reward functions return: name them in algorithm.gdpo_reward_keys"
        )
    unread = {
        "algorithm.use_kl_in_reward": options.use_kl_in_reward,
        "algorithm.reward_model": options.reward_model,
        "env.name": cfg.env.name,
        "algorithm.overlong_buffer.len": getattr(options, "overlong_buffer", OverlongBuffer()).len
        and "overlong" not in names,
    }
    if lost := [key for key, value in unread.items() if value]:
        raise ConfigError(
            f"{lost[0]} changes the reward of a response, and {start} reads only its parts {', '.join(names)}; "
            "remove it, or take another estimator"
        )


def check_run(cfg: Config, outline: Outline) -> None:
    """Checks the rules between the tables and what the algorithm asks of a run; ``make_plan`` calls it."""
    name, learns_from = cfg.algorithm.name, outline.learns_from
    options = cfg.algorithm.options
    if isinstance(options, GRPO) and options.adv_estimator == "gdpo":
        _check_gdpo(cfg, options)
    _check_lag(cfg, learns_from)
    if cfg.rollout.exact != "off":
        _check_exact(cfg, outline)
    if cfg.rollout.n < outline.min_n:
        raise ConfigError(
            f"rollout.n is {cfg.rollout.n}: {name} compares responses within a group and needs "
            f"at least {outline.min_n} a prompt"
        )
    if cfg.data.truncation != "error" and (learns_from != "samples" or cfg.env.name):
        what = f"rows of {name}" if learns_from != "samples" else "conversations"
        raise ConfigError(
            f"data.truncation is {cfg.data.truncation}, which cuts prompts that are sampled from; {what} are not "
            "cut: set data.filter_overlong_prompts, or raise data.max_prompt_length"
        )
    if "actor" not in outline.roles:
        raise ConfigError(f"{name} has no role 'actor'; it is the policy that is sampled and saved")
    if _publishes_adapters(cfg) and cfg.actor.strategy == "megatron":
        raise ConfigError(
            'rollout.adapters = "alone" works with actor.strategy local and fsdp: set rollout.adapters=merged for '
            "megatron"
        )


def _check_exact(cfg: Config, outline: Outline) -> None:
    """Checks that the actor can compute the engine's log-probs in every bit."""
    fsdp, name = cfg.actor.fsdp_config, cfg.algorithm.name
    shares = fsdp.ulysses_sequence_parallel_size > 1 or cfg.ray.ranks > 1
    refused = {
        "the engine vllm has kernels of its own; set rollout.name=sampler": cfg.rollout.name == "vllm",
        "megatron has kernels of its own; set actor.strategy=local or fsdp": cfg.actor.strategy == "megatron",
        "it is for one training rank; set ray.ranks=1": cfg.actor.strategy == "fsdp" and shares,
        "compiled layers have kernels of their own; set actor.fsdp_config.use_torch_compile=false": (
            cfg.actor.strategy == "fsdp" and fsdp.use_torch_compile
        ),
        "with driver.max_lag older weights than the actor's draw the tokens; set it to 0": cfg.driver.max_lag > 0,
        "actor and engine must compute in one dtype; set actor.dtype and rollout.dtype alike": (
            cfg.actor.dtype != cfg.rollout.dtype
        ),
        f"{name} does not compare log-probs with the engine's; set rollout.exact=off": (
            name in BUILT_IN and not isinstance(cfg.algorithm.options, PolicyOptimization)
        ),
        "the actor must be a language model": outline.roles["actor"].head != "lm",
    }
    if reasons := [reason for reason, holds in refused.items() if holds]:
        raise ConfigError(f'rollout.exact = "{cfg.rollout.exact}" cannot be: {"; ".join(reasons)}')


def _check_lag(cfg: Config, learns_from: LearnsFrom) -> None:
    """Checks that sampling can run ahead of learning, if the config asks for it."""
    lag = f"driver.max_lag = {cfg.driver.max_lag}"
    if cfg.driver.max_lag == 0:
        if cfg.rollout.in_flight_weight_updates:
            raise ConfigError(
                f"rollout.in_flight_weight_updates lets weights reach engines that sample while the trainer learns, "
                f"and with {lag} they do not; set driver.max_lag=1 or more, or in_flight_weight_updates=false"
            )
        return
    if cfg.rollout.in_flight_weight_updates and cfg.actor.router_replay.mode == "R3":
        raise ConfigError(
            "new weights that arrive in flight may send earlier tokens to other experts than those that the engine "
            "recorded; set rollout.in_flight_weight_updates=false or actor.router_replay.mode=R2"
        )
    if learns_from != "samples":
        name = cfg.algorithm.name
        raise ConfigError(f"{lag} lets sampling run ahead of learning, and {name} samples nothing; leave it at 0")
    if isinstance(cfg.algorithm.options, DAPO) and cfg.algorithm.options.filter_groups.enable:
        raise ConfigError(
            f"{lag} asks engines for samples before those of earlier steps have arrived, and dynamic sampling asks "
            "for more where it has seen the rewards; set algorithm.filter_groups.enable=false, or driver.max_lag=0"
        )
    if isinstance(cfg.algorithm.options, Distill) and not cfg.algorithm.options.top_k:
        raise ConfigError(
            f"{lag} lets older weights draw the tokens, and the loss of distill on the drawn token has the right "
            "gradient only for tokens of the weights that learn; set algorithm.top_k=64 or so, whose gradient is "
            "exact for any tokens, or driver.max_lag=0"
        )
    if cfg.driver.kind == "local":
        raise ConfigError(
            f"{lag} lets engines sample while the trainer learns, and driver.kind = local has one process for both; "
            "set driver.kind=ray rollout.placement=apart, or driver.max_lag=0"
        )
    if cfg.rollout.placement == "colocated":
        raise ConfigError(
            f"{lag} lets engines sample while the trainer learns, and rollout.placement = colocated lets them share "
            "a GPU; set rollout.placement=apart, or driver.max_lag=0"
        )


def check_address(address: str, *, reach: bool = True) -> None:
    """Raises an error for an address where no cluster answers, since Ray itself would try for a long time.

    Ray resolves ``auto`` and addresses with a scheme itself. Without ``reach``, only the form is checked.

    Example:
        >>> check_address("nowhere")
        Traceback (most recent call last):
        verl_fn.config.options.ConfigError: ray.address is 'nowhere'; it must be auto, or host:port as 10.0.0.1:6379
    """
    if address == "auto" or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"ray.address is {address!r}; it must be auto, or host:port as 10.0.0.1:6379")
    try:
        if reach:
            socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray.address: no Ray cluster answers at {address} ({error}); start one with `ray start --head`, or "
            "leave the key empty to use this machine alone"
        ) from error


def check_room(
    plan: Plan, bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]], *, planned: bool = False
) -> None:
    """Raises an error for a plan for which a cluster can never have room.

    Args:
        bundles: the resources that the plan's processes reserve.
        nodes: the resources of each node.
        planned: whether they are of a machine that is only planned for.

    Raises:
        ConfigError: it has too few GPUs, or too few nodes for the placement.
    """
    table, rollout = plan.ray, plan.rollout
    gpus, asked = sum(node.get("GPU", 0) for node in nodes), sum(bundle.get("GPU", 0) for bundle in bundles)
    if asked > gpus:
        separate = f" and ray.separate = {list(table.separate)}" if table.separate else ""
        engines, lower = "", "ray.ranks"
        if rollout.placement == "apart":
            engines, lower = f" and rollout.engines = {rollout.engines} apart", "ray.ranks or rollout.engines"
        one = lower == "ray.ranks" and not separate and asked == table.ranks
        engines_too = f" and rollout.engines={gpus:g}" * (rollout.engines > gpus)
        fewer = f"set ray.ranks={gpus:g}{engines_too}" if one and gpus else f"lower {lower}"
        has, other = ("--gpus is", "give --gpus more") if planned else ("the cluster has", "set driver.device=cpu")
        raise ConfigError(
            f"ray.ranks = {table.ranks}{separate}{engines} ask for {asked:g} GPUs, and {has} {gpus:g}; "
            f"{fewer}, or {other}"
        )
    largest, lacks = max(node.get("GPU", 0) for node in nodes), ""
    if table.placement == "STRICT_SPREAD" and len(nodes) < len(bundles):
        lacks = f"a node for each of {len(bundles)} processes, and the cluster has {len(nodes)}"
    if table.placement == "STRICT_PACK" and asked > largest:
        lacks = f"{asked:g} GPUs on one node, and the largest has {largest:g}"
    if lacks:
        weaker = table.placement.removeprefix("STRICT_")
        raise ConfigError(f"ray.placement = {table.placement} wants {lacks}; take {weaker}, or lower ray.ranks")


def with_absolute_paths(cfg: Config, folder: Path) -> Config:
    """Returns the config with absolute paths, so that it does not depend on the current folder.

    Example:
        >>> with_absolute_paths(Config(), Path("/a")).trainer.dir
        '/a/runs/run'
    """

    def path(name: str) -> str:
        return name if name.startswith("hub:") or not name.strip() else str((folder / name).resolve())

    places: dict[str | None, Callable[[str], str]] = {
        "path": path,
        "code": lambda name: absolute(name, folder),
        # The interpreter of a virtual environment is a link and knows its folder by its path.
        "link": lambda name: os.path.abspath(folder / name),
    }

    def located(table: Any) -> Any:
        changes = {}
        for field in attrs.fields(type(table)):
            new = value = getattr(table, field.name)
            if attrs.has(type(value)):
                new = located(value)
            elif value and (place := places.get(field.metadata.get("place"))):
                new = tuple(map(place, value)) if isinstance(value, tuple) else place(value)
            if new is not value:
                changes[field.name] = new
        return attrs.evolve(table, **changes) if changes else table

    cfg = located(cfg)
    data = attrs.evolve(cfg.data, task=absolute_task(cfg.data.task, folder))
    name, options = absolute(cfg.algorithm.name, folder), cfg.algorithm.options
    # An algorithm of the user has options of these names too.
    of_name = dict.fromkeys(OWN_PARTS, places["code"]) | {"reward_model": path, "teacher": path}
    given = {key: getattr(options, key, None) for key in of_name}
    options = attrs.evolve(options, **{k: of_name[k](v) for k, v in given.items() if v and isinstance(v, str)})
    return attrs.evolve(cfg, data=data, algorithm=AlgorithmTable(name, options))


def absolute_task(task: str, folder: Path) -> str:
    """Makes the file of an environment of verifiers absolute; all other tasks are returned unchanged.

    Raises:
        ConfigError: no file can have this path.

    Example:
        >>> absolute_task("verifiers:envs/my-env", Path("/a")), absolute_task("verifiers:my-env", Path("/a"))
        ('verifiers:/a/envs/my-env', 'verifiers:my-env')
    """
    name = verifiers_name(task)
    if not name:
        return task
    with raised_as(ConfigError, "data.task", ValueError):
        path = (folder / check_path(home(name))).resolve()
    is_file = "/" in name or path.with_name(f"{path.name.replace('-', '_')}.py").is_file()
    return f"{VERIFIERS}{path}" if is_file else task
