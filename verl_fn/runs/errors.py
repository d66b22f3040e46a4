"""What can go wrong with a run's folder."""

from verl_fn.errors import UserError


class RunError(UserError, ValueError):
    """A run's folder that cannot be begun, continued or written."""
