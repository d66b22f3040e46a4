"""A training backend and a rollout engine without a model, for unit tests of algorithms."""

from verl_fn.state import Request

from .rollout import MockRollout, Response, sample_table
from .train import Mock

__all__ = ["Mock", "MockRollout", "Request", "Response", "sample_table"]
