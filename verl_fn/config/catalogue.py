"""The names of policy losses and advantage estimators, and which of them read which options."""

from __future__ import annotations

POLICY_LOSSES = (
    "ppo_clip", "gspo", "sapo", "cispo", "gpg", "dro", "dppo_tv", "dppo_kl", "geo_mean", "clip_cov", "kl_cov",
    "reinforce",
)  # fmt: skip
GROUP_ESTIMATORS = (
    "grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "gdpo",
    "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
TOKEN_BASELINES = GROUP_ESTIMATORS[-2:]
SCALED_BY_STD = ("grpo", "grpo_passk", "gdpo")
CLIPPED = ("ppo_clip", "gspo", "cispo", "dppo_tv", "dppo_kl", "geo_mean", "clip_cov")
