"""The configuration: its keys, how it is read, and the plan made of it. This package does not import torch."""

from .algorithms import (
    DAPO,
    DPO,
    GRPO,
    PPO,
    RLOO,
    SFT,
    AlgorithmTable,
    Distill,
    Outline,
    Rejection,
    ReMax,
    RewardModel,
    Role,
)
from .describe import describe, notes, options_lines, origins
from .load import flat, keys, load, structure
from .options import ConfigError, given, opt, sub, unless
from .plan import Plan, RolePlan, RolloutPlan, evaluation_plan, make_plan
from .schema import Config, to_table

__all__ = [
    "DAPO",
    "DPO",
    "GRPO",
    "PPO",
    "RLOO",
    "SFT",
    "AlgorithmTable",
    "Config",
    "ConfigError",
    "Distill",
    "Outline",
    "Plan",
    "ReMax",
    "Rejection",
    "RewardModel",
    "Role",
    "RolePlan",
    "RolloutPlan",
    "describe",
    "evaluation_plan",
    "flat",
    "given",
    "keys",
    "load",
    "make_plan",
    "notes",
    "opt",
    "options_lines",
    "origins",
    "structure",
    "sub",
    "to_table",
    "unless",
]
