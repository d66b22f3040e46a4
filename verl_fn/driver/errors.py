"""What can go wrong with the processes of a run."""

from __future__ import annotations

from verl_fn.errors import UserError


class ActorDied(UserError, RuntimeError):
    """A worker's process ended; the message holds its own error and the end of its log."""


class ActorHangs(UserError, RuntimeError):
    """A worker is not where others wait for it; the message says where it is."""
