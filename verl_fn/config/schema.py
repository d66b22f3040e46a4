"""The configuration's tables: frozen classes, with verl's names for what verl has, and a line of doc for each key."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import ge, gt, in_, le

from .algorithms import PPO
from .fields import MOST, ConfigError, all_or_some, each_below_one, each_in, opt, paths, sub

LARGEST_VAL_SIZE = 20_000  # more of a made task would take long to draw


@attrs.frozen(kw_only=True)
class OptimConfig:
    lr: float = opt(1e-6, "learning rate", ge(0), le(MOST))
    betas: tuple[float, float] = opt((0.9, 0.999), "decay rates of AdamW's averages", each_below_one)
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
    top_k: int = opt(-1, "keep the k likeliest tokens; -1 keeps all", all_or_some)
    top_p: float = opt(1.0, "keep the likeliest tokens up to this probability", gt(0), le(1))


@attrs.frozen(kw_only=True)
class RolloutConfig:
    name: str = opt("sampler", "the rollout engine", in_(("sampler",)))
    n: int = opt(1, "responses a prompt", ge(1))
    temperature: float = opt(1.0, "sampling temperature", gt(0), le(MOST))
    top_k: int = opt(-1, "keep the k likeliest tokens; -1 keeps all", all_or_some)
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
        each_in("critic", "reference"),
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
    resume_mode: str = opt(
        "auto", "auto continues the folder's last checkpoint; disable starts anew", in_(("auto", "disable"))
    )
    resume_from_path: str | None = paths(None, "checkpoint to begin from, of this or another run: a fork")
    stop_at: float | None = opt(None, "end when held-out exact match reaches this", ge(0), le(1))
    log_freq: int = opt(1, "steps between lines on the screen", ge(1))
    logger: tuple[str, ...] = opt((), "beside metrics.jsonl: tensorboard, wandb", each_in("tensorboard", "wandb"))
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


@attrs.frozen
class AlgorithmTable:
    """The ``[algorithm]`` table: an algorithm's name, and its own options.

    Attributes:
        name: ``ppo``, ``grpo``, ``sft``, or a function of yours as ``FILE.py:NAME`` or ``MODULE:NAME``.
        options: an instance of the algorithm's options class; its fields are the table's other keys.
    """

    name: str = "ppo"
    options: Any = attrs.field(factory=PPO)


@attrs.frozen(kw_only=True)
class Config:
    """The whole configuration.

    Example:
        >>> Config(algorithm=AlgorithmTable("ppo", PPO(lam=0.95))).algorithm.options.clip_ratio
        0.2
    """

    trainer: TrainerConfig = sub(TrainerConfig)
    data: DataConfig = sub(DataConfig)
    model: ModelConfig = sub(ModelConfig)
    algorithm: AlgorithmTable = sub(AlgorithmTable)
    actor: ActorConfig = sub(ActorConfig)
    critic: CriticConfig = sub(CriticConfig)
    rollout: RolloutConfig = sub(RolloutConfig)
    reward: RewardConfig = sub(RewardConfig)
    driver: DriverConfig = sub(DriverConfig)
    ray: RayConfig = sub(RayConfig)

    def __attrs_post_init__(self) -> None:
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
