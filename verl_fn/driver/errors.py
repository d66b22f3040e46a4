"""Errors of the processes of a run."""

from __future__ import annotations

from verl_fn.errors import UserError


class ActorDied(UserError, RuntimeError):
    """A worker's process ended; the message has its error and the end of its log."""


class ActorHangs(UserError, RuntimeError):
    """A worker makes no progress while others wait for it; the message has its stack."""
