"""Runs: their folders, the training loop, the journal, evaluation and replay."""

from verl_fn.errors import UserError


class RunError(UserError, ValueError):
    """Raised if a run cannot start, continue or write in its folder."""
