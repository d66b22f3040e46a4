"""Pure functions: advantages, losses, KL, aggregation, optimizers, schedules, minibatch scans."""

from . import losses
from .advantages import gae, grpo, reinforce_plus_plus, rloo, whiten_masked
from .aggregate import aggregate
from .kl import AdaptiveKL, FixedKL, apply_kl_in_reward, kl_penalty
from .losses import (
    Loss,
    cross_entropy,
    entropy,
    kl_to_reference,
    loss,
    ppo_clip,
    token_mean,
    total_loss,
    value_clip,
    weighted_sum,
)
from .minibatch import minibatches, scan
from .optim import (
    AdamState,
    GradTransform,
    Optimizer,
    Update,
    adamw,
    apply_update,
    chain,
    check_update,
    clip_by_global_norm,
    constant,
    cosine,
    frozen,
    linear,
    sgd,
)

__all__ = [
    "AdamState", "AdaptiveKL", "FixedKL", "GradTransform", "Loss", "Optimizer", "Update", "adamw", "aggregate",
    "apply_kl_in_reward", "apply_update", "chain", "check_update", "clip_by_global_norm", "constant", "cosine", "cross_entropy",
    "entropy", "frozen", "gae", "grpo", "kl_penalty", "kl_to_reference", "linear", "loss", "losses", "minibatches", "ppo_clip", "reinforce_plus_plus", "rloo", "scan", "sgd", "token_mean", "total_loss",
    "value_clip", "weighted_sum", "whiten_masked",
]  # fmt: skip
