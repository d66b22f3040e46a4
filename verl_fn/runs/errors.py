"""The error for a run's folder that cannot be used."""

from verl_fn.errors import UserError


class RunError(UserError, ValueError):
    """Raised where a run cannot start, continue or write in its folder."""
