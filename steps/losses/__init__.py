"""Losses: pure functions of outputs and batch."""

from .contract import (
    Level,
    Loss,
    LossError,
    Term,
    check_weights,
    loss,
    row_mean,
    token_mean,
    total_loss,
    weighted_sum,
)
from .covariance import clip_cov, kl_cov
from .distillation import distill, distill_top_k
from .divergence import dppo_kl, dppo_tv
from .policy import (
    cispo,
    cross_entropy,
    dro,
    entropy,
    geo_mean,
    gspo,
    kl_to_reference,
    ppo_clip,
    reinforce,
    sapo,
    value_clip,
)
from .preference import bradley_terry, cdpo, dpo, ipo, kto, kto_reference_point, orpo, simpo

__all__ = [
    "Level",
    "Loss",
    "LossError",
    "Term",
    "bradley_terry",
    "cdpo",
    "check_weights",
    "cispo",
    "clip_cov",
    "cross_entropy",
    "distill",
    "distill_top_k",
    "dpo",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "entropy",
    "geo_mean",
    "gspo",
    "ipo",
    "kl_cov",
    "kl_to_reference",
    "kto",
    "kto_reference_point",
    "loss",
    "orpo",
    "ppo_clip",
    "reinforce",
    "row_mean",
    "sapo",
    "simpo",
    "token_mean",
    "total_loss",
    "value_clip",
    "weighted_sum",
]
