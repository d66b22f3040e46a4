"""The configuration's keys: frozen classes, with verl's names for what verl has, and a line of doc each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import attrs
from attrs.validators import ge, gt, in_, le

from verl_fn.errors import UserError


class ConfigError(UserError, ValueError):
    """A configuration that cannot be used; the message names the key."""


class RangeError(ValueError):
    """A field's name and what is wrong with its value."""


def opt(default: Any, doc: str, *checks: Callable[..., Any]) -> Any:
    """A field with a default, a line of documentation, and checks of its range."""

    def check(instance: Any, attribute: Any, value: Any) -> None:
        for one in checks if value is not None else ():
            try:
                one(instance, attribute, value)
            except ValueError as error:
                raise RangeError(attribute.name, str(error.args[0])) from error

    return attrs.field(default=default, validator=check, metadata={"doc": doc})


def home(value: Any) -> Any:
    """A path, or each of several, with a leading ``~`` replaced by the home folder."""
    if isinstance(value, tuple):
        return tuple(map(home, value))
    try:
        return os.path.expanduser(value) if isinstance(value, str) else value
    except ValueError:  # no user has such a name
        return value


def paths(default: Any, doc: str) -> Any:
    """A field of one or several paths."""
    return attrs.field(default=default, converter=home, metadata={"doc": doc})


def _all_or_some(instance: Any, attribute: Any, value: int) -> None:
    if value != -1 and value < 1:
        raise ValueError(f"must be -1, which keeps all, or at least 1 (got {value})")


def _each_in(*choices: str) -> Callable[..., Any]:
    def check(instance: Any, attribute: Any, values: tuple[str, ...]) -> None:
        for value in values:
            if value not in choices:
                raise ValueError(f"must be of {choices} (got {value!r})")

    return check


def _each_below_one(instance: Any, attribute: Any, values: tuple[float, ...]) -> None:
    if not all(0 <= value < 1 for value in values):
        raise ValueError(f"must be at least 0 and below 1 (got {list(values)})")


def sub(cls: type) -> Any:
    """A nested table."""
    return attrs.field(factory=cls)


ESTIMATORS = {"ppo": ("gae",), "grpo": ("grpo", "rloo", "reinforce_plus_plus"), "sft": ()}
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
LARGEST_VAL_SIZE = 20_000  # more of a made task would take long to draw
MOST = 1e6  # of factors and ranges; beyond it numbers overflow and mean nothing
KL_TYPES = tuple(kind + plus for plus in ("", "+") for kind in ("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"))


@attrs.frozen(kw_only=True)
class KLCtrl:
    type: str = opt("fixed", "fixed or adaptive", in_(("fixed", "adaptive")))
    kl_coef: float = opt(0.001, "coefficient of the KL penalty, the first one if adaptive", ge(0), le(MOST))
    target_kl: float = opt(0.1, "KL that the adaptive controller steers to, in nats", gt(0), le(MOST))
    horizon: int = opt(10000, "rows over which the adaptive controller reacts", ge(1))


