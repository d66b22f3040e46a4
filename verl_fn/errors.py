"""The errors that a user can cause and mend: shown as one line, without a traceback."""

from verl_fn.backends.checkpoint import CheckpointError
from verl_fn.backends.model import ModelError
from verl_fn.config import ConfigError
from verl_fn.data import DataError
from verl_fn.report import ReportError
from verl_fn.rewards import RewardError
from verl_fn.runs import RunError
from verl_fn.workers import ActorDied

USER_ERRORS = (ActorDied, CheckpointError, ConfigError, DataError, ModelError, ReportError, RewardError, RunError)
