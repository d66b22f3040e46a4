"""The adapters of a run: of each role, and the ones that are published apart from the model."""

from __future__ import annotations

from .algorithms import Role
from .fields import ConfigError
from .schema import RolloutConfig
from .trained import ActorConfig, TrainedConfig

Adapters = tuple[int, float, tuple[str, ...]]
"""Rank, alpha and target layers."""


def adapters_of(settings: TrainedConfig, role: Role) -> Adapters | None:
    """Returns the adapters of a role; None without any."""
    if not settings.lora_rank or not (role.trained or role.copy_of):
        return None
    return settings.lora_rank, settings.lora_alpha, settings.target_modules


def published_alone(rollout: RolloutConfig, actor: ActorConfig) -> Adapters | None:
    """Returns the adapters that are published apart from the model; None where they are merged or there are none.

    Raises:
        ConfigError: the actor's ranks hold adapters in another form than engines take them.

    Example:
        >>> published_alone(RolloutConfig(name="vllm", adapters="alone"), ActorConfig(lora_rank=8))
        (8, 16.0, ('all-linear',))
    """
    if rollout.adapters == "merged" or rollout.name != "vllm" or not actor.lora_rank:
        return None
    if actor.strategy == "megatron":
        raise ConfigError(
            'rollout.adapters = "alone" works with actor.strategy local and fsdp: set rollout.adapters=merged for '
            "megatron"
        )
    return actor.lora_rank, actor.lora_alpha, actor.target_modules
