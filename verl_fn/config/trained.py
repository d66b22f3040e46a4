"""The tables of the models that are trained: their optimizers, layouts and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import ge, gt, le

from .fields import MOST, each_below_one, free, given, one_of, opt, paths, sub, unless


@attrs.frozen(kw_only=True)
class OptimConfig:
    """The optimizer of a model."""

    lr: float = opt(1e-6, "learning rate", ge(0), le(MOST))
    betas: tuple[float, float] = opt((0.9, 0.999), "decay rates of AdamW's averages", each_below_one)
    eps: float = opt(1e-8, "AdamW's epsilon", gt(0), le(MOST))
    weight_decay: float = opt(0.01, "decoupled weight decay", ge(0), le(MOST))
    clip_grad: float = opt(1.0, "global gradient norm above which gradients are clipped", gt(0), le(1e30))
    lr_scheduler_type: str = opt("constant", "constant, linear or cosine", one_of("constant", "linear", "cosine"))
    lr_warmup_steps: int = opt(
        0,
        "updates of linear warm-up from 0; a step has ppo_epochs * ceil(train_batch_size / ppo_mini_batch_size) of "
        "them, and verl's key counts steps",
        ge(0),
    )
    min_lr_ratio: float = opt(
        0.0,
        "share of the learning rate left at the end of a decay",
        ge(0),
        le(1),
        when=unless("lr_scheduler_type", "constant"),
    )
    lr_decay_steps: int | None = opt(
        None,
        "the update at which a decay ends, counted from the first; by default the role's last update",
        ge(1),
        when=unless("lr_scheduler_type", "constant"),
    )
    decay_biases_and_norms: bool = opt(
        True, "weight decay also of parameters with one dimension; Megatron's optimizer exempts these"
    )


@attrs.frozen(kw_only=True)
class FsdpConfig:
    """The layout of a sharded model."""

    replicate: int = opt(1, "complete copies of the parameters among the ranks", ge(1), le(4096))
    ulysses_sequence_parallel_size: int = opt(1, "neighbouring ranks that share each row", ge(1), le(4096))
    reshard_after_forward: bool = opt(True, "free a layer's gathered parameters between forward and backward")
    offload_policy: bool = opt(False, "keep parameters and optimizer state on the CPU between passes")
    use_torch_compile: bool = opt(False, "compile each layer; the first steps take longer")


@attrs.frozen(kw_only=True)
class MegatronConfig:
    """The layout of a model of Megatron; the ranks that these sizes leave have rows of their own."""

    tensor_model_parallel_size: int = opt(1, "ranks that share the matrices of each layer", ge(1), le(4096))
    pipeline_model_parallel_size: int = opt(1, "ranks that share the layers", ge(1), le(4096))
    context_parallel_size: int = opt(1, "ranks that share the tokens of each row", ge(1), le(4096))
    expert_model_parallel_size: int = opt(1, "ranks that share the experts", ge(1), le(4096))
    sequence_parallel: bool = opt(False, "sequence parallelism: tensor-parallel ranks also split tokens")
    override_transformer_config: Mapping[str, Any] = free("a table of fields of Megatron-Bridge's provider")
    use_megatron_fsdp: bool = opt(False, "Megatron-FSDP in place of Megatron's DDP: ranks divide all parameters")
    optimizer: str = opt(
        "verl_fn",
        "implementation of the optimizer: verl_fn, or megatron (its distributed optimizer)",
        one_of("verl_fn", "megatron"),
    )


STRATEGIES = ("local", "fsdp", "megatron")


@attrs.frozen(kw_only=True)
class RouterReplayConfig:
    """The replay of expert routing."""

    mode: str = opt(
        "disabled",
        "in updates, tokens go to the experts of the pass for old log-probs (R2), or in both to those of the rollout "
        "engine (R3); for megatron",
        one_of("disabled", "R2", "R3"),
    )


@attrs.frozen(kw_only=True)
class TrainedConfig:
    """What the tables of the actor and of the critic have in common."""

    optim: OptimConfig = sub(OptimConfig)
    strategy: str | None = opt("local", "local: one process; fsdp and megatron: over all ranks", one_of(*STRATEGIES))
    fsdp_config: FsdpConfig = sub(FsdpConfig, when=given("strategy", "fsdp"))
    megatron: MegatronConfig = sub(MegatronConfig, when=given("strategy", "megatron"))
    ppo_max_token_len_per_gpu: int = opt(16384, "most tokens of a micro-batch; no row may be longer", ge(1))
    dtype: str | None = opt(
        None,
        "compute dtype: float32 or bfloat16; by default float32 on a CPU, and the model folder's on a GPU; masters "
        "are fp32",
        one_of("float32", "bfloat16"),
    )
    enable_gradient_checkpointing: bool = opt(False, "recompute each layer in the backward pass")
    lora_rank: int = opt(0, "rank of the LoRA adapters; 0 trains all parameters", ge(0), le(2**16))
    lora_alpha: float = opt(
        16.0, "adapters are scaled by lora_alpha / lora_rank", gt(0), le(MOST), when=given("lora_rank")
    )
    target_modules: tuple[str, ...] = opt(
        ("all-linear",), "layers that get adapters, by the end of their names", when=given("lora_rank")
    )


@attrs.frozen(kw_only=True)
class ActorConfig(TrainedConfig):
    """The actor, and every other model without a value head."""

    router_replay: RouterReplayConfig = sub(RouterReplayConfig)


@attrs.frozen(kw_only=True)
class CriticOptimConfig(OptimConfig):
    """The optimizer of the critic."""

    lr: float = opt(1e-5, "learning rate", ge(0), le(MOST))


@attrs.frozen(kw_only=True)
class CriticConfig(TrainedConfig):
    """The critic."""

    optim: CriticOptimConfig = sub(CriticOptimConfig)
    strategy: str | None = opt(
        None, "local, fsdp or megatron; by default the actor's, with the actor's layout", one_of(*STRATEGIES)
    )
    path: str | None = paths(None, "model folder of the critic, by default the actor's")