@attrs.frozen(kw_only=True)
class AlgorithmConfig:
    name: str = opt("ppo", "ppo (with a critic), grpo (groups, no critic) or sft", in_(("ppo", "grpo", "sft")))
    adv_estimator: str | None = opt(
        None, "gae for ppo; grpo, rloo or reinforce_plus_plus for grpo",
        in_(("gae", "grpo", "rloo", "reinforce_plus_plus")),
    )  # fmt: skip
    gamma: float = opt(1.0, "discount of later rewards", ge(0), le(1))
    lam: float = opt(1.0, "GAE's lambda", ge(0), le(1))
    norm_adv_by_std_in_grpo: bool = opt(True, "divide by the group's standard deviation; off is Dr. GRPO")
    clip_ratio: float = opt(0.2, "PPO's clip range", gt(0), le(MOST))
    clip_ratio_low: float | None = opt(None, "lower clip range, by default clip_ratio", gt(0), le(MOST))
    clip_ratio_high: float | None = opt(None, "upper clip range, by default clip_ratio", gt(0), le(MOST))
    clip_ratio_c: float = opt(3.0, "bound of the dual clip", gt(1), le(MOST))
    loss_agg_mode: str = opt(
        "token-mean", "how per-token losses are averaged",
        in_(AGGREGATIONS),
    )  # fmt: skip
    loss_scale_factor: float | None = opt(
        None, "the constant of seq-mean-token-sum-norm, by default data.max_response_length", gt(0), le(1e12)
    )
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus", ge(-MOST), le(MOST))
    use_kl_loss: bool = opt(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: float = opt(0.001, "weight of that term", ge(0), le(MOST))
    kl_loss_type: str = opt("low_var_kl", "its estimator: k1, k2, k3 (low_var_kl), abs, or one with +", in_(KL_TYPES))
    use_kl_in_reward: bool = opt(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = opt("kl", "its estimator", in_(KL_TYPES))
    kl_ctrl: KLCtrl = sub(KLCtrl)
    cliprange_value: float = opt(0.5, "clip range of the value loss", gt(0), le(MOST))
    ppo_mini_batch_size: int = opt(256, "prompts an update", ge(1))
    ppo_epochs: int = opt(1, "passes over a batch", ge(1))
    shuffle: bool = opt(False, "another order of rows in every pass")


@attrs.frozen(kw_only=True)
class OptimConfig:
    lr: float = opt(1e-6, "learning rate", ge(0), le(MOST))
    betas: tuple[float, float] = opt((0.9, 0.999), "decay rates of AdamW's averages", _each_below_one)
    eps: float = opt(1e-8, "AdamW's epsilon", gt(0), le(MOST))
    weight_decay: float = opt(0.01, "decoupled weight decay", ge(0), le(MOST))
    clip_grad: float = opt(1.0, "largest global gradient norm", gt(0), le(1e30))
    lr_scheduler_type: str = opt("constant", "constant, linear or cosine", in_(("constant", "linear", "cosine")))
    lr_warmup_steps: int = opt(0, "updates of linear warm-up from 0", ge(0))
    min_lr_ratio: float = opt(0.0, "share of the learning rate left at the end of a decay", ge(0), le(1))


@attrs.frozen(kw_only=True)
class FsdpConfig:
    replicate: int = opt(1, "whole copies of the parameters among the ranks", ge(1), le(4096))
    ulysses_sequence_parallel_size: int = opt(1, "neighbouring ranks that share each row", ge(1), le(4096))
    reshard_after_forward: bool = opt(True, "drop a layer's gathered parameters between forward and backward")
    offload_policy: bool = opt(False, "keep parameters and optimizer on the CPU between the passes")
    use_torch_compile: bool = opt(False, "compile each layer; the first steps take longer")


@attrs.frozen(kw_only=True)
class ActorConfig:
    optim: OptimConfig = sub(OptimConfig)
    strategy: str | None = opt("local", "local: one process; fsdp: sharded over all ranks", in_(("local", "fsdp")))
    fsdp_config: FsdpConfig = sub(FsdpConfig)
    ppo_max_token_len_per_gpu: int = opt(16384, "strict budget of tokens a micro-batch", ge(1))
    dtype: str = opt("float32", "compute dtype; masters are fp32", in_(("float32", "bfloat16")))
    enable_gradient_checkpointing: bool = opt(False, "recompute each layer in the backward pass")
    lora_rank: int = opt(0, "rank of the LoRA adapters; 0 trains all parameters", ge(0), le(2**16))
    lora_alpha: float = opt(16.0, "adapters are scaled by lora_alpha / lora_rank", gt(0), le(MOST))
    target_modules: tuple[str, ...] = opt(("all-linear",), "layers that get adapters, by the end of their names")


@attrs.frozen(kw_only=True)
class CriticOptimConfig(OptimConfig):
    lr: float = opt(1e-5, "learning rate", ge(0), le(MOST))


@attrs.frozen(kw_only=True)
class CriticConfig(ActorConfig):
    optim: CriticOptimConfig = sub(CriticOptimConfig)
    strategy: str | None = opt(None, "by default that of the actor, with its fsdp_config", in_(("local", "fsdp")))
    path: str | None = paths(None, "model folder of the critic, by default the actor's")


@attrs.frozen(kw_only=True)
class ValConfig:
    n: int = opt(1, "responses a held-out prompt; above 1 gives best@N and maj@N too", ge(1))
    temperature: float = opt(0.0, "sampling temperature; 0 takes the likeliest token", ge(0), le(MOST))
    top_k: int = opt(-1, "keep the k likeliest tokens; -1 keeps all", _all_or_some)
    top_p: float = opt(1.0, "keep the likeliest tokens up to this probability", gt(0), le(1))


@attrs.frozen(kw_only=True)
class RolloutConfig:
    name: str = opt("sampler", "the rollout engine", in_(("sampler",)))
    n: int = opt(1, "responses a prompt", ge(1))
    temperature: float = opt(1.0, "sampling temperature", gt(0), le(MOST))
    top_k: int = opt(-1, "keep the k likeliest tokens; -1 keeps all", _all_or_some)
    top_p: float = opt(1.0, "keep the likeliest tokens up to this probability", gt(0), le(1))
    slots: int = opt(64, "rows decoded at once", ge(1), le(2**20))
    dtype: str = opt("float32", "dtype of the engine", in_(("float32", "bfloat16")))
    val_kwargs: ValConfig = sub(ValConfig)


@attrs.frozen(kw_only=True)
class DataConfig:
    task: str = opt(
        "reverse", "problems made from a key, where train_files is empty", in_(("count", "reverse", "countdown"))
    )
    train_files: tuple[str, ...] = paths((), "parquet or JSONL files in verl's RL columns; they replace the task")
    val_files: tuple[str, ...] = paths((), "the same, of held-out problems")
    train_batch_size: int = opt(256, "prompts a step", ge(1))
    val_size: int | None = opt(
        None, "held-out problems, at most; by default all of data.val_files, or 512 of a made task", ge(1)
    )
    max_prompt_length: int = opt(512, "longest prompt in tokens", ge(1))
    max_response_length: int = opt(16, "longest response in tokens, the end token included", ge(1))
    prompt_key: str = opt("prompt", "the files' column of prompts: chat messages, or a text")
    filter_overlong_prompts: bool = opt(False, "leave out longer prompts; otherwise one ends the run")
    shuffle: bool = opt(True, "another order of the files' rows in every epoch")


@attrs.frozen(kw_only=True)
class RewardConfig:
    functions: tuple[str, ...] = paths(
        (), "rewards as module:function or FILE.py:function; empty takes the data's own rule"
    )
    weights: tuple[float, ...] = opt((), "weight of each function, by default 1")
    timeout: float = opt(30.0, "seconds that one call of a function may take", gt(0), le(MOST))
    num_workers: int = opt(1, "processes that run the functions", ge(1), le(4096))


@attrs.frozen(kw_only=True)
class NewModelConfig:
    arch: str = opt("qwen3", "transformers model type")
    hidden_size: int = opt(64, "width", ge(1), le(2**16))
    num_hidden_layers: int = opt(2, "depth", ge(1), le(1024))
    num_attention_heads: int = opt(4, "query heads", ge(1), le(1024))
    num_key_value_heads: int = opt(2, "key and value heads", ge(1), le(1024))


@attrs.frozen(kw_only=True)
class ModelConfig:
    path: str = paths("", "Hugging Face model folder; empty makes a random model for the task")
    new: NewModelConfig = sub(NewModelConfig)


@attrs.frozen(kw_only=True)
class DriverConfig:
    kind: str = opt(
        "local", "local: this process; ray: rollout, reward and training as actors", in_(("local", "ray"))
    )
    num_threads: int = opt(
        0, "CPU threads of torch in each process; 0 shares the cores among the ranks", ge(0), le(4096)
    )
    device: str = opt("auto", "cpu, cuda, or auto", in_(("auto", "cpu", "cuda")))
    deterministic: bool = opt(True, "bitwise repeatable kernels")


@attrs.frozen(kw_only=True)
class RayConfig:
    ranks: int = opt(1, "training processes, each with a GPU where there are GPUs", ge(1), le(4096))
    separate: tuple[str, ...] = opt(
        (), "training roles with processes of their own, as many again; the others share theirs",
        _each_in("critic", "reference"),
    )  # fmt: skip
    address: str = opt("", "a running cluster to use: auto, or host:port; empty starts one")
    runtime_env: str = paths("", "YAML file with Ray's runtime environment for the workers")
    placement: str = opt(
        "PACK", "how Ray places the ranks on nodes", in_(("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"))
    )
    timeout: float = opt(600.0, "seconds after which a rank that others wait for counts as hung", gt(0), le(MOST))


@attrs.frozen(kw_only=True)
class TrainerConfig:
    dir: str = paths("runs/run", "the run's folder")
    seed: int = opt(0, "everything random derives from it", ge(0), le(2**63 - 1))
    total_training_steps: int = opt(100, "steps of the run", ge(1))
    val_before_train: bool = opt(True, "evaluate before the first step")
    test_freq: int = opt(-1, "steps between evaluations; -1 only at the end", ge(-1))
    save_freq: int = opt(50, "steps between checkpoints; -1 only at the end", ge(-1))
    max_ckpt_to_keep: int = opt(2, "checkpoints kept", ge(1))
    critic_warmup: int = opt(0, "steps in which only the critic learns", ge(0))
    resume_mode: str = opt(
        "auto", "auto continues the folder's last checkpoint; disable starts anew", in_(("auto", "disable"))
    )
    resume_from_path: str | None = paths(None, "checkpoint to begin from, of this or another run: a fork")
    stop_at: float | None = opt(None, "end when held-out exact match reaches this", ge(0), le(1))
    log_freq: int = opt(1, "steps between lines on the screen", ge(1))
    logger: tuple[str, ...] = opt((), "beside metrics.jsonl: tensorboard, wandb", _each_in("tensorboard", "wandb"))
    project_name: str = opt("verl_fn", "wandb's project")
    experiment_name: str = opt("", "the run's name there, by default its folder's")
    log_val_generations: int = opt(8, "held-out answers kept of each evaluation, for the report", ge(0))
    journal: str = opt(
        "off", "for replay: off; digests of samples and state each step; samples, which are kept too",
        in_(("off", "digests", "samples")),
    )  # fmt: skip
    max_skipped_steps: int = opt(
        5, "steps in a row without any finite gradient of a role after which the run ends", ge(1)
    )


@attrs.frozen(kw_only=True)
class Config:
    """The whole configuration.

    >>> Config(algorithm=AlgorithmConfig(name="sft")).algorithm.clip_ratio
    0.2
    """

    trainer: TrainerConfig = sub(TrainerConfig)
    data: DataConfig = sub(DataConfig)
    model: ModelConfig = sub(ModelConfig)
    algorithm: AlgorithmConfig = sub(AlgorithmConfig)
    actor: ActorConfig = sub(ActorConfig)
    critic: CriticConfig = sub(CriticConfig)
    rollout: RolloutConfig = sub(RolloutConfig)
    reward: RewardConfig = sub(RewardConfig)
    driver: DriverConfig = sub(DriverConfig)
    ray: RayConfig = sub(RayConfig)

    def __attrs_post_init__(self) -> None:
        a = self.algorithm
        allowed = ESTIMATORS[a.name]
        if a.adv_estimator is not None and a.adv_estimator not in allowed:
            raise ConfigError(
                f"algorithm.adv_estimator is {a.adv_estimator!r}, which algorithm.name = {a.name!r} does not use; "
                f"it takes {' or '.join(allowed) or 'none'}"
            )
        r, d, t = self.reward, self.data, self.trainer
        if r.weights and len(r.weights) != len(r.functions):
            raise ConfigError(
                f"reward.weights has {len(r.weights)} values for the {len(r.functions)} of reward.functions"
            )
        from_files = d.train_files or d.val_files
        if not from_files and d.val_size is not None and d.val_size > LARGEST_VAL_SIZE:
            raise ConfigError(f"data.val_size is {d.val_size}; a made task gives at most {LARGEST_VAL_SIZE}")
        if from_files and not self.model.path:
            raise ConfigError("data from files needs model.path: a random model knows only a task's characters")
        v = self.rollout.val_kwargs
        if v.n > 1 and v.temperature == 0:
            raise ConfigError(
                f"rollout.val_kwargs.n is {v.n} at temperature 0, where all answers are the same; "
                f"set rollout.val_kwargs.temperature"
            )
        if t.stop_at is not None and t.test_freq < 1:
            raise ConfigError("trainer.stop_at needs evaluations to look at; set trainer.test_freq")
        if a.name == "grpo" and a.adv_estimator != "reinforce_plus_plus" and self.rollout.n < 2:
            raise ConfigError(
                "rollout.n is 1: estimators that compare within a group need at least 2 responses a prompt"
            )
