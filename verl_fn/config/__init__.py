"""The configuration: its keys, how it is read, and the plan made of it. This package does not import torch."""

from .algorithms import DAPO, DPO, GRPO, PPO, RLOO, SFT, Distill, Outline, Rejection, ReMax, RewardModel, Role
from .describe import describe, options_lines, origins
from .fields import ConfigError, given, opt, sub, unless
from .loading import keys, load, structure, to_table
from .notes import notes
from .plan import Plan, RolePlan, RolloutPlan, evaluation_plan, make_plan
from .schema import AlgorithmTable, Config
from .tables import flat

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
