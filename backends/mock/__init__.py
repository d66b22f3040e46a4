"""A training backend and a rollout engine without a model, for unit tests of algorithms."""

from .rollout import MockRollout, Request, Response, sample_table
from .train import Mock

__all__ = ["Mock", "MockRollout", "Request", "Response", "sample_table"]
