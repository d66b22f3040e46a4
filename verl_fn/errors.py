"""The errors that a user can cause and mend: shown as one line, without a traceback."""

from verl_fn.backends.checkpoint import CheckpointError
from verl_fn.backends.loading import ModelError
from verl_fn.backends.lora import LoraError
from verl_fn.backends.memory import OutOfMemory
from verl_fn.backends.ulysses import LayoutError
from verl_fn.config import ConfigError
from verl_fn.data import DataError
from verl_fn.report import ReportError
from verl_fn.rewards import RewardError
from verl_fn.runs import RunError
from verl_fn.workers import ActorDied, ActorHangs

USER_ERRORS = (
    ActorDied, ActorHangs, CheckpointError, ConfigError, DataError, LayoutError, LoraError, ModelError, OutOfMemory,
    ReportError, RewardError, RunError,
)  # fmt: skip
