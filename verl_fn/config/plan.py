"""What a config means: roles, their tables and folders, and how many updates a step has."""

from __future__ import annotations

import attrs

from .schema import ActorConfig, Config


def settings(cfg: Config, role: str) -> ActorConfig:
    """The table of a training role. The reference has the actor's; so has the critic its layout, unless it has its own.

    >>> cfg = Config(actor=ActorConfig(strategy="fsdp"))
    >>> [settings(cfg, role).strategy for role in ("actor", "critic", "reference")]
    ['fsdp', 'fsdp', 'fsdp']
    """
    if role != "critic":
        return cfg.actor
    if cfg.critic.strategy is not None:
        return cfg.critic
    return attrs.evolve(cfg.critic, strategy=cfg.actor.strategy, fsdp_config=cfg.actor.fsdp_config)


def folder_of(cfg: Config, role: str) -> str:
    """The model folder of a training role: a critic may have one of its own."""
    return cfg.critic.path if role == "critic" and cfg.critic.path else cfg.model.path


def token_budget(s: ActorConfig) -> int:
    """Tokens a micro-batch: ranks that share rows have their budgets together."""
    return s.ppo_max_token_len_per_gpu * (s.fsdp_config.ulysses_sequence_parallel_size if s.strategy == "fsdp" else 1)


def updates_a_step(cfg: Config) -> int:
    """Optimizer updates in one step of the algorithm."""
    if cfg.algorithm.name == "sft":
        return 1
    size = min(cfg.algorithm.ppo_mini_batch_size, cfg.data.train_batch_size)
    return cfg.algorithm.ppo_epochs * -(-cfg.data.train_batch_size // size)


def roles(cfg: Config) -> tuple[str, ...]:
    """The training roles that the algorithm has."""
    a = cfg.algorithm
    found = ["actor"]
    if a.name == "ppo":
        found.append("critic")
    # With LoRA the actor's own base is the reference.
    if a.name != "sft" and (a.use_kl_loss or a.use_kl_in_reward) and not cfg.actor.lora_rank:
        found.append("reference")
    return tuple(found)
